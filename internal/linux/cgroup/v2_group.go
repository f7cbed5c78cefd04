package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// v2Group is one sandbox's groups in the unified hierarchy.
type v2Group struct {
	v  *v2
	id string

	mu sync.Mutex
	// mu guards the fields below.

	limits    Limits
	uid, gid  int
	delegated bool
}

// limitWhole limits the sandbox as a whole: payload's limits plus the guest's reserve. It holds from
// the start; those of the parts are set by settle.
func (g *v2Group) limitWhole(l Limits) error {
	r := GuestReserve()
	whole := Limits{}
	if l.MemoryBytes > 0 {
		whole.MemoryBytes = l.MemoryBytes + r.MemoryBytes
	}
	if l.CPUs > 0 {
		whole.CPUs = l.CPUs + r.CPUs
	}
	if l.Pids > 0 {
		whole.Pids = l.Pids + r.Pids
	}
	return g.v.limit(g.id, whole)
}

// limit sets the limits of one group. Order does not matter on v2: the kernel lets a child's limit
// exceed its parent's.
func (v *v2) limit(path string, l Limits) error {
	var all []error
	if v.has("memory") {
		all = append(all, write(v.dir, path+"/memory.max", orMax64(l.MemoryBytes)))
		// No swap, so that the limit is the limit. The file is missing in kernels without swap.
		swap := "0"
		if l.MemoryBytes <= 0 {
			swap = "max"
		}
		if err := write(v.dir, path+"/memory.swap.max", swap); !errors.Is(err, fs.ErrNotExist) {
			all = append(all, err)
		}
	}
	if v.has("pids") {
		all = append(all, write(v.dir, path+"/pids.max", orMax(l.Pids)))
	}
	if v.has("cpu") {
		q := "max"
		if l.CPUs > 0 {
			q = quota(l.CPUs)
		}
		all = append(all, write(v.dir, path+"/cpu.max", q+" "+strconv.Itoa(cpuPeriodUS)))
	}
	return errors.Join(all...)
}

