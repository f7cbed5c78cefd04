package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

// gather is a RunSink that keeps everything.
type gather struct {
	mu      sync.Mutex
	started []Process
	data    bytes.Buffer
	next    int64
	gaps    []Gap
	fail    error
}

func (g *gather) Started(p Process) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.started = append(g.started, p)
	return nil
}

func (g *gather) Output(_ Stream, offset int64, data []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fail != nil {
		return g.fail
	}
	if offset != g.next {
		return fmt.Errorf("offset %d, want %d", offset, g.next)
	}
	g.next += int64(len(data))
	g.data.Write(data)
	return nil
}

func (g *gather) Gap(gap Gap) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gaps = append(g.gaps, gap)
	g.next = gap.To
	return nil
}

func TestEndsOfProcesses(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	for _, c := range []struct {
		name string
		spec ProcessSpec
		act  func(p Process) error
		want Process
	}{
		{"exit", ProcessSpec{Argv: []string{"sh", "-c", "exit 7"}}, nil, Process{End: EndExited, Code: 7}},
		{"signal", ProcessSpec{Argv: []string{"sleep", "60"}}, func(p Process) error {
			return s.Signal(t.Context(), alice, sb.ID, p.ID, 15, false)
		}, Process{End: EndSignaled, Signal: 15}},
		{"kill that is no lack of memory", ProcessSpec{Argv: []string{"sleep", "60"}}, func(p Process) error {
			return s.Signal(t.Context(), alice, sb.ID, p.ID, 9, false)
		}, Process{End: EndSignaled, Signal: 9}},
		{"cancel", ProcessSpec{Argv: []string{"sleep", "60"}}, func(p Process) error {
			return s.Signal(t.Context(), alice, sb.ID, p.ID, 9, true)
		}, Process{End: EndCanceled, Signal: 9}},
		{"timeout", ProcessSpec{Argv: []string{"sleep", "60"}, Timeout: 10 * time.Millisecond}, nil, Process{End: EndTimedOut}},
		{"memory", ProcessSpec{Argv: []string{"oom"}}, nil, Process{End: EndOOMKilled, Signal: 9, OOMKills: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			started := s.start(sb.ID, c.spec)
			if started.End != EndNone && c.spec.Timeout == 0 || started.PID == 0 || started.StartedAt.IsZero() {
				t.Errorf("started %+v", started)
			}
			if c.act != nil {
				if err := c.act(started); err != nil {
					t.Fatal(err)
				}
			}
			p := s.wait(sb.ID, started.ID)
			if p.End != c.want.End || p.Code != c.want.Code || c.want.Signal != 0 && p.Signal != c.want.Signal || p.OOMKills != c.want.OOMKills {
				t.Errorf("%+v, want %+v", p, c.want)
			}
			if p.EndedAt.Before(p.StartedAt) {
				t.Errorf("ended %s, started %s", p.EndedAt, p.StartedAt)
			}
		})
	}
	s.history(sb.ID)
}

func TestFactsOfAnEndNameTheirObservers(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	r := s.exec(sb.ID, "oom")
	if r.Process.End != EndOOMKilled {
		t.Fatalf("%+v", r.Process)
	}
	e := s.ended(sb.ID, r.Process.ID)
	var guest endedFacts
	var kernel kernelEndFacts
	var server serverEndFacts
	for o, into := range map[journal.Observer]any{journal.Guest: &guest, journal.Kernel: &kernel, journal.Server: &server} {
		if err := json.Unmarshal(e.Facts[o], into); err != nil {
			t.Errorf("%s: %v", o, err)
		}
	}
	if guest.End != EndSignaled || guest.Code != nil || guest.Signal != 9 || kernel.OOMKills != 1 || server.End != EndOOMKilled {
		t.Errorf("guest %+v, kernel %+v, server %+v", guest, kernel, server)
	}
}

