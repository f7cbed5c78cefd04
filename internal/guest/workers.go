package guest

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/account"
	"casemate.dev/internal/guest/files"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

const (
	// maxWorkers bounds the workers that take calls, one for each user that asks for files.
	maxWorkers = 8
	// workerIdle is how long a worker is kept without a call.
	workerIdle = 30 * time.Second
	// handLimit bounds handing over a call to a worker that does not take it.
	handLimit = 5 * time.Second
	// prodEvery is how long a worker can be held up by being stopped.
	prodEvery = time.Second
)

// workers hand file calls to a process of the asking user: PID 1 itself touches no file (HARDENING
// 1). The worker gets the call's own connection, so no byte of a file passes through the guest.
type workers struct {
	g *Guest

	// mu guards the fields below. It is held while a worker is started, so that there is one.
	mu    sync.Mutex
	byUID map[uint32]*worker
}

// worker is one process that serves files.
type worker struct {
	user  account.User
	conn  *net.UnixConn
	child *child
	idle  *time.Timer
	last  atomic.Int64 // when it was last given a call, in Unix nanoseconds

	// mu makes each hand-over one message.
	mu sync.Mutex
}

func newWorkers(g *Guest) *workers { return &workers{g: g, byUID: make(map[uint32]*worker)} }

// hand gives a file call to the worker of the user who asks.
func (ws *workers) hand(c *guestwire.Conn, call guestwire.Call) error {
	var asker guestwire.Asker
	if err := guestwire.Unmarshal(call.Body, &asker); err != nil {
		return badBody(err)
	}
	id := ws.g.identity()
	u, err := ws.g.user(id.or(asker.User))
	if err != nil {
		return err
	}
	job := files.Job{Home: u.Home, Request: call.Body}
	if asker.Privileged && !ws.g.cfg.SingleUser && u.UID != 0 {
		job.Owner = &files.Owner{UID: u.UID, GID: u.GID}
		if u, err = ws.g.user("0"); err != nil {
			return err
		}
	}
	body, err := guestwire.Marshal(job)
	if err != nil {
		return fmt.Errorf("encode job: %w", err)
	}
	call.Body = body
	conn, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return errs.New(errs.Unsupported, "this connection can't be handed to a worker")
	}
	// A worker that has died meanwhile shows on the first hand-over; the second starts another.
	for range 2 {
		w, startErr := ws.of(u)
		if startErr != nil {
			return startErr
		}
		if err = w.take(conn, call); err == nil {
			return nil
		}
		ws.drop(w)
	}
	return errs.Wrap(err, errs.Unavailable, "the sandbox's file worker does not answer")
}

// of returns the worker of a user, and starts it where there is none.
func (ws *workers) of(u account.User) (*worker, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.byUID[u.UID]; w != nil {
		if w.user.GID == u.GID && slices.Equal(w.user.Groups, u.Groups) {
			return w, nil
		}
		ws.dropLocked(w) // its groups have changed
	}
	for len(ws.byUID) >= maxWorkers {
		ws.dropLocked(ws.oldestLocked())
	}
	w, err := ws.start(u)
	if err != nil {
		return nil, err
	}
	ws.byUID[u.UID] = w
	return w, nil
}

func (ws *workers) oldestLocked() *worker {
	var oldest *worker
	for _, w := range ws.byUID {
		if oldest == nil || w.last.Load() < oldest.last.Load() {
			oldest = w
		}
	}
	return oldest
}

func (ws *workers) start(u account.User) (*worker, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	w := &worker{user: u, conn: ours}
	w.last.Store(time.Now().UnixNano())
	scope, left, err := ws.scope()
	if err != nil {
		_ = ours.Close()
		return nil, err
	}
	defer left()
	fork := func() (int, error) {
		return ws.g.cfg.Spawner.StartWorker(spawn.Worker{
			Args: []string{files.Arg}, Socket: theirs, UID: u.UID, GID: u.GID, Groups: u.Groups, Scope: scope,
		})
	}
	ended := make(chan struct{})
	w.child, err = ws.g.reaper.start(fork, func(exit) {
		close(ended)
		go ws.drop(w)
	})
	if err != nil {
		_ = ours.Close()
		return nil, errs.Wrap(err, errs.ResourceExhausted, "cannot start the sandbox's file worker: %v", err)
	}
	w.idle = time.AfterFunc(workerIdle, func() { ws.retire(w) })
	go w.prod(ended)
	return w, nil
}

// scope returns where a worker is born: where processes have groups of the guest's, in one of these. Its user may trace it
// there, and must gain nothing by that. What it returns is to be called once the worker runs.
func (ws *workers) scope() (spawn.Scope, func(), error) {
	if ws.g.cfg.Bounds == nil {
		return spawn.Scope{}, func() {}, nil
	}
	own, err := ws.g.cfg.Bounds.NewScope()
	if err != nil {
		return spawn.Scope{}, nil, err
	}
	return spawn.Scope{Layout: []string{"dir"}, Files: []*os.File{own.Dir}}, func() {
		closeFiles([]*os.File{own.Dir, own.Kill})
		own.Leave()
	}, nil
}

// prod keeps the worker going until it ends: its user's processes may stop it at any moment, and the
// calls that it has would wait for ever.
func (w *worker) prod(ended <-chan struct{}) {
	t := time.NewTicker(prodEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			_ = w.child.signal(unix.SIGCONT)
		case <-ended:
			return
		}
	}
}

// retire drops a worker that had no call for long.
func (ws *workers) retire(w *worker) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if left := workerIdle - time.Since(time.Unix(0, w.last.Load())); left > 0 {
		w.idle.Reset(left)
		return
	}
	ws.dropLocked(w)
}

func (ws *workers) drop(w *worker) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.dropLocked(w)
}

// dropLocked gives a worker no more calls. It ends by itself when those that it has are done.
func (ws *workers) dropLocked(w *worker) {
	if ws.byUID[w.user.UID] == w {
		delete(ws.byUID, w.user.UID)
	}
	if w.idle != nil {
		w.idle.Stop()
	}
	_ = w.conn.Close()
}

// end ends all workers, with the calls that they have.
func (ws *workers) end() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, w := range ws.byUID {
		_ = w.child.signal(unix.SIGKILL)
		ws.dropLocked(w)
	}
}

// take sends a call and its connection to the worker.
func (w *worker) take(conn *net.UnixConn, call guestwire.Call) error {
	payload, err := guestwire.AppendCall(nil, call)
	if err != nil {
		return err
	}
	frame := guestwire.AppendFrame(nil, guestwire.FrameCall, payload)
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last.Store(time.Now().UnixNano())
	// Its user may have stopped it.
	_ = w.child.signal(unix.SIGCONT)
	if err := w.conn.SetWriteDeadline(time.Now().Add(handLimit)); err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		n := 0
		n, _, sendErr = w.conn.WriteMsgUnix(frame, unix.UnixRights(int(fd)), nil)
		if sendErr == nil && n < len(frame) {
			_, sendErr = w.conn.Write(frame[n:])
		}
	})
	if err == nil {
		err = sendErr
	}
	return err
}

// socketPair returns two connected sockets: ours for Go's poller, the other as a plain descriptor.
func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "worker")
	f := os.NewFile(uintptr(fds[0]), "worker")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), theirs, nil
}