func orMax64(n int64) string {
	if n <= 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

// limitParts sets the payload's limits and the guest's reserve.
func (g *v2Group) limitParts(l Limits) error {
	r := GuestReserve()
	return errors.Join(
		g.v.limit(g.id+"/payload", l),
		g.v.limit(g.id+"/guest", Limits{MemoryBytes: r.MemoryBytes, Pids: r.Pids}))
}

func (g *v2Group) update(l Limits) error {
	used, err := g.usage()
	if err != nil {
		return err
	}
	// memory.max below the usage would not fail but kill; v1 refuses, and so do we.
	if l.MemoryBytes > 0 && used.MemoryBytes > l.MemoryBytes {
		return errs.New(errs.FailedPrecondition, "more memory is in use than the new limit allows")
	}
	g.mu.Lock()
	g.limits = l
	g.mu.Unlock()
	if err := g.limitWhole(l); err != nil {
		return err
	}
	if g.v.enable == "" || !hasWord(g.v.dir, g.id+"/cgroup.subtree_control", strings.TrimPrefix(strings.Fields(g.v.enable)[0], "+")) {
		return nil // not settled yet: settle sets them
	}
	return g.limitParts(l)
}

func (g *v2Group) inGuest(start func(dirFD int) error) error {
	fd, err := openDir(g.v.dir, g.id)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return start(fd)
}

func (g *v2Group) settle(pid int) error {
	if err := write(g.v.dir, g.id+"/guest/cgroup.procs", strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("place process %d: %w", pid, err)
	}
	if g.v.enable == "" {
		return nil
	}
	// Only now: a group with processes of its own can't hand controllers down.
	if err := write(g.v.dir, g.id+"/cgroup.subtree_control", g.v.enable); err != nil {
		return err
	}
	g.mu.Lock()
	l := g.limits
	g.mu.Unlock()
	return g.limitParts(l)
}

func (g *v2Group) delegate(uid, gid int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	// What moves a process needs the right to the group above both places: the sandbox's own one for what the
	// guest starts, the payload's for what goes from one scope to another (a fork of a code context).
	for _, path := range []string{g.id, g.id + "/payload"} {
		if err := g.v.chownProcs(path, uid, gid); err != nil {
			return err
		}
	}
	g.uid, g.gid, g.delegated = uid, gid, true
	return nil
}

func (v *v2) chownProcs(path string, uid, gid int) error {
	path += "/cgroup.procs"
	return pathError("chown", path, unix.Fchownat(v.dir, path, uid, gid, unix.AT_SYMLINK_NOFOLLOW))
}

func (g *v2Group) payloadFiles() ([]*os.File, error) { return nil, nil }
func (g *v2Group) homeFile() (*os.File, error)       { return nil, nil }

func (g *v2Group) freeze(ctx context.Context, frozen bool) error {
	path, value, want := g.id+"/payload", "0", int64(0)
	if frozen {
		value, want = "1", 1
	}
	if err := write(g.v.dir, path+"/cgroup.freeze", value); err != nil {
		return err
	}
	if err := g.v.waitEvent(ctx, path, "frozen", want); err != nil {
		// Half frozen is neither: give it back running.
		return errors.Join(err, write(g.v.dir, path+"/cgroup.freeze", "0"))
	}
	return nil
}

func (g *v2Group) frozen() (bool, error) {
	n, err := readInt(g.v.dir, g.id+"/payload/cgroup.freeze")
	return n != 0, err
}

func (g *v2Group) freezeFile() (*os.File, string, error) {
	f, err := openFile(g.v.dir, g.id+"/payload/cgroup.freeze", unix.O_WRONLY)
	return f, "1", err
}

func (g *v2Group) usage() (Usage, error) {
	var u Usage
	usec, err := readKey(g.v.dir, g.id+"/cpu.stat", "usage_usec")
	u.CPU = time.Duration(usec) * time.Microsecond
	all := []error{err}
	path := g.id + "/payload/"
	get := func(file string, into *int64) {
		n, err := readInt(g.v.dir, path+file)
		if errors.Is(err, fs.ErrNotExist) { // not settled yet, or an older kernel without memory.peak
			return
		}
		*into, all = n, append(all, err)
	}
	var pids int64
	get("memory.current", &u.MemoryBytes)
	get("memory.peak", &u.MemoryPeak)
	get("pids.current", &pids)
	u.Pids = int(pids)
	if u.CacheBytes, err = readKey(g.v.dir, path+"memory.stat", "file"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		all = append(all, err)
	}
	if u.OOMKills, err = readKey(g.v.dir, path+"memory.events", "oom_kill"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		all = append(all, err)
	}
	return u, errors.Join(all...)
}

func (g *v2Group) pids() ([]int, error) {
	paths := []string{g.id, g.id + "/guest", g.id + "/payload"}
	names, err := g.scopes()
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		paths = append(paths, g.id+"/payload/"+n)
	}
	var all []int
	for _, p := range paths {
		pids, err := readPids(g.v.dir, p+"/cgroup.procs")
		if err != nil {
			return nil, err
		}
		all = append(all, pids...)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func (g *v2Group) scopes() ([]string, error) { return children(g.v.dir, g.id+"/payload") }

func (g *v2Group) kill(ctx context.Context) error   { return g.v.kill(ctx, g.id) }
func (g *v2Group) remove(ctx context.Context) error { return g.v.remove(ctx, g.id) }
func (g *v2Group) close() error                     { return nil }

// kill needs no freezing: the kernel kills what is forked meanwhile too. Frozen processes die as well.
func (v *v2) kill(ctx context.Context, path string) error {
	if err := write(v.dir, path+"/cgroup.kill", "1"); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	} else if err != nil {
		return err
	}
	return v.waitEvent(ctx, path, "populated", 0)
}

func (v *v2) remove(ctx context.Context, path string) error {
	if err := v.kill(ctx, path); err != nil {
		return err
	}
	return removeTree(ctx, v.dir, path)
}

// readEvent returns one value of an open cgroup.events.
func readEvent(f *os.File, key string) (int64, error) {
	var buf [256]byte
	n, err := unix.Pread(int(f.Fd()), buf[:], 0)
	if err != nil {
		return 0, pathError("read", f.Name(), err)
	}
	for line := range strings.Lines(string(buf[:n])) {
		if k, val, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return strconv.ParseInt(val, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q", f.Name(), key)
}
