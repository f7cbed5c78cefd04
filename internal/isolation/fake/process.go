package fake

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/fake/script"
)

const (
	defaultBuffer = 1 << 20
	defaultGrace  = 2 * time.Second
	// outputGrace is how long a process's output may stay open after it ended, held by others.
	outputGrace = 50 * time.Millisecond
)

// process is one command that was started through the guest's protocol.
type process struct {
	machine *machine
	out     *output
	in      *input // nil without standard input
	done    chan struct{}
	drained chan struct{}
	main    *task
	request guestwire.StartProcess

	// mu guards the fields below.
	mu     sync.Mutex
	info   guestwire.ProcessInfo
	reason guestwire.End // why it is being killed, before it has ended
	tasks  map[*task]bool
	size   winsize
}

type winsize struct{ rows, cols uint16 }

// start starts a process, or attaches to one that exists.
func (m *machine) start(s guestwire.StartProcess) (*process, guestwire.ProcessInfo, error) {
	if s.ID == "" || len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, guestwire.ProcessInfo{}, errs.New(errs.InvalidArgument, "a process needs an id and a command")
	}
	if p := m.process(s.ID); p != nil {
		return p, p.attached(), nil
	}
	u, err := m.user(s.User)
	if err != nil {
		return nil, guestwire.ProcessInfo{}, err
	}
	p := m.newProcess(s, u)
	if !m.tree.isDir(p.info.Dir) {
		return nil, guestwire.ProcessInfo{}, errs.New(errs.NotFound, "no such directory: %s", p.info.Dir)
	}
	t, err := m.newTask(p)
	if errors.Is(err, syscall.EAGAIN) {
		err = errs.Wrap(err, errs.ResourceExhausted, "the sandbox may have no more processes")
	}
	if err != nil {
		return nil, guestwire.ProcessInfo{}, err
	}
	sh := p.shell(t, s, u)
	if sh.Host.Lookup(sh, s.Argv[0]) == nil {
		m.endTask(t)
		return nil, guestwire.ProcessInfo{}, errs.New(errs.NotFound, "no such program: %s", s.Argv[0])
	}
	m.mu.Lock()
	if other := m.processes[s.ID]; other != nil { // a call with the same id was faster
		m.mu.Unlock()
		m.endTask(t)
		return other, other.attached(), nil
	}
	p.main, p.info.PID, p.tasks[t] = t, t.pid, true
	m.processes[s.ID] = p
	m.order = append(m.order, s.ID)
	m.mu.Unlock()
	if s.TimeoutMS > 0 {
		go p.enforce(milliseconds(s.TimeoutMS, 0), milliseconds(s.GraceMS, defaultGrace))
	}
	info := p.snapshot()
	go func() { p.ended(t, sh.Call(s.Argv)) }()
	return p, info, nil
}

func milliseconds(n int64, otherwise time.Duration) time.Duration {
	if n <= 0 {
		return otherwise
	}
	return time.Duration(n) * time.Millisecond
}

func (m *machine) newProcess(s guestwire.StartProcess, u user) *process {
	buffer := s.Buffer
	if buffer <= 0 {
		buffer = defaultBuffer
	}
	p := &process{
		machine: m, request: s, out: newOutput(buffer, s.Hold), done: make(chan struct{}), drained: make(chan struct{}),
		size: winsize{rows: s.Rows, cols: s.Cols}, tasks: map[*task]bool{},
		info: guestwire.ProcessInfo{
			ID: s.ID, Argv: s.Argv, Dir: m.dir(s.Dir, u), User: u.name, TTY: s.TTY, Started: time.Now().UnixNano(),
		},
	}
	if s.Stdin == guestwire.StdinPipe || s.TTY {
		p.in = newInput()
	}
	return p
}

func (p *process) attached() guestwire.ProcessInfo {
	info := p.snapshot()
	info.Attached = true
	return info
}

func (p *process) shell(t *task, s guestwire.StartProcess, u user) *script.Shell {
	sh := &script.Shell{
		Host: shellHost{p.machine}, Env: p.machine.env(u, s.Env), Dir: p.info.Dir, PID: t.pid, Task: t,
		Stdin: bytes.NewReader(nil), Args: s.Argv[:1],
		Stdout: &writer{t, p.out, guestwire.Stdout}, Stderr: &writer{t, p.out, guestwire.Stderr},
	}
	if p.in != nil {
		sh.Stdin = &reader{t, p.in}
	}
	if s.TTY {
		tty := &writer{t, p.out, guestwire.TTY}
		sh.Stdout, sh.Stderr = tty, tty
		if sh.Env["TERM"] == "" {
			sh.Env["TERM"] = "xterm-256color"
		}
	}
	return sh
}