func TestFailedStarts(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	for name, c := range map[string]struct {
		spec ProcessSpec
		kind errs.Kind
	}{
		"program":   {ProcessSpec{Argv: []string{"no-such-program"}}, errs.NotFound},
		"directory": {ProcessSpec{Argv: []string{"true"}, Dir: "/no/such/dir"}, errs.NotFound},
		"user":      {ProcessSpec{Argv: []string{"true"}, User: "nobody-here"}, errs.NotFound},
		"no argv":   {ProcessSpec{}, errs.InvalidArgument},
		"id":        {ProcessSpec{ID: "a b", Argv: []string{"true"}}, errs.InvalidArgument},
		"env":       {ProcessSpec{Argv: []string{"true"}, Env: map[string]string{"A=B": ""}}, errs.InvalidArgument},
		"nul":       {ProcessSpec{Argv: []string{"echo", "a\x00b"}}, errs.InvalidArgument},
		"rows":      {ProcessSpec{Argv: []string{"true"}, Rows: 3}, errs.InvalidArgument},
		"huge":      {ProcessSpec{Argv: []string{"echo", strings.Repeat("x", maxText)}}, errs.InvalidArgument},
		"timeout":   {ProcessSpec{Argv: []string{"true"}, Timeout: -1}, errs.InvalidArgument},
	} {
		_, err := s.StartProcess(ctx, alice, sb.ID, c.spec, "")
		wantKind(t, name, err, c.kind)
		_, err = s.Execute(ctx, alice, sb.ID, c.spec, RunOptions{})
		wantKind(t, name+" by execute", err, c.kind)
	}
	failed := 0
	for _, typ := range s.history(sb.ID) {
		if typ == journal.ProcessFailed {
			failed++
		}
	}
	if failed != 6 {
		t.Errorf("%d failed starts are recorded, want 6", failed)
	}
	if b := s.find(sb.ID); len(b.procs) != 0 {
		t.Errorf("%d entries left over", len(b.procs))
	}
}

func TestSameIDAttaches(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	fresh := 0
	for range 20 {
		wg.Go(func() {
			p, err := s.StartProcess(ctx, alice, sb.ID, ProcessSpec{ID: "job", Argv: []string{"sh", "-c", "echo hi; sleep 60"}}, "")
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if !p.Attached {
				fresh++
			}
		})
	}
	wg.Wait()
	if fresh != 1 {
		t.Errorf("%d starts", fresh)
	}
	if err := s.Signal(ctx, alice, sb.ID, "job", 9, true); err != nil {
		t.Fatal(err)
	}
	// Run attaches too, and shows all of it, also after the end.
	g := &gather{}
	p, err := s.Run(ctx, alice, sb.ID, ProcessSpec{ID: "job", Argv: []string{"ignored"}}, RunOptions{}, g)
	if err != nil || p.End != EndCanceled || g.data.String() != "hi\n" || !g.started[0].Attached {
		t.Errorf("run: %+v %q, %v", p, g.data.String(), err)
	}
	s.history(sb.ID)
}

func TestRunFollowsAndHoldsNothingBack(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	g := &gather{}
	p, err := s.Run(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"cat"}}, RunOptions{Input: []byte("hello\n")}, g)
	if err != nil || p.End != EndExited || g.data.String() != "hello\n" || len(g.started) != 1 || g.started[0].ID != p.ID {
		t.Fatalf("run: %+v %q, %v", p, g.data.String(), err)
	}
	// Nobody may be told of an end that is not recorded.
	if e := s.ended(sb.ID, p.ID); e.Actor != alice.ID {
		t.Errorf("its end: %+v", e)
	}
	if p, err := s.Run(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"cat"}}, RunOptions{Input: []byte{}}, &gather{}); err != nil || p.Code != 0 {
		t.Errorf("empty input: %+v, %v", p, err)
	}
}

func TestRunWhoseReaderLeaves(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	spec := func(id string) ProcessSpec {
		return ProcessSpec{ID: id, Argv: []string{"sh", "-c", "echo one; cat"}, Stdin: true}
	}
	for _, how := range []string{"cancel", "sink"} {
		ctx, cancel := context.WithCancel(t.Context())
		g := &gather{}
		if how == "sink" {
			g.fail = errors.New("broken pipe")
		}
		started := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			_, err := s.Run(ctx, alice, sb.ID, spec(how), RunOptions{}, &notifying{gather: g, started: started})
			done <- err
		}()
		testenv.Receive(t, "the process starts", started)
		if how == "cancel" {
			cancel()
			wantKind(t, how, testenv.Receive(t, "the call ends", done), errs.Canceled)
		} else if err := testenv.Receive(t, "the call ends", done); !errors.Is(err, g.fail) {
			t.Errorf("%s: %v", how, err)
		}
		cancel()
		if _, err := s.Input(t.Context(), alice, sb.ID, how, -1, []byte("more\n"), true); err != nil {
			t.Fatal(err)
		}
		if p := s.wait(sb.ID, how); p.End != EndExited || p.Code != 0 {
			t.Errorf("%s: the process %+v", how, p)
		}
		again := &gather{next: 4}
		p, err := s.Output(t.Context(), alice, sb.ID, how, OutputOptions{Offset: 4, Follow: true}, again)
		if err != nil || p.End != EndExited || again.data.String() != "more\n" {
			t.Errorf("%s: the rest is %q, %v", how, again.data.String(), err)
		}
	}
	s.history(sb.ID)
}

