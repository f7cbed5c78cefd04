package files

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
)

// unlink removes a file or an empty directory. isDir says that it is known to be the latter.
func unlink(dir int, name string, isDir bool) error {
	if isDir {
		return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	}
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	// POSIX has EPERM for a directory; it may also mean what it says.
	if again := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); again != unix.ENOTDIR {
		return again
	}
	return err
}

// step is a directory on the way down, to know it again on the way up.
type step struct {
	name     string // of the directory below
	dev, ino uint64
	only     bool // the directory below seems to be all that is left
}

// removeTree removes a directory with all that is in it, links themselves and not what they lead to.
//
// It neither recurses nor keeps a descriptor for each level, so that no depth harms it: it climbs by
// "..", and makes sure that this is where it came from, since others may move directories meanwhile.
// Each call that Landlock looks at costs it a walk up to the root, which in a tree of 5,000 levels is
// most of the time; so there are two for each directory, and climbing by O_PATH is none.
func removeTree(at *place) error {
	dir, err := openDir(at.dir, at.name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { dir.close() }()
	var way []step
	empty := false
	for {
		if !empty {
			child, only, err := dir.removeEntries()
			if err != nil {
				return err
			}
			if child != "" {
				way = append(way, step{name: child, dev: dir.dev, ino: dir.ino, only: only})
				if err := dir.turn(child, unix.O_RDONLY); err != nil {
					return err
				}
				continue
			}
		}
		if len(way) == 0 {
			return unix.Unlinkat(at.dir, at.name, unix.AT_REMOVEDIR)
		}
		last := way[len(way)-1]
		way = way[:len(way)-1]
		if empty, err = dir.up(last); err != nil {
			return err
		}
	}
}

// openedDir is a directory being emptied.
type openedDir struct {
	fd       int
	dev, ino uint64
}

func openDir(at int, name string, flags int) (*openedDir, error) {
	fd, err := resolve.Open(at, name, flags|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &openedDir{fd: fd, dev: st.Dev, ino: st.Ino}, nil
}

func (d *openedDir) close() { _ = unix.Close(d.fd) }

// turn goes on with another directory, named from this one.
func (d *openedDir) turn(name string, flags int) error {
	next, err := openDir(d.fd, name, flags)
	if err != nil {
		return err
	}
	d.close()
	*d = *next
	return nil
}

// up climbs to where a step came from and removes the directory below. It reports whether the
// directory that it stands in then seems to be empty; else it is open for reading.
func (d *openedDir) up(to step) (empty bool, err error) {
	if err := d.turn("..", unix.O_PATH); err != nil {
		return false, err
	}
	if d.dev != to.dev || d.ino != to.ino {
		return false, errs.New(errs.Conflict, "a directory was moved while it was being removed")
	}
	err = unix.Unlinkat(d.fd, to.name, unix.AT_REMOVEDIR)
	switch err {
	case nil, unix.ENOENT:
		if to.only {
			return true, nil
		}
	case unix.ENOTEMPTY, unix.EEXIST: // it was not all that was left, or there is something new
	default:
		return false, err
	}
	return false, d.turn(".", unix.O_RDONLY)
}

// removeEntries removes what can be removed at once, and returns the first directory that holds
// something, "" when the directory is empty. only says that there seems to be nothing else.
func (d *openedDir) removeEntries() (full string, only bool, err error) {
	buf := make([]byte, 8<<10)
	for {
		if _, err := unix.Seek(d.fd, 0, 0); err != nil {
			return "", false, err
		}
		full, only, seen, err := d.pass(buf)
		if err != nil || full != "" {
			return full, only, err
		}
		if seen == 0 {
			return "", false, nil
		}
		// What was removed may have moved the rest past the reading position: look again.
	}
}

// pass reads the directory once to its end, or to the first directory that holds something.
func (d *openedDir) pass(buf []byte) (full string, only bool, seen int, err error) {
	for {
		n, err := unix.Getdents(d.fd, buf)
		if err != nil || n == 0 {
			return "", false, seen, err
		}
		list := parseEntries(buf[:n])
		if seen == 0 && len(list) == 1 && list[0].isDir {
			return list[0].name, true, 1, nil
		}
		seen += len(list)
		for _, e := range list {
			switch err := unlink(d.fd, e.name, e.isDir); err {
			case nil, unix.ENOENT:
			case unix.ENOTEMPTY, unix.EEXIST:
				return e.name, false, seen, nil
			default:
				return "", false, seen, err
			}
		}
	}
}

// entry is a name in a directory. isDir is false where the file system does not tell.
type entry struct {
	name  string
	isDir bool
}

// parseEntries reads struct linux_dirent64 (getdents(2)), without "." and "..".
func parseEntries(b []byte) []entry {
	const header = 19 // inode and offset, 8 bytes each; length, 2; type, 1
	var list []entry
	for len(b) >= header {
		n := int(binary.NativeEndian.Uint16(b[16:]))
		if n < header || n > len(b) {
			break
		}
		name, _, _ := bytes.Cut(b[header:n], []byte{0})
		if s := string(name); s != "." && s != ".." {
			list = append(list, entry{name: s, isDir: b[18] == unix.DT_DIR})
		}
		b = b[n:]
	}
	return list
}
