package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/sched"
)

// v1Group is one sandbox's groups in the v1 hierarchies.
type v1Group struct {
	v  *v1
	id string
}

// discard removes what create made so far.
func (g *v1Group) discard() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return g.remove(ctx)
}

// limit sets the limits of fresh groups, whose limits are all "none" before.
func (g *v1Group) limit(l Limits) error {
	r := GuestReserve()
	var all []error
	if fd, ok := g.v.dirs["memory"]; ok {
		all = append(all,
			setMemory(fd, g.id+"/payload", l.MemoryBytes),
			setMemory(fd, g.id+"/guest", r.MemoryBytes),
			setTCP(fd, g.id+"/payload", l.MemoryBytes),
			setTCP(fd, g.id+"/guest", r.MemoryBytes))
	}
	if fd, ok := g.v.dirs["pids"]; ok {
		all = append(all,
			write(fd, g.id+"/payload/pids.max", orMax(l.Pids)),
			write(fd, g.id+"/guest/pids.max", orMax(r.Pids)))
	}
	if fd, ok := g.v.dirs["cpu"]; ok {
		// The parent's quota must not be below the child's at any moment: sched_group_set_quota
		// refuses it.
		if l.CPUs > 0 {
			all = append(all, write(fd, g.id+"/cpu.cfs_quota_us", quota(l.CPUs+r.CPUs)))
		}
		all = append(all, write(fd, g.id+"/payload/cpu.cfs_quota_us", quota(l.CPUs)))
	}
	return errors.Join(all...)
}

