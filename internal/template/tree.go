package template

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/rootfs"
)

// tree is where a COPY takes files from. Paths are relative to its root, clean; "" is the root. What is not
// there matches fs.ErrNotExist. No path is resolved through a symbolic link, but by resolve, which never leaves
// the tree.
type tree interface {
	lstat(p string) (node, error)
	names(p string) ([]string, error)
	open(p string) (io.ReadCloser, error)
}

// node is one file of a tree.
type node struct {
	guestwire.Entry
	// sum is the content's digest, where it is known.
	sum string
	// inode is the same for all names of one file; zero: it has one name.
	inode [2]uint64
}

func notThere(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// layerTree is a commit's files.
type layerTree struct{ t *rootfs.Tree }

func (l layerTree) lstat(p string) (node, error) {
	f, err := l.t.Lstat(p)
	if err != nil {
		return node{}, err
	}
	n := node{Entry: guestwire.Entry{
		Path: p, Type: guestwire.FileType(f.Type), Mode: f.Mode, UID: f.UID, GID: f.GID, Size: f.Size, Target: f.Target,
		MTime: f.Modified.UnixNano(),
	}}
	if f.Type == "file" && f.Links > 1 {
		n.inode = f.Inode
	}
	attrs, err := l.t.Attrs(p)
	for name, value := range attrs {
		// What else there may be belongs to the kernel, or to a user's programs, as with cp -a.
		if name == "security.capability" || strings.HasPrefix(name, "user.") {
			if n.Attrs == nil {
				n.Attrs = map[string][]byte{}
			}
			n.Attrs[name] = value
		}
	}
	return n, err
}

func (l layerTree) names(p string) ([]string, error)     { return l.t.Names(p) }
func (l layerTree) open(p string) (io.ReadCloser, error) { return l.t.Open(p) }

// maxLinks is how many symbolic links a path may lead through, as in the kernel.
const maxLinks = 40

// resolve follows the symbolic links of a path, as if the tree were the whole file system.
func resolve(t tree, p string) (string, error) {
	links := 0
	done := ""
	todo := strings.Split(p, "/")
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			if done = path.Dir(done); done == "." {
				done = ""
			}
			continue
		}
		at := path.Join(done, name)
		n, err := t.lstat(at)
		if err != nil {
			return "", err
		}
		if n.Type != guestwire.TypeSymlink {
			done = at
			continue
		}
		if links++; links > maxLinks {
			return "", errs.New(errs.InvalidArgument, "too many symbolic links: %s", p)
		}
		if strings.HasPrefix(n.Target, "/") {
			done = ""
		}
		todo = append(strings.Split(n.Target, "/"), todo...)
	}
	return done, nil
}

// hasGlob reports whether a path holds characters of a pattern.
func hasGlob(p string) bool { return strings.ContainsAny(p, `*?[\`) }

const (
	// maxGlob bounds how much of a tree a pattern may try: each directory at most once by each of its parts.
	maxGlob = 2_000_000
	// maxStars bounds how many ** a pattern has.
	maxStars = 32
)

// glob returns the paths that match a pattern, in order: each part by path.Match, and ** any number of parts.
func glob(ctx context.Context, t tree, pattern string) ([]string, error) {
	if strings.Count(pattern, "**") > maxStars {
		return nil, errs.New(errs.InvalidArgument, "the pattern %.40q has more than %d **", pattern, maxStars)
	}
	var out []string
	type try struct {
		dir  string
		left int
	}
	tried := map[try]bool{}
	var walk func(dir string, parts []string) error
	walk = func(dir string, parts []string) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		at := try{dir, len(parts)}
		if tried[at] {
			return nil // several ** lead here in many ways
		}
		if len(tried) >= maxGlob {
			return errs.New(errs.ResourceExhausted, "the pattern %.40q tries too much", pattern).WithHint("use fewer **")
		}
		tried[at] = true
		if len(parts) == 0 {
			out = append(out, dir)
			return nil
		}
		if parts[0] == "**" {
			if err := walk(dir, parts[1:]); err != nil {
				return err
			}
		}
		names, err := listDir(t, dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			at := path.Join(dir, name)
			if parts[0] == "**" {
				if n, err := t.lstat(at); err != nil {
					return err
				} else if n.Type == guestwire.TypeDir {
					if err := walk(at, parts); err != nil {
						return err
					}
				}
				continue
			}
			ok, err := path.Match(parts[0], name)
			if err != nil {
				return errs.Wrap(err, errs.InvalidArgument, "%q is no pattern", pattern)
			}
			if ok {
				if err := walk(at, parts[1:]); err != nil {
					return err
				}
			}
		}
		return nil
	}
	err := walk("", strings.Split(pattern, "/"))
	slices.Sort(out)
	return slices.Compact(out), err
}

// listDir returns a directory's names; of anything else there are none.
func listDir(t tree, dir string) ([]string, error) {
	at, err := resolve(t, dir)
	if notThere(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if n, err := t.lstat(at); err != nil || n.Type != guestwire.TypeDir && at != "" {
		return nil, err
	}
	return t.names(at)
}
