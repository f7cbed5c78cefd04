package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// v2 is this server's directory in the unified hierarchy.
type v2 struct {
	name  string
	base  int
	dir   int
	lacks []string
	// enable is what each level's cgroup.subtree_control gets, as "+cpu +memory +pids".
	enable string

	closeOnce sync.Once
}

// v2Controllers are the ones that limits need; freezing and killing are part of the core.
var v2Controllers = [...]string{"memory", "cpu", "pids"}

func openV2(serverID string, m mounts, own map[string]string) (*v2, error) {
	if m.unified == "" {
		return nil, errs.New(errs.Unsupported, "no cgroup hierarchy is mounted").
			WithHint("mount one: mount -t cgroup2 cgroup2 /sys/fs/cgroup")
	}
	v := &v2{name: rootName(serverID)}
	var err error
	for _, dir := range slices.Compact([]string{m.unified, filepath.Join(m.unified, own[""])}) {
		if v.base, err = openDir(unix.AT_FDCWD, dir); err != nil {
			continue
		}
		if err = makeDir(v.base, v.name); err == nil || errors.Is(err, fs.ErrExist) {
			if v.dir, err = openDir(v.base, v.name); err == nil {
				break
			}
		}
		_ = unix.Close(v.base)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.Unsupported, "the cgroup v2 hierarchy can't be written").
			WithHint("run the server as root on the host, or in a container with a writable cgroup mount")
	}
	v.enableControllers()
	if v.has("pids") {
		if err := limitPids(v.dir); err != nil {
			_ = v.close()
			return nil, err
		}
	}
	return v, nil
}

// enableControllers makes the controllers available to the sandboxes' groups, as far as the host
// lets us. A group that has processes of its own can't hand controllers down (EBUSY), except the
// real root: inside a container with its own cgroup namespace they stay missing.
func (v *v2) enableControllers() {
	var on []string
	for _, c := range v2Controllers {
		for _, level := range [...]int{v.base, v.dir} {
			if !hasWord(level, "cgroup.subtree_control", c) {
				_ = write(level, "cgroup.subtree_control", "+"+c) // read back below
			}
		}
		if hasWord(v.dir, "cgroup.subtree_control", c) {
			on = append(on, "+"+c)
		} else {
			v.lacks = append(v.lacks, c)
		}
	}
	v.enable = strings.Join(on, " ")
}

// hasWord reports whether a file of space-separated words has this one.
func hasWord(fd int, path, word string) bool {
	s, err := read(fd, path)
	return err == nil && slices.Contains(strings.Fields(s), word)
}

func (v *v2) version() int         { return 2 }
func (v *v2) missing() []string    { return slices.Clone(v.lacks) }
func (v *v2) has(name string) bool { return !slices.Contains(v.lacks, name) }

func (v *v2) create(id string, l Limits) (groupDriver, error) {
	if err := makeDir(v.dir, id); errors.Is(err, fs.ErrExist) {
		return nil, errs.Wrap(err, errs.AlreadyExists, "control group %s exists", id)
	} else if err != nil {
		return nil, err
	}
	g := &v2Group{v: v, id: id, limits: l}
	err := errors.Join(
		makeDir(v.dir, id+"/guest"),
		makeDir(v.dir, id+"/payload"),
		g.limitWhole(l))
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
		defer cancel()
		return nil, errors.Join(err, g.remove(ctx))
	}
	return g, nil
}

func (v *v2) open(id string) (groupDriver, error) {
	g := &v2Group{v: v, id: id}
	var st unix.Stat_t
	if err := unix.Fstatat(v.dir, id+"/cgroup.procs", &st, 0); err != nil {
		return nil, errs.Wrap(err, errs.NotFound, "no control group %s", id)
	}
	// The earlier server's Delegate shows in the owner.
	g.uid, g.gid = int(st.Uid), int(st.Gid)
	g.delegated = st.Uid != 0
	return g, nil
}

func (v *v2) list() ([]string, error) {
	names, err := children(v.dir, ".")
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, n := range names {
		seen[n] = true
	}
	return sortedNames(seen), nil
}

// allowDevice has nothing to do: version 2 holds no device back.
func (v *v2) allowDevice(uint32, uint32) error { return nil }

func (v *v2) removeRoot() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return removeTree(ctx, v.base, v.name)
}

func (v *v2) close() error {
	v.closeOnce.Do(func() {
		_ = unix.Close(v.dir)
		_ = unix.Close(v.base)
	})
	return nil
}

// waitEvent waits until key in a group's cgroup.events is want. The kernel announces changes of the
// file with POLLPRI (cgroup-v2.rst); the poll is cut in slices so that ctx is seen.
func (v *v2) waitEvent(ctx context.Context, path, key string, want int64) error {
	f, err := openFile(v.dir, path+"/cgroup.events", unix.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // gone: neither populated nor frozen
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		// Read through the same descriptor: that is what re-arms its poll.
		n, err := readEvent(f, key)
		if errors.Is(err, unix.ENODEV) || err == nil && n == want {
			return nil
		}
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wait for %s %d of %s: %w", key, want, path, err)
		}
		fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(fds, 20); err != nil && !errors.Is(err, unix.EINTR) {
			return pathError("poll", path, err)
		}
	}
}
