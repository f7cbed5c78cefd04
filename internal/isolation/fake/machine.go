package fake

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// machine is one instance: what a kernel and a guest would be.
type machine struct {
	spec   isolation.Spec
	serial int
	tree   *tree
	done   chan struct{}
	gone   chan struct{}   // closed once its end is told, after done
	held   <-chan struct{} // as Faults.DoneHeld
	born   time.Time

	// mu guards the fields below.
	mu        sync.Mutex
	applied   isolation.Applied
	exit      isolation.Exit
	claim     *guestwire.Claim
	processes map[string]*process
	order     []string
	tasks     map[int]*task
	nextPID   int
	conns     map[net.Conn]bool
	ports     map[int]func(net.Conn)
	thawed    chan struct{} // nil while nothing is frozen; closed by the thaw
	memory    int64
	peak      int64
	oomKills  int64

	codes interpreters // with a lock of their own
}

func newMachine(s isolation.Spec, serial int, a isolation.Applied) *machine {
	m := &machine{
		spec: s, serial: serial, applied: a, done: make(chan struct{}), gone: make(chan struct{}), born: time.Now(),
		tree:      newTree(s.Limits.DiskBytes),
		processes: map[string]*process{}, tasks: map[int]*task{}, nextPID: 2,
		conns: map[net.Conn]bool{}, ports: map[int]func(net.Conn){},
	}
	m.tree.fill(s.Root)
	return m
}

func (m *machine) appliedNow() isolation.Applied {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.applied
}

func (m *machine) exitNow() isolation.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

func (m *machine) dead() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

// die ends the machine; the first reason stays.
func (m *machine) die(e isolation.Exit) {
	m.mu.Lock()
	if m.dead() {
		m.mu.Unlock()
		return
	}
	m.exit = e
	close(m.done)
	if m.thawed != nil {
		close(m.thawed)
		m.thawed = nil
	}
	tasks := slices.Collect(maps.Values(m.tasks))
	conns := slices.Collect(maps.Keys(m.conns))
	m.mu.Unlock()
	for _, t := range tasks {
		t.signal(int(syscall.SIGKILL))
	}
	for _, c := range conns {
		_ = c.Close()
	}
	if m.held == nil {
		close(m.gone)
		return
	}
	go func() {
		<-m.held
		close(m.gone)
	}()
}

// dial makes a connection as a Unix socket would be, so that half-closing works, and serves the
// guest's end of it.
func (m *machine) dial() (net.Conn, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	server, err := fileConn(fds[0])
	if err != nil {
		_ = syscall.Close(fds[1])
		return nil, err
	}
	guest, err := fileConn(fds[1])
	if err != nil {
		_ = server.Close()
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead() {
		_, _ = server.Close(), guest.Close()
		return nil, errs.New(errs.Unavailable, "the guest of %s is gone", m.spec.ID)
	}
	m.conns[guest] = true
	go func() {
		m.serve(guest)
		_ = guest.Close()
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.conns, guest)
	}()
	return server, nil
}

func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "guest")
	defer func() { _ = f.Close() }() // FileConn has its own copy
	return net.FileConn(f)
}

func (m *machine) process(id string) *process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.processes[id]
}

func (m *machine) freeze(on bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.dead():
		return errs.New(errs.FailedPrecondition, "instance %s has ended", m.spec.ID)
	case on && m.thawed == nil:
		m.thawed = make(chan struct{})
	case !on && m.thawed != nil:
		close(m.thawed)
		m.thawed = nil
	}
	return nil
}

// gate blocks while the machine is frozen.
func (m *machine) gate(ctx context.Context) {
	m.mu.Lock()
	thawed := m.thawed
	m.mu.Unlock()
	if thawed == nil {
		return
	}
	select {
	case <-thawed:
	case <-m.done:
	case <-ctx.Done():
	}
}

func (m *machine) usage() isolation.Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return isolation.Usage{
		CPU:         time.Duration(m.nextPID) * time.Millisecond,
		MemoryBytes: 1<<20 + m.memory, MemoryPeak: max(1<<20, m.peak), Pids: 1 + len(m.tasks),
		DiskBytes: m.tree.size(), OOMKills: m.oomKills,
	}
}

func (m *machine) update(l isolation.Limits) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead() {
		return errs.New(errs.FailedPrecondition, "instance %s has ended", m.spec.ID)
	}
	m.applied.Limits = l
	m.tree.setLimit(l.DiskBytes)
	return nil
}

// charge accounts memory to a task and reports whether the limit held.
func (m *machine) charge(t *task, n int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.memory+n > m.applied.Limits.MemoryBytes {
		m.oomKills++
		return false
	}
	m.memory += n
	m.peak = max(m.peak, 1<<20+m.memory)
	t.memory += n
	return true
}

// newTask makes a task where the limit on processes allows it.
func (m *machine) newTask(p *process) (*task, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead() {
		return nil, errs.New(errs.Unavailable, "the guest is gone")
	}
	if limit := m.applied.Limits.Pids; limit > 0 && len(m.tasks)+1 >= limit {
		return nil, fmt.Errorf("fork: %w", syscall.EAGAIN)
	}
	t := &task{machine: m, process: p, pid: m.nextPID, ignored: map[int]bool{}}
	t.ctx, t.cancel = context.WithCancelCause(context.Background())
	m.nextPID++
	m.tasks[t.pid] = t
	return t, nil
}

func (m *machine) endTask(t *task) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.tasks, t.pid)
	m.memory -= t.memory
}

// listen registers a port; it fails where something listens already.
func (m *machine) listen(port int, serve func(net.Conn)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ports[port] != nil {
		return syscall.EADDRINUSE
	}
	m.ports[port] = serve
	return nil
}

func (m *machine) unlisten(port int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.ports, port)
}

// task is one simulated process of the kernel.
type task struct {
	machine *machine
	process *process
	pid     int
	memory  int64 // guarded by machine.mu
	ctx     context.Context
	cancel  context.CancelCauseFunc

	// mu guards the fields below.
	mu      sync.Mutex
	ignored map[int]bool
}

// killedError is why a task's context ended.
type killedError struct{ signal int }

func (e killedError) Error() string { return fmt.Sprintf("killed by signal %d", e.signal) }

func (t *task) signal(sig int) {
	t.mu.Lock()
	ignored := t.ignored[sig] && sig != int(syscall.SIGKILL)
	t.mu.Unlock()
	switch syscall.Signal(sig) {
	case syscall.SIGCHLD, syscall.SIGCONT, syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGWINCH, syscall.SIGURG, 0:
		return
	}
	if !ignored {
		t.cancel(killedError{sig})
	}
}

func (t *task) ignore(sig int, on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ignored[sig] = on
}
