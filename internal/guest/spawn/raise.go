package spawn

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/seccomp"
)

// raise puts the walls on the calling thread, which must be locked and not the main one. The order
// is the logic: each step still needs what a later one takes away.
//
// send takes the listener of the filter, where there is one, and must get it out of the process.
func raise(w guestwire.Walls, join []*os.File, send func(*os.File) error) (guestwire.WallsApplied, error) {
	var a guestwire.WallsApplied
	// 1. Control groups, so that what the forks below cost is charged to the payload. "0" written to
	// tasks moves the calling thread alone (cgroups(7), version 1).
	for _, f := range join {
		if _, err := f.Write([]byte("0")); err != nil {
			return a, fmt.Errorf("join control group: %w", err)
		}
	}
	// 2. Seen from a control group namespace that begins here, the payload's group (version 2: the
	// sandbox's) is "/": processes inside learn no name of the host's (cgroup_namespaces(7)). Children
	// inherit it.
	if !w.Emulated {
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return a, fmt.Errorf("unshare control group namespace: %w", err)
		}
		// A thread that the runtime's watching thread made lets the kernel be late with timers; processes don't.
		if err := unix.Prctl(unix.PR_SET_TIMERSLACK, defaultTimerSlack, 0, 0, 0); err != nil {
			return a, fmt.Errorf("set timer slack: %w", err)
		}
	}
	// 3. Processors, which every child inherits; nproc inside reads this.
	if len(w.CPUs) > 0 {
		if err := setCPUs(w.CPUs); err != nil {
			return a, err
		}
	}
	// 4. The bounding set, while CAP_SETPCAP is still held. It decides what a root process holds.
	if err := caps.LimitBounding(caps.Of(w.Capabilities...)); err != nil {
		return a, err
	}
	// 5. no_new_privs before the next two, which it would also serve as permission.
	if w.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return a, fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	// 6. Landlock before seccomp, though the filter allows its calls: it opens the rules' paths, and a
	// filter should not have to care what that takes. Without no_new_privs it needs CAP_SYS_ADMIN, which
	// root inside does not have: hence this thread, which takes the walls while it still does.
	if w.Landlock != nil {
		absent, err := landlock.Restrict(ruleset(w.Landlock))
		if err != nil {
			return a, fmt.Errorf("landlock: %w", err)
		}
		a.LandlockABI, a.LandlockAbsent = w.Landlock.ABI, absent
	}
	// 7. seccomp. From here on this thread makes only calls that the filter allows, and none that a listener would
	// have to answer.
	if err := installFilter(w, send); err != nil {
		return a, err
	}
	// 8. The thread's own capabilities, last, since the steps above took most of them: what is left is
	// what the children may hold and what becoming their user takes.
	keep := caps.Of(w.Capabilities...) | caps.Of(unix.CAP_SETUID, unix.CAP_SETGID)
	if len(w.SeccompExec) > 0 && !w.NoNewPrivs || w.OwnGroup {
		keep |= caps.Of(unix.CAP_SYS_ADMIN) // each child installs a filter or makes a namespace, before it gives this up
	}
	if w.Emulated {
		keep |= caps.Of(unix.CAP_CHOWN) // its pipes go to their users by owner, since gVisor's have no modes
	}
	if err := caps.Limit(keep); err != nil {
		return a, err
	}
	a.Joined, a.SeccompExec = len(join), len(w.SeccompExec) > 0
	return a, readBack(w, &a)
}

func installFilter(w guestwire.Walls, send func(*os.File) error) error {
	if len(w.Seccomp) == 0 {
		return nil
	}
	if !w.Listen {
		return seccomp.Install(w.Seccomp)
	}
	listener, err := seccomp.Listen(w.Seccomp)
	if err != nil {
		return err
	}
	return errors.Join(send(listener), listener.Close())
}

// defaultTimerSlack is what a process has that nobody gave another value, in nanoseconds (prctl(2)).
const defaultTimerSlack = 50_000

func ruleset(l *guestwire.Landlock) landlock.Ruleset {
	r := landlock.Ruleset{Handled: landlock.Access(l.HandledFS), Scoped: landlock.Scope(l.Scoped)}
	for _, x := range l.Rules {
		r.Rules = append(r.Rules, landlock.Rule{Path: x.Path, Access: landlock.Access(x.Access), Optional: x.Optional})
	}
	return r
}

func setCPUs(cpus []int) error {
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("set affinity to %v: %w", cpus, err)
	}
	return nil
}

// errWalls says that the kernel shows something else than what was put in place.
var errWalls = errors.New("the walls read back differ from those put up")

// readBack fills in what the kernel says about this thread, and compares. It asks by prctl, which
// takes a tenth of the time that /proc/thread-self/status does.
func readBack(w guestwire.Walls, a *guestwire.WallsApplied) error {
	bounding, err := caps.Bounding()
	if err != nil {
		return err
	}
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil {
		return fmt.Errorf("read no_new_privs: %w", err)
	}
	if a.SeccompMode, err = unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("read seccomp mode: %w", err)
	}
	a.Capabilities, a.NoNewPrivs = bounding.List(), nnp == 1
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	for c := range len(set) * 64 {
		if set.IsSet(c) {
			a.CPUs = append(a.CPUs, c)
		}
	}
	switch {
	case bounding != caps.Of(w.Capabilities...):
		return fmt.Errorf("%w: bounding set %v", errWalls, caps.Names(a.Capabilities))
	case w.NoNewPrivs && !a.NoNewPrivs:
		return fmt.Errorf("%w: no_new_privs is off", errWalls)
	case len(w.Seccomp) > 0 && a.SeccompMode != unix.SECCOMP_MODE_FILTER:
		return fmt.Errorf("%w: seccomp mode %d", errWalls, a.SeccompMode)
	case len(w.CPUs) > 0 && !slices.Equal(a.CPUs, slices.Sorted(slices.Values(w.CPUs))):
		return fmt.Errorf("%w: processors %v", errWalls, a.CPUs)
	}
	return nil
}

// limitsOf returns the limits as the child sets them, none above what the guest itself may have:
// raising a hard limit would be refused. Those that the guest itself has are left out, since a child begins
// with them; nobody inside can change the guest's.
func limitsOf(rs []guestwire.Rlimit) ([]limit, error) {
	out := make([]limit, 0, len(rs))
	for _, r := range rs {
		var own unix.Rlimit
		if err := unix.Getrlimit(r.Resource, &own); err != nil {
			return nil, fmt.Errorf("read limit %d: %w", r.Resource, err)
		}
		m := min(r.Max, own.Max)
		if own.Cur != m || own.Max != m {
			out = append(out, limit{uintptr(r.Resource), unix.Rlimit{Cur: m, Max: m}})
		}
	}
	return out, nil
}
