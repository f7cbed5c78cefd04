package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/testenv"
)

func TestRecoverAdoptsWhatRuns(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	running := s.create(alice, Spec{Name: "web", Labels: map[string]string{"a": "1"}})
	paused := s.create(alice, Spec{})
	dead := s.create(alice, Spec{})
	deadProcess := s.start(dead.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	job := s.start(running.ID, ProcessSpec{ID: "job", Argv: []string{"sh", "-c", "echo before; cat"}, Stdin: true})
	ended := s.exec(running.ID, "sh", "-c", "exit 4").Process
	if _, err := s.Pause(ctx, alice, paused.ID); err != nil {
		t.Fatal(err)
	}
	s.stop(false)
	s.w.host.Kill(dead.ID)

	s = s.w.serve()
	if want := []string{running.ID, paused.ID}; len(s.report.Adopted) != 2 || !slices.Contains(want, s.report.Adopted[0]) {
		t.Errorf("adopted %v", s.report.Adopted)
	}
	if !slices.Equal(s.report.Lost, []string{dead.ID}) || s.report.Processes != 1 {
		t.Errorf("report %+v", s.report)
	}
	got, err := s.Get(ctx, alice, "web")
	if err != nil || got.ID != running.ID || got.State != Running || got.Spec.Labels["a"] != "1" ||
		got.Applied.HostUID != running.Applied.HostUID || !got.ExpiresAt.Equal(running.ExpiresAt) {
		t.Errorf("adopted %+v, %v", got, err)
	}
	if _, err := s.Input(ctx, alice, running.ID, "job", -1, []byte("after\n"), true); err != nil {
		t.Fatal(err)
	}
	g := &gather{}
	if p, err := s.Output(ctx, alice, running.ID, "job", OutputOptions{Follow: true}, g); err != nil || p.End != EndExited || g.data.String() != "before\nafter\n" {
		t.Errorf("output over a restart: %q, %+v, %v", g.data.String(), p, err)
	}
	if p := s.wait(running.ID, "job"); !p.StartedAt.Equal(job.StartedAt) {
		t.Errorf("its start changed: %s, was %s", p.StartedAt, job.StartedAt)
	}
	if p, err := s.GetProcess(ctx, alice, running.ID, ended.ID); err != nil || p.Code != 4 || p.End != EndExited {
		t.Errorf("one that had ended: %+v, %v", p, err)
	}
	if st := s.state(paused.ID); st != Paused {
		t.Errorf("the paused one is %s", st)
	}
	if _, err := s.Resume(ctx, alice, paused.ID); err != nil {
		t.Fatal(err)
	}
	if r := s.exec(paused.ID, "echo", "on"); string(r.Stdout) != "on\n" {
		t.Errorf("after resume: %q", r.Stdout)
	}
	if got, err := s.Get(ctx, alice, dead.ID); err != nil || got.State != Stopped || got.EndReason != EndLost {
		t.Errorf("the dead one: %+v, %v", got, err)
	}
	if p, err := s.GetProcess(ctx, alice, dead.ID, deadProcess.ID); err != nil || p.End != EndProcessLost {
		t.Errorf("its process: %+v, %v", p, err)
	}
	for _, sb := range []Sandbox{running, paused, dead} {
		s.history(sb.ID)
	}
}

// TestRecoverWhoseGuestStandsStill: the guest of a runtime answers nothing while its sandbox is frozen, whether that is
// paused or the server ended in the middle of a commit. Either is taken up all the same, and as it was recorded.
func TestRecoverWhoseGuestStandsStill(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	s.backend.SetFaults(fake.Faults{Runtime: "a kernel"})
	running, paused := s.create(alice, Spec{}), s.create(alice, Spec{})
	for _, sb := range []Sandbox{running, paused} {
		s.start(sb.ID, ProcessSpec{ID: "job", Argv: []string{"sleep", "60"}})
	}
	if _, err := s.Pause(ctx, alice, paused.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.find(running.ID).inst.Freeze(ctx); err != nil {
		t.Fatal(err)
	}
	s.stop(false)

	s = s.w.serve()
	if len(s.report.Adopted) != 2 || s.report.Processes != 2 {
		t.Fatalf("report %+v", s.report)
	}
	if s.w.host.Frozen(running.ID) || s.state(running.ID) != Running {
		t.Error("the running one is frozen")
	}
	if !s.w.host.Frozen(paused.ID) || s.state(paused.ID) != Paused {
		t.Error("the paused one is not frozen")
	}
	if _, err := s.Resume(ctx, alice, paused.ID); err != nil {
		t.Fatal(err)
	}
	for _, sb := range []Sandbox{running, paused} {
		if r := s.exec(sb.ID, "echo", "on"); string(r.Stdout) != "on\n" {
			t.Errorf("after the restart: %q", r.Stdout)
		}
	}
}

// TestRecoverRecordsWhatEndedMeanwhile: a process that ends while no server is there must have its
// end recorded as the guest kept it.
func TestRecoverRecordsWhatEndedMeanwhile(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.start(sb.ID, ProcessSpec{ID: "job", Argv: []string{"sh", "-c", "sleep 0.05; echo done; exit 5"}})
	s.stop(false)
	time.Sleep(100 * time.Millisecond) // nobody is there who could tell that it has ended
	s = s.w.serve()
	if p := s.wait(sb.ID, "job"); p.End != EndExited || p.Code != 5 {
		t.Errorf("%+v", p)
	}
	g := &gather{}
	if _, err := s.Output(t.Context(), alice, sb.ID, "job", OutputOptions{}, g); err != nil || g.data.String() != "done\n" {
		t.Errorf("its output: %q, %v", g.data.String(), err)
	}
	s.history(sb.ID)
}

// TestCrashAtAnyMoment takes the data directory as kill -9 would leave it, while 20 creates and 20
// processes are under way.
func TestCrashAtAnyMoment(t *testing.T) {
	for round := range 6 {
		s := newWorld(t).serve()
		ctx := context.Background()
		s.backend.SetFaults(fake.Faults{StartDelay: time.Millisecond})
		acknowledged := make(chan string, 100)
		ended := make(chan [2]string, 1000)
		for c := range 20 {
			go func(s *server) { // not the one after the crash
				for {
					sb, err := s.Create(ctx, alice, Spec{}, CreateOptions{})
					if err != nil {
						return
					}
					acknowledged <- sb.ID
					for range 5 {
						r, err := s.Execute(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"true"}}, RunOptions{})
						if err != nil {
							return
						}
						ended <- [2]string{sb.ID, r.Process.ID}
					}
					if c%3 == 0 {
						_, _ = s.Delete(ctx, alice, sb.ID)
					}
				}
			}(s)
		}
		for range 10 + 5*round {
			testenv.Receive(t, "a create is acknowledged", acknowledged)
		}
		var before [][2]string
		for len(ended) > 0 {
			before = append(before, <-ended)
		}
		s = s.crash()
		for _, p := range before {
			if got, err := s.GetProcess(ctx, admin, p[0], p[1]); err != nil || got.End != EndExited {
				t.Errorf("an acknowledged process: %+v, %v", got, err)
			}
		}
		checkNoOrphans(t, s)
	}
}

