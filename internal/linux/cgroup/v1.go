package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// v1 is this server's directory in each v1 hierarchy.
type v1 struct {
	name string // casemate-<serverid>
	base map[string]int
	// dirs holds an open directory per controller; co-mounted controllers share one.
	dirs map[string]int
	// home is the "tasks" file, per controller, of the group that the server itself is in.
	home  map[string]*os.File
	lacks []string

	closeOnce sync.Once
}

func rootName(serverID string) string { return "casemate-" + serverID }

func openV1(serverID string, m mounts, own map[string]string) (*v1, error) {
	v := &v1{name: rootName(serverID), base: map[string]int{}, dirs: map[string]int{}, home: map[string]*os.File{}}
	byMount := map[string]string{} // mount point to the controller opened first
	var firstErr error
	for _, c := range v1Controllers {
		point, ok := m.v1[c]
		if !ok {
			v.lacks = append(v.lacks, c)
			continue
		}
		if first, ok := byMount[point]; ok {
			v.base[c], v.dirs[c] = v.base[first], v.dirs[first]
			continue
		}
		if err := v.openRoot(c, point, own[c]); err != nil {
			firstErr = errors.Join(firstErr, err)
			v.lacks = append(v.lacks, c)
			continue
		}
		if home, err := openFile(unix.AT_FDCWD, filepath.Join(point, own[c], "tasks"), unix.O_WRONLY); err == nil {
			v.home[c] = home // without it InGuest lets its thread end
		}
		byMount[point] = c
	}
	if len(v.dirs) == 0 {
		return nil, errs.Wrap(firstErr, errs.Unsupported, "no cgroup v1 hierarchy can be written").
			WithHint("run the server as root on the host, or in a container with a writable cgroup mount")
	}
	if err := v.allowDevices(); err != nil {
		_ = v.close()
		return nil, err
	}
	if fd, ok := v.dirs["memory"]; ok {
		// Counting socket buffers patches the kernel's code when the first group begins to, and again when
		// the last one ends (memcg_update_tcp_max). This group keeps it on while sandboxes come and go.
		if err := setTCP(fd, ".", 0); err != nil {
			_ = v.close()
			return nil, err
		}
	}
	if fd, ok := v.dirs["pids"]; ok {
		if err := limitPids(fd); err != nil {
			_ = v.close()
			return nil, err
		}
	}
	if v.lacksSwap() {
		v.lacks = append(v.lacks, "swap")
	}
	return v, nil
}

// openRoot makes this server's directory at the hierarchy's root or else below our own group, and
// opens it.
func (v *v1) openRoot(controller, point, own string) error {
	var err error
	for _, dir := range slices.Compact([]string{point, filepath.Join(point, own)}) {
		var base int
		if base, err = openDir(unix.AT_FDCWD, dir); err != nil {
			continue
		}
		if err = makeDir(base, v.name); err == nil || errors.Is(err, fs.ErrExist) {
			var fd int
			if fd, err = openDir(base, v.name); err == nil {
				v.base[controller], v.dirs[controller] = base, fd
				return nil
			}
		}
		_ = unix.Close(base)
	}
	return fmt.Errorf("controller %s: %w", controller, err)
}

// allowDevices sets the device list that every sandbox of this server inherits: the nodes of a
// minimal /dev and pseudo-terminals; no mknod, which would need "m". A group that already has
// children refuses the change with EINVAL ("a"), and then has it from an earlier start.
func (v *v1) allowDevices() error {
	fd, ok := v.dirs["devices"]
	if !ok {
		return nil
	}
	if list, err := read(fd, "devices.list"); err != nil || list != "a *:* rwm\n" {
		return err
	}
	if err := write(fd, "devices.deny", "a"); err != nil {
		return err
	}
	for _, rule := range [...]string{
		"c 1:3 rw",   // null
		"c 1:5 rw",   // zero
		"c 1:7 rw",   // full
		"c 1:8 rw",   // random
		"c 1:9 rw",   // urandom
		"c 5:0 rw",   // tty
		"c 5:1 rw",   // console
		"c 5:2 rw",   // ptmx
		"c 136:* rw", // pts
	} {
		if err := write(fd, "devices.allow", rule); err != nil {
			return err
		}
	}
	return nil
}

