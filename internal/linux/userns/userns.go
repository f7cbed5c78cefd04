// Package userns opens and makes user namespaces, whose id maps an idmapped mount takes over.
//
// What belongs here: descriptors of user namespaces, and reading the maps of a process's. What does
// not: which ids a sandbox gets; that is the backend's.
package userns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Range maps Count ids from Inside on to those from Outside on, as one line of uid_map does
// (user_namespaces(7)).
type Range struct{ Inside, Outside, Count uint32 }

// Of returns the user namespace of a process.
func Of(pid int) (*os.File, error) {
	return os.OpenFile("/proc/"+strconv.Itoa(pid)+"/ns/user", os.O_RDONLY|unix.O_CLOEXEC, 0)
}

// New makes a user namespace with the given maps, which lives as long as the descriptor or a mount
// uses it. A namespace is born with a process; this one's stops at its exec and is killed at once, so
// none of its instructions runs (ptrace(2), PTRACE_TRACEME).
func New(ctx context.Context, uids, gids []Range) (*os.File, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// The tracer is a thread, not a process: all calls must come from this one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"userns"}, &syscall.ProcAttr{ //nolint:forbidigo // it never runs: killed at its exec
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Ptrace:      true,
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: mappings(uids),
			GidMappings: mappings(gids),
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make user namespace: %w", err)
	}
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		for {
			if _, err := syscall.Wait4(pid, nil, syscall.WALL, nil); err != syscall.EINTR {
				return
			}
		}
	}()
	return Of(pid)
}

func mappings(ranges []Range) []syscall.SysProcIDMap {
	out := make([]syscall.SysProcIDMap, len(ranges))
	for i, r := range ranges {
		out[i] = syscall.SysProcIDMap{ContainerID: int(r.Inside), HostID: int(r.Outside), Size: int(r.Count)}
	}
	return out
}

// Map writes the id maps of a process's new user namespace, which can be done once: users and groups
// are mapped alike. The caller must hold SETUID and SETGID in the parent namespace.
func Map(pid int, r Range) error {
	line := []byte(fmt.Sprintf("%d %d %d", r.Inside, r.Outside, r.Count))
	for _, name := range [...]string{"gid_map", "uid_map"} {
		// In one write, and not through os.WriteFile, which would create and truncate.
		f, err := os.OpenFile("/proc/"+strconv.Itoa(pid)+"/"+name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(line)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// UIDMap reads the uid map of a process's namespace as this process sees it. Inside the namespace the
// same file may tell another story, so it is asked from outside.
func UIDMap(pid int) ([]Range, error) { return readMap(pid, "uid_map") }

// GIDMap is UIDMap for groups.
func GIDMap(pid int) ([]Range, error) { return readMap(pid, "gid_map") }

func readMap(pid int, name string) ([]Range, error) {
	path := "/proc/" + strconv.Itoa(pid) + "/" + name
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m, err := parseMap(b)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return m, nil
}

func parseMap(b []byte) ([]Range, error) {
	var out []Range
	for line := range bytes.Lines(b) {
		fields := bytes.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("line %q has no three numbers", line)
		}
		var n [3]uint32
		for i, f := range fields {
			v, err := strconv.ParseUint(string(f), 10, 32)
			if err != nil {
				return nil, err
			}
			n[i] = uint32(v)
		}
		out = append(out, Range{Inside: n[0], Outside: n[1], Count: n[2]})
	}
	return out, nil
}
