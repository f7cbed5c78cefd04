// Package keeper is the server's side of the keeper: a process of its own that answers the system calls which sandboxes'
// filters hand over, and that outlives the server. It starts the process, finds it again, gives it listeners, and takes
// its events.
//
// What belongs here: that, and the messages between the two, which travel as package guestwire's. What does not: what the
// keeper does about a call (package watch).
//
// # Why a process
//
// A filter's listener may let refused calls through, so that no guest may have it; and where its last holder ends, every
// call that it would have answered fails with ENOSYS, so that the server's must not be the only one.
package keeper

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/daemon"
)

// The server's patience with the keeper.
const (
	callTimeout = 30 * time.Second
	retryPause  = 200 * time.Millisecond
	endLimit    = 5 * time.Second // for a process whose connection broke to end
)

// Config says how a Keeper works.
type Config struct {
	// RunDir holds the keeper's socket, record and log.
	RunDir string
	// Program is the executable that becomes the keeper, called with Verb.
	Program string
	// UID is the user that it runs as, unless one that an earlier server left runs already. Sandboxes' user namespaces
	// must belong to that user, or the keeper can't look at their processes.
	UID func() (uid uint32, err error)
	// KeepUID marks the user of a found keeper as taken.
	KeepUID func(uid uint32)
	Log     *slog.Logger
}

// Member is a sandbox whose calls are to be answered.
type Member struct {
	ID    string
	Calls isolation.Calls
	Arch  string
	// Decide is the filter as it would be without a listener. Where Listener is a runtime's trace, see Attach.
	Decide   []byte
	Trace    bool
	ExecMark uint64
	// Listener, Guest (a pidfd of the first process) and Freezer (nil: none) stay the caller's. Freeze is what
	// freezes, written to Freezer.
	Listener, Guest, Freezer *os.File
	Freeze                   string
}

// Keeper is the server's handle on the keeper process. Methods are safe for concurrent use.
type Keeper struct {
	cfg Config
	uid uint32

	mu      sync.Mutex // guards the fields below, and is held while the process is started
	proc    *daemon.Process
	members map[string]isolation.Calls // what the process watches for this server
	lost    []isolation.CallEvent      // what is to be told of those that nobody watches any more
	gone    map[string]bool            // those
	more    chan struct{}              // has something where lost has, or a process was started
	closed  bool
}

// New returns a handle, and finds the keeper that an earlier server left. None is started yet.
func New(cfg Config) (*Keeper, error) {
	k := &Keeper{cfg: cfg, members: map[string]isolation.Calls{}, gone: map[string]bool{}, more: make(chan struct{}, 1)}
	p, err := k.spec().Find()
	if err != nil {
		return nil, fmt.Errorf("find keeper: %w", err)
	}
	if p != nil {
		k.uid = p.UID
		cfg.KeepUID(p.UID)
		if err := k.takeOver(p); err != nil {
			// It does not answer, or speaks another protocol: its sandboxes are told of as lost when they are adopted.
			cfg.Log.Warn("the keeper of an earlier server is of no use", "err", err)
			end(p)
		}
		return k, nil
	}
	if k.uid, err = cfg.UID(); err != nil {
		return nil, err
	}
	return k, nil
}

func (k *Keeper) takeOver(p *daemon.Process) error {
	k.proc = p
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var hello Hello
	err := k.call(ctx, MethodHello, nil, nil, &hello)
	if err == nil && hello.Protocol != Protocol {
		err = fmt.Errorf("it speaks version %d of the protocol, not %d", hello.Protocol, Protocol)
	}
	if err != nil {
		k.proc = nil
	}
	return err
}

// UID is the user that the keeper runs as, and that sandboxes' user namespaces must belong to.
func (k *Keeper) UID() uint32 { return k.uid }

