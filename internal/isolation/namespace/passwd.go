package namespace

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// maxPasswd bounds what is read of a template's passwd file.
const maxPasswd = 1 << 20

// lookupUser finds a user in the topmost layer that has a passwd file (passwd(5)). It reads the
// template's read-only layers, never what a sandbox wrote.
func lookupUser(lowers []string, name string) (uid, gid uint32, err error) {
	name, _, _ = strings.Cut(name, ":") // an image may name a group, too
	if name == "" || name == "root" {
		return 0, 0, nil
	}
	number, numErr := strconv.ParseUint(name, 10, 16)
	for _, dir := range lowers {
		b, err := readIn(dir, "etc/passwd")
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return 0, 0, fmt.Errorf("look up user %q: %w", name, err)
		}
		if uid, gid, ok := findUser(b, name); ok {
			return uid, gid, nil
		}
		break // lower files are hidden by this one
	}
	if numErr == nil {
		return uint32(number), uint32(number), nil
	}
	return 0, 0, errs.New(errs.FailedPrecondition, "the template has no user %q", name)
}

// readIn reads a regular file below dir, following no link.
func readIn(dir, name string) ([]byte, error) {
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(d)
	// O_NONBLOCK: a FIFO in its place must not block us.
	fd, err := unix.Openat2(d, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	return io.ReadAll(io.LimitReader(f, maxPasswd))
}

func findUser(passwd []byte, name string) (uid, gid uint32, ok bool) {
	for line := range bytes.Lines(passwd) {
		f := bytes.Split(bytes.TrimSpace(line), []byte(":"))
		if len(f) < 4 || string(f[0]) != name {
			continue
		}
		u, errU := strconv.ParseUint(string(f[2]), 10, 16)
		g, errG := strconv.ParseUint(string(f[3]), 10, 16)
		return uint32(u), uint32(g), errU == nil && errG == nil
	}
	return 0, 0, false
}