type notifying struct {
	*gather
	started chan struct{}
}

func (n *notifying) Started(p Process) error {
	close(n.started)
	return n.gather.Started(p)
}

// TestSlowReaderDoesNotKeepTheEndFromBeingRecorded lets the reader of Run stand still.
func TestSlowReaderDoesNotKeepTheEndFromBeingRecorded(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	release := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := s.Run(t.Context(), alice, sb.ID, ProcessSpec{ID: "slow", Argv: []string{"echo", "x"}}, RunOptions{}, &stuck{release: release})
		done <- err
	}()
	testenv.Eventually(t, soon, "the start", func() bool { return s.find(sb.ID).proc("slow") != nil })
	if p := s.wait(sb.ID, "slow"); p.End != EndExited {
		t.Errorf("%+v", p)
	}
	close(release)
	if err := testenv.Receive(t, "the call ends", done); err != nil {
		t.Error(err)
	}
	s.history(sb.ID)
}

type stuck struct {
	gather
	release chan struct{}
}

func (s *stuck) Output(st Stream, offset int64, data []byte) error {
	<-s.release
	return s.gather.Output(st, offset, data)
}

func TestExecuteLimitsItsOutput(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	r, err := s.Execute(t.Context(), alice, sb.ID, ProcessSpec{Argv: []string{"spam", "3000000"}, Buffer: 1000}, RunOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var dropped int64
	for i, g := range r.Gaps {
		dropped += g.To - g.From
		if i > 0 && g.From < r.Gaps[i-1].To {
			t.Errorf("gaps overlap: %v", r.Gaps)
		}
	}
	if r.Process.Bytes != 3_000_000 || int64(len(r.Stdout))+dropped != 3_000_000 || len(r.Stdout) > 1000 {
		t.Errorf("bytes %d, kept %d, dropped %d", r.Process.Bytes, len(r.Stdout), dropped)
	}
}

func TestExecuteTimesOutAndNamesTheSetting(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.Defaults.Execution = 20 * time.Millisecond }
	s := w.serve()
	sb := s.create(alice, Spec{})
	r := s.exec(sb.ID, "sleep", "60")
	if r.Process.End != EndTimedOut || !strings.Contains(r.Process.Error, "execution timeout") {
		t.Errorf("%+v", r.Process)
	}
	// Only one-shot calls have that limit.
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "0.05"}})
	if p = s.wait(sb.ID, p.ID); p.End != EndExited {
		t.Errorf("a process in the background: %+v", p)
	}
}

// TestSandboxThatEndsTellsItsFollowers: the connections of those who follow break before anybody knows that the guest has
// ended, and still they get the process's end, not an error.
func TestSandboxThatEndsTellsItsFollowers(t *testing.T) {
	for name, end := range map[string]func(s *server, id string) error{
		"deleted": func(s *server, id string) error {
			_, err := s.Delete(t.Context(), alice, id)
			return err
		},
		"its guest dies": func(s *server, id string) error {
			if !s.backend.Host().Kill(id) {
				return errors.New("no such instance")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newWorld(t).serve()
			known := make(chan struct{})
			s.backend.SetFaults(fake.Faults{DoneHeld: known})
			sb := s.create(alice, Spec{})
			results := s.followThrice(sb.ID, "a")
			time.AfterFunc(50*time.Millisecond, func() { close(known) })
			if err := end(s, sb.ID); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				if r := testenv.Receive(t, "three calls end", results); r.err != nil || r.p.End != EndSandboxStopped {
					t.Errorf("%+v, %v", r.p, r.err)
				}
			}
		})
	}
}

// outcome is what a call returned.
type outcome struct {
	p   Process
	err error
}

