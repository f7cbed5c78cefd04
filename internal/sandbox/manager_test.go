package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

func TestLifeOfASandbox(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{Name: "web-1", Labels: map[string]string{"team": "a"}, Env: map[string]string{"A": "secret-value"}})
	if sb.State != Running || sb.Owner != alice.ID || sb.Spec.Profile != Locked || sb.Spec.Template != "host" {
		t.Errorf("created %+v", sb)
	}
	if sb.Spec.Limits.MemoryBytes != 1<<30 || sb.Spec.Limits.Pids != 512 || sb.Spec.Limits.OpenFiles != 4096 || sb.Spec.Limits.DiskBytes != 2<<30 {
		t.Errorf("default limits %+v", sb.Spec.Limits)
	}
	if d := sb.ExpiresAt.Sub(sb.StartedAt); d != time.Hour {
		t.Errorf("lifetime %s", d)
	}
	for _, step := range []string{"plan", "start", "claim", "total"} {
		if _, ok := sb.Timings[step]; !ok {
			t.Errorf("no timing of %s in %v", step, sb.Timings)
		}
	}
	r := s.exec(sb.ID, "sh", "-c", "echo out; echo err >&2; echo $A; hostname; exit 3")
	if r.Process.End != EndExited || r.Process.Code != 3 || string(r.Stdout) != "out\nsecret-value\nweb-1\n" || string(r.Stderr) != "err\n" {
		t.Errorf("execute: %+v %q %q", r.Process, r.Stdout, r.Stderr)
	}
	if sb, err := s.Pause(ctx, alice, sb.ID); err != nil || sb.State != Paused {
		t.Fatalf("pause: %v, %v", sb.State, err)
	}
	if sb, err := s.Resume(ctx, alice, sb.ID); err != nil || sb.State != Running {
		t.Fatalf("resume: %v, %v", sb.State, err)
	}
	for range 2 { // idempotent
		got, err := s.Delete(ctx, alice, sb.ID)
		if err != nil || got.State != Stopped || got.EndReason != EndDeleted || got.EndedAt.IsZero() {
			t.Fatalf("delete: %+v, %v", got, err)
		}
	}
	if left := s.w.host.Instances(); len(left) != 0 || len(s.w.roots.writable()) != 0 {
		t.Errorf("left over: %v, %v", left, s.w.roots.writable())
	}
	want := []journal.Type{
		journal.SandboxCreated, journal.SandboxStarted, journal.SandboxClaimed, journal.ProcessStarted, journal.ProcessEnded,
		journal.SandboxPaused, journal.SandboxResumed, journal.SandboxStopping, journal.UsageMetered, journal.SandboxEnded,
	}
	if got := s.history(sb.ID); !slices.Equal(got, want) {
		t.Errorf("history %v, want %v", got, want)
	}
	if p, err := s.GetProcess(ctx, alice, sb.ID, r.Process.ID); err != nil || p.Code != 3 || p.End != EndExited || p.Argv[0] != "sh" {
		t.Errorf("the process after its sandbox: %+v, %v", p, err)
	}
	if all, err := s.ListProcesses(ctx, alice, sb.ID); err != nil || len(all) != 1 {
		t.Errorf("list after the end: %v, %v", all, err)
	}
}

func TestEnvironmentValuesAreNotKept(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Env: map[string]string{"TOKEN": "hunter2-hunter2"}})
	s.start(sb.ID, ProcessSpec{Argv: []string{"true"}, Env: map[string]string{"OTHER": "hunter2-hunter2"}})
	events, err := s.Events(t.Context(), alice, sb.ID, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprint(events); strings.Contains(text, "hunter2") {
		t.Error("an event holds a value of the environment")
	}
	row, _, err := s.db.GetSandbox(t.Context(), sb.ID)
	if err != nil || strings.Contains(string(row.Body), "hunter2") {
		t.Errorf("the store holds a value of the environment, %v", err)
	}
	if sb, _ := s.Get(t.Context(), alice, sb.ID); sb.Spec.Env != nil {
		t.Error("an answer holds the environment")
	}
}

