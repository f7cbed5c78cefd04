package cli

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	"casemate.dev/internal/errs"
)

// packDir writes a directory's files as a tar archive, but for those that .dockerignore leaves out and the lock file,
// which says what came of the build before. Symbolic links are written as they are: none is followed, so nothing
// outside the directory is sent.
func (a *app) packDir(ctx context.Context, dir string, f *buildFlags, w io.Writer) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	ignored, err := ignoreRules(dir, f.dockerfile(dir))
	if err != nil {
		return err
	}
	lock, err := filepath.Rel(dir, f.lockFile(dir))
	if err != nil {
		lock = "" // it lies elsewhere
	}
	buffered := bufio.NewWriterSize(w, 1<<20)
	out := tar.NewWriter(buffered)
	err = fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err := errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		if p == "." || p == filepath.ToSlash(lock) {
			return nil
		}
		skip, err := ignored.MatchesOrParentMatches(filepath.FromSlash(p))
		if err != nil {
			return err
		}
		if skip {
			if d.IsDir() && !ignored.Exclusions() {
				return fs.SkipDir
			}
			return nil
		}
		return a.packFile(root, p, d, out)
	})
	if err != nil {
		return err
	}
	return errors.Join(out.Close(), buffered.Flush())
}

// ignoreRules reads the rules of what is left out: those beside the Dockerfile that have its name, or the
// directory's.
func ignoreRules(dir, dockerfile string) (*patternmatcher.PatternMatcher, error) {
	var patterns []string
	for _, name := range []string{dockerfile + ".dockerignore", filepath.Join(dir, ".dockerignore")} {
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		patterns, err = ignorefile.ReadAll(f)
		_ = f.Close()
		if err != nil {
			return nil, errs.Wrap(err, errs.InvalidArgument, "%s can't be read: %v", name, err)
		}
		break
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, ".dockerignore: %v", err)
	}
	return m, nil
}

func (a *app) packFile(root *os.Root, p string, d fs.DirEntry, out *tar.Writer) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode().IsRegular(), info.IsDir():
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = root.Readlink(p); err != nil {
			return err
		}
	default:
		a.note("left out: %s is a device, a pipe or a socket", clean(p))
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	// Whose they are here means nothing there.
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = p, 0, 0, "", ""
	if info.IsDir() {
		h.Name = strings.TrimSuffix(p, "/") + "/"
	}
	h.Format = tar.FormatPAX
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	f, err := root.Open(p)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	n, err := io.CopyN(out, f, info.Size())
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%s has become shorter, from %d to %d bytes, while it was sent", p, info.Size(), n)
	}
	return err
}
