package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// out copies source of a sandbox to target on this host. What comes out was written by an attacker,
// so that every name is checked and every write stays below the directory that the person named.
func (c *copier) out(ctx context.Context, source, target string) error {
	contents := strings.HasSuffix(source, "/.") || source == "." || source == "/"
	f, err := c.client.Files.Stat(ctx, c.sandbox, source, c.user, true)
	if err != nil {
		return err
	}
	if target == "-" {
		if f.GetType() != "file" {
			return errs.New(errs.InvalidArgument, "%s is a %s", source, f.GetType())
		}
		return c.stdout(ctx, source)
	}
	dir, name := filepath.Dir(filepath.Clean(target)), filepath.Base(filepath.Clean(target))
	if st, serr := os.Stat(target); serr == nil && st.IsDir() {
		dir, name = target, path.Base(path.Clean(source))
		if contents {
			name = "."
		}
	} else if strings.HasSuffix(target, "/") && f.GetType() != "dir" {
		return errs.New(errs.InvalidArgument, "%s is no directory", target)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	switch f.GetType() {
	case "dir":
		return c.getDir(ctx, root, source, name, name, f.GetMode())
	case "file":
		return c.getFile(ctx, root, source, name, f.GetMode())
	}
	return errs.New(errs.InvalidArgument, "%s is neither a file nor a directory", source)
}

func (c *copier) stdout(ctx context.Context, source string) error {
	r, err := c.client.Files.Open(ctx, c.sandbox, source, client.ReadOptions{User: c.user})
	if err != nil {
		return err
	}
	defer r.Close()
	c.bytes, err = io.Copy(c.app.processWriter(c.app.stdout, false), r)
	c.files = 1
	return err
}

func (c *copier) getFile(ctx context.Context, root *os.Root, source, name string, mode uint32) error {
	r, err := c.client.Files.Open(ctx, c.sandbox, source, client.ReadOptions{User: c.user})
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := replaceFile(root, name, r, fs.FileMode(mode)&0o777)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	c.files++
	c.bytes += n
	return nil
}

// getDir copies a directory's entries into name; top is the name of the whole copy, which links must
// not leave.
func (c *copier) getDir(ctx context.Context, root *os.Root, source, name, top string, mode uint32) error {
	// The owner must be able to fill it, whatever mode it has inside.
	if err := root.Mkdir(name, fs.FileMode(mode)&0o777|0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := c.client.Files.List(ctx, c.sandbox, source, c.user, 1)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from := path.Join(source, e.GetName())
		if !plainName(e.GetName()) {
			c.skip(from, "its name is no file name")
			continue
		}
		to := path.Join(name, e.GetName())
		switch e.GetType() {
		case "dir":
			err = c.getDir(ctx, root, from, to, top, e.GetMode())
		case "file":
			err = c.getFile(ctx, root, from, to, e.GetMode())
		case "symlink":
			if !staysBelow(top, to, e.GetTarget()) {
				c.skip(from, "it is a link that leads out of what is copied")
				continue
			}
			err = replaceLink(root, to, e.GetTarget())
		default:
			c.skip(from, "it is neither a file nor a directory")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// plainName reports whether a name from a sandbox is one element of a path.
func plainName(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

// staysBelow reports whether a link at name, pointing at target, leads to something below top. It
// looks at the text only; links in between are confined by the same rule.
func staysBelow(top, name, target string) bool {
	if target == "" || path.IsAbs(target) {
		return false
	}
	// The same link must not mean something else when a directory on its way is itself a link: every
	// ".." has to come first, where it counts the link's own parents.
	rest := target
	for strings.HasPrefix(rest, "../") {
		rest = strings.TrimPrefix(rest, "../")
	}
	if rest == ".." || strings.Contains("/"+rest+"/", "/../") {
		return false
	}
	full := path.Join(path.Dir(name), target)
	return top == "." && full != ".." && !strings.HasPrefix(full, "../") ||
		full == top || strings.HasPrefix(full, top+"/")
}

// replaceFile puts what r gives in place of name below root, at once. A link at name is replaced,
// not followed.
func replaceFile(root *os.Root, name string, r io.Reader, mode fs.FileMode) (int64, error) {
	temp := path.Join(path.Dir(name), ".casemate-"+strings.ToLower(rand.Text())[:12])
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode|0o200)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, r)
	err = errors.Join(err, f.Close())
	if err == nil && mode&0o200 == 0 {
		err = root.Chmod(temp, mode)
	}
	if err == nil {
		err = root.Rename(temp, name)
	}
	if err != nil {
		err = errors.Join(err, root.Remove(temp))
	}
	return n, err
}

// replaceLink makes a symbolic link at name below root in place of what is there.
func replaceLink(root *os.Root, name, target string) error {
	temp := path.Join(path.Dir(name), ".casemate-"+strings.ToLower(rand.Text())[:12])
	if err := root.Symlink(target, temp); err != nil {
		return err
	}
	if err := root.Rename(temp, name); err != nil {
		return errors.Join(err, root.Remove(temp))
	}
	return nil
}
