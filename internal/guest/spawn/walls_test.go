package spawn_test

import (
	"os"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
)

// attack is a probe, and what comes of it inside the walls. Without walls it must succeed.
type attack struct {
	name     string
	locked   string
	standard string
	root     bool   // only root can do it without walls: then its twin runs as root also for locked
	twin     string // what it says without walls, if not "ok"
}

func attacks() []attack {
	return []attack{
		{name: "mount", locked: "EPERM", standard: "EPERM", root: true},
		{name: "fsopen", locked: "EPERM", standard: "EPERM", root: true},
		{name: "open_tree", locked: "EPERM", standard: "EPERM", root: true},
		{name: "unshare-user", locked: "EPERM", standard: "EPERM"},
		{name: "unshare-mount", locked: "EPERM", standard: "EPERM", root: true},
		{name: "clone-user", locked: "EPERM", standard: "EPERM"},
		{name: "clone3-user", locked: "ENOSYS", standard: "ENOSYS"},
		{name: "setns", locked: "EPERM", standard: "EPERM", root: true},
		{name: "chroot", locked: "EPERM", standard: "ok", root: true}, // standard holds SYS_CHROOT
		{name: "vsock", locked: "EAFNOSUPPORT", standard: "EAFNOSUPPORT"},
		{name: "packet", locked: "EPERM", standard: "EPERM", root: true},
		{name: "xdp", locked: "EAFNOSUPPORT", standard: "EAFNOSUPPORT", root: true},
		{name: "raw", locked: "EPERM", standard: "EPERM", root: true},
		{name: "netlink-uevent", locked: "EPROTONOSUPPORT", standard: "EPROTONOSUPPORT"},
		{name: "mptcp", locked: "EPROTONOSUPPORT", standard: "EPROTONOSUPPORT"},
		{name: "ptrace", locked: "EPERM", standard: "EPERM"},
		{name: "ptrace-me", locked: "EPERM", standard: "EPERM"},
		{name: "process-read", locked: "EPERM", standard: "EPERM"},
		{name: "pidfd-getfd", locked: "EPERM", standard: "EPERM"},
		{name: "kcmp", locked: "EPERM", standard: "EPERM"},
		{name: "userfaultfd", locked: "EPERM", standard: "EPERM"},
		{name: "io-uring", locked: "ENOSYS", standard: "ENOSYS"},
		{name: "keyctl", locked: "EPERM", standard: "EPERM"},
		{name: "handle", locked: "EPERM", standard: "EPERM"},
		{name: "sethostname", locked: "EPERM", standard: "EPERM", root: true},
		{name: "personality", locked: "EPERM", standard: "EPERM"},
		{name: "prlimit-init", locked: "EPERM", standard: "EPERM", root: true},
		{name: "tiocsti", locked: "EPERM", standard: "EPERM"},
		{name: "tiocsti-high", locked: "EPERM", standard: "EPERM"},
		{name: "tiocsetd", locked: "EPERM", standard: "EPERM"},
		{name: "mknod", locked: "EPERM", standard: "EPERM"},
		{name: "listener", locked: "EPERM", standard: "EPERM"},
		{name: "init-signal", locked: "EPERM", standard: "EPERM", root: true},
		// A kernel without the x32 ABI has no such call; with it the twin says "ok". The filter kills either way.
		{name: "x32", locked: "signal 31", standard: "signal 31", twin: "ENOSYS"},
	}
}

// works lists what every profile must allow.
func works() []string {
	var out []string
	for name := range probes() {
		if strings.HasPrefix(name, "work-") {
			out = append(out, name)
		}
	}
	return out
}

func probeRun(name string, uid uint32) run {
	return run{Name: name, Probe: name, UID: uid, GID: uid, TTY: strings.HasPrefix(name, "tioc")}
}

// alone says which probes need a process of their own: they end or stop it, change it as a whole, or need a
// terminal. The others share one, since starting a program with the race detector takes a second.
func alone(name string) bool {
	return name == "x32" || name == "chroot" || name == "ptrace-me" || strings.HasPrefix(name, "tioc")
}

// add puts a probe into the script, where it may into an earlier run of the same user.
func (s *script) add(name string, uid uint32) {
	for i, r := range s.Runs {
		if !alone(name) && !alone(r.Name) && r.UID == uid {
			s.Runs[i].Probe += " " + name
			return
		}
	}
	s.Runs = append(s.Runs, probeRun(name, uid))
}

