package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"casemate.dev/client"
)

// idleMemory holds sandboxes that do nothing and adds up what their processes take: the
// proportional set size, in which a page that several processes share counts in parts (proc(5),
// smaps_rollup). What the server itself grew by is added.
func idleMemory(ctx context.Context, b *bench) (Row, error) {
	path, local := strings.CutPrefix(b.c.URL(), "unix://")
	if !local || os.Geteuid() != 0 {
		return Row{Unit: "MB", Note: "needs root on the server's machine and its socket"}, nil
	}
	server, err := peerPID(ctx, path)
	if err != nil {
		return Row{}, err
	}
	n := b.rounds(300)
	var ids []string
	defer func() {
		_ = atOnce(len(ids), func(i int) error { return b.delete(ctx, ids[i]) }) // the rest ends by its lifetime
	}()
	// One sandbox first: what the server makes once counts for nobody.
	if ids, err = b.idle(ctx, ids); err != nil {
		return Row{}, err
	}
	before, err := pss(server)
	if err != nil {
		return Row{}, err
	}
	for range n {
		if ids, err = b.idle(ctx, ids); err != nil {
			return Row{}, err
		}
	}
	after, err := pss(server)
	if err != nil {
		return Row{}, err
	}
	guests, err := b.guestMemory(ctx, ids)
	if err != nil {
		return Row{}, err
	}
	each := (guests/float64(len(ids)) + max(0, after-before)/float64(n)) / (1 << 20)
	r := Row{Unit: "MB", Stats: Stats{P50: each, P95: each, P99: each, N: len(ids)}}
	r.Note = fmt.Sprintf("guest %.2f MB, server %.2f MB", guests/float64(len(ids))/(1<<20), (after-before)/float64(n)/(1<<20))
	r.budget("≤ 6 MB", each, 6, 0)
	return r, nil
}

func (b *bench) idle(ctx context.Context, ids []string) ([]string, error) {
	id, err := b.create(ctx)
	if err != nil {
		return ids, err
	}
	return append(ids, id), b.hello(ctx, id)
}

// guestMemory adds up the PSS of every process whose user is in the range of one of the sandboxes.
func (b *bench) guestMemory(ctx context.Context, ids []string) (float64, error) {
	var ranges []*client.Sandbox
	for _, id := range ids {
		sb, err := b.c.Sandboxes.Get(ctx, id)
		if err != nil {
			return 0, err
		}
		ranges = append(ranges, sb)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	var sum float64
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !inRange(mappedRoot(pid), ranges) {
			continue
		}
		if n, err := pss(pid); err == nil { // else it ended meanwhile
			sum += n
		}
	}
	if sum == 0 {
		return 0, fmt.Errorf("no process of a sandbox was found")
	}
	return sum, nil
}

// mappedRoot returns the host id that is 0 in a process's user namespace: it tells whose it is,
// whatever ids the process has.
func mappedRoot(pid int) uint32 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
	if err != nil {
		return 0
	}
	var inside, outside, count uint32
	if _, err := fmt.Sscan(string(b), &inside, &outside, &count); err != nil || inside != 0 {
		return 0
	}
	return outside
}

func inRange(uid uint32, ranges []*client.Sandbox) bool {
	for _, r := range ranges {
		if first := r.GetApplied().GetHostUid(); first != 0 && uid >= first && uid < first+r.GetApplied().GetUidCount() {
			return true
		}
	}
	return false
}

// pss returns a process's proportional set size in bytes.
func pss(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "Pss:" {
			n, err := strconv.ParseFloat(f[1], 64)
			return n * 1024, err
		}
	}
	return 0, fmt.Errorf("smaps_rollup of %d names no Pss", pid)
}

// peerPID returns the process behind a Unix socket (SO_PEERCRED, unix(7)).
func peerPID(ctx context.Context, path string) (pid int, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	ctrlErr := raw.Control(func(fd uintptr) {
		var cred *syscall.Ucred
		if cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	if err == nil {
		err = ctrlErr
	}
	return pid, err
}
