package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv"
)

// steps are the failpoints of a start, in order.
func steps() []string {
	return []string{"groups", "forked", "recorded", "limited", "built", "launched", "settled", "verified"}
}

// A start that fails at any step leaves nothing behind: no process, mount, control group, file,
// descriptor or id range.
func TestFailedStartsLeaveNothing(t *testing.T) {
	testenv.NoLeaks(t)
	var at string
	h := newHost(t, func(c *Config) {
		c.fail = func(step string) error {
			if step == at {
				return errors.New("failed on purpose at " + step)
			}
			return nil
		}
	})
	b := h.backend()
	destroy(t, start(t, b, conformance.Spec(t, isolation.Locked)).inst) // opens what is opened once
	free := len(b.ids.free)
	fds := descriptors(t)
	for _, at = range steps() {
		_, err := tryStart(t, b, conformance.Spec(t, isolation.Locked))
		if err == nil || !strings.Contains(err.Error(), "failed on purpose at "+at) {
			t.Fatalf("%s: %v", at, err)
		}
		if left := h.leftovers(); len(left) > 0 {
			t.Errorf("%s: left behind: %v", at, left)
		}
		if len(b.ids.free) != free || len(b.names) > 0 || len(b.instances) > 0 {
			t.Errorf("%s: %d of %d id ranges are free, %d names, %d instances", at, len(b.ids.free), free, len(b.names), len(b.instances))
		}
	}
	testenv.Eventually(t, patience, "descriptors are closed", func() bool { return descriptors(t) <= fds })
	at = ""
	wants(t, "a start afterwards", start(t, b, conformance.Spec(t, isolation.Locked)).sh("echo fine"), "fine")
}