// listed returns the sandboxes that List shows as not stopped, sorted, and checks every one's history.
func listed(t *testing.T, s *server) []string {
	t.Helper()
	var alive []string
	var token string
	for {
		page, next, err := s.List(context.Background(), admin, Query{PageSize: 1000, PageToken: token, States: []State{Starting, Running, Paused, Stopping, Stopped}})
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range page {
			if sb.State != Stopped {
				alive = append(alive, sb.ID)
			}
			s.history(sb.ID)
		}
		if token = next; token == "" {
			break
		}
	}
	slices.Sort(alive)
	return alive
}

// checkNoOrphans compares what the server believes with what is there.
func checkNoOrphans(t *testing.T, s *server) {
	t.Helper()
	// An end shows in Get a moment before it is written, and List reads what is written.
	testenv.Eventually(t, soon, "the list to show what runs", func() bool { return slices.Equal(s.w.host.Instances(), listed(t, s)) })
	alive := listed(t, s)
	if got := s.w.host.Instances(); !slices.Equal(got, alive) {
		t.Errorf("instances %v, sandboxes %v", got, alive)
	}
	if got := s.w.roots.writable(); !slices.Equal(got, alive) {
		t.Errorf("layers %v, sandboxes %v", got, alive)
	}
	if left := s.w.host.Leftovers(); len(left) != 0 {
		t.Errorf("leftovers %v", left)
	}
}