func (k *Keeper) spec() daemon.Spec {
	return daemon.Spec{
		Dir: k.cfg.RunDir, Name: "keeper", Program: k.cfg.Program, Args: []string{Verb}, UID: k.uid,
		// It needs no network, and none of the host's names and queues.
		Namespaces: unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
}

// Attach gives the keeper a sandbox's listener. Until it returns, what the filter hands over waits. Kind: Unavailable
// where the keeper could not be started.
func (k *Keeper) Attach(ctx context.Context, m Member) error {
	files := []*os.File{m.Listener, m.Guest}
	if m.Freezer != nil && m.Calls.OnAttempt == isolation.ReactPause {
		files = append(files, m.Freezer)
	} else {
		m.Freeze = ""
	}
	a := Attach{Sandbox: m.ID, Calls: m.Calls, Arch: m.Arch, Decide: m.Decide, Trace: m.Trace, ExecMark: m.ExecMark, Freeze: m.Freeze}
	p, err := k.attach(ctx, a, files)
	if p != nil && (errs.Is(err, errs.Unavailable) || errs.Is(err, errs.FailedPrecondition)) && ended(ctx, p) {
		// The next one can have the files as well.
		p, err = k.attach(ctx, a, files)
	}
	if p != nil && err != nil {
		return fmt.Errorf("hand the listener to the keeper: %w", err)
	}
	return err
}

// ended reports whether a process has ended that does not answer. One that ends closes its connections first.
func ended(ctx context.Context, p *daemon.Process) bool {
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	_, _ = p.Handle.Wait(ctx)
	return !p.Handle.Alive()
}

// attach asks the process that runs, which it returns.
func (k *Keeper) attach(ctx context.Context, a Attach, files []*os.File) (*daemon.Process, error) {
	p, err := k.ready(ctx)
	if err != nil {
		return nil, err
	}
	a.PID = p.Handle.PID()
	if err := k.call(ctx, MethodAttach, a, files, nil); err != nil {
		return p, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.proc != p || !p.Handle.Alive() { // what it watched is told of as lost already, or will be, without this one
		return p, errs.New(errs.Unavailable, "the keeper of system calls ended")
	}
	k.members[a.Sandbox] = a.Calls
	delete(k.gone, a.Sandbox)
	return p, nil
}

// ready sees to it that a keeper runs and answers, and returns it.
func (k *Keeper) ready(ctx context.Context) (*daemon.Process, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil, errs.New(errs.Unavailable, "the server is shutting down")
	}
	if k.proc != nil && k.proc.Handle.Alive() {
		return k.proc, nil
	}
	k.loseLocked()
	p, err := k.spec().Start()
	if err != nil {
		return nil, errs.Wrap(err, errs.Unavailable, "the keeper of system calls could not be started")
	}
	k.proc = p
	// Its socket takes connections from before it runs, so there is nothing to wait for but its answer.
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := k.call(ctx, MethodHello, nil, nil, nil); err != nil {
		end(p)
		k.proc = nil
		return nil, errs.Wrap(err, errs.Unavailable, "the keeper of system calls does not answer after its start; see %s", k.spec().Log())
	}
	k.tell()
	return p, nil
}

// end kills a keeper that is of no use.
func end(p *daemon.Process) {
	_ = p.Handle.Signal(syscall.SIGKILL)
	reap(p)
}

// reap takes the end of a process that has ended or was killed, which else stays in the kernel's table as long as this
// server lives, and lets go of it.
func reap(p *daemon.Process) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	_, _ = p.Handle.Wait(ctx)
	_ = p.Handle.Close()
}

// loseLocked takes note that the process has ended, and with it the listeners of all that it watched.
func (k *Keeper) loseLocked() {
	if k.proc == nil {
		return
	}
	reap(k.proc)
	k.proc = nil
	for id, c := range k.members {
		k.lostLocked(id, c)
	}
	k.members = map[string]isolation.Calls{}
}

func (k *Keeper) lostLocked(id string, c isolation.Calls) {
	k.gone[id] = true
	k.lost = append(k.lost, isolation.CallEvent{
		Sandbox: id, Time: time.Now(), Kind: isolation.CallGap, Reaction: c.OnAttempt, Lost: true,
		Note: "the keeper ended: from here on no system call is recorded, and those that wait for its answer fail with ENOSYS",
	})
	k.tell()
}

// Adopt takes up a sandbox that an earlier server attached. One that nobody watches any more is told of as lost.
func (k *Keeper) Adopt(ctx context.Context, id string, c isolation.Calls) error {
	s, err := k.State(ctx, id)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil && s.Watched {
		k.members[id] = c
		return nil
	}
	k.lostLocked(id, c)
	return err
}

// Forget is called when a sandbox is gone.
func (k *Keeper) Forget(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.members, id)
	delete(k.gone, id)
}

// Lost reports whether a sandbox's calls can't be observed any more.
func (k *Keeper) Lost(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.gone[id]
}

// State asks what the keeper knows of a sandbox.
func (k *Keeper) State(ctx context.Context, id string) (State, error) {
	var s State
	err := k.call(ctx, MethodState, Ref{id}, nil, &s)
	return s, err
}

// Release says that the server has taken note that a sandbox was frozen.
func (k *Keeper) Release(ctx context.Context, id string) error {
	return k.call(ctx, MethodRelease, Ref{id}, nil, nil)
}

// Sink takes events, in order. What it returns nil for is recorded, together with the position, which names the keeper
// and the last event; else the same events come again.
type Sink func(list []isolation.CallEvent, position string) error