func TestOthersSeeNothing(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{Name: "mine"})
	pr := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	calls := map[string]func(p Principal, ref string) error{
		"get":     func(p Principal, ref string) error { _, err := s.Get(ctx, p, ref); return err },
		"delete":  func(p Principal, ref string) error { _, err := s.Delete(ctx, p, ref); return err },
		"pause":   func(p Principal, ref string) error { _, err := s.Pause(ctx, p, ref); return err },
		"resume":  func(p Principal, ref string) error { _, err := s.Resume(ctx, p, ref); return err },
		"update":  func(p Principal, ref string) error { _, err := s.Update(ctx, p, ref, Update{}); return err },
		"usage":   func(p Principal, ref string) error { _, err := s.Usage(ctx, p, ref); return err },
		"changes": func(p Principal, ref string) error { _, err := s.Changes(ctx, p, ref, ""); return err },
		"files":   func(p Principal, ref string) error { _, err := s.Files(ctx, p, ref); return err },
		"dial":    func(p Principal, ref string) error { _, err := s.DialPort(ctx, p, ref, 80); return err },
		"ports":   func(p Principal, ref string) error { _, err := s.Ports(ctx, p, ref); return err },
		"events":  func(p Principal, ref string) error { _, err := s.Events(ctx, p, ref, 0, 0); return err },
		"start": func(p Principal, ref string) error {
			_, err := s.StartProcess(ctx, p, ref, ProcessSpec{Argv: []string{"true"}}, "")
			return err
		},
		"process":   func(p Principal, ref string) error { _, err := s.GetProcess(ctx, p, ref, pr.ID); return err },
		"processes": func(p Principal, ref string) error { _, err := s.ListProcesses(ctx, p, ref); return err },
		"signal":    func(p Principal, ref string) error { return s.Signal(ctx, p, ref, pr.ID, 15, false) },
		"input": func(p Principal, ref string) error {
			_, err := s.Input(ctx, p, ref, pr.ID, -1, []byte("x"), false)
			return err
		},
		"follow": func(p Principal, ref string) error {
			return s.FollowEvents(ctx, p, ref, 0, func(journal.Event) error { return context.Canceled })
		},
	}
	inside := Principal{ID: "sandbox:" + sb.ID, Sandbox: sb.ID}
	forged := Principal{ID: "sandbox:" + sb.ID, Sandbox: sb.ID, Admin: true}
	for name, call := range calls {
		for who, p := range map[string]Principal{"bob": bob, "nobody": {}, "the sandbox itself": inside, "a forged admin": forged} {
			for _, ref := range []string{sb.ID, sb.ID[:6], "mine"} {
				err := call(p, ref)
				wantKind(t, name+" by "+who, err, errs.NotFound)
				// The text must not tell that there is one.
				if missing := call(p, "zzzzzzzzzzzzzzzzzzzz"[:len(ref)]); err != nil && missing != nil &&
					strings.ReplaceAll(err.Error(), ref, "") != strings.ReplaceAll(missing.Error(), "zzzzzzzzzzzzzzzzzzzz"[:len(ref)], "") {
					t.Errorf("%s by %s: %q differs from %q", name, who, err, missing)
				}
			}
		}
	}
	if page, _, err := s.List(ctx, bob, Query{}); err != nil || len(page) != 0 {
		t.Errorf("bob lists %v, %v", page, err)
	}
	if page, _, err := s.List(ctx, admin, Query{}); err != nil || len(page) != 1 {
		t.Errorf("the administrator lists %d, %v", len(page), err)
	}
	if s.state(sb.ID) != Running {
		t.Error("somebody changed it")
	}
}

func TestResolve(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	add := func(p Principal, id, name string) {
		t.Helper()
		if _, err := s.Create(ctx, p, Spec{Name: name}, CreateOptions{ID: id}); err != nil {
			t.Fatal(err)
		}
	}
	add(alice, "aaaabbbbccccdddd0001", "web")
	add(alice, "aaaabbbbccccdddd0002", "aaaab")
	add(bob, "aaaabbbbccccdddd0003", "web")
	add(alice, "xyzzybbbccccdddd0004", "")
	for _, c := range []struct {
		p    Principal
		ref  string
		want string
		kind errs.Kind
	}{
		{alice, "aaaabbbbccccdddd0001", "aaaabbbbccccdddd0001", 0},
		{alice, "web", "aaaabbbbccccdddd0001", 0},
		{bob, "web", "aaaabbbbccccdddd0003", 0},
		{admin, "web", "", errs.InvalidArgument}, // two
		{alice, "aaaa", "", errs.InvalidArgument},
		{bob, "aaaa", "aaaabbbbccccdddd0003", 0},    // the only one that bob sees
		{alice, "aaaab", "aaaabbbbccccdddd0002", 0}, // a name goes before a prefix
		{alice, "xyzz", "xyzzybbbccccdddd0004", 0},
		{alice, "xyz", "", errs.NotFound}, // too short
		{bob, "xyzz", "", errs.NotFound},
		{alice, "", "", errs.NotFound},
		{alice, "' OR 1=1 --", "", errs.NotFound},
		{alice, "xyzzybbbccccdddd0004", "xyzzybbbccccdddd0004", 0},
	} {
		for _, when := range []string{"alive", "stopped"} {
			if when == "stopped" && c.ref != "xyzz" {
				continue
			}
			if when == "stopped" {
				if _, err := s.Delete(ctx, alice, "xyzzybbbccccdddd0004"); err != nil {
					t.Fatal(err)
				}
			}
			sb, err := s.Get(ctx, c.p, c.ref)
			if c.want == "" {
				wantKind(t, c.ref, err, c.kind)
			} else if err != nil || sb.ID != c.want {
				t.Errorf("%s %s as %s: %s, %v, want %s", when, c.ref, c.p.ID, sb.ID, err, c.want)
			}
		}
	}
}