func TestRecoverFinishesWhatWasStopping(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.Defaults.Stop = 20 * time.Millisecond }
	s := w.serve()
	sb := s.create(alice, Spec{})
	s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	s.backend.SetFaults(fake.Faults{FailDestroy: errs.New(errs.Internal, "stuck")})
	_, err := s.Delete(t.Context(), alice, sb.ID)
	wantKind(t, "delete", err, errs.DeadlineExceeded)
	s = s.crash()
	testenv.Eventually(t, soon, "its end", func() bool { return s.state(sb.ID) == Stopped })
	if got, err := s.Get(t.Context(), alice, sb.ID); err != nil || got.EndReason != EndDeleted {
		t.Errorf("%+v, %v", got, err)
	}
	checkNoOrphans(t, s)
}

func TestRecoverEndsWhatHasExpired(t *testing.T) {
	w := newWorld(t)
	c := newFakeClock()
	w.clock = c
	s := w.serve()
	short := s.create(alice, Spec{Lifetime: time.Minute})
	long := s.create(alice, Spec{Lifetime: time.Hour})
	idle := s.create(alice, Spec{Lifetime: -1, Idle: time.Minute})
	s.stop(false)
	c.advance(2 * time.Minute)
	s = w.serve()
	s.stops(short.ID, EndLifetime)
	if s.state(long.ID) != Running || s.state(idle.ID) != Running {
		t.Error("time in which no server was there counted against the idle limit")
	}
	c.advance(time.Minute)
	s.stops(idle.ID, EndIdle)
	c.advance(time.Hour)
	s.stops(long.ID, EndLifetime)
}

func TestRecoverKeepsFamiliesTogether(t *testing.T) {
	s := newWorld(t).serve()
	small := Limits{MemoryBytes: 64 << 20, DiskBytes: 64 << 20, Pids: 50, CPUs: 0.25, OpenFiles: 512}
	parent := s.create(alice, Spec{})
	child := s.create(Principal{ID: "sandbox:" + parent.ID, Sandbox: parent.ID}, Spec{Limits: small})
	widow := s.create(alice, Spec{})
	orphan := s.create(Principal{ID: "sandbox:" + widow.ID, Sandbox: widow.ID}, Spec{Limits: small})
	s.stop(false)
	s.w.host.Kill(widow.ID)
	s = s.w.serve()
	s.stops(orphan.ID, EndParent)
	if s.state(child.ID) != Running {
		t.Error("a child ended over a restart")
	}
	if _, err := s.Delete(t.Context(), alice, parent.ID); err != nil {
		t.Fatal(err)
	}
	if r := s.endReason(child.ID); r != EndParent {
		t.Errorf("after its parent the child ended because of %s", r)
	}
}

func TestRecoverRemovesLeftovers(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	s.backend.SetFaults(fake.Faults{FailAt: fake.StepGuest, Debris: true})
	_, _ = s.Create(t.Context(), alice, Spec{}, CreateOptions{ID: "leavesdebris00000000"})
	s.stop(false)
	w.roots.held["nobodyslayer00000000"] = true
	s = w.serve()
	for _, want := range []string{"leftover of leavesdebris00000000", "layer nobodyslayer00000000"} {
		if !slices.Contains(s.report.Removed, want) {
			t.Errorf("removed %v, want %s", s.report.Removed, want)
		}
	}
	checkNoOrphans(t, s)
}

