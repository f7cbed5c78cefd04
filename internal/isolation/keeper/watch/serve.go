package watch

import (
	"context"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/linux/daemon"
)

// lonelyLimit is how long a keeper that watches nothing waits for a server. One that was killed, and whose run
// directory is gone, never comes back.
const lonelyLimit = 2 * time.Minute

// process is the keeper.
type process struct {
	log    *slog.Logger
	proc   int // a path descriptor of /proc
	epoll  int
	events *events
	idle   atomic.Int64 // loops that wait

	records sync.Pool // *[maxRecord]byte: room for what a sandbox's kernel tells

	servers  atomic.Int64 // open connections
	lastSeen atomic.Int64 // when the last one went, in ns

	mu      sync.Mutex // guards the fields below
	boxes   map[int32]*box
	byID    map[string]*box
	lastKey int32
	// killed are the sandboxes that an attempt ended, by id, the oldest first in order.
	killed map[string]string
	order  []string
}

// keepKilled is how many sandboxes are remembered that an attempt ended.
const keepKilled = 1024

func newKeeper(proc int, log *slog.Logger) (*process, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	k := &process{
		log: log, proc: proc, epoll: epoll, events: newEvents(), boxes: map[int32]*box{}, byID: map[string]*box{}, killed: map[string]string{},
	}
	k.lastSeen.Store(time.Now().UnixNano())
	return k, nil
}

// serve answers the server's calls on l, and sandboxes' system calls, until the server asks the process to end or nobody
// needs it.
func (k *process) serve(l *net.UnixListener) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go k.leaveWhenAlone(ctx, cancel)
	k.idle.Add(1)
	go k.loop(ctx)
	context.AfterFunc(ctx, func() { _ = l.Close() })
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			k.log.Error("cannot take a connection", "err", err)
			select {
			case <-time.After(100 * time.Millisecond): // no descriptor is left: that passes
			case <-ctx.Done():
			}
			continue
		}
		k.servers.Add(1)
		go func() {
			defer func() {
				_ = c.Close()
				k.lastSeen.Store(time.Now().UnixNano())
				k.servers.Add(-1)
			}()
			if err := daemon.CheckPeer(c); err != nil {
				k.log.Warn("refused a control connection", "err", err)
				return
			}
			if k.serveConn(ctx, c) {
				cancel()
			}
		}()
	}
}

func (k *process) leaveWhenAlone(ctx context.Context, leave func()) {
	t := time.NewTicker(lonelyLimit / 10)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if k.servers.Load() == 0 && k.watched() == 0 && time.Since(time.Unix(0, k.lastSeen.Load())) > lonelyLimit {
			leave()
			return
		}
	}
}

// serveConn answers the one call of a connection, and reports whether the process is to end.
func (k *process) serveConn(ctx context.Context, conn *net.UnixConn) bool {
	c := guestwire.NewConn(conn)
	call, files, err := c.ReadCall()
	if err != nil {
		return false
	}
	// Whoever asks and goes away is not waited for.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if call.Method == keeper.MethodEvents {
		go func() {
			_, _ = conn.Read(make([]byte, 1))
			cancel()
		}()
	}
	reply, err := k.answer(ctx, call, files)
	if err != nil {
		_ = c.Fail(err)
		return false
	}
	_ = c.Reply(reply)
	return call.Method == keeper.MethodExit
}

func (k *process) answer(ctx context.Context, call guestwire.Call, files []*os.File) (any, error) {
	if call.Method == keeper.MethodAttach {
		reply, err := body(call, func(a keeper.Attach) (any, error) {
			if err := meant(a.PID); err != nil {
				return nil, err
			}
			return nil, k.attach(a, files)
		})
		if err != nil {
			closeAll(files)
		}
		return reply, err
	}
	closeAll(files)
	switch call.Method {
	case keeper.MethodHello:
		return k.hello(), nil
	case keeper.MethodState:
		return body(call, func(r keeper.Ref) (any, error) { return k.state(r.Sandbox), nil })
	case keeper.MethodRelease:
		return body(call, func(r keeper.Ref) (any, error) {
			k.release(r.Sandbox)
			return nil, nil
		})
	case keeper.MethodEvents:
		return body(call, func(a keeper.After) (any, error) {
			if err := meant(a.PID); err != nil {
				return nil, err
			}
			return k.events.after(ctx, a.After)
		})
	case keeper.MethodExit:
		return nil, k.settle(ctx)
	}
	return nil, errs.New(errs.Unsupported, "the keeper knows no call %q", call.Method)
}

// meant refuses what was meant for another keeper.
func meant(pid int) error {
	if pid != os.Getpid() {
		return errs.New(errs.FailedPrecondition, "process %d is another keeper", pid)
	}
	return nil
}

// settleLimit is how long the kernel may take to say that processes which have ended have.
const settleLimit = 5 * time.Second

// settle waits until nothing is watched.
func (k *process) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for k.watched() > 0 {
		select {
		case <-t.C:
		case <-ctx.Done():
			return errs.New(errs.FailedPrecondition, "the keeper watches %d sandboxes", k.watched())
		}
	}
	return nil
}

func body[T any](call guestwire.Call, f func(T) (any, error)) (any, error) {
	var v T
	if err := guestwire.Unmarshal(call.Body, &v); err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the call's body is malformed: %v", err)
	}
	return f(v)
}

func (k *process) hello() keeper.Hello {
	k.mu.Lock()
	defer k.mu.Unlock()
	h := keeper.Hello{Protocol: keeper.Protocol}
	for id := range k.byID {
		h.Sandboxes = append(h.Sandboxes, id)
	}
	return h
}

func (k *process) watched() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.byID)
}

func (k *process) state(id string) keeper.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := keeper.State{Killed: k.killed[id]}
	if b := k.byID[id]; b != nil {
		s.Watched, s.Held = true, b.held
	}
	return s
}

func (k *process) release(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if b := k.byID[id]; b != nil {
		b.held = false
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
