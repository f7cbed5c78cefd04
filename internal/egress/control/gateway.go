package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/daemon"
)

// The server's patience with the gateway.
const (
	callTimeout  = 10 * time.Second
	startTimeout = 30 * time.Second // until one that was started has answered its first call
	// restartPause grows up to restartMost where one start after the other fails.
	restartPause = 100 * time.Millisecond
	restartMost  = 10 * time.Second
)

// Config says how a Gateway works. RunDir, Program, UID and KeepUID must be set.
type Config struct {
	// RunDir holds the gateway's socket, record and log.
	RunDir string
	// Program is the executable that becomes the gateway, called with Verb.
	Program string
	// UID hands out a user of the host that nothing else runs as, and how to give it back. KeepUID marks
	// the one of an adopted gateway as taken.
	UID     func() (uid uint32, release func(), err error)
	KeepUID func(uid uint32)
	// Nameservers (host:port) look names up instead of the host's own.
	Nameservers []string
	// Proxy says which proxy connections leave through; nil, or returning nil: none. It is asked each time a
	// control connection is made, as Shared is.
	Proxy func(context.Context) *proxy.Proxy
	// Shared and Private make the Inspector's parts: for all sandboxes, and for one. nil: none.
	Shared  func(context.Context) (egress.Private, error)
	Private func(ctx context.Context, sandbox string) (egress.Private, error)
	// OwnProxy returns the Proxy of a sandbox's policy that has a Via; nothing where it can't be read. It is asked when
	// Private is.
	OwnProxy func(ctx context.Context, sandbox string) egress.Private
	// Events takes what the gateway saw, in order. It is called from one goroutine. What it returns nil for
	// is recorded; else the same events come again.
	Events func([]egress.Event) error
	// Failed is told where a gateway that was started again can't be given a sandbox's device. It must not wait for
	// this Gateway. nil: nobody is told.
	Failed func(sandbox string, err error)
	Log    *slog.Logger
}

// Gateway is the server's handle on the gateway process. The process is started with the first sandbox
// that needs it, outlives the server, and is started again if it dies. Methods are safe for concurrent use.
type Gateway struct {
	cfg     Config
	stop    context.CancelFunc
	ctx     context.Context
	wg      sync.WaitGroup
	release func() // gives the user back
	// patience is how long a call waits for its answer.
	patience time.Duration

	mu        sync.Mutex // guards the fields below; held for the length of a call
	proc      *daemon.Process
	conn      *net.UnixConn
	sandboxes map[string]egress.Member
	closed    bool
	watching  bool

	taken taken
}

// taken tells how far the gateway's events are recorded.
type taken struct {
	mu   sync.Mutex    // guards the fields below
	last uint64        // the number of the last one
	more chan struct{} // closed when there are more
}

// note says that the events up to a number are recorded, of whatever gateway runs now.
func (t *taken) note(last uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = last
	if t.more != nil {
		close(t.more)
		t.more = nil
	}
}

// wait returns once those up to a number are.
func (t *taken) wait(ctx context.Context, last uint64) error {
	for {
		t.mu.Lock()
		if t.last >= last {
			t.mu.Unlock()
			return nil
		}
		if t.more == nil {
			t.more = make(chan struct{})
		}
		more := t.more
		t.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return errs.Wrap(ctx.Err(), errs.Unavailable, "what the gateway saw last is not recorded yet")
		}
	}
}

// New returns a handle. Nothing is started yet.
func New(cfg Config) *Gateway {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{cfg: cfg, sandboxes: map[string]egress.Member{}, release: func() {}, patience: callTimeout}
	g.ctx, g.stop = context.WithCancel(context.Background())
	return g
}

// Attach gives the gateway a sandbox's device and policy. Until it returns, nothing of the sandbox goes
// anywhere. Kinds: as Open's; Unavailable where the gateway could not be started.
func (g *Gateway) Attach(ctx context.Context, s egress.Member) error {
	// Before the lock: a device may be busy for a moment, and nobody else is to wait for it.
	p, f, err := g.open(ctx, s)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.ready(ctx); err != nil {
		return err
	}
	if _, err := g.call(Request{Op: OpAttach, Sandbox: s.ID, Policy: &p}, f); err != nil {
		return err
	}
	g.sandboxes[s.ID] = s
	return nil
}

// open gathers what the gateway needs of a sandbox: its policy and its device.
func (g *Gateway) open(ctx context.Context, s egress.Member) (egress.Policy, *os.File, error) {
	p, err := g.whole(ctx, s)
	if err != nil {
		return p, nil, err
	}
	f, err := s.Open(ctx)
	if err != nil {
		return p, nil, fmt.Errorf("open device of %s: %w", s.ID, err)
	}
	return p, f, nil
}

