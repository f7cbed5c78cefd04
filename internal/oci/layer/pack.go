package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Pack writes the layer in root as an archive, which the same layer always gives: entries by name, owners as
// numbers, times to the nanosecond, no times of access. Nobody changes the layer meanwhile. Sockets are left out,
// since no archive holds them.
// Kinds: FailedPrecondition (it holds what an archive can't say).
func Pack(ctx context.Context, root *os.File, w io.Writer) error {
	p := &packer{out: tar.NewWriter(w), links: map[[2]uint64]string{}}
	i, err := fd.Stat(root)
	if err != nil {
		return err
	}
	if err := p.directory(fd.Entry{Path: ".", Name: ".", Dir: root, Info: i}); err != nil {
		return err
	}
	if err := fd.Walk(ctx, root, p.entry); err != nil {
		return err
	}
	return p.out.Close()
}

type packer struct {
	out *tar.Writer
	// links is the first name of each file that has several.
	links map[[2]uint64]string
}

func cannotSay(e fd.Entry, why string) error {
	return errs.New(errs.FailedPrecondition, "an image can't hold %q: %s", "/"+short(e.Path), why)
}

func (p *packer) entry(e fd.Entry) error {
	i := e.Info
	if strings.HasPrefix(e.Name, whiteoutPrefix) {
		return cannotSay(e, "names that begin with .wh. mean that a file was removed")
	}
	gone, err := isWhiteout(e)
	switch {
	case err != nil:
		return err
	case gone:
		dir, _ := fd.Split(e.Path)
		if dir != "" {
			dir += "/"
		}
		return p.out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dir + whiteoutPrefix + e.Name, Format: tar.FormatPAX})
	case i.IsDir():
		return p.directory(e)
	case !i.IsRegular() && !i.IsSymlink() && !isFifo(i):
		if i.IsDevice() {
			return cannotSay(e, "it is a device")
		}
		return nil
	}
	if i.Links > 1 {
		key := [2]uint64{i.Dev, i.Ino}
		if first, ok := p.links[key]; ok {
			h := header(e)
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return p.out.WriteHeader(h)
		}
		p.links[key] = e.Path
	}
	return p.file(e)
}

// Types of files (stat(2)).
const (
	typeMask = 0o170000
	typeFifo = 0o010000
)

func isFifo(i fd.Info) bool { return i.Mode&typeMask == typeFifo }

// isWhiteout reports whether an entry is overlayfs's mark for a removed file, in either of its forms.
func isWhiteout(e fd.Entry) (bool, error) {
	if e.Info.IsWhiteout() {
		return true, nil
	}
	if !e.Info.IsRegular() || e.Info.Size != 0 {
		return false, nil
	}
	_, ok, err := fd.Xattr(e.Dir, e.Name, "user.overlay.whiteout")
	return ok, err
}

func header(e fd.Entry) *tar.Header {
	i := e.Info
	return &tar.Header{
		Name: e.Path, Mode: int64(i.Perm()), Uid: int(i.UID), Gid: int(i.GID),
		ModTime: time.Unix(i.Modified.Sec, i.Modified.Nsec), Format: tar.FormatPAX,
	}
}

func (p *packer) directory(e fd.Entry) error {
	h := header(e)
	h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
	opaque, err := p.xattrs(e, h)
	if err != nil {
		return err
	}
	if err := p.out.WriteHeader(h); err != nil {
		return fmt.Errorf("entry %q: %w", short(e.Path), err)
	}
	if !opaque || e.Path == "." {
		return nil
	}
	return p.out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: e.Path + "/" + whiteoutPrefix + opaqueRest, Format: tar.FormatPAX})
}

// xattrs puts a file's attributes into its header, and reports whether it is an opaque directory.
func (p *packer) xattrs(e fd.Entry, h *tar.Header) (opaque bool, err error) {
	names, err := fd.Xattrs(e.Dir, e.Name)
	if err != nil {
		return false, err
	}
	slices.Sort(names)
	for _, name := range names {
		switch name {
		case opaqueAttr, "trusted.overlay.opaque":
			v, _, err := fd.Xattr(e.Dir, e.Name, name)
			if err != nil {
				return false, err
			}
			opaque = opaque || v == "y"
			continue
		case "user.overlay.redirect", "user.overlay.metacopy", "trusted.overlay.redirect", "trusted.overlay.metacopy":
			return false, cannotSay(e, "it refers to another file of the layers below")
		}
		if !keptXattr(name) {
			continue
		}
		v, ok, err := fd.XattrBytes(e.Dir, e.Name, name)
		if err != nil {
			return false, err
		}
		if !ok {
			continue
		}
		if strings.Contains(name, "=") {
			return false, cannotSay(e, "the name of one of its attributes holds an equals sign")
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[xattrPrefix+name] = string(v)
	}
	return opaque, nil
}

// file writes a regular file, a symbolic link or a FIFO.
func (p *packer) file(e fd.Entry) error {
	h := header(e)
	switch i := e.Info; {
	case i.IsSymlink():
		target, err := fd.Readlink(e.Dir, e.Name)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case isFifo(i):
		h.Typeflag = tar.TypeFifo
	default:
		h.Typeflag, h.Size = tar.TypeReg, i.Size
	}
	if !e.Info.IsSymlink() {
		if _, err := p.xattrs(e, h); err != nil {
			return err
		}
	}
	if err := p.out.WriteHeader(h); err != nil {
		return fmt.Errorf("entry %q: %w", short(e.Path), err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := fd.OpenFile(e.Dir, e.Name)
	if err != nil {
		return err
	}
	_, err = io.CopyN(p.out, f, h.Size)
	return errors.Join(err, f.Close())
}