// followThrice starts a process that does not end, and follows it in each of the three ways.
func (s *server) followThrice(sandboxID, processID string) <-chan outcome {
	s.w.t.Helper()
	ctx := s.w.t.Context()
	results := make(chan outcome, 3)
	ready := make(chan struct{})
	go func() {
		p, err := s.Run(ctx, alice, sandboxID, ProcessSpec{ID: processID, Argv: []string{"sleep", "60"}}, RunOptions{}, &notifying{gather: &gather{}, started: ready})
		results <- outcome{p, err}
	}()
	testenv.Receive(s.w.t, "the process starts", ready)
	go func() {
		p, err := s.Output(ctx, alice, sandboxID, processID, OutputOptions{Follow: true}, &gather{})
		results <- outcome{p, err}
	}()
	go func() {
		p, err := s.WaitProcess(ctx, alice, sandboxID, processID)
		results <- outcome{p, err}
	}()
	testenv.Eventually(s.w.t, soon, "three in use", func() bool {
		b := s.find(sandboxID)
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.inUse == 3
	})
	return results
}

func TestWaitReturnsWithItsContext(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if p, err := s.WaitProcess(ctx, alice, sb.ID, p.ID); err != nil || p.End != EndNone {
		t.Errorf("%+v, %v", p, err)
	}
	_, err := s.WaitProcess(t.Context(), alice, sb.ID, "prc_none")
	wantKind(t, "no such process", err, errs.NotFound)
}

func TestManyProcessesKeepMemoryBounded(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	var first Process
	for i := range keepEnded + 50 {
		r := s.exec(sb.ID, "true")
		if i == 0 {
			first = r.Process
		}
	}
	b := s.find(sb.ID)
	b.mu.Lock()
	held := len(b.procs)
	b.mu.Unlock()
	if held > keepEnded {
		t.Errorf("%d processes in memory", held)
	}
	if p, err := s.GetProcess(t.Context(), alice, sb.ID, first.ID); err != nil || p.End != EndExited {
		t.Errorf("an old one: %+v, %v", p, err)
	}
	_, err := s.Output(t.Context(), alice, sb.ID, first.ID, OutputOptions{}, &gather{})
	wantKind(t, "its output", err, errs.NotFound)
	_, err = s.StartProcess(t.Context(), alice, sb.ID, ProcessSpec{ID: first.ID, Argv: []string{"true"}}, "")
	wantKind(t, "its id again", err, errs.AlreadyExists)
	if all, err := s.ListProcesses(t.Context(), alice, sb.ID); err != nil || len(all) != keepEnded+50 || all[0].ID != first.ID {
		t.Errorf("list: %d, %v", len(all), err)
	}
}

func TestSignalAndResizeCheckTheirArguments(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"sh"}, TTY: true, Rows: 24, Cols: 80})
	if err := s.Resize(ctx, alice, sb.ID, p.ID, 50, 132); err != nil {
		t.Error(err)
	}
	for _, sig := range []int{0, -1, 65} {
		wantKind(t, fmt.Sprint("signal ", sig), s.Signal(ctx, alice, sb.ID, p.ID, sig, false), errs.InvalidArgument)
	}
	wantKind(t, "no such process", s.Signal(ctx, alice, sb.ID, "prc_none", 15, false), errs.NotFound)
	if b := s.find(sb.ID); b.inUse != 0 {
		t.Errorf("%d calls are counted as running", b.inUse)
	}
}

func BenchmarkExecuteTrue(b *testing.B) {
	s := newWorld(b).serve()
	sb := s.create(alice, Spec{Lifetime: -1})
	for b.Loop() {
		if _, err := s.Execute(b.Context(), alice, sb.ID, ProcessSpec{Argv: []string{"true"}}, RunOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCreateAndDelete(b *testing.B) {
	s := newWorld(b).serve()
	for b.Loop() {
		sb := s.create(alice, Spec{})
		if _, err := s.Delete(b.Context(), alice, sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}

// TestStartedAt: a guest that answers late tells when a process started, and can't tell what can't be.
func TestStartedAt(t *testing.T) {
	asked := time.Unix(100, 0).UTC()
	now := asked.Add(20 * time.Millisecond)
	for said, want := range map[time.Time]time.Time{
		asked.Add(time.Millisecond): asked.Add(time.Millisecond),
		asked.Add(-time.Hour):       asked,
		now.Add(time.Hour):          now,
	} {
		if got := startedAt(guestwire.ProcessInfo{Started: said.UnixNano()}, asked, now); got != want {
			t.Errorf("said %v: %v, not %v", said, got, want)
		}
	}
}