// setMemory sets a memory limit, swap included. The kernel keeps memsw ≥ memory, so the order of the
// two writes depends on the direction.
func setMemory(fd int, path string, bytes int64) error {
	mem, memsw := path+"/memory.limit_in_bytes", path+"/memory.memsw.limit_in_bytes"
	value := "-1"
	if bytes > 0 {
		value = strconv.FormatInt(bytes, 10)
	}
	err := write(fd, mem, value)
	if errors.Is(err, unix.EINVAL) { // above today's memsw: raise that first
		if err := write(fd, memsw, value); err != nil {
			return err
		}
		return write(fd, mem, value)
	}
	if err != nil {
		return err
	}
	if err := write(fd, memsw, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// tcpShare is the part of the memory limit that buffers of IP sockets may take on top of it.
const tcpShare = 4

// setTCP limits the buffers of TCP and UDP sockets. Version 1 charges them to nobody unless this counter
// of its own has a limit (mem_cgroup_sk_alloc in mm/memcontrol.c): 38 connections over loopback held 300
// MB of the host beside a limit of 128 MB. Version 2 counts them as memory.
func setTCP(fd int, path string, bytes int64) error {
	value := "-1"
	if bytes > 0 {
		value = strconv.FormatInt(bytes/tcpShare, 10)
	}
	// A kernel without CONFIG_INET or with cgroup.memory=nosocket has nothing to limit, or no such file.
	if err := write(fd, path+"/memory.kmem.tcp.limit_in_bytes", value); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// cpuPeriodUS is the kernel's default period, which we keep.
const cpuPeriodUS = 100_000

// quota returns the runtime per period; the kernel's minimum is 1 ms.
func quota(cpus float64) string {
	if cpus <= 0 {
		return "-1"
	}
	return strconv.Itoa(max(1000, int(cpus*cpuPeriodUS)))
}

func orMax(n int) string {
	if n <= 0 {
		return "max"
	}
	return strconv.Itoa(n)
}

func (g *v1Group) update(l Limits) error {
	if fd, ok := g.v.dirs["memory"]; ok {
		if err := setMemory(fd, g.id+"/payload", l.MemoryBytes); errors.Is(err, unix.EBUSY) {
			return errs.Wrap(err, errs.FailedPrecondition, "more memory is in use than the new limit allows")
		} else if err != nil {
			return err
		}
		// More may be in use than a lower limit allows; that is refused, and harms nobody: what is in
		// use drains, and the limit before still holds.
		if err := setTCP(fd, g.id+"/payload", l.MemoryBytes); err != nil && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	if fd, ok := g.v.dirs["pids"]; ok {
		if err := write(fd, g.id+"/payload/pids.max", orMax(l.Pids)); err != nil {
			return err
		}
	}
	fd, ok := g.v.dirs["cpu"]
	if !ok {
		return nil
	}
	// Lift the parent's quota, so that the child's may go either way, then put it back above.
	if err := write(fd, g.id+"/cpu.cfs_quota_us", "-1"); err != nil {
		return err
	}
	if err := write(fd, g.id+"/payload/cpu.cfs_quota_us", quota(l.CPUs)); err != nil || l.CPUs <= 0 {
		return err
	}
	return write(fd, g.id+"/cpu.cfs_quota_us", quota(l.CPUs+GuestReserve().CPUs))
}

// guestGroups are the groups that the guest sits in.
func (g *v1Group) guestGroups() []at {
	var all []at
	for _, c := range v1Controllers {
		fd, ok := g.v.dirs[c]
		if !ok || c == "cpuacct" && g.v.sharesCPU() {
			continue
		}
		switch c {
		case "memory", "pids":
			all = append(all, at{fd, g.id + "/guest"})
		case "devices":
			all = append(all, at{fd, "."})
		default:
			all = append(all, at{fd, g.id})
		}
	}
	return all
}

// inGuest forks on a thread that moves itself into the guest's groups for that moment.
func (g *v1Group) inGuest(start func(dirFD int) error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home := false
		err := sched.Normally(func() error { // the groups take no thread of a real-time class
			err := g.join()
			if err == nil {
				err = start(-1)
			}
			// The thread must be out before anyone kills or freezes the groups, or the server would hit
			// itself. One that can't be moved home ends: a locked goroutine takes its thread along.
			herr := g.leave()
			home = herr == nil
			return errors.Join(err, herr)
		})
		if home {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// join moves the calling thread into the guest's groups.
func (g *v1Group) join() error {
	for _, a := range g.guestGroups() {
		if err := write(a.fd, a.path+"/tasks", "0"); err != nil {
			return err
		}
	}
	return nil
}

// leave moves the calling thread back to where the server is.
func (g *v1Group) leave() error {
	var all []error
	for c := range g.v.dirs {
		if home, ok := g.v.home[c]; ok {
			_, err := home.WriteString("0")
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// settle moves pid where it is not in place already.
func (g *v1Group) settle(pid int) error {
	where, err := readOwn("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(err, errs.NotFound, "process %d has ended", pid)
	}
	if err != nil {
		return err
	}
	if freezer, ok := where["freezer"]; ok && strings.HasSuffix(freezer, g.v.name+"/"+g.id) {
		return nil
	}
	for _, a := range g.guestGroups() {
		if err := write(a.fd, a.path+"/cgroup.procs", strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("place process %d: %w", pid, err)
		}
	}
	return nil
}

func (g *v1Group) delegate(int, int) error { return nil }

func (g *v1Group) payloadFiles() ([]*os.File, error) {
	var files []*os.File
	for _, c := range v1Controllers {
		fd, ok := g.v.dirs[c]
		if !ok || c == "freezer" || c == "cpuacct" && g.v.sharesCPU() {
			continue
		}
		path := g.id + "/payload/tasks"
		switch c {
		case "cpuacct":
			path = g.id + "/tasks"
		case "devices":
			path = "tasks"
		}
		f, err := openFile(fd, path, unix.O_WRONLY)
		if err != nil {
			closeFiles(files)
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

func (g *v1Group) homeFile() (*os.File, error) {
	fd, err := g.freezer()
	if err != nil {
		return nil, err
	}
	return openFile(fd, g.id+"/tasks", unix.O_WRONLY)
}

// freezer returns the freezer hierarchy, without which no scope works.
func (g *v1Group) freezer() (int, error) {
	fd, ok := g.v.dirs["freezer"]
	if !ok {
		return -1, errs.New(errs.Unsupported, "the cgroup v1 controller freezer is not available").
			WithHint("mount it at /sys/fs/cgroup/freezer, or boot with cgroup v2")
	}
	return fd, nil
}

func (g *v1Group) usage() (Usage, error) {
	var u Usage
	var all []error
	get := func(controller, file string, into *int64) {
		fd, ok := g.v.dirs[controller]
		if !ok {
			return
		}
		n, err := readInt(fd, g.id+file)
		*into, all = n, append(all, err)
	}
	var cpu, pids int64
	get("cpuacct", "/cpuacct.usage", &cpu)
	get("memory", "/payload/memory.usage_in_bytes", &u.MemoryBytes)
	get("memory", "/payload/memory.max_usage_in_bytes", &u.MemoryPeak)
	get("pids", "/payload/pids.current", &pids)
	if fd, ok := g.v.dirs["memory"]; ok {
		n, err := readKey(fd, g.id+"/payload/memory.oom_control", "oom_kill")
		u.OOMKills, all = n, append(all, err)
		n, err = readKey(fd, g.id+"/payload/memory.stat", "total_cache")
		u.CacheBytes, all = n, append(all, err)
	}
	u.CPU, u.Pids = time.Duration(cpu), int(pids)
	return u, errors.Join(all...)
}

// pids lists every process in any freezer group of the sandbox, and those that are only in its
// memory or pids groups, as after a start that broke off.
func (g *v1Group) pids() ([]int, error) {
	seen := map[int]bool{}
	for _, a := range g.populated() {
		pids, err := readPids(a.fd, a.path+"/cgroup.procs")
		if err != nil {
			return nil, err
		}
		for _, p := range pids {
			seen[p] = true
		}
	}
	var all []int
	for p := range seen {
		all = append(all, p)
	}
	slices.Sort(all)
	return all, nil
}

// populated lists the groups that processes may be in.
func (g *v1Group) populated() []at {
	all := g.v.tree(g.id)
	if fd, ok := g.v.dirs["freezer"]; ok {
		names, _ := children(fd, g.id+"/payload")
		for _, n := range names {
			all = append(all, at{fd, g.id + "/payload/" + n})
		}
	}
	return all
}

func (g *v1Group) kill(ctx context.Context) error {
	k := v1Kill{list: g.pids}
	if fd, ok := g.v.dirs["freezer"]; ok {
		k.freezer = fd
		k.states = func() []string {
			states := []string{g.id, g.id + "/payload"}
			names, _ := children(fd, g.id+"/payload")
			for _, n := range names {
				states = append(states, g.id+"/payload/"+n)
			}
			return states
		}
	}
	return k.run(ctx)
}

func (g *v1Group) remove(ctx context.Context) error {
	tree := g.v.tree(g.id)
	slices.Reverse(tree)
	// The usual case: all processes have ended with the guest, and nothing needs to be looked for.
	// Else it takes freezing, for which the kernel changes its code on every processor.
	if g.removeEmpty(tree) {
		return nil
	}
	if err := g.kill(ctx); err != nil {
		return err
	}
	var all []error
	for _, a := range tree {
		all = append(all, removeTree(ctx, a.fd, a.path))
	}
	return errors.Join(all...)
}

// removeEmpty removes the groups of a tree, and the scopes that waited for another process, as long as
// they are empty. It reports whether all of them were.
func (g *v1Group) removeEmpty(tree []at) bool {
	if fd, ok := g.v.dirs["freezer"]; ok {
		names, _ := children(fd, g.id+"/payload") // what can't be listed shows below
		for _, n := range names {
			_ = unix.Unlinkat(fd, g.id+"/payload/"+n, unix.AT_REMOVEDIR)
		}
	}
	for _, a := range tree {
		if err := unix.Unlinkat(a.fd, a.path, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
			return false
		}
	}
	return true
}

func (g *v1Group) close() error { return nil }