// TestAcknowledgedWorkSurvivesKill kills a working child with -9. The fake machine dies with it, so
// that every sandbox is lost; what was acknowledged is not.
func TestAcknowledgedWorkSurvivesKill(t *testing.T) {
	if dir := os.Getenv("SANDBOX_TEST_CHILD"); dir != "" {
		workForever(t, dir)
	}
	for range 3 {
		w := newWorld(t)
		cmd := exec.Command(os.Args[0], "-test.run=^TestAcknowledgedWorkSurvivesKill$")
		// Killed, it leaves its own temporary files behind: they go with ours.
		cmd.Env = append(os.Environ(), "SANDBOX_TEST_CHILD="+w.dir, "TMPDIR="+t.TempDir())
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var said []string
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if said = append(said, lines.Text()); len(said) == 150 {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // killed
		if len(said) < 150 {
			t.Fatalf("the child said %d lines: %v", len(said), said)
		}
		s := w.serve()
		for _, line := range said {
			what, rest, _ := strings.Cut(line, " ")
			id, process, _ := strings.Cut(rest, " ")
			sb, err := s.Get(t.Context(), admin, id)
			if err != nil || sb.State != Stopped || sb.StartedAt.IsZero() {
				t.Errorf("%s: %+v, %v", line, sb, err)
			}
			switch what {
			case "deleted":
				if sb.EndReason != EndDeleted {
					t.Errorf("%s: %s", line, sb.EndReason)
				}
			case "ran":
				if p, err := s.GetProcess(t.Context(), admin, id, process); err != nil || p.End != EndExited {
					t.Errorf("%s: %+v, %v", line, p, err)
				}
			}
		}
		checkNoOrphans(t, s)
	}
}

func workForever(t *testing.T, dir string) {
	w := newWorld(t)
	w.dir = dir
	s := w.serve()
	for c := range 4 {
		go func() {
			for {
				sb := s.create(alice, Spec{})
				fmt.Println("created", sb.ID)
				for range 3 {
					fmt.Println("ran", sb.ID, s.exec(sb.ID, "true").Process.ID)
				}
				s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
				if c%2 == 0 {
					if _, err := s.Delete(context.Background(), alice, sb.ID); err == nil {
						fmt.Println("deleted", sb.ID)
					}
				}
			}
		}()
	}
	select {}
}

// idlers is a backend of which some sandboxes, once an earlier server's, have guests that say that they live, and do nothing else
// until awake is closed.
type idlers struct {
	isolation.Backend
	idle  map[string]bool
	awake chan struct{}
}

// Adopt implements isolation.Backend.
func (b *idlers) Adopt(ctx context.Context, record json.RawMessage) (isolation.Instance, error) {
	inst, err := b.Backend.Adopt(ctx, record)
	if err != nil || !b.idle[inst.ID()] {
		return inst, err
	}
	return &idler{inst, b.awake}, nil
}

type idler struct {
	isolation.Instance
	awake <-chan struct{}
}

// Dial implements isolation.Instance.
func (i *idler) Dial(ctx context.Context) (net.Conn, error) {
	behind, err := i.Instance.Dial(ctx)
	if err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	go func() {
		defer func() { _ = theirs.Close() }()
		defer func() { _ = behind.Close() }()
		call, _, err := guestwire.NewConn(theirs).ReadCall()
		if err != nil {
			return
		}
		if call.Method != guestwire.MethodStatus {
			select {
			case <-i.awake:
			case <-i.Done():
				return
			}
		}
		payload, err := guestwire.AppendCall(nil, call)
		if err != nil || guestwire.WriteFrame(behind, guestwire.FrameCall, payload) != nil {
			return
		}
		go func() { _, _ = io.Copy(behind, theirs) }()
		_, _ = io.Copy(theirs, behind)
	}()
	return ours, nil
}

// idleLifetime is that of sandboxes whose guests idle.
const idleLifetime = 2 * time.Hour

// idling starts a server after another one had n sandboxes, each with a process, whose guests idle by now. Beside them is one whose
// guest does not.
func idling(t *testing.T, n int, d Defaults) (s *server, b *idlers, idle []string, good string) {
	w := newWorld(t)
	w.clock = newFakeClock()
	s = w.serve()
	b = &idlers{idle: map[string]bool{}, awake: make(chan struct{})}
	for range n {
		sb := s.create(alice, Spec{Lifetime: idleLifetime})
		s.start(sb.ID, ProcessSpec{ID: "job", Argv: []string{"sh", "-c", "echo before; cat"}, Stdin: true})
		idle, b.idle[sb.ID] = append(idle, sb.ID), true
	}
	good = s.create(alice, Spec{}).ID
	s.stop(false)
	w.shape = func(c *Config) {
		b.Backend = c.Backends["fake"]
		c.Backends["fake"] = b
		c.Defaults.Connect, c.Defaults.Start = d.Connect, d.Start
	}
	slices.Sort(idle)
	return w.serve(), b, idle, good
}

// VULNERABILITY: a server that starts asks each guest what runs, and one that says that it lives is waited for.
// ATTACK: guests, more than are asked side by side, that say so and tell of nothing.
// VERIFIES: the server starts, takes up the others and answers; a guest that was only slow loses nothing.
func TestIdleGuestsDoNotHoldAStart(t *testing.T) {
	s, b, idle, good := idling(t, adopters+4, Defaults{Connect: 3 * time.Second, Start: time.Minute})
	if !slices.Equal(s.report.Waiting, idle) || !slices.Equal(s.report.Adopted, []string{good}) || len(s.report.Lost) > 0 {
		t.Errorf("report %+v", s.report)
	}
	if r := s.exec(good, "echo", "on"); string(r.Stdout) != "on\n" {
		t.Errorf("the other sandbox says %q", r.Stdout)
	}
	answer := make(chan error, len(idle))
	for _, id := range idle {
		if st := s.state(id); st != Running {
			t.Errorf("a sandbox that is waited for is %s", st)
		}
		go func() {
			_, err := s.Input(context.Background(), alice, id, "job", -1, []byte("after\n"), true)
			answer <- err
		}()
	}
	if len(answer) > 0 {
		t.Errorf("input is taken before it is known what runs: %v", <-answer)
	}
	close(b.awake)
	for _, id := range idle {
		if err := testenv.Receive(t, "input is taken", answer); err != nil {
			t.Error(err)
		}
		if p := s.wait(id, "job"); p.End != EndExited {
			t.Errorf("its process: %+v", p)
		}
		g := &gather{}
		if _, err := s.Output(t.Context(), alice, id, "job", OutputOptions{}, g); err != nil || g.data.String() != "before\nafter\n" {
			t.Errorf("its output: %q, %v", g.data.String(), err)
		}
		s.history(id)
	}
	checkNoOrphans(t, s)
}

// One that never tells is given up, with its processes; one that is deleted meanwhile is gone at once, and one whose lifetime
// runs out, too.
func TestIdleGuestsAfterAStart(t *testing.T) {
	for name, tt := range map[string]struct {
		limits Defaults
		do     func(s *server, id string)
		reason EndReason
		end    End
	}{
		"given up": {Defaults{Connect: 10 * time.Millisecond, Start: 30 * time.Millisecond}, func(*server, string) {}, EndLost, EndProcessLost},
		"deleted": {Defaults{Connect: 3 * time.Second, Start: time.Hour}, func(s *server, id string) {
			if _, err := s.Delete(t.Context(), alice, id); err != nil {
				t.Error(err)
			}
		}, EndDeleted, EndSandboxStopped},
		"too old": {Defaults{Connect: 3 * time.Second, Start: time.Hour}, func(s *server, _ string) {
			s.w.clock.(*fakeClock).advance(idleLifetime)
		}, EndLifetime, EndSandboxStopped},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, idle, _ := idling(t, 1, tt.limits)
			tt.do(s, idle[0])
			s.stops(idle[0], tt.reason)
			if p, err := s.GetProcess(t.Context(), alice, idle[0], "job"); err != nil || p.End != tt.end {
				t.Errorf("its process: %+v, %v", p, err)
			}
			s.history(idle[0])
			checkNoOrphans(t, s)
		})
	}
}