// attach is Attach for one that the gateway did serve, or should. g.mu is held.
func (g *Gateway) attach(ctx context.Context, s egress.Member) error {
	p, f, err := g.open(ctx, s)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, err = g.call(Request{Op: OpAttach, Sandbox: s.ID, Policy: &p}, f)
	return err
}

// whole adds the Inspector's part and the proxy's to a policy.
func (g *Gateway) whole(ctx context.Context, s egress.Member) (egress.Policy, error) {
	p := s.Policy
	if g.cfg.OwnProxy != nil && p.Via != "" {
		p.Proxy = g.cfg.OwnProxy(ctx, s.ID)
	}
	if g.cfg.Private == nil {
		return p, nil
	}
	part, err := g.cfg.Private(ctx, s.ID)
	if err != nil {
		return p, fmt.Errorf("gather secrets of %s: %w", s.ID, err)
	}
	p.Private = part
	return p, nil
}

// Configure replaces a sandbox's policy; connections that it no longer allows are cut when it returns.
// Kind: NotFound.
func (g *Gateway) Configure(ctx context.Context, id string, p egress.Policy) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, ok := g.sandboxes[id]
	if !ok {
		return errs.New(errs.NotFound, "sandbox %s has no network", id)
	}
	if err := g.ready(ctx); err != nil {
		return err
	}
	s.Policy = p
	return g.configure(ctx, s)
}

// configure is told the gateway first: a policy that it refuses does not count.
func (g *Gateway) configure(ctx context.Context, s egress.Member) error {
	p, err := g.whole(ctx, s)
	if err != nil {
		return err
	}
	if _, err := g.call(Request{Op: OpConfigure, Sandbox: s.ID, Policy: &p}, nil); err != nil {
		return err
	}
	g.sandboxes[s.ID] = s
	return nil
}

// Refresh asks for the Inspector's part of a sandbox anew and hands it on. A sandbox without network is no
// error.
func (g *Gateway) Refresh(ctx context.Context, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, ok := g.sandboxes[id]
	if !ok {
		return nil
	}
	if err := g.ready(ctx); err != nil {
		return err
	}
	return g.configure(ctx, s)
}

// RefreshShared does so for the part of all sandboxes.
func (g *Gateway) RefreshShared(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn == nil {
		return nil
	}
	_, err := g.hello(ctx, g.patience)
	return err
}

// Detach takes a sandbox's device away and ends its connections. One that has none is no error.
func (g *Gateway) Detach(_ context.Context, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.sandboxes[id]; !ok {
		return nil
	}
	delete(g.sandboxes, id)
	if g.conn == nil {
		return nil // what is started next does not hear of it
	}
	_, err := g.call(Request{Op: OpDetach, Sandbox: id}, nil)
	return err
}

// Refused returns what was refused to a sandbox at or after since; nothing where it has no network.
func (g *Gateway) Refused(_ context.Context, id string, since time.Time) ([]egress.Refusal, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.sandboxes[id]; !ok || g.conn == nil {
		return nil, nil
	}
	r, err := g.call(Request{Op: OpRefused, Sandbox: id, Since: since}, nil)
	if err != nil {
		return nil, err
	}
	return r.Refusals, nil
}

// Usage returns what a sandbox has moved. Kind: NotFound.
func (g *Gateway) Usage(_ context.Context, id string) (egress.Usage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn == nil {
		return egress.Usage{}, errs.New(errs.NotFound, "sandbox %s has no network", id)
	}
	r, err := g.call(Request{Op: OpUsage, Sandbox: id}, nil)
	if err != nil {
		return egress.Usage{}, err
	}
	return *r.Usage, nil
}

// SetAnswers gives a sandbox that is answered from a record its answers, in place of those before, or with more behind them.
// A gateway that is started again has none, and refuses. Kinds: NotFound, FailedPrecondition, InvalidArgument,
// ResourceExhausted, Unavailable.
func (g *Gateway) SetAnswers(_ context.Context, id string, list []egress.RecordedAnswer, more bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.sandboxes[id]; !ok || g.conn == nil {
		return errs.New(errs.NotFound, "sandbox %s has no network", id)
	}
	_, err := g.call(Request{Op: OpAnswers, Sandbox: id, Answers: list, More: more}, nil)
	return err
}

// Settle returns once everything is recorded that the gateway has seen of a sandbox so far. Kind: Unavailable.
func (g *Gateway) Settle(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, g.patience)
	defer cancel()
	g.mu.Lock()
	if g.conn == nil {
		g.mu.Unlock()
		return nil
	}
	r, err := g.call(Request{Op: OpWaiting, Sandbox: id}, nil)
	g.mu.Unlock()
	if err != nil || r.Last == 0 {
		return err
	}
	return g.taken.wait(ctx, r.Last)
}

