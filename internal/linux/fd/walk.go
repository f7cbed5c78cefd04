package fd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// keepOpen is how many directories of the current path a walk holds open. Above that the shallowest
// ones are closed, and found again by ".." on the way back.
const keepOpen = 64

// Entry is one file that a walk meets.
type Entry struct {
	Path  string   // relative to the root, without a leading slash
	Name  string   // its last part
	Dir   *os.File // the directory that holds it; valid during the call
	Depth int      // 1 for what lies in the root
	Info  Info
}

// ErrSkipDir, returned by a visit, leaves out what is below a directory. Elsewhere it means nothing.
var ErrSkipDir = fmt.Errorf("skip this directory")

// frame is one directory on the way from the root to where the walk stands.
type frame struct {
	dir   *os.File // nil while it is closed
	self  Info
	path  string
	names []string // not yet visited
}

// Walk visits everything below root, each directory's entries by name, a directory before what is in
// it. It opens directories only, follows no symlink, enters no other mount, and needs neither stack
// nor descriptors in proportion to the depth. Where the tree changes meanwhile, entries that are gone
// are left out; a directory that was moved away while the walk was inside it ends the walk with an
// error.
func Walk(ctx context.Context, root *os.File, visit func(Entry) error) error {
	start, err := OpenDir(root, ".") // an offset of its own
	if err != nil {
		return err
	}
	first, err := newFrame(start, "")
	if err != nil {
		return err
	}
	stack := []frame{first}
	defer func() {
		for _, f := range stack {
			if f.dir != nil {
				_ = f.dir.Close()
			}
		}
	}()
	for len(stack) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		top := &stack[len(stack)-1]
		if len(top.names) == 0 {
			if stack, err = pop(stack); err != nil {
				return err
			}
			continue
		}
		name := top.names[0]
		top.names = top.names[1:]
		child, err := step(top, name, len(stack), visit)
		if err != nil {
			return err
		}
		if child != nil {
			stack = push(stack, *child)
		}
	}
	return nil
}

// step visits one entry, and returns its frame where the walk goes down into it.
func step(top *frame, name string, depth int, visit func(Entry) error) (*frame, error) {
	i, err := lstatAt(int(top.dir.Fd()), name)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	path := name
	if top.path != "" {
		path = top.path + "/" + name
	}
	err = visit(Entry{Path: path, Name: name, Dir: top.dir, Depth: depth, Info: i})
	if err == ErrSkipDir { //nolint:errorlint // a sentinel that nobody wraps
		return nil, nil
	}
	if err != nil || !i.IsDir() {
		return nil, err
	}
	dir, err := OpenDir(top.dir, name)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f, err := newFrame(dir, path)
	return &f, err
}

// maxNames bounds the names of one directory, which a walk holds all at once to sort them.
const maxNames = 1 << 20

func newFrame(dir *os.File, path string) (frame, error) {
	self, err := Stat(dir)
	if err == nil {
		var names []string
		names, err = dir.Readdirnames(maxNames + 1)
		switch {
		case err == nil && len(names) > maxNames:
			err = fmt.Errorf("walk: a directory holds more than %d entries", maxNames)
		case err == nil || errors.Is(err, io.EOF):
			slices.Sort(names)
			return frame{dir: dir, self: self, path: path, names: names}, nil
		}
	}
	_ = dir.Close()
	return frame{}, err
}

// push goes down, and closes what lies keepOpen levels above.
func push(stack []frame, f frame) []frame {
	stack = append(stack, f)
	if n := len(stack) - 1 - keepOpen; n > 0 { // the root stays open
		_ = stack[n].dir.Close()
		stack[n].dir = nil
	}
	return stack
}

// pop goes up. A directory closed meanwhile is found by ".."; it must be the same one.
func pop(stack []frame) ([]frame, error) {
	top := stack[len(stack)-1]
	stack = stack[:len(stack)-1]
	defer top.dir.Close()
	if len(stack) == 0 || stack[len(stack)-1].dir != nil {
		return stack, nil
	}
	above := &stack[len(stack)-1]
	dir, err := open(int(top.dir.Fd()), "..", &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
	})
	if err != nil {
		return stack, err
	}
	self, err := Stat(dir)
	if err == nil && !self.SameFile(above.self) {
		err = fmt.Errorf("walk: directory at depth %d was moved away", len(stack))
	}
	if err != nil {
		_ = dir.Close()
		return stack, err
	}
	above.dir = dir
	return stack, nil
}

// gone reports whether an entry vanished, or became something else, between being listed and looked at.
func gone(err error) bool {
	for _, e := range [...]error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP} {
		if isErrno(err, e) {
			return true
		}
	}
	return false
}