// Follow gives events to sink until ctx ends. position is the last that was recorded. While no process runs, it waits for
// one.
func (k *Keeper) Follow(ctx context.Context, position string, sink Sink) {
	for ctx.Err() == nil {
		var err error
		if k.tellLost(position, sink) { // else nothing can be recorded now
			position, err = k.follow(ctx, position, sink)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && k.alive() {
			k.cfg.Log.Warn("cannot take the keeper's events; trying again", "err", err)
		}
		select {
		case <-k.retry():
		case <-k.more:
		case <-ctx.Done():
		}
	}
}

// retry takes note of a process that has ended, and returns what tells when to look again; nil where nothing comes before
// there is a process, or something is lost.
func (k *Keeper) retry() <-chan time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.proc != nil && !k.proc.Handle.Alive() {
		k.loseLocked()
	}
	if k.proc == nil && len(k.lost) == 0 {
		return nil
	}
	return time.After(retryPause)
}

// tell wakes Follow.
func (k *Keeper) tell() {
	select {
	case k.more <- struct{}{}:
	default:
	}
}

func (k *Keeper) alive() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.proc != nil && k.proc.Handle.Alive()
}

// follow takes events of the process that runs now, until it ends or there is something else to tell.
func (k *Keeper) follow(ctx context.Context, position string, sink Sink) (string, error) {
	k.mu.Lock()
	p := k.proc
	k.mu.Unlock()
	if p == nil {
		return position, nil
	}
	name := fmt.Sprintf("%d.%d", p.Handle.PID(), p.Start)
	var last uint64
	if n, err := fmt.Sscanf(position, name+" %d", &last); n != 1 || err != nil {
		last = 0
	}
	for {
		ev, err := k.events(ctx, After{last, p.Handle.PID()})
		if ev == nil {
			return position, err
		}
		next := fmt.Sprintf("%s %d", name, ev.Last)
		k.takeNote(ev.Events)
		if err := sink(ev.Events, next); err != nil {
			return position, fmt.Errorf("record events: %w", err)
		}
		position, last = next, ev.Last
	}
}

// events waits for events; nil without an error says that there is something else to tell.
func (k *Keeper) events(ctx context.Context, a After) (*Events, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	more := make(chan bool, 1)
	go func() {
		select {
		case <-k.more:
			cancel()
			more <- true
		case <-ctx.Done():
			more <- false
		}
	}()
	var ev Events
	err := k.call(ctx, MethodEvents, a, nil, &ev)
	cancel()
	interrupted := <-more
	if interrupted {
		k.tell() // Follow looks what it is
	}
	switch {
	case err == nil:
		return &ev, nil
	case interrupted:
		return nil, nil
	}
	return nil, err
}

// takeNote knows afterwards which sandboxes the process has stopped to watch.
func (k *Keeper) takeNote(list []isolation.CallEvent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, e := range list {
		if _, ok := k.members[e.Sandbox]; ok && e.Kind == isolation.CallGap && e.Lost {
			delete(k.members, e.Sandbox)
			k.gone[e.Sandbox] = true
		}
	}
}

// tellLost tells of sandboxes that nobody watches any more, and reports whether none is left to be told of.
func (k *Keeper) tellLost(position string, sink Sink) bool {
	k.mu.Lock()
	list := k.lost
	k.lost = nil
	k.mu.Unlock()
	if len(list) == 0 {
		return true
	}
	if err := sink(list, position); err != nil {
		k.cfg.Log.Error("cannot record that system calls are not observed any more", "err", err)
		k.mu.Lock()
		k.lost = append(list, k.lost...)
		k.mu.Unlock()
		return false
	}
	return true
}

// Close lets the keeper go on for the next server, or ends it where it watches nothing.
func (k *Keeper) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if k.proc == nil {
		return nil
	}
	p := k.proc
	k.proc = nil
	if len(k.members) > 0 {
		return p.Handle.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if err := k.call(ctx, MethodExit, nil, nil, nil); errs.Is(err, errs.FailedPrecondition) {
		return p.Handle.Close()
	}
	if _, err := p.Handle.Wait(ctx); err != nil {
		_ = p.Handle.Signal(syscall.SIGKILL)
	}
	k.spec().Forget()
	return p.Handle.Close()
}

// call makes one call, on a connection of its own. reply may be nil.
func (k *Keeper) call(ctx context.Context, m guestwire.Method, body any, files []*os.File, reply any) error {
	conn, err := k.spec().Dial()
	if err != nil {
		return errs.Wrap(err, errs.Unavailable, "the keeper of system calls does not answer")
	}
	return guestwire.CallOn(ctx, conn, m, body, files, reply)
}
