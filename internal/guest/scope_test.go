package guest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// scope is a freezer control group of version 1 for one process, as the server makes it.
func scope(t testing.TB, id string) (layout []string, open []*os.File) {
	t.Helper()
	dir := "/sys/fs/cgroup/freezer/casemate-" + testenv.ServerID(t) + "-" + id
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, 10*time.Second, "removal of "+dir, func() bool { return os.Remove(dir) == nil })
	})
	for _, f := range []struct {
		role, name string
		flags      int
	}{{"tasks", "tasks", os.O_WRONLY}, {"procs", "cgroup.procs", os.O_RDONLY}, {"freezer", "freezer.state", os.O_WRONLY}} {
		file, err := os.OpenFile(filepath.Join(dir, f.name), f.flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = file.Close() })
		layout, open = append(layout, f.role), append(open, file)
	}
	return layout, open
}

func (r *runner) scoped(t *testing.T, p guestwire.StartProcess) (*guestwire.OutputStream, error) {
	t.Helper()
	var open []*os.File
	p.Scope, open = scope(t, p.ID)
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{Start: p, Output: guestwire.OutputRequest{Follow: true}}, open)
	return s, err
}

// TestScopeTimeout ends trees that do all they can to live on: what parentage and marks would miss.
func TestScopeTimeout(t *testing.T) {
	r := newRunner(t, setup{})
	tests := map[string]string{
		"plain":    "sleep 401",
		"setsid":   "env -i /usr/bin/setsid /usr/bin/sleep 402 & sleep 403",
		"daemon":   "(env -i /usr/bin/setsid /bin/sh -c 'trap \"\" TERM; /usr/bin/sleep 404; /usr/bin/sleep 405' &); sleep 0.1; exec sleep 406",
		"forking":  "(while :; do env -i /usr/bin/setsid /usr/bin/sleep 407 & /usr/bin/sleep 0.001; done) & sleep 408",
		"ignoring": "trap '' TERM; while :; do sleep 0.05; done",
		"stopped":  "sleep 409 & kill -STOP $!; kill -STOP $$",
	}
	for name, script := range tests {
		t.Run(name, func(t *testing.T) {
			s, err := r.scoped(t, guestwire.StartProcess{
				ID: name, Argv: []string{"sh", "-c", script}, TimeoutMS: 300, GraceMS: 200,
			})
			if err != nil {
				t.Fatal(err)
			}
			res, err := collect(s)
			if err != nil || res.info.End != guestwire.EndTimedOut || res.info.Leftover != 0 {
				t.Errorf("%+v, %v", res.info, err)
			}
			// At once: the answer came when the tree was dead.
			r.wantOut("pgrep -x sleep || true", "")
		})
	}
}

// TestScopeForkBomb lets a process multiply up to the limit of processes, and ends it by a call.
func TestScopeForkBomb(t *testing.T) {
	r := newRunner(t, setup{})
	s, err := r.scoped(t, guestwire.StartProcess{
		// Bounded by the user's limit, since the test has no pids group.
		ID: "bomb", Argv: []string{"bash", "-c", "ulimit -u 300; bomb() { bomb | bomb & }; bomb; while :; do :; done"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	testenv.Eventually(t, 10*time.Second, "there are many", func() bool {
		info, err := r.Get(t.Context(), "bomb")
		return err == nil && info.PID > 0 && len(strings.Fields(string(r.runRoot("pgrep -x bash | head -100").out))) >= 100
	})
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "bomb", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	info, err := r.Wait(t.Context(), "bomb")
	if err != nil || info.End != guestwire.EndCanceled || info.Leftover != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	// Dead at once; to be reaped may take the first process a while.
	r.wantOut("ps -e -o stat= -o comm= | grep -v ^Z | grep -w bash || true", "")
}

func (r *runner) runRoot(script string) result {
	r.t.Helper()
	return r.run(guestwire.StartProcess{Argv: []string{"sh", "-c", script}, User: "root", Dir: "/"})
}

// TestScopeLeftover counts what lives on, forgets it when it ends, and signals all of it.
func TestScopeLeftover(t *testing.T) {
	r := newRunner(t, setup{})
	before, _ := r.Status(t.Context())
	s, err := r.scoped(t, guestwire.StartProcess{
		ID: "left", Argv: []string{"sh", "-c", "for i in 1 2 3; do env -i /usr/bin/setsid /usr/bin/sleep 411 >/dev/null 2>&1 & done; sleep 0.2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || res.info.Leftover != 3 || res.info.End != guestwire.EndExited {
		t.Fatalf("%+v, %v", res.info, err)
	}
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "left", Signal: 15, Tree: true}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "nothing is left over", func() bool {
		info, err := r.Get(t.Context(), "left")
		return err == nil && info.Leftover == 0
	})
	r.Close() // drops the connection that is kept for the next process
	testenv.Eventually(t, 5*time.Second, "its files are closed", func() bool {
		after, err := r.Status(t.Context())
		return err == nil && after.Open <= before.Open
	})
}

// TestScopeListIsFresh is about a trap: version 1 repeats for a second what it said about a group.
func TestScopeListIsFresh(t *testing.T) {
	r := newRunner(t, setup{})
	s, err := r.scoped(t, guestwire.StartProcess{ID: "fresh", Argv: []string{"sh", "-c", "sleep 412 & read x"}, Stdin: guestwire.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 3 {
		if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "fresh", Signal: 0, Tree: true}); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "fresh", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	r.wantOut("pgrep -x sleep || true", "")
}

// TestScopeV2 is TestScopeTimeout with control groups of version 2.
func TestScopeV2(t *testing.T) {
	base := filepath.Join(unified(t), "casemate-"+testenv.ServerID(t))
	for _, dir := range []string{base, base + "/guest", base + "/scope"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			testenv.Eventually(t, 10*time.Second, "removal of "+dir, func() bool { return os.Remove(dir) == nil })
		})
	}
	for _, dir := range []string{base, base + "/scope"} {
		if err := os.Chown(dir+"/cgroup.procs", hostUID, hostUID); err != nil {
			t.Fatal(err)
		}
	}
	r := newRunner(t, setup{home: base + "/guest"})
	kill, err := os.OpenFile(base+"/scope/cgroup.kill", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer kill.Close()
	dir, err := os.Open(base + "/scope")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{
		Start: guestwire.StartProcess{
			ID: "v2", Scope: []string{"kill", "dir"}, TimeoutMS: 300, GraceMS: 100,
			Argv: []string{"sh", "-c", "trap '' TERM; env -i /usr/bin/setsid /usr/bin/sleep 421 & env -i /usr/bin/setsid /bin/sh -c 'trap \"\" TERM; /usr/bin/sleep 422; /usr/bin/sleep 423' & while :; do sleep 0.1; done"},
		},
		Output: guestwire.OutputRequest{Follow: true},
	}, []*os.File{kill, dir})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || res.info.End != guestwire.EndTimedOut || res.info.Leftover != 0 {
		t.Errorf("%+v, %v", res.info, err)
	}
	r.wantOut("pgrep -x sleep || true", "")
}

// unified returns where version 2 is mounted, which hybrid hosts do beside version 1.
func unified(t *testing.T) string {
	t.Helper()
	for _, at := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(at + "/cgroup.controllers"); err == nil {
			return at
		}
	}
	t.Fatal("no control groups of version 2")
	return ""
}