// Only the thread by which Go's runtime watches over the others may be late: with the slack of that one, a
// thread that looks for work would sleep for milliseconds while the work waits.
func TestGuestIsLateWithOneThread(t *testing.T) {
	testenv.NoLeaks(t)
	x := start(t, newHost(t).backend(), conformance.Spec(t, isolation.Locked))
	dir, err := os.Open(procFile(recordOf(t, x.inst).PID, "task"))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	threads, err := dir.Readdirnames(2) // in the order in which they were made
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"50000", "5000000"} {
		got, err := os.ReadFile(filepath.Join("/proc", threads[i], "timerslack_ns"))
		if err != nil {
			t.Fatal(err)
		}
		wants(t, "slack", strings.TrimSpace(string(got)), want)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A caller that gives up leaves nothing behind either.
func TestCanceledStart(t *testing.T) {
	testenv.NoLeaks(t)
	ctx, cancel := context.WithCancel(t.Context())
	h := newHost(t, func(c *Config) {
		c.fail = func(step string) error {
			if step == "built" {
				cancel()
			}
			return nil
		}
	})
	if _, err := h.backend().Start(ctx, conformance.Spec(t, isolation.Locked)); !errors.Is(err, context.Canceled) {
		t.Errorf("start: %v", err)
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Everything of a destroyed instance is gone, twice if asked twice. (How soon, bench measures.)
func TestDestroyLeavesNothing(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		x := start(t, b, conformance.Spec(t, p))
		x.sh("setsid sleep 1000 & (sleep 1000 &) ; sleep 0.01; echo")
		destroy(t, x.inst)
		destroy(t, x.inst)
		if left := h.leftovers(); len(left) > 0 {
			t.Errorf("%s: left behind: %v", p, left)
		}
		if e := x.inst.Exit(); e.Reason != "destroyed" {
			t.Errorf("%s: exit %+v", p, e)
		}
	}
}

// A guest program that can't be a guest is reported, with its last words.
func TestBrokenGuest(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHost(t)
	program, err := os.ReadFile("/usr/bin/ls")
	if err != nil {
		t.Fatal(err)
	}
	h.cfg.Guest = program
	b := h.backend()
	if _, err := tryStart(t, b, conformance.Spec(t, isolation.Locked)); err == nil {
		t.Error("the sandbox started")
	} else if text, _ := errs.PublicText(err); strings.Contains(text, "/") {
		t.Errorf("the public text shows a path: %q", text)
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Applied holds what the kernel shows.
func TestAppliedIsTrue(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		spec := conformance.Spec(t, p)
		spec.Limits.CPUs = 1
		x := start(t, b, spec)
		a := x.inst.Applied()
		if a.HostUID < firstID || a.UIDCount != rangeSize || !a.GuestSeparated || len(a.Namespaces) != 7 || len(a.Missing) > 0 {
			t.Errorf("%s: %+v", p, a)
		}
		wants(t, "processors", x.sh("nproc; cat /sys/devices/system/cpu/online | tr -d '[0-9]'"), "1")
		status := x.sh("grep -E '^(NoNewPrivs|Seccomp|CapBnd):' /proc/self/status | tr -d '\\t'")
		want := "CapBnd:0000000000000000\nNoNewPrivs:1\nSeccomp:2"
		if p == isolation.Standard {
			want = "CapBnd:00000000800405fb\nNoNewPrivs:0\nSeccomp:2"
		}
		wants(t, string(p)+": status", status, want)
		if _, err := b.Start(t.Context(), spec); !errs.Is(err, errs.AlreadyExists) {
			t.Errorf("%s: the same id again: %v", p, err)
		}
		wants(t, string(p)+": out-of-memory score", x.sh("cat /proc/1/oom_score_adj | tr -d '0-9'"), "")
		for name, who := range a.Observed {
			if who != "kernel" && who != "server" && who != "guest" {
				t.Errorf("%s was observed by %q", name, who)
			}
		}
	}
}

// Nobody but the host's root can reach a guest's socket or read its record, wherever they lie.
func TestRunFilesArePrivate(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Locked))
	for _, path := range []string{x.inst.socket, x.inst.b.recordPath(x.inst.name)} {
		st, err := os.Stat(path)
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
}

// A workspace shows its owner as the default user, takes writes, and leaves the source alone.
func TestWorkspace(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		spec := conformance.Spec(t, p)
		source := t.TempDir()
		writeFile(t, filepath.Join(source, "mine"), "mine")
		writeFile(t, filepath.Join(source, "dir/deep"), "deep")
		writeFile(t, filepath.Join(source, "roots"), "roots")
		for _, f := range []string{"", "mine", "dir", "dir/deep"} {
			if err := os.Chown(filepath.Join(source, f), 4242, 4243); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(filepath.Join(source, "roots"), 0o600); err != nil {
			t.Fatal(err)
		}
		upper, work := conformance.Writable(t)
		spec.Root.Workspaces = []rootfs.Workspace{{
			Source: source, Target: "/home/user/made/project", Upper: upper, Work: work, OwnerUID: 4242, OwnerGID: 4243,
		}}
		x := start(t, b, spec)
		wants(t, "owners", x.sh("cd made/project && stat -c %U:%G . mine dir dir/deep | sort -u && stat -c %u roots"), "user:user\n65534")
		wants(t, "write", x.sh("cd made/project && echo more >> mine && mkdir new && echo x > new/f && mv dir/deep new/ && rm -r dir && cat mine new/*"), "minemore\ndeepx")
		if got := x.sh("cat made/project/roots 2>&1"); !strings.Contains(got, "denied") {
			t.Errorf("another user's private file: %q", got)
		}
		for name, want := range map[string]string{"mine": "mine", "dir/deep": "deep"} {
			if got, err := os.ReadFile(filepath.Join(source, name)); err != nil || string(got) != want {
				t.Errorf("the source changed: %s holds %q, %v", name, got, err)
			}
		}
		if got, err := os.ReadFile(filepath.Join(upper, "new/f")); err != nil || string(got) != "x\n" {
			t.Errorf("the writable layer: %q, %v", got, err)
		}
	}
}

// Binds show files and directories, read-only, with the host's ids unless mapped.
func TestBinds(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	spec := conformance.Spec(t, isolation.Standard)
	dir, empty := t.TempDir(), t.TempDir()
	writeFile(t, filepath.Join(dir, "plain"), "plain")
	writeFile(t, filepath.Join(dir, "sub/f"), "f")
	if err := os.Chown(filepath.Join(dir, "plain"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	spec.Root.Binds = append(spec.Root.Binds,
		rootfs.Bind{Source: dir, Target: "/srv/mapped", Mapped: true},
		rootfs.Bind{Source: dir, Target: "/srv/tree"},
		rootfs.Bind{Source: empty, Target: "/usr/local", Mapped: true},
		rootfs.Bind{Source: "/etc/hostname", Target: "/etc/hostname"})
	x := start(t, b, spec)
	wants(t, "contents", x.sh("cat /srv/mapped/plain /srv/tree/sub/f; ls /usr/local"), "plainf")
	name, err := os.ReadFile("/etc/hostname")
	if err != nil {
		t.Fatal(err)
	}
	wants(t, "a single file", x.sh("cat /etc/hostname"), strings.TrimSpace(string(name)))
	wants(t, "owners", x.sh("stat -c %u /srv/mapped/plain /srv/tree/plain"), "1000\n65534")
	for _, name := range []string{"/etc/hostname", "/srv/tree/sub/f", "/srv/mapped/new", "/usr/new", "/usr/local/new"} {
		if got := x.shAs("root", "echo x > "+name+" 2>&1"); !strings.Contains(got, "Read-only") && !strings.Contains(got, "denied") {
			t.Errorf("write %s: %q", name, got)
		}
	}
	info := x.sh("cat /proc/self/mountinfo")
	for _, path := range []string{dir, empty} {
		if strings.Contains(info, path) {
			t.Errorf("mountinfo shows %s:\n%s", path, info)
		}
	}
	spec = conformance.Spec(t, isolation.Locked)
	spec.Root.Binds = append(spec.Root.Binds, rootfs.Bind{Source: filepath.Join(dir, "plain"), Target: "/srv/file"})
	if _, err := b.Start(t.Context(), spec); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a file under another path: %v", err)
	}
}

// What can't be mounted safely is refused before anything is made.
func TestCheckPlan(t *testing.T) {
	good := isolation.Spec{Profile: isolation.Locked, Root: rootfs.Plan{Lowers: []string{"/l"}, Upper: "/x/u", Work: "/x/w"}}
	if err := checkPlan(good); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(*isolation.Spec){
		"no profile":         func(s *isolation.Spec) { s.Profile = "" },
		"no layers":          func(s *isolation.Spec) { s.Root.Lowers = nil },
		"too many layers":    func(s *isolation.Spec) { s.Root.Lowers = slices.Repeat([]string{"/l"}, maxLowers+1) },
		"relative layer":     func(s *isolation.Spec) { s.Root.Lowers = []string{"l"} },
		"unclean upper":      func(s *isolation.Spec) { s.Root.Upper = "/x/../u" },
		"no work":            func(s *isolation.Spec) { s.Root.Work = "" },
		"bind over /proc":    func(s *isolation.Spec) { s.Root.Binds = []rootfs.Bind{{Source: "/a", Target: "/proc"}} },
		"bind below /dev":    func(s *isolation.Spec) { s.Root.Binds = []rootfs.Bind{{Source: "/a", Target: "/dev/x"}} },
		"bind over the root": func(s *isolation.Spec) { s.Root.Binds = []rootfs.Bind{{Source: "/a", Target: "/"}} },
		"bind with ..":       func(s *isolation.Spec) { s.Root.Binds = []rootfs.Bind{{Source: "/a", Target: "/x/../proc"}} },
		"relative bind":      func(s *isolation.Spec) { s.Root.Binds = []rootfs.Bind{{Source: "a", Target: "/x"}} },
		"workspace below /sys": func(s *isolation.Spec) {
			s.Root.Workspaces = []rootfs.Workspace{{Source: "/a", Target: "/sys/fs", Upper: "/u", Work: "/w"}}
		},
		"workspace of no layer": func(s *isolation.Spec) { s.Root.Workspaces = []rootfs.Workspace{{Source: "/a", Target: "/w"}} },
	} {
		s := good
		edit(&s)
		if err := checkPlan(s); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCommonParent(t *testing.T) {
	for _, tt := range []struct{ a, b, want string }{
		{"/d/x/upper", "/d/x/work", "/d/x"},
		{"/d/x/upper", "/d/work", "/d"},
		{"/d/upper", "/d/x/work", "/d"},
		{"/a/u", "/b/w", ""},
		{"/u", "/w", ""},
		{"/d/u", "/d/u", ""},
		{"/d/u", "/d/u2", "/d"},
	} {
		got, err := commonParent(tt.a, tt.b)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("commonParent(%q, %q) = %q, %v, want %q", tt.a, tt.b, got, err, tt.want)
		}
	}
}

// A required layer that the host lacks stops the start and is named; one that the spec waives shows.
func TestMissingLayers(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	b.abi = 0
	spec := conformance.Spec(t, isolation.Locked)
	_, err := b.Start(t.Context(), spec)
	if text, hint := errs.PublicText(err); !errs.Is(err, errs.Unsupported) || !strings.Contains(text, "landlock") || hint == "" {
		t.Errorf("start without landlock: %q, %q", text, hint)
	}
	spec.AllowMissing = []string{"landlock"}
	x := start(t, b, spec)
	if a := x.inst.Applied(); !slices.Equal(a.Missing, []string{"landlock"}) || a.LandlockABI != 0 {
		t.Errorf("applied: %+v", a)
	}

	groups := b.groups
	b.groups = nil
	defer func() { b.groups = groups }()
	if _, err := b.Start(t.Context(), conformance.Spec(t, isolation.Locked)); !errs.Is(err, errs.Unsupported) {
		t.Errorf("start without control groups: %v", err)
	}
	spec = conformance.Spec(t, isolation.Locked)
	spec.AllowMissing = []string{"landlock", "cgroup-memory", "cgroup-cpu", "cgroup-pids", "cgroup-freezer"}
	x = start(t, b, spec)
	if a := x.inst.Applied(); len(a.Missing) != 5 || a.CgroupVersion != 0 || a.Limits.MemoryBytes != 0 || a.Limits.Pids != 0 {
		t.Errorf("applied without control groups: %+v", a)
	}
	wants(t, "a process without control groups", x.sh("echo works"), "works")
	spec.AllowMissing = append(spec.AllowMissing, "user-namespaces")
	if waivable("user-namespaces") || waivable("seccomp") {
		t.Error("what makes a sandbox can be waived")
	}
}

// Only the process that the record was written for is taken up.
func TestAdoptComparesEverything(t *testing.T) {
	h := newHost(t)
	first := h.backend()
	x := start(t, first, conformance.Spec(t, isolation.Locked))
	good := recordOf(t, x.inst)
	_ = first.Close()
	b := h.backend()
	for name, edit := range map[string]func(*record){
		"another boot":       func(r *record) { r.Boot = "00000000-0000-0000-0000-000000000000" },
		"another start time": func(r *record) { r.Start++ },
		"another namespace":  func(r *record) { r.PIDNS = "pid:[1]" },
		"another process":    func(r *record) { r.PID = os.Getpid() },
		"no process":         func(r *record) { r.PID = 1 << 22 },
	} {
		r := good
		edit(&r)
		raw, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Adopt(t.Context(), raw); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, raw := range []string{``, `{}`, `{"v":99}`, `{"v":1,"name":"../x","pid":5}`, `{"v":1,"name":"g1","pid":1}`} {
		if _, err := b.Adopt(t.Context(), json.RawMessage(raw)); err == nil {
			t.Errorf("record %q was adopted", raw)
		}
	}
	i, err := b.Adopt(t.Context(), x.inst.Record())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Adopt(t.Context(), x.inst.Record()); !errs.Is(err, errs.AlreadyExists) {
		t.Errorf("adopted twice: %v", err)
	}
	if _, err := guestwire.NewClient(i.Dial).Status(limited(t)); err != nil {
		t.Error(err)
	}
	destroy(t, i)
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