// ended notes a task's end, and where it was the first one, the process's.
func (p *process) ended(t *task, status int) {
	p.machine.endTask(t)
	p.mu.Lock()
	delete(p.tasks, t)
	left := len(p.tasks)
	if t == p.main {
		p.finishLocked(t, status)
	}
	mainDone := p.info.End != guestwire.EndNone
	p.mu.Unlock()
	if t == p.main {
		close(p.done)
		go p.drain(left)
	}
	if mainDone && left == 0 {
		p.complete()
	}
}

func (p *process) finishLocked(t *task, status int) {
	p.info.Ended = time.Now().UnixNano()
	p.info.Leftover = len(p.tasks)
	p.info.UserMS, p.info.MaxRSS = 1, 1<<20+t.memory
	p.info.End, p.info.Code = guestwire.EndExited, status
	var killed killedError
	if errors.As(context.Cause(t.ctx), &killed) {
		p.info.End, p.info.Code, p.info.Signal = guestwire.EndSignaled, 0, killed.signal
		if p.machine.dead() {
			p.info.End = guestwire.EndSandboxStopped
		}
	}
	if p.reason != guestwire.EndNone {
		p.info.End = p.reason
	}
}

// drain ends the output a short while after the process, though others hold it open.
func (p *process) drain(left int) {
	if left > 0 {
		select {
		case <-p.drained:
		case <-time.After(outputGrace):
		case <-p.machine.done:
		}
	}
	p.complete()
}

func (p *process) complete() {
	p.mu.Lock()
	first := !p.info.Complete
	p.info.Complete = true
	p.mu.Unlock()
	if first {
		close(p.drained)
		p.out.close()
		if p.in != nil {
			p.in.close()
		}
	}
}

// enforce ends the whole tree at the timeout: first by SIGTERM, after the grace by SIGKILL.
func (p *process) enforce(timeout, grace time.Duration) {
	select {
	case <-p.done:
		return
	case <-time.After(timeout):
	}
	p.setReason(guestwire.EndTimedOut)
	p.signalTree(int(syscall.SIGTERM))
	select {
	case <-p.done:
	case <-time.After(grace):
	}
	p.signalTree(int(syscall.SIGKILL))
}

func (p *process) setReason(r guestwire.End) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.info.End == guestwire.EndNone && p.reason == guestwire.EndNone {
		p.reason = r
	}
}

// kill ends the whole tree at once; reason may be empty.
func (p *process) kill(reason guestwire.End) {
	if reason != "" {
		p.setReason(reason)
	}
	p.signalTree(int(syscall.SIGKILL))
}

func (p *process) signalTree(sig int) {
	p.mu.Lock()
	tasks := maps.Clone(p.tasks)
	p.mu.Unlock()
	for t := range tasks {
		t.signal(sig)
	}
}

func (p *process) alive() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.tasks)
}

func (p *process) snapshot() guestwire.ProcessInfo {
	end, dropped := p.out.counts()
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.info
	i.Bytes, i.Dropped = end, dropped
	return i
}

// writer is a task's standard output or error.
type writer struct {
	task   *task
	out    *output
	stream guestwire.Stream
}

func (w *writer) Write(p []byte) (int, error) {
	w.task.machine.gate(w.task.ctx)
	b := p
	if w.stream == guestwire.TTY {
		// A terminal in its usual mode ends lines with CR LF (ONLCR, termios(3)).
		b = bytes.ReplaceAll(p, []byte("\n"), []byte("\r\n"))
	}
	if err := w.out.write(w.task.ctx, w.stream, b); err != nil {
		return 0, err
	}
	return len(p), nil
}

// reader is a task's standard input; a signal ends the wait for it.
type reader struct {
	task *task
	in   *input
}

func (r *reader) Read(p []byte) (int, error) {
	defer context.AfterFunc(r.task.ctx, r.in.close)()
	return r.in.Read(p)
}
