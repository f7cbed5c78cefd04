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
	"syscall"

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
	out := &packer{Writer: tar.NewWriter(buffered), root: root, sent: map[[2]uint64]string{}}
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
		return a.packFile(p, d, out)
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

// packer writes the files of a directory.
type packer struct {
	*tar.Writer
	root *os.Root
	// sent are the first names of files that have several, by device and inode.
	sent map[[2]uint64]string
}

// first returns the name under which a file was sent before; "": it was not.
func (p *packer) first(name string, info fs.FileInfo) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || st.Nlink < 2 {
		return ""
	}
	key := [2]uint64{st.Dev, st.Ino}
	first := p.sent[key]
	if first == "" {
		p.sent[key] = name
	}
	return first
}

func (a *app) packFile(p string, d fs.DirEntry, out *packer) error {
	root := out.root
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
	first := out.first(p, info)
	if first != "" {
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
	}
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	if first != "" || !info.Mode().IsRegular() {
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