// outcome is what a probe said, or how it ended where it had no time to speak.
func (r report) outcome(name string) string {
	for _, out := range r.Output {
		for line := range strings.Lines(out) {
			if said, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
				return said
			}
		}
	}
	return r.Status[name]
}

// TestAttacks runs each attack inside the walls of each profile, as the most powerful user there is,
// and in a guest without walls.
func TestAttacks(t *testing.T) {
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			user := uint32(1000)
			if p == isolation.Standard {
				user = 0
			}
			inside := script{Walls: profile(t, p, walls.Options{OpenFiles: 4096}, false)}
			twin := script{Walls: noWalls()}
			for _, a := range attacks() {
				inside.add(a.name, user)
				twinUser := user
				if a.root {
					twinUser = 0
				}
				twin.add(a.name, twinUser)
			}
			for _, w := range works() {
				inside.add(w, user)
			}
			got, without := inGuest(t, inside), inGuest(t, twin)
			if got.Error != "" || without.Error != "" {
				t.Fatal(got.Error, without.Error)
			}
			for _, a := range attacks() {
				want := a.locked
				if p == isolation.Standard {
					want = a.standard
				}
				if out := got.outcome(a.name); out != want {
					t.Errorf("%s inside: %s, want %s", a.name, out, want)
				}
				if out := without.outcome(a.name); out != "ok" && out != a.twin {
					t.Errorf("%s without walls: %s, so the case proves nothing", a.name, out)
				}
			}
			for _, w := range works() {
				if out := got.outcome(w); out != "ok" {
					t.Errorf("%s inside: %s", w, out)
				}
			}
		})
	}
}

// TestForeignArchitecture runs a 32-bit program, whose calls a filter that looks at numbers alone
// would take for others.
func TestForeignArchitecture(t *testing.T) {
	x := run{Name: "int80", Paths: []string{"/tmp/int80"}, Argv: []string{"int80"}, UID: 1000, GID: 1000}
	for _, c := range []struct {
		walls guestwire.Walls
		want  string
	}{
		{profile(t, isolation.Locked, walls.Options{}, false), "signal 31"},
		{profile(t, isolation.Standard, walls.Options{}, false), "signal 31"},
		{noWalls(), "exit 0"},
	} {
		if r := inGuest(t, script{Walls: c.walls, Runs: []run{x}}); r.Status["int80"] != c.want {
			t.Errorf("root allowed %v, capabilities %d: %q, want %q",
				c.walls.RootAllowed, len(c.walls.Capabilities), r.Status["int80"], c.want)
		}
	}
}

// TestInitOutOfReach looks at PID 1's memory and descriptors as root. Two walls stand before them, and
// each must hold alone: the program that root inside can't read, and the Landlock domain.
func TestInitOutOfReach(t *testing.T) {
	domain := noWalls()
	domain.Landlock = profile(t, isolation.Standard, walls.Options{}, false).Landlock
	for _, c := range []struct {
		name  string
		mode  os.FileMode
		walls guestwire.Walls
		mem   string
		fd    string
	}{
		{"neither", 0o755, noWalls(), "ok", "ok"},
		{"unreadable program", 0o711, noWalls(), "EACCES", "EACCES"},
		{"landlock", 0o755, domain, "EACCES", "EACCES"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newGuestOf(t, c.mode)
			s := script{Walls: c.walls}
			s.add("init-mem", 0)
			s.add("init-fd", 0)
			g.start(s)
			r := g.wait()
			if mem, fd := r.outcome("init-mem"), r.outcome("init-fd"); mem != c.mem || fd != c.fd {
				t.Errorf("mem %s, fd %s; want %s, %s", mem, fd, c.mem, c.fd)
			}
		})
	}
}

// TestOneDomain shows that processes started apart share one Landlock domain: they can signal each
// other, but not PID 1 (see init-signal in TestAttacks).
func TestOneDomain(t *testing.T) {
	sh := func(name, script string) run {
		return run{Name: name, Paths: []string{"/bin/sh"}, Argv: []string{"sh", "-c", script}, UID: 1000, GID: 1000}
	}
	r := inGuest(t, script{
		Walls: profile(t, isolation.Locked, walls.Options{}, false),
		Runs: []run{
			sh("first", `sleep 100 >/dev/null 2>&1 & echo $! >/tmp/pid`),
			sh("second", `kill "$(cat /tmp/pid)"`),
		},
	})
	if r.Status["second"] != "exit 0" {
		t.Errorf("one process could not signal another's: %s %s", r.Status["second"], r.Output["second"])
	}
}
