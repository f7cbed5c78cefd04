package layer

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"casemate.dev/internal/linux/fd"
)

// maxLinks is how many symbolic links lie on the way to one file at most, as the kernel has it (path_resolution(7)).
const maxLinks = 40

// tree is the directory that is filled. Nobody else changes it. It keeps the directory open that was used last:
// archives stay in one for a while.
type tree struct {
	root *os.File
	dir  *os.File
	path string
	// made are the directories that were made, by path.
	made map[string]bool
}

func newTree(root *os.File) *tree { return &tree{root: root, made: map[string]bool{}} }

func (t *tree) close() { t.leave() }

func (t *tree) leave() {
	if t.dir != nil {
		_ = t.dir.Close()
		t.dir = nil
	}
}

// open opens the directory at a path of the tree's own, on which there is no link; it stays the tree's.
func (t *tree) open(path string) (*os.File, error) {
	if t.dir != nil && t.path == path {
		return t.dir, nil
	}
	t.leave()
	dir, err := fd.OpenDir(t.root, path)
	if err != nil {
		return nil, err
	}
	t.dir, t.path = dir, path
	return dir, nil
}

// parent opens the directory that holds the last of names, and returns it with the path of that last name.
// Missing directories are made, or else are an error that matches fs.ErrNotExist. Symbolic links on the way, which can
// only be ones of this layer, are followed by their text: they start at the root or at the directory that
// holds them, and never lead out.
func (t *tree) parent(names []string, create bool) (dir *os.File, path string, err error) {
	last := names[len(names)-1]
	way := strings.Join(names[:len(names)-1], "/")
	if way == "" {
		way = "."
	}
	// Most often it is the directory of the entry before, or one that was made: no link is on the way then.
	if t.dir != nil && t.path == way || t.made[way] || way == "." {
		if dir, err = t.open(way); !fd.Missing(err) { // else it has been replaced meanwhile
			return dir, join(way, last), err
		}
	}
	at, err := t.walk(names[:len(names)-1], create)
	if err != nil {
		return nil, "", err
	}
	dir, err = t.open(at)
	return dir, join(at, last), err
}

func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// walk returns the path of the directory that names lead to, with links replaced.
func (t *tree) walk(names []string, create bool) (string, error) {
	todo, at, links := slices.Clone(names), []string(nil), 0
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		switch name {
		case "", ".":
			continue
		case "..": // of a link's text: above the root is the root
			at = at[:max(0, len(at)-1)]
			continue
		}
		here := strings.Join(at, "/")
		if here == "" {
			here = "."
		}
		dir, err := t.open(here)
		if err != nil {
			return "", err
		}
		i, err := fd.Lstat(dir, name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && create:
			if err := fd.Mkdir(dir, name, 0o755); err != nil {
				return "", err
			}
			t.made[join(here, name)] = true
		case err != nil:
			return "", err
		case i.IsSymlink():
			if links++; links > maxLinks || len(todo) > maxDepth {
				return "", refuse("the layer holds a path with too many symbolic links: %q", short(strings.Join(names, "/")))
			}
			target, err := fd.Readlink(dir, name)
			if err != nil {
				return "", err
			}
			if strings.HasPrefix(target, "/") {
				at = nil
			}
			todo = append(strings.Split(target, "/"), todo...)
			continue
		case !i.IsDir():
			return "", refuse("the layer holds a file below %q, which is no directory", short(join(here, name)))
		}
		at = append(at, name)
	}
	if len(at) == 0 {
		return ".", nil
	}
	return strings.Join(at, "/"), nil
}

// opaqueAttr hides what lies below a directory, as overlayfs marks it with option userxattr.
const opaqueAttr = "user.overlay.opaque"

func (t *tree) markOpaque(path string) error {
	dir, err := t.open(path)
	if err != nil {
		return err
	}
	return fd.SetOpenXattr(dir, opaqueAttr, []byte("y"))
}

func (t *tree) touch(path string, at times) error {
	dir, err := t.open(path)
	if err != nil {
		return err
	}
	return fd.SetModified(dir, ".", fd.Time(at.sec, at.nsec))
}