func TestNamesAreUniqueAmongTheLiving(t *testing.T) {
	s := newWorld(t).serve()
	first := s.create(alice, Spec{Name: "web"})
	_, err := s.Create(t.Context(), alice, Spec{Name: "web"}, CreateOptions{})
	wantKind(t, "a second web", err, errs.AlreadyExists)
	s.create(bob, Spec{Name: "web"})
	if _, err := s.Delete(t.Context(), alice, first.ID); err != nil {
		t.Fatal(err)
	}
	s.create(alice, Spec{Name: "web"})
	_, err = s.Create(t.Context(), alice, Spec{}, CreateOptions{ID: first.ID})
	wantKind(t, "an id that was", err, errs.AlreadyExists)
}

func TestLimitsOnSandboxes(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.MaxSandboxes, c.MaxPerPrincipal = 3, 2 }
	s := w.serve()
	a := s.create(alice, Spec{})
	s.create(alice, Spec{})
	_, err := s.Create(t.Context(), alice, Spec{}, CreateOptions{})
	wantKind(t, "a third of alice", err, errs.ResourceExhausted)
	s.create(bob, Spec{})
	_, err = s.Create(t.Context(), admin, Spec{}, CreateOptions{})
	wantKind(t, "a fourth", err, errs.ResourceExhausted)
	if _, err := s.Delete(t.Context(), alice, a.ID); err != nil {
		t.Fatal(err)
	}
	s.create(alice, Spec{})
}

