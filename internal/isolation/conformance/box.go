package conformance

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

// patience bounds every wait for something that must happen; it is reached only where it does not.
const patience = 2 * time.Minute

// box is a started and claimed instance.
type box struct {
	t      *testing.T
	inst   isolation.Instance
	client *guestwire.Client
}

func startBox(t *testing.T, h Harness, edit ...func(*isolation.Spec)) *box {
	t.Helper()
	return startProfile(t, h, isolation.Locked, edit...)
}

func startProfile(t *testing.T, h Harness, p isolation.Profile, edit ...func(*isolation.Spec)) *box {
	t.Helper()
	spec := h.Spec(t, p)
	for _, e := range edit {
		e(&spec)
	}
	b := startOnly(t, h.Backend, spec)
	b.claim(guestwire.Claim{Sandbox: spec.ID, Hostname: "box", Env: map[string]string{"FROM_CLAIM": "claim", "BOTH": "claim"}})
	return b
}

// startOnly starts an instance and claims nothing.
func startOnly(t *testing.T, b isolation.Backend, spec isolation.Spec) *box {
	t.Helper()
	inst, err := b.Start(limited(t), spec)
	if err != nil {
		t.Fatalf("start: %v (%v)", err, errors.Unwrap(err))
	}
	t.Cleanup(func() { destroy(t, inst) })
	return &box{t: t, inst: inst, client: guestwire.NewClient(inst.Dial)}
}

func destroy(t *testing.T, i isolation.Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := i.Destroy(ctx); err != nil {
		t.Errorf("destroy: %v", err)
	}
}

// limited returns a context that ends with the test, and after a time that nothing may take.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (b *box) claim(c guestwire.Claim) {
	b.t.Helper()
	if err := b.client.Claim(limited(b.t), c); err != nil {
		b.t.Fatalf("claim: %v", err)
	}
}

// running is a process that was started in its scope.
type running struct {
	box   *box
	id    string
	info  guestwire.ProcessInfo
	scope isolation.Scope
}

// start starts a process in a scope of its own.
func (b *box) start(s guestwire.StartProcess) *running {
	b.t.Helper()
	r, err := b.tryStart(s)
	if err != nil {
		b.t.Fatalf("start %q: %v", s.Argv, err)
	}
	return r
}

func (b *box) tryStart(s guestwire.StartProcess) (*running, error) {
	b.t.Helper()
	if s.ID == "" {
		s.ID = id.New(id.Process)
	}
	scope, err := b.inst.NewScope(limited(b.t), s.ID)
	if err != nil {
		b.t.Fatalf("scope: %v", err)
	}
	b.t.Cleanup(func() {
		if err := scope.Close(); err != nil {
			b.t.Errorf("close scope of %q: %v", s.Argv, err)
		}
	})
	s.Scope = scope.Layout()
	info, err := b.client.Start(limited(b.t), s, scope.Files())
	return &running{box: b, id: s.ID, info: info, scope: scope}, err
}

func sh(script string) []string { return []string{"sh", "-c", script} }

func (b *box) startScript(script string) *running {
	b.t.Helper()
	return b.start(guestwire.StartProcess{Argv: sh(script)})
}

// wait returns the state of the process once it has ended.
func (r *running) wait() guestwire.ProcessInfo {
	r.box.t.Helper()
	info, err := r.box.client.Wait(limited(r.box.t), r.id)
	if err != nil {
		r.box.t.Fatalf("wait: %v", err)
	}
	return info
}

// transcript is what a stream gave.
type transcript struct {
	stdout, stderr, tty bytes.Buffer
	all                 bytes.Buffer
	gaps                int64
	info                guestwire.ProcessInfo
}

// output reads a process's output from an offset to its end.
func (r *running) output(req guestwire.OutputRequest) *transcript {
	r.box.t.Helper()
	req.ID = r.id
	s, err := r.box.client.Output(limited(r.box.t), req)
	if err != nil {
		r.box.t.Fatalf("output: %v", err)
	}
	return r.box.read(s)
}

func (b *box) read(s *guestwire.OutputStream) *transcript {
	b.t.Helper()
	defer s.Close()
	var tr transcript
	for {
		item, err := s.Next()
		if err == io.EOF {
			tr.info = s.Info()
			return &tr
		}
		if err != nil {
			b.t.Fatalf("output: %v", err)
		}
		tr.gaps += item.Gap
		tr.all.Write(item.Data)
		switch item.Stream {
		case guestwire.Stdout:
			tr.stdout.Write(item.Data)
		case guestwire.Stderr:
			tr.stderr.Write(item.Data)
		case guestwire.TTY:
			tr.tty.Write(item.Data)
		}
	}
}

// run runs a process to its end by one call.
func (b *box) run(s guestwire.StartProcess) *transcript {
	b.t.Helper()
	s.ID = id.New(id.Process)
	scope, err := b.inst.NewScope(limited(b.t), s.ID)
	if err != nil {
		b.t.Fatalf("scope: %v", err)
	}
	defer func() {
		if err := scope.Close(); err != nil {
			b.t.Errorf("close scope of %q: %v", s.Argv, err)
		}
	}()
	s.Scope = scope.Layout()
	_, stream, err := b.client.Run(limited(b.t), guestwire.RunProcess{Start: s, Output: guestwire.OutputRequest{Follow: true}}, scope.Files())
	if err != nil {
		b.t.Fatalf("run %q: %v", s.Argv, err)
	}
	return b.read(stream)
}

func (b *box) runScript(script string) *transcript {
	b.t.Helper()
	return b.run(guestwire.StartProcess{Argv: sh(script)})
}

// prints runs a script and wants that standard output and status 0.
func (b *box) prints(script, want string) {
	b.t.Helper()
	tr := b.runScript(script)
	if got := tr.stdout.String(); got != want || tr.info.End != guestwire.EndExited || tr.info.Code != 0 {
		b.t.Errorf("%s: got %q, %s %d, want %q; stderr: %s", script, got, tr.info.End, tr.info.Code, want, tr.stderr.String())
	}
}

// until waits until the process has printed want.
func (r *running) until(want string) {
	r.box.t.Helper()
	testenv.Eventually(r.box.t, patience, "the process prints "+want, func() bool { return r.said(want) })
}

// said reports whether the process has printed that.
func (r *running) said(want string) bool {
	r.box.t.Helper()
	return strings.Contains(r.output(guestwire.OutputRequest{}).all.String(), want)
}

func (r *running) empty() bool {
	r.box.t.Helper()
	empty, err := r.scope.Empty()
	if err != nil {
		r.box.t.Fatalf("scope: %v", err)
	}
	return empty
}

func (r *running) wantEmpty() {
	r.box.t.Helper()
	testenv.Eventually(r.box.t, patience, "no process of the tree is left", r.empty)
}

func wantKind(t *testing.T, what string, err error, kinds ...errs.Kind) {
	t.Helper()
	for _, k := range kinds {
		if errs.Is(err, k) {
			return
		}
	}
	t.Errorf("%s: got %v, want an error of kind %v", what, err, kinds)
}

func ended(t *testing.T, what string, info guestwire.ProcessInfo, end guestwire.End, code, signal int) {
	t.Helper()
	if info.End != end || info.Code != code || info.Signal != signal {
		t.Errorf("%s: ended as %s (code %d, signal %d, error %q), want %s (code %d, signal %d)",
			what, info.End, info.Code, info.Signal, info.Error, end, code, signal)
	}
}
