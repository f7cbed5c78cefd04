package files

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

const (
	// maxAttributes bounds the names and values that one FileInfo tells; the rest is left out.
	maxAttributes = 16 << 10
	// attributeSpace is where users' programs may keep attributes (xattr(7)); overlaySpace, in it, is
	// where an overlay mounted with userxattr keeps its own.
	attributeSpace = "user."
	overlaySpace   = "user.overlay."
)

func checkAttributes(r guestwire.PathRequest) error {
	if !strings.HasPrefix(r.Attributes, attributeSpace) || strings.HasPrefix(r.Attributes, overlaySpace) ||
		strings.ContainsRune(r.Attributes, 0) {
		return errs.New(errs.InvalidArgument, "no attributes to be had that begin with %s", guestwire.Escape(r.Attributes))
	}
	return nil
}

// more adds to info what a request wants to know beyond it: where a link leads, and attributes. The
// file is name in the open directory dir, and already open as fd unless that is -1.
func more(info *guestwire.FileInfo, r guestwire.PathRequest, dir int, name string, fd int) error {
	if r.Attributes != "" {
		if err := checkAttributes(r); err != nil {
			return err
		}
	}
	switch {
	case !r.Resolve && r.Attributes == "" || info.Type == guestwire.TypeOther:
		return nil
	case info.Type == guestwire.TypeSymlink:
		end, err := resolve.Open(dir, name, unix.O_PATH, 0)
		if err != nil {
			return nil //nolint:nilerr // it leads nowhere, or nowhere that may be seen
		}
		defer unix.Close(end)
		fd = end
		if r.Resolve {
			info.LeadsTo = linkEnd(end)
		}
	case r.Attributes == "":
		return nil
	case fd < 0:
		return readAttributes(info, selfName(dir)+"/"+name, r.Attributes)
	}
	if r.Attributes == "" {
		return nil
	}
	return readAttributes(info, selfName(fd), r.Attributes)
}

// linkEnd describes an open file by the path that the kernel knows it under.
func linkEnd(fd int) *guestwire.LinkEnd {
	var st unix.Stat_t
	p, err := readLink(unix.AT_FDCWD, selfName(fd))
	if err != nil || unix.Fstat(fd, &st) != nil {
		return nil
	}
	return &guestwire.LinkEnd{Path: guestwire.Escape(p), Type: typeOf(st.Mode), Mode: st.Mode & 0o7777}
}

// readAttributes reads the attributes of what at names, which is a regular file or a directory. One
// that is gone meanwhile, or that has none, has none.
func readAttributes(info *guestwire.FileInfo, at, prefix string) error {
	names, err := attributeNames(at, prefix)
	left := maxAttributes
	buf := make([]byte, 4096)
	for _, name := range names {
		n, err := unix.Getxattr(at, name, buf)
		if left -= n + len(name); err != nil || left < 0 {
			continue
		}
		if info.Attributes == nil {
			info.Attributes = make(map[string]string)
		}
		info.Attributes[guestwire.Escape(name[len(prefix):])] = guestwire.Escape(string(buf[:n]))
	}
	if err == unix.EOPNOTSUPP || isNotExist(err) {
		return nil
	}
	return err
}

// attributeNames lists a file's attributes whose names begin with prefix.
func attributeNames(at, prefix string) ([]string, error) {
	buf := make([]byte, 4096)
	n, err := unix.Listxattr(at, buf)
	if err == unix.ERANGE {
		buf = make([]byte, 64<<10) // XATTR_LIST_MAX
		n, err = unix.Listxattr(at, buf)
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if len(name) > len(prefix) && strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names, nil
}

// setAttributes makes a written file's attributes those of the request.
func setAttributes(f *os.File, p string, r guestwire.WriteRequest) error {
	if r.Attributes == "" {
		return nil
	}
	if err := checkAttributes(r.PathRequest); err != nil {
		return err
	}
	at := selfName(int(f.Fd()))
	old, err := attributeNames(at, r.Attributes)
	if err != nil && (err != unix.EOPNOTSUPP || len(r.SetAttributes) > 0) {
		return fault(err, "set attributes of", p)
	}
	for _, name := range old {
		if _, stays := r.SetAttributes[name[len(r.Attributes):]]; stays {
			continue
		}
		if err := unix.Removexattr(at, name); err != nil {
			return fault(err, "set attributes of", p)
		}
	}
	for name, value := range r.SetAttributes {
		if err := unix.Setxattr(at, r.Attributes+name, []byte(value), 0); err != nil {
			return fault(err, "set attributes of", p)
		}
	}
	return nil
}
