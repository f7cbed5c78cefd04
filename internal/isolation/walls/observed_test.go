package walls

import (
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

// answer says what a program answers to a call; ok is false where the architecture has none of that name.
func answer(t *testing.T, program []byte, arch, call string, args ...uint64) (v seccomp.Verdict, ok bool) {
	t.Helper()
	c, err := filter.Named(arch, call, args...)
	if err != nil {
		return 0, false
	}
	if v, err = filter.Simulate(program, c); err != nil {
		t.Fatal(err)
	}
	return v, true
}

func observing(t *testing.T, p isolation.Profile, arch string, c isolation.Calls, mark uint64) Plan {
	t.Helper()
	plan, err := ForProfile(p, Host{Arch: arch, LandlockABI: landlock.MaxABI}, Options{OpenFiles: 4096, CPUs: []int{0}, Calls: c, ExecMark: mark})
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// VULNERABILITY: a filter that hands calls over refuses less than one that does not.
// ATTACK: every call that there is, without arguments and with some that are refused.
// VERIFIES: what is observed is answered as without a listener or handed over, and what then decides about it answers as
// the filter without one. The twin is that there are calls of both kinds.
func TestObservedFilterAllowsNoMore(t *testing.T) {
	const mark = 0x33_00000044
	all := isolation.Calls{Attempts: true, Exec: true, Connect: true, Open: true}
	for _, p := range profiles() {
		for _, arch := range filter.Arches() {
			plain, seen := observing(t, p, arch, isolation.Calls{}, 0), observing(t, p, arch, all, mark)
			if len(plain.Decide) > 0 || !seen.Walls.Listen || plain.Walls.Listen {
				t.Errorf("%s, %s: what is observed: %v, and what not: %v", p, arch, seen.Walls.Listen, plain.Walls.Listen)
			}
			var told, same int
			for _, e := range table(p, false, isolation.Calls{}, 0).Entries {
				for _, args := range [][]uint64{nil, {unix.CLONE_NEWUSER}, {unix.AF_INET, unix.SOCK_RAW}, {0, unix.TIOCSTI}, {0, unix.S_IFCHR}} {
					want, ok := answer(t, plain.Walls.Seccomp, arch, e.Call, args...)
					if !ok {
						continue
					}
					got, _ := answer(t, seen.Walls.Seccomp, arch, e.Call, args...)
					decided, _ := answer(t, seen.Decide, arch, e.Call, args...)
					if got == seccomp.Notify {
						told++
					} else if got == want {
						same++
					}
					if got != want && got != seccomp.Notify || decided != want {
						t.Errorf("%s, %s: %s %x: %s; observed %s, and then %s", p, arch, e.Call, args, want, got, decided)
					}
				}
			}
			if told < 50 || same < 500 {
				t.Errorf("%s, %s: %d are handed over, %d answered", p, arch, told, same)
			}
		}
	}
}

// VULNERABILITY: whoever knows the mark of what the guest executes itself can execute unseen.
// ATTACK: executions with the mark that stands in every filter at first, with half of the instance's own, and without one.
// VERIFIES: they are handed over. The twin has the whole mark of the instance, and goes on.
func TestExecMark(t *testing.T) {
	const first, own = 0x7ca5e3a1_7ca5e3a2, 0x0123456789abcdef
	for _, arch := range filter.Arches() {
		plan := observing(t, isolation.Locked, arch, isolation.Calls{Exec: true}, first)
		program := Remark(plan.Walls.Seccomp, first, own)
		for mark, want := range map[uint64]seccomp.Verdict{
			0: seccomp.Notify, first: seccomp.Notify, own & 0xffffffff: seccomp.Notify, own &^ 0xffffffff: seccomp.Notify,
			own: seccomp.Allow,
		} {
			for _, call := range []string{"execve", "execveat"} {
				if got, _ := answer(t, program, arch, call, 0, 0, 0, 0, 0, mark); got != want {
					t.Errorf("%s: %s with %#x: %s, want %s", arch, call, mark, got, want)
				}
			}
		}
		if got, _ := answer(t, plan.Walls.Seccomp, arch, "execve", 0, 0, 0, 0, 0, first); got != seccomp.Allow {
			t.Errorf("%s: Remark changed the program that it was given: %s", arch, got)
		}
	}
}