func TestPausedSandboxRefusesWhatNeedsAProcess(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	pr := s.start(sb.ID, ProcessSpec{Argv: []string{"sh", "-c", "echo before; sleep 60"}, Stdin: true})
	testenv.Eventually(t, soon, "output", func() bool {
		p, err := s.Output(ctx, alice, sb.ID, pr.ID, OutputOptions{}, newCollector(100))
		return err == nil && p.Bytes > 0
	})
	for range 2 {
		if _, err := s.Pause(ctx, alice, sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.StartProcess(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"true"}}, "")
	wantKind(t, "start", err, errs.FailedPrecondition)
	if text, hint := errs.PublicText(err); !strings.Contains(text, "paused") || !strings.Contains(hint, "resume") {
		t.Errorf("text %q, hint %q", text, hint)
	}
	wantKind(t, "signal", s.Signal(ctx, alice, sb.ID, pr.ID, 15, false), errs.FailedPrecondition)
	_, err = s.Files(ctx, alice, sb.ID)
	wantKind(t, "files", err, errs.FailedPrecondition)
	_, err = s.Input(ctx, alice, sb.ID, pr.ID, -1, []byte("x"), false)
	wantKind(t, "input", err, errs.FailedPrecondition)
	c := newCollector(100)
	if _, err := s.Output(ctx, alice, sb.ID, pr.ID, OutputOptions{}, c); err != nil || string(c.result().Stdout) != "before\n" {
		t.Errorf("output of a paused sandbox: %q, %v", c.result().Stdout, err)
	}
	if _, err := s.Usage(ctx, alice, sb.ID); err != nil {
		t.Errorf("usage: %v", err)
	}
	if _, err := s.Resume(ctx, alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if r := s.exec(sb.ID, "echo", "on"); string(r.Stdout) != "on\n" {
		t.Errorf("after resume: %q", r.Stdout)
	}
	if _, err := s.Pause(ctx, alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Delete(ctx, alice, sb.ID); err != nil || got.State != Stopped {
		t.Errorf("delete of a paused sandbox: %v, %v", got.State, err)
	}
}

func TestUpdate(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{Labels: map[string]string{"a": "1"}})
	labels, life, idle := map[string]string{"b": "2"}, 2*time.Hour, time.Minute
	got, err := s.Update(ctx, alice, sb.ID, Update{Labels: &labels, Lifetime: &life, Idle: &idle, Limits: &Limits{Pids: 64}})
	if err != nil {
		t.Fatal(err)
	}
	if got.Spec.Labels["b"] != "2" || got.Spec.Labels["a"] != "" || got.Spec.Idle != idle ||
		time.Until(got.ExpiresAt) < 119*time.Minute || got.Spec.Limits.Pids != 64 || got.Spec.Limits.MemoryBytes != 1<<30 ||
		got.Applied.Limits.Pids != 64 {
		t.Errorf("updated %+v", got)
	}
	none := time.Duration(0)
	if got, err = s.Update(ctx, alice, sb.ID, Update{Lifetime: &none, Idle: &none}); err != nil || !got.ExpiresAt.IsZero() || got.Spec.Idle != 0 {
		t.Errorf("without ends: %+v, %v", got, err)
	}
	bad := map[string]string{"": "x"}
	_, err = s.Update(ctx, alice, sb.ID, Update{Labels: &bad})
	wantKind(t, "bad labels", err, errs.InvalidArgument)
	if _, err := s.Delete(ctx, alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	_, err = s.Update(ctx, alice, sb.ID, Update{Lifetime: &life})
	wantKind(t, "update of a stopped sandbox", err, errs.FailedPrecondition)
}

func TestChildrenEndWithTheirParentAndHaveNoMoreRights(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) {
		c.Backends["other"] = fake.New(fake.Config{Name: "other", Host: w.host})
	}
	s := w.serve()
	ctx := t.Context()
	parent := s.create(alice, Spec{Template: "base", Limits: Limits{MemoryBytes: 256 << 20, DiskBytes: 1 << 30, Pids: 100, CPUs: 0.5, OpenFiles: 1024}})
	as := func(sb Sandbox) Principal { return Principal{ID: "sandbox:" + sb.ID, Sandbox: sb.ID} }
	small := Limits{MemoryBytes: 64 << 20, DiskBytes: 64 << 20, Pids: 50, CPUs: 0.25, OpenFiles: 512}
	child := s.create(as(parent), Spec{Template: "base", Limits: small})
	if child.Parent != parent.ID || child.Owner != alice.ID {
		t.Errorf("child %+v", child)
	}
	grandchild := s.create(as(child), Spec{Limits: small})

	for name, spec := range map[string]Spec{
		"more memory":      {Limits: Limits{MemoryBytes: 512 << 20, DiskBytes: 64 << 20, Pids: 50, CPUs: 0.25, OpenFiles: 512}},
		"default limits":   {},
		"another backend":  {Isolation: "other", Limits: small},
		"profile standard": {Template: "base", Profile: Standard, Limits: small},
		"a workspace":      {Limits: small, Workspaces: []Workspace{{Source: t.TempDir()}}},
		"a missing layer":  {Limits: small, AllowMissing: []string{"landlock"}},
	} {
		_, err := s.Create(ctx, as(parent), spec, CreateOptions{})
		wantKind(t, name, err, errs.PermissionDenied)
	}
	more := Limits{MemoryBytes: 512 << 20}
	_, err := s.Update(ctx, as(parent), child.ID, Update{Limits: &more})
	wantKind(t, "raise a child's limits", err, errs.PermissionDenied)

	sees := func(p Principal, id string, want bool) {
		t.Helper()
		_, err := s.Get(ctx, p, id)
		if (err == nil) != want {
			t.Errorf("%s sees %s: %v", p.ID, id, err)
		}
	}
	sees(as(parent), child.ID, true)
	sees(as(parent), grandchild.ID, true)
	sees(as(child), grandchild.ID, true)
	sees(as(child), parent.ID, false)
	sees(as(grandchild), child.ID, false)
	sees(as(child), child.ID, false)
	sees(alice, grandchild.ID, true)
	sees(bob, grandchild.ID, false)
	if page, _, err := s.List(ctx, as(parent), Query{}); err != nil || len(page) != 2 {
		t.Errorf("the parent lists %d, %v", len(page), err)
	}
	if page, _, err := s.List(ctx, alice, Query{Parent: parent.ID}); err != nil || len(page) != 1 {
		t.Errorf("children: %d, %v", len(page), err)
	}

	if _, err := s.Delete(ctx, alice, parent.ID); err != nil {
		t.Fatal(err)
	}
	for _, sb := range []Sandbox{child, grandchild} {
		got, err := s.Get(ctx, alice, sb.ID)
		if err != nil || got.State != Stopped || got.EndReason != EndParent {
			t.Errorf("after its parent: %+v, %v", got, err)
		}
	}
	_, err = s.Create(ctx, as(parent), Spec{Limits: small}, CreateOptions{})
	wantKind(t, "a child of a stopped sandbox", err, errs.FailedPrecondition)
}

func TestListPages(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	made := map[string]bool{}
	for i := range 23 {
		sb := s.create(alice, Spec{Labels: map[string]string{"n": fmt.Sprint(i % 2)}})
		made[sb.ID] = true
		if i%5 == 4 {
			if _, err := s.Delete(ctx, alice, sb.ID); err != nil {
				t.Fatal(err)
			}
			delete(made, sb.ID)
		}
	}
	s.create(bob, Spec{})
	collect := func(p Principal, q Query) map[string]bool {
		t.Helper()
		got := map[string]bool{}
		var last time.Time
		for {
			page, next, err := s.List(ctx, p, q)
			if err != nil {
				t.Fatal(err)
			}
			for _, sb := range page {
				if got[sb.ID] || !last.IsZero() && sb.CreatedAt.After(last) {
					t.Fatalf("%s is out of place", sb.ID)
				}
				got[sb.ID], last = true, sb.CreatedAt
			}
			if next == "" {
				return got
			}
			q.PageToken = next
		}
	}
	if got := collect(alice, Query{PageSize: 4}); len(got) != len(made) {
		t.Errorf("%d sandboxes, want %d", len(got), len(made))
	}
	if got := collect(admin, Query{PageSize: 7}); len(got) != len(made)+1 {
		t.Errorf("the administrator sees %d", len(got))
	}
	if got := collect(alice, Query{PageSize: 3, States: []State{Stopped}}); len(got) != 4 {
		t.Errorf("%d stopped", len(got))
	}
	if got := collect(alice, Query{Labels: map[string]string{"n": "1"}, States: []State{Running, Stopped}}); len(got) != 11 {
		t.Errorf("%d with the label", len(got))
	}
	for name, q := range map[string]Query{
		"token": {PageToken: "bm9uZQ"}, "size": {PageSize: 1001}, "negative size": {PageSize: -1},
		"state": {States: []State{"sleeping"}}, "label": {Labels: map[string]string{`"`: ""}},
	} {
		_, _, err := s.List(ctx, alice, q)
		wantKind(t, name, err, errs.InvalidArgument)
	}
}

func TestWorkspaces(t *testing.T) {
	s := newWorld(t).serve()
	dir := t.TempDir()
	sb := s.create(admin, Spec{Workspaces: []Workspace{{Source: dir}}})
	if w := sb.Spec.Workspaces; len(w) != 1 || w[0].Target != "/workspace" || w[0].Source != dir {
		t.Errorf("workspaces %v", w)
	}
	if c, err := s.Changes(t.Context(), admin, sb.ID, "/workspace"); err != nil || len(c) != 1 || !utf8.ValidString(c[0].Path) {
		t.Errorf("changes: %v, %v", c, err) // a name that is no text must not fail the answer
	}
	_, err := s.Changes(t.Context(), admin, sb.ID, "/elsewhere")
	wantKind(t, "changes elsewhere", err, errs.NotFound)
	_, err = s.Create(t.Context(), alice, Spec{Workspaces: []Workspace{{Source: dir}}}, CreateOptions{})
	wantKind(t, "a workspace for somebody", err, errs.PermissionDenied)
}

func TestCloseLeavesOrTakesSandboxes(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{})
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	_, err := s.Create(t.Context(), alice, Spec{}, CreateOptions{})
	wantKind(t, "create after close", err, errs.Unavailable)
	_, err = s.Create(t.Context(), alice, Spec{}, CreateOptions{IdempotencyKey: "k"})
	wantKind(t, "create with a key after close", err, errs.Unavailable)
	s.stop(false)
	if got := w.host.Instances(); len(got) != 1 {
		t.Fatalf("instances after close: %v", got)
	}
	s = w.serve()
	if !slices.Equal(s.report.Adopted, []string{sb.ID}) {
		t.Errorf("report %+v", s.report)
	}
	s.stop(true)
	if got := w.host.Instances(); len(got) != 0 {
		t.Errorf("instances after close with its sandboxes: %v", got)
	}
	got, err := w.serve().Get(t.Context(), alice, sb.ID)
	if err != nil || got.EndReason != EndServerDown {
		t.Errorf("%+v, %v", got, err)
	}
}