func (v *v1) allowDevice(major, minor uint32) error {
	fd, ok := v.dirs["devices"]
	if !ok {
		return nil
	}
	return write(fd, "devices.allow", fmt.Sprintf("c %d:%d rw", major, minor))
}

// lacksSwap reports whether memory is limited here but swap is not, on a host that has swap.
func (v *v1) lacksSwap() bool {
	fd, ok := v.dirs["memory"]
	if !ok {
		return false
	}
	if _, err := readInt(fd, "memory.memsw.limit_in_bytes"); err == nil {
		return false
	}
	var si unix.Sysinfo_t
	return unix.Sysinfo(&si) == nil && si.Totalswap > 0
}

func (v *v1) version() int      { return 1 }
func (v *v1) missing() []string { return slices.Clone(v.lacks) }

// sharesCPU reports whether cpu and cpuacct are one hierarchy, as on most hosts.
func (v *v1) sharesCPU() bool {
	cpu, ok := v.dirs["cpu"]
	return ok && cpu == v.dirs["cpuacct"]
}

// tree lists the groups of one sandbox, parents first.
func (v *v1) tree(id string) []at {
	var t []at
	add := func(controller string, paths ...string) {
		if fd, ok := v.dirs[controller]; ok {
			for _, p := range paths {
				t = append(t, at{fd, p})
			}
		}
	}
	add("memory", id, id+"/guest", id+"/payload")
	add("pids", id, id+"/guest", id+"/payload")
	add("cpu", id, id+"/payload")
	if !v.sharesCPU() {
		add("cpuacct", id)
	}
	add("freezer", id, id+"/payload")
	return t
}

// at is a path below an open directory.
type at struct {
	fd   int
	path string
}

func (v *v1) create(id string, l Limits) (groupDriver, error) {
	g := &v1Group{v: v, id: id}
	for i, a := range v.tree(id) {
		err := makeDir(a.fd, a.path)
		if err == nil {
			continue
		}
		if i == 0 && errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap(err, errs.AlreadyExists, "control group %s exists", id)
		}
		return nil, errors.Join(err, g.discard())
	}
	if err := g.limit(l); err != nil {
		return nil, errors.Join(err, g.discard())
	}
	return g, nil
}

func (v *v1) open(id string) (groupDriver, error) {
	for _, fd := range v.dirs {
		if err := unix.Faccessat(fd, id, unix.F_OK, 0); err == nil {
			return &v1Group{v: v, id: id}, nil
		}
	}
	return nil, errs.New(errs.NotFound, "no control group %s", id)
}

func (v *v1) list() ([]string, error) {
	seen := map[string]bool{}
	for _, fd := range v.dirs {
		names, err := children(fd, ".")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			seen[n] = true
		}
	}
	return sortedNames(seen), nil
}

func (v *v1) removeRoot() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	var all []error
	for _, base := range v.base {
		all = append(all, removeTree(ctx, base, v.name)) // co-mounted: the second time it is gone
	}
	return errors.Join(all...)
}

func (v *v1) close() error {
	v.closeOnce.Do(func() {
		for _, f := range v.home {
			_ = f.Close()
		}
		seen := map[int]bool{}
		for _, fds := range []map[string]int{v.dirs, v.base} {
			for _, fd := range fds {
				if !seen[fd] {
					seen[fd] = true
					_ = unix.Close(fd)
				}
			}
		}
	})
	return nil
}

// sortedNames returns the valid group names of a set.
func sortedNames(set map[string]bool) []string {
	var names []string
	for n := range set {
		if validName(n) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names
}
