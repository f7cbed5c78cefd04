package cgroup

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Groups are reached relative to an open directory of this server, so that a path costs one short
// walk, and a mount over /sys/fs/cgroup meanwhile changes nothing.

// removeTimeout bounds how long closing a scope may take.
const removeTimeout = 5 * time.Second

// openDir opens a directory as a base for the *at calls.
func openDir(at int, path string) (int, error) {
	fd, err := unix.Openat(at, path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return fd, pathError("open", path, err)
}

// openFile opens one file of a group. It never goes through Go's poller: kernfs files claim to be
// pollable and would be switched to non-blocking.
func openFile(at int, path string, flags int) (*os.File, error) {
	fd, err := unix.Openat(at, path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// write sets a file of a group.
func write(at int, path, value string) error {
	fd, err := unix.Openat(at, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return pathError("open", path, err)
	}
	// A memory limit below the usage is reclaimed for until it fits or nothing more can be had, and any
	// signal on the way ends that, such as those by which Go preempts (mem_cgroup_resize_max).
	for {
		if _, err = unix.Write(fd, []byte(value)); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	_ = unix.Close(fd)
	return pathError("write "+value+" to", path, err)
}

// read returns a file of a group.
func read(at int, path string) (string, error) {
	fd, err := unix.Openat(at, path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", pathError("open", path, err)
	}
	defer unix.Close(fd)
	var out bytes.Buffer
	var buf [4096]byte
	for {
		n, err := unix.Read(fd, buf[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return "", pathError("read", path, err)
		}
		if n == 0 {
			return out.String(), nil
		}
		out.Write(buf[:n])
	}
}

// readInt returns a file that holds one number; "max" is -1.
func readInt(at int, path string) (int64, error) {
	s, err := read(at, path)
	if err != nil {
		return 0, err
	}
	s = strings.TrimSpace(s)
	if s == "max" {
		return -1, nil
	}
	return strconv.ParseInt(s, 10, 64)
}

// readKey returns the number after key in a file of "key number" lines; 0 where there is no such line.
func readKey(at int, path, key string) (int64, error) {
	s, err := read(at, path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, nil
}

// readPids returns the pids in a procs or tasks file. Zero stands for a process outside of our pid
// namespace, which can't be signalled and is left out. A group that is gone has none.
func readPids(at int, path string) ([]int, error) {
	s, err := read(at, path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(s) {
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return nil, pathError("parse", path, err)
		}
		if pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// children lists the groups directly below path, sorted by name. A group that is gone has none.
func children(at int, path string) ([]string, error) {
	fd, err := unix.Openat(at, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("open", path, err)
	}
	d := os.NewFile(uintptr(fd), path)
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// makeDir makes a group.
func makeDir(at int, path string) error {
	return pathError("mkdir", path, unix.Mkdirat(at, path, 0o755))
}

// removeTree removes a group and the ones below it, retrying while they are busy: a group stays busy
// for a moment after its last process was killed, until that one is dead. A group that is gone is
// removed.
func removeTree(ctx context.Context, at int, path string) error {
	p := newPacer()
	for {
		err := unix.Unlinkat(at, path, unix.AT_REMOVEDIR)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY):
			return pathError("rmdir", path, err)
		}
		names, lerr := children(at, path)
		if lerr != nil {
			return lerr
		}
		for _, n := range names {
			if err := removeTree(ctx, at, path+"/"+n); err != nil {
				return err
			}
		}
		if werr := p.wait(ctx); werr != nil {
			return errors.Join(pathError("rmdir", path, err), werr)
		}
	}
}

// pathError keeps the errno visible to errors.Is, as os does.
func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// pacer waits between looks at something that no event announces, first briefly, then longer.
type pacer struct{ d time.Duration }

func newPacer() *pacer { return &pacer{d: 20 * time.Microsecond} }

// wait returns ctx's error once it is over.
func (p *pacer) wait(ctx context.Context) error {
	t := time.NewTimer(p.d)
	defer t.Stop()
	p.d = min(2*p.d, 4*time.Millisecond)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