// Stats returns the process's figures; ok is false where none runs.
func (g *Gateway) Stats() (s egress.Stats, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn == nil {
		return s, false
	}
	r, err := g.call(Request{Op: OpStats}, nil)
	if err != nil || r.Stats == nil {
		return s, false
	}
	return *r.Stats, true
}

// Adopt takes up the gateway that an earlier server left and brings it in line with the sandboxes that
// live: those it serves get their policy, those it lost their device, the others go. It returns an error for
// each sandbox that could not be served.
func (g *Gateway) Adopt(ctx context.Context, list []egress.Member) map[string]error {
	g.mu.Lock()
	defer g.mu.Unlock()
	failed := map[string]error{}
	for _, s := range list {
		g.sandboxes[s.ID] = s
	}
	served, err := g.connectLeft(ctx)
	if err == nil && served == nil && len(list) > 0 {
		err = g.ready(ctx) // starts one, which attaches all
		for _, s := range list {
			if err != nil {
				failed[s.ID] = err
			}
		}
		return failed
	}
	for _, id := range served {
		if _, ok := g.sandboxes[id]; !ok {
			_, _ = g.call(Request{Op: OpDetach, Sandbox: id}, nil)
		}
	}
	for _, s := range list {
		if err := g.bringUp(ctx, s, served); err != nil {
			failed[s.ID] = err
		}
	}
	return failed
}

func (g *Gateway) bringUp(ctx context.Context, s egress.Member, served []string) error {
	for _, id := range served {
		if id == s.ID {
			return g.configure(ctx, s)
		}
	}
	return g.attach(ctx, s)
}

// connectLeft connects to the gateway that an earlier server left. served is nil where there is none.
func (g *Gateway) connectLeft(ctx context.Context) (served []string, err error) {
	p, err := g.adopt()
	if err != nil || p == nil {
		return nil, err
	}
	g.proc = p
	if g.conn, err = g.dial(); err == nil {
		if served, err = g.hello(ctx, g.patience); err == nil {
			g.watch()
			return append([]string{}, served...), nil
		}
	}
	// It does not answer, or speaks another protocol.
	g.cfg.Log.Warn("the gateway of an earlier server is of no use; starting another", "err", err)
	g.kill()
	return nil, nil
}

// Close lets the gateway go on for the next server, or ends it where it serves nobody.
func (g *Gateway) Close() {
	g.stop() // first, so that nobody takes the end of the process for a fault
	g.mu.Lock()
	g.closed = true
	if len(g.sandboxes) == 0 && g.conn != nil {
		_, _ = g.call(Request{Op: OpExit}, nil)
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		if _, err := g.proc.Handle.Wait(ctx); err != nil {
			_ = g.proc.Handle.Signal(syscall.SIGKILL)
		}
		cancel()
		g.spec(0).Forget()
	}
	g.disconnect()
	g.mu.Unlock()
	g.wg.Wait()
}

func (g *Gateway) disconnect() {
	if g.conn != nil {
		_ = g.conn.Close()
		g.conn = nil
	}
	if g.proc != nil {
		_ = g.proc.Handle.Close()
		g.proc = nil
	}
}

// kill ends the process and waits for it.
func (g *Gateway) kill() {
	if g.proc == nil {
		return
	}
	_ = g.proc.Handle.Signal(syscall.SIGKILL)
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if _, err := g.proc.Handle.Wait(ctx); err != nil {
		g.cfg.Log.Error("the gateway does not end", "err", err)
	}
	g.disconnect()
	g.release()
	g.release = func() {}
}

// call sends a request and returns its reply, or the error in it. A call that is not answered within the patience failed.
func (g *Gateway) call(r Request, f *os.File) (*Reply, error) { return g.callWithin(g.patience, r, f) }

func (g *Gateway) callWithin(limit time.Duration, r Request, f *os.File) (*Reply, error) {
	reply, err := exchange(g.conn, r, f, time.Now().Add(limit))
	if errs.Is(err, errs.InvalidArgument) {
		return nil, err // it was too long, and nothing was sent
	}
	if err != nil {
		g.renew()
		return nil, errs.Wrap(err, errs.Unavailable, "the gateway does not answer")
	}
	return reply, reply.Err()
}

// renew takes another connection after a call that failed: the answer may still come, and would be taken for the
// next call's.
func (g *Gateway) renew() {
	if g.conn == nil {
		return
	}
	fresh, err := g.dial()
	_ = g.conn.Close()
	if err == nil { // else the next call fails, and tries again
		g.conn = fresh
	}
}

func exchange(c *net.UnixConn, r Request, f *os.File, until time.Time) (*Reply, error) {
	if c == nil {
		return nil, errors.New("not connected")
	}
	_ = c.SetDeadline(until)
	if err := Write(c, r, f); err != nil {
		return nil, err
	}
	var reply Reply
	extra, err := Read(c, &reply)
	if extra != nil {
		_ = extra.Close()
	}
	return &reply, err
}
