package sandbox

import (
	"context"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// slow is a guest that takes its time: what it is asked waits until gate is closed, and is then done. That it lives, it
// says at once, unless it is mute.
type slow struct {
	guest
	mute  bool
	gate  chan struct{}
	asked atomic.Int32
	// called is closed once something was asked of it.
	called chan struct{}
	once   sync.Once
	// opens closes gate at that many questions whether it lives; 0: never.
	opens int32
}

// Status implements guest.
func (g *slow) Status(ctx context.Context) (guestwire.Status, error) {
	if g.mute {
		<-ctx.Done()
		return guestwire.Status{}, ctx.Err()
	}
	if g.asked.Add(1) == g.opens {
		close(g.gate)
	}
	return guestwire.Status{Version: guestwire.Version}, nil
}

func (g *slow) note() { g.once.Do(func() { close(g.called) }) }

func (g *slow) wait(ctx context.Context) error {
	g.note()
	select {
	case <-g.gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run implements guest.
func (g *slow) Run(ctx context.Context, r guestwire.RunProcess, files []*os.File) (guestwire.ProcessInfo, *guestwire.OutputStream, error) {
	if err := g.wait(ctx); err != nil {
		return guestwire.ProcessInfo{}, nil, err
	}
	return g.guest.Run(ctx, r, files)
}

// Start implements guest.
func (g *slow) Start(ctx context.Context, r guestwire.StartProcess, files []*os.File) (guestwire.ProcessInfo, error) {
	if err := g.wait(ctx); err != nil {
		return guestwire.ProcessInfo{}, err
	}
	return g.guest.Start(ctx, r, files)
}

// CreateContext implements guest. It is not slow.
func (g *slow) CreateContext(ctx context.Context, r guestwire.CreateContext, files []*os.File) (guestwire.ContextInfo, error) {
	g.note()
	return g.guest.CreateContext(ctx, r, files)
}

// RunCode implements guest.
func (g *slow) RunCode(ctx context.Context, r guestwire.RunCode, code string) (guestwire.RunInfo, *guestwire.ItemStream, error) {
	if err := g.wait(ctx); err != nil {
		return guestwire.RunInfo{}, nil, err
	}
	return g.guest.RunCode(ctx, r, code)
}

// Write implements guest.
func (g *slow) Write(ctx context.Context, r guestwire.WriteRequest, in io.Reader) (guestwire.FileInfo, error) {
	if err := g.wait(ctx); err != nil {
		return guestwire.FileInfo{}, err
	}
	return g.guest.Write(ctx, r, in)
}

// asks are the ways to ask something of a guest that may be slow.
func (s *server) asks(id string) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"run": func(ctx context.Context) error {
			r, err := s.Execute(ctx, admin, id, ProcessSpec{Argv: []string{"echo", "x"}}, RunOptions{})
			if err == nil && string(r.Stdout) != "x\n" {
				s.w.t.Errorf("run: output %q", r.Stdout)
			}
			return err
		},
		"start": func(ctx context.Context) error {
			p, err := s.StartProcess(ctx, admin, id, ProcessSpec{Argv: []string{"true"}}, "")
			if err == nil {
				s.wait(id, p.ID)
			}
			return err
		},
		"code": func(ctx context.Context) error {
			h := newHeard()
			_, err := s.RunCode(ctx, admin, id, CodeSpec{Code: "1+1"}, "", h)
			if err == nil && h.value() != "2" {
				s.w.t.Errorf("code: value %q", h.value())
			}
			return err
		},
		"write": func(ctx context.Context) error {
			f, err := s.Files(ctx, admin, id)
			if err != nil {
				return err
			}
			_, err = f.Write(ctx, WriteRequest{PathRequest: PathRequest{Path: "/tmp/f"}, Offset: -1, Size: -1}, strings.NewReader("x"))
			return err
		},
	}
}

// slowly has a sandbox whose guest is slow from then on; nothing has begun to use it yet. What asks whether it lives is
// answered without any thread but its own, so the short timeouts here depend on no machine's speed.
func (w *world) slowly(g *slow, d Defaults) (*server, string) {
	w.t.Helper()
	s := w.serve()
	sb := s.create(admin, Spec{})
	b := s.find(sb.ID)
	g.guest, g.gate, g.called = b.guest, make(chan struct{}), make(chan struct{})
	b.guest = g
	s.cfg.Defaults.Connect, s.cfg.Defaults.Start = d.Connect, d.Start
	return s, sb.ID
}

// ends waits for the end of a call that must not succeed.
func ends(t *testing.T, gone <-chan error) {
	t.Helper()
	if testenv.Receive(t, "the call ends", gone) == nil {
		t.Error("what was not done succeeded")
	}
}

// A guest that lives and is slow is waited for.
func TestSlowGuest(t *testing.T) {
	for _, how := range []string{"run", "start", "code", "write"} {
		t.Run(how, func(t *testing.T) {
			g := &slow{opens: 3}
			s, id := newWorld(t).slowly(g, Defaults{Connect: 10 * time.Millisecond, Start: time.Hour})
			if err := s.asks(id)[how](t.Context()); err != nil {
				t.Errorf("asked %d times whether it lives: %v", g.asked.Load(), err)
			}
			s.history(id)
		})
	}
}

// VULNERABILITY: what a guest takes long for has no deadline of its own.
// ATTACK: a guest that takes calls and never answers.
// VERIFIES: the call ends, and says why. The twin is TestSlowGuest: the same guest that says that it lives.
func TestMuteGuest(t *testing.T) {
	for _, how := range []string{"run", "start", "code", "write"} {
		t.Run(how, func(t *testing.T) {
			s, id := newWorld(t).slowly(&slow{mute: true}, Defaults{Connect: 10 * time.Millisecond, Start: time.Hour})
			err := s.asks(id)[how](t.Context())
			if !errs.Is(err, errs.DeadlineExceeded) || !strings.Contains(err.Error(), "connect timeout") {
				t.Errorf("the call of a mute guest ended with: %v", err)
			}
		})
	}
}

// VULNERABILITY: a guest that says that it lives is waited for.
// ATTACK: one that says so for ever, and does nothing.
// VERIFIES: what it could do at once ends with the start timeout, or with its caller.
func TestIdleGuest(t *testing.T) {
	for _, how := range []string{"run", "start", "code"} {
		t.Run(how, func(t *testing.T) {
			s, id := newWorld(t).slowly(&slow{}, Defaults{Connect: 10 * time.Millisecond, Start: 30 * time.Millisecond})
			err := s.asks(id)[how](t.Context())
			if !errs.Is(err, errs.DeadlineExceeded) || !strings.Contains(err.Error(), "start timeout") {
				t.Errorf("the call of an idle guest ended with: %v", err)
			}
		})
		t.Run(how+", and who asks leaves", func(t *testing.T) {
			g := &slow{}
			s, id := newWorld(t).slowly(g, Defaults{Connect: 10 * time.Millisecond, Start: time.Hour})
			ctx, leave := context.WithCancel(t.Context())
			gone := make(chan error, 1)
			go func() { gone <- s.asks(id)[how](ctx) }()
			testenv.Eventually(t, soon, "somebody asks whether the guest lives", func() bool { return g.asked.Load() > 0 })
			leave()
			ends(t, gone)
		})
	}
}

// One that has died is not waited for.
func TestGuestDiesUnasked(t *testing.T) {
	for _, how := range []string{"run", "start", "code", "write"} {
		t.Run(how, func(t *testing.T) {
			w := newImageWorld(t) // what has memory images stands still as a whole
			g := &slow{}
			s, id := w.slowly(g, Defaults{Connect: time.Hour, Start: time.Hour})
			close(g.gate)
			if err := s.find(id).inst.Freeze(t.Context()); err != nil {
				t.Fatal(err)
			}
			gone := make(chan error, 1)
			go func() { gone <- s.asks(id)[how](t.Context()) }()
			testenv.Receive(t, "something is asked of the guest", g.called)
			w.host.Kill(id)
			ends(t, gone)
		})
	}
}

// hoarder is a guest that tells of three contexts and says that it lives; of their runs it tells only if it answers.
type hoarder struct {
	guest
	answers        bool
	asked, endured atomic.Int32 // how often for runs, and how often by somebody who was ready to wait
}

// Status implements guest.
func (*hoarder) Status(context.Context) (guestwire.Status, error) {
	return guestwire.Status{Version: guestwire.Version}, nil
}

// Contexts implements guest.
func (*hoarder) Contexts(context.Context) ([]guestwire.ContextInfo, error) {
	var list []guestwire.ContextInfo
	for _, name := range []string{"a", "b", "c"} {
		list = append(list, guestwire.ContextInfo{ID: name, State: guestwire.ContextIdle, Starts: 1})
	}
	return list, nil
}

// ContextRuns implements guest.
func (g *hoarder) ContextRuns(ctx context.Context, _ string) ([]guestwire.RunInfo, error) {
	g.asked.Add(1)
	if ctx.Err() == nil {
		g.endured.Add(1)
	}
	if g.answers {
		return nil, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// VULNERABILITY: a server that starts asks each guest for the runs of each of its contexts.
// ATTACK: a guest with many contexts that says that it lives, and tells of no runs.
// VERIFIES: it is waited for once, not once for each. The twin answers, and is asked for all.
func TestIdleGuestWithManyContexts(t *testing.T) {
	for _, answers := range []bool{false, true} {
		s := newWorld(t).serve()
		sb := s.create(admin, Spec{})
		b := s.find(sb.ID)
		g := &hoarder{guest: b.guest, answers: answers}
		b.guest = g
		s.cfg.Defaults.Connect, s.cfg.Defaults.Start = 10*time.Millisecond, time.Hour
		if !answers {
			s.cfg.Defaults.Start = 30 * time.Millisecond
		}
		if err := s.takeUpContexts(t.Context(), b); err != nil {
			t.Error(err)
		}
		if n := g.endured.Load(); g.asked.Load() != 3 || answers && n != 3 || !answers && n > 1 {
			t.Errorf("it answers: %v; asked for the runs of %d contexts, and %d times there was time to wait", answers, g.asked.Load(), n)
		}
	}
}
