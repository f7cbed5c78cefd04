package files

import (
	"errors"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

// maxWatched bounds the directories of one recursive watch.
const maxWatched = 8192

// The words of WatchEvent.Op.
const (
	opCreate   = "create"
	opWrite    = "write"
	opRemove   = "remove"
	opRename   = "rename"
	opChmod    = "chmod"
	opOverflow = "overflow"
)

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE | unix.IN_MOVED_FROM |
	unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// watcher is one file.watch.
type watcher struct {
	c         *guestwire.Conn
	file      *os.File // the inotify instance
	fd        int
	root      string
	recursive bool
	paths     map[int32]string // watch descriptor → directory
	last      guestwire.WatchEvent
}

// watch answers file.watch, until the caller closes the connection or the directory is gone.
func (s *server) watch(c *guestwire.Conn, job Job, r guestwire.WatchRequest) error {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return err
	}
	if !s.mayWatch() {
		return errs.New(errs.ResourceExhausted, "%d watches are open already", maxWatches)
	}
	defer s.watchEnded()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fault(err, "watch", p)
	}
	w := &watcher{
		c: c, file: os.NewFile(uintptr(fd), "inotify"), fd: fd, root: path.Clean(p),
		recursive: r.Recursive, paths: make(map[int32]string),
	}
	defer w.file.Close()
	if err := w.begin(r.Follow); err != nil {
		return err
	}
	if err := c.Reply(nil); err != nil {
		return err
	}
	// The caller sends nothing more: a read returns when it has gone, and ends the wait for events.
	go func() {
		var one [1]byte
		_, _ = c.Read(one[:])
		_ = w.file.Close()
	}()
	return w.run()
}

func (s *server) mayWatch() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watches >= maxWatches {
		return false
	}
	s.watches++
	return true
}

func (s *server) watchEnded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches--
}

// begin puts watches on the directory and, if asked, on all below it.
func (w *watcher) begin(follow bool) error {
	flags := unix.O_PATH | unix.O_DIRECTORY
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := resolve.Open(unix.AT_FDCWD, w.root, flags, 0)
	if err != nil {
		return fault(err, "watch", w.root)
	}
	defer unix.Close(fd)
	return w.add(fd, w.root, known)
}

// contents says what is told of the things that are in a directory already when its watch is put.
type contents uint8

const (
	known contents = iota // nothing: the caller can look
	moved                 // they came with the directory
	made                  // they came between the directory's making and its watch: made, and written
)

// add watches an open directory, and below it if the watch is recursive.
func (w *watcher) add(fd int, p string, in contents) error {
	if len(w.paths) >= maxWatched {
		return errs.New(errs.ResourceExhausted, "more than %d directories below %s", maxWatched, guestwire.Escape(w.root)).
			WithHint("watch a smaller directory")
	}
	wd, err := unix.InotifyAddWatch(w.fd, selfName(fd), watchMask)
	if err == unix.ENOSPC {
		return errs.Wrap(err, errs.ResourceExhausted, "the sandbox has as many watches as it may (fs.inotify.max_user_watches)")
	}
	if err != nil {
		return fault(err, "watch", p)
	}
	w.paths[int32(wd)] = p
	if !w.recursive {
		return nil
	}
	return w.below(fd, p, in)
}

// below looks at what is in a directory after its watch was put.
func (w *watcher) below(at int, p string, in contents) error {
	fd, err := resolve.Open(at, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil // not readable by the user: then nothing below is either
	}
	dir := os.NewFile(uintptr(fd), p)
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil && len(entries) == 0 {
		return nil // removed meanwhile
	}
	for _, e := range entries {
		name := path.Join(p, e.Name())
		if in != known {
			if err := w.tell(opCreate, name); err != nil {
				return err
			}
		}
		if in == made && written(fd, e.Name()) {
			if err := w.tell(opWrite, name); err != nil {
				return err
			}
		}
		if e.IsDir() {
			if err := w.enter(fd, e.Name(), name, in); err != nil {
				return err
			}
		}
	}
	return nil
}

// written reports whether something is a file that is not empty.
func written(at int, name string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size > 0
}

func (w *watcher) enter(at int, name, p string, in contents) error {
	fd, err := resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil // gone, or not the user's to see
	}
	defer unix.Close(fd)
	err = w.add(fd, p, in)
	if errs.Is(err, errs.PermissionDenied) || errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// run tells what happens.
func (w *watcher) run() error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.file.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return fault(err, "watch", w.root)
		}
		w.last = guestwire.WatchEvent{}
		for b := buf[:n]; len(b) > 0; {
			var e event
			if e, b = parseEvent(b); b == nil {
				break
			}
			over, err := w.handle(e)
			if err != nil {
				return err
			}
			if over {
				return w.c.End(nil)
			}
		}
	}
}

// handle tells of one event. It reports true when the watched directory itself is gone.
func (w *watcher) handle(e event) (over bool, err error) {
	if e.mask&unix.IN_Q_OVERFLOW != 0 {
		return false, w.tell(opOverflow, w.root)
	}
	dir, ok := w.paths[e.wd]
	if !ok {
		return false, nil
	}
	switch {
	case e.mask&unix.IN_IGNORED != 0:
		delete(w.paths, e.wd)
		return dir == w.root, nil
	case e.mask&unix.IN_DELETE_SELF != 0:
		if dir == w.root {
			return false, w.tell(opRemove, dir) // IN_IGNORED follows
		}
		return false, nil // its parent tells
	case e.mask&unix.IN_MOVE_SELF != 0:
		if dir == w.root {
			return true, w.tell(opRename, dir) // paths below mean nothing any more
		}
		return false, nil
	}
	return false, w.entry(e, path.Join(dir, e.name))
}

// entry tells of something in a watched directory.
func (w *watcher) entry(e event, p string) error {
	if e.name == "" {
		if e.mask&unix.IN_ATTRIB != 0 && p == w.root {
			return w.tell(opChmod, p)
		}
		return nil // a directory below: its parent tells
	}
	isDir := e.mask&unix.IN_ISDIR != 0
	op := ""
	switch {
	case e.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		op = opCreate
	case e.mask&unix.IN_MODIFY != 0:
		op = opWrite
	case e.mask&unix.IN_DELETE != 0:
		op = opRemove
	case e.mask&unix.IN_MOVED_FROM != 0:
		op = opRename
	case e.mask&unix.IN_ATTRIB != 0:
		op = opChmod
	default:
		return nil
	}
	if err := w.tell(op, p); err != nil {
		return err
	}
	switch {
	case isDir && w.recursive && op == opCreate:
		in := made
		if e.mask&unix.IN_MOVED_TO != 0 {
			in = moved
		}
		return w.enter(unix.AT_FDCWD, p, p, in)
	case isDir && op == opRename:
		w.forget(p)
	}
	return nil
}

// forget takes the watches from a directory that was moved away, and from those below it.
func (w *watcher) forget(p string) {
	for wd, dir := range w.paths {
		if dir == p || strings.HasPrefix(dir, p+"/") {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.paths, wd)
		}
	}
}

// tell sends an event, unless it repeats the one before in the same batch.
func (w *watcher) tell(op, p string) error {
	e := guestwire.WatchEvent{Op: op, Path: guestwire.Escape(p)}
	if e == w.last {
		return nil
	}
	w.last = e
	return w.c.Event(e)
}
