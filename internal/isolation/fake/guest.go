package fake

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// serve answers the one call of a connection, as a guest does.
func (m *machine) serve(conn net.Conn) {
	c := guestwire.NewConn(conn)
	call, files, err := c.ReadCall()
	for _, f := range files {
		_ = f.Close() // the fake takes no files
	}
	if m.appliedNow().Runtime != "" {
		m.gate(context.Background())
		if m.dead() { // it died as it stood, and answers nothing
			return
		}
	}
	if err == nil {
		err = m.answer(c, call)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) {
		_ = c.Fail(kinded(err))
	}
}

// kinded gives an error of the file tree its kind.
func kinded(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	kind := errs.Internal
	switch errno {
	case syscall.ENOENT:
		kind = errs.NotFound
	case syscall.EEXIST:
		kind = errs.AlreadyExists
	case syscall.EACCES, syscall.EPERM:
		kind = errs.PermissionDenied
	case syscall.ENOTDIR, syscall.EISDIR, syscall.ENOTEMPTY, syscall.EBUSY, syscall.ELOOP:
		kind = errs.FailedPrecondition
	case syscall.ENOSPC, syscall.EAGAIN:
		kind = errs.ResourceExhausted
	case syscall.ECONNREFUSED:
		kind = errs.Unavailable
	}
	return errs.Wrap(err, kind, "%s", errno.Error())
}

func decode[T any](call guestwire.Call) (T, error) {
	var v T
	if len(call.Body) == 0 {
		return v, nil
	}
	if err := guestwire.Unmarshal(json.RawMessage(call.Body), &v); err != nil {
		return v, errs.Wrap(err, errs.InvalidArgument, "the request is malformed")
	}
	return v, nil
}

func (m *machine) answer(c *guestwire.Conn, call guestwire.Call) error {
	if strings.HasPrefix(string(call.Method), "context.") {
		return m.answerContext(c, call)
	}
	switch call.Method {
	case guestwire.MethodClaim:
		return reply(c, call, func(r guestwire.Claim) (any, error) { return nil, m.take(r) })
	case guestwire.MethodRestored:
		return reply(c, call, func(r guestwire.Restored) (any, error) { m.identify(r); return nil, nil })
	case guestwire.MethodStatus:
		return c.Reply(m.status())
	case guestwire.MethodEnv:
		return c.Reply(m.environment())
	case guestwire.MethodSync:
		return c.Reply(nil)
	case guestwire.MethodStart:
		return reply(c, call, func(r guestwire.StartProcess) (any, error) {
			_, info, err := m.start(unescaped(r))
			return info, err
		})
	case guestwire.MethodRun:
		return m.runProcess(c, call)
	case guestwire.MethodOutput:
		r, err := decode[guestwire.OutputRequest](call)
		if err != nil {
			return err
		}
		return m.withProcess(r.ID, func(p *process) error { return p.send(c, r) })
	case guestwire.MethodInput:
		return m.feed(c, call)
	case guestwire.MethodSignal:
		return reply(c, call, func(r guestwire.SignalRequest) (any, error) { return nil, m.signalProcess(r) })
	case guestwire.MethodResize:
		return reply(c, call, func(r guestwire.ResizeRequest) (any, error) {
			return nil, m.withProcess(r.ID, func(p *process) error { return p.resize(r) })
		})
	case guestwire.MethodGet, guestwire.MethodWait:
		return m.getProcess(c, call)
	case guestwire.MethodList:
		return m.listProcesses(c)
	case guestwire.MethodForget:
		return reply(c, call, func(r guestwire.ProcessRef) (any, error) { return nil, m.forget(r.ID) })
	case guestwire.MethodDial:
		return m.dialPort(c, call)
	case guestwire.MethodListenings:
		return c.Reply(guestwire.PortList{Ports: m.listenings()})
	}
	return m.answerFile(c, call)
}

func reply[T any](c *guestwire.Conn, call guestwire.Call, f func(T) (any, error)) error {
	r, err := decode[T](call)
	if err != nil {
		return err
	}
	v, err := f(r)
	if err != nil {
		return err
	}
	return c.Reply(v)
}

func unescaped(r guestwire.StartProcess) guestwire.StartProcess {
	plain := func(s string) string {
		if raw, ok := guestwire.Unescape(s); ok {
			return raw
		}
		return s
	}
	argv := slices.Clone(r.Argv)
	for i, a := range argv {
		argv[i] = plain(a)
	}
	env := make(map[string]string, len(r.Env))
	for k, v := range r.Env {
		env[k] = plain(v)
	}
	r.Argv, r.Env, r.Dir = argv, env, plain(r.Dir)
	return r
}

func (m *machine) environment() guestwire.Environment {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.claim == nil {
		return guestwire.Environment{}
	}
	return guestwire.Environment{Env: m.claim.Env}
}

func (m *machine) take(r guestwire.Claim) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.claim != nil {
		return errs.New(errs.FailedPrecondition, "the sandbox has its identity already")
	}
	m.claim = &r
	return nil
}

func (m *machine) status() guestwire.Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	running := 0
	for _, p := range m.processes {
		if p.alive() > 0 {
			running++
		}
	}
	return guestwire.Status{Version: guestwire.Version, Claimed: m.claim != nil, Processes: running, Open: len(m.conns)}
}

func (m *machine) withProcess(id string, f func(*process) error) error {
	p := m.process(id)
	if p == nil {
		return errs.New(errs.NotFound, "no such process: %s", id)
	}
	return f(p)
}

func (m *machine) runProcess(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.RunProcess](call)
	if err != nil {
		return err
	}
	p, info, err := m.start(unescaped(r.Start))
	if err != nil {
		return err
	}
	if err := c.Reply(info); err != nil {
		return err
	}
	return p.send(c, r.Output)
}

// send sends a process's output from an offset on, and its state at the end.
func (p *process) send(c *guestwire.Conn, r guestwire.OutputRequest) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // the caller sends nothing more, so that any end of this read is its going away
		var b [1]byte
		_, _ = c.Read(b[:])
		cancel()
	}()
	offset := r.Offset
	if r.Hold {
		p.out.hold(&offset)
		defer p.out.unhold(&offset)
	}
	for r.Limit == 0 || offset-r.Offset < r.Limit {
		from := offset
		item, ok := p.out.next(ctx, &offset, r.Follow)
		if !ok {
			break
		}
		if len(item.data) == 0 {
			if err := c.Gap(from, offset); err != nil {
				return err
			}
			continue
		}
		if over := offset - r.Offset - r.Limit; r.Limit > 0 && over > 0 {
			item.data = item.data[:int64(len(item.data))-over]
		}
		if err := c.Output(item.stream, item.offset, item.data); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return io.EOF
	}
	return c.End(p.snapshot())
}

func (m *machine) feed(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.InputRequest](call)
	if err != nil {
		return err
	}
	return m.withProcess(r.ID, func(p *process) error {
		if p.in == nil {
			return errs.New(errs.FailedPrecondition, "process %s has no standard input", r.ID)
		}
		offset := r.Offset
		if offset < 0 {
			offset = p.in.offset()
		}
		if offset > p.in.offset() {
			return errs.New(errs.FailedPrecondition, "standard input stands at %d, not at %d", p.in.offset(), offset)
		}
		for {
			f, err := c.ReadFrame()
			if err != nil {
				return err
			}
			if f.Kind == guestwire.FrameEnd {
				break
			}
			if p.info.TTY {
				p.echo(f.Payload)
			}
			if err := p.in.write(offset, f.Payload); err != nil {
				return err
			}
			offset += int64(len(f.Payload))
		}
		if r.Close {
			p.in.close()
		}
		return c.Reply(guestwire.InputReply{Offset: p.in.offset()})
	})
}

// echo shows what is typed, as a terminal does (ECHO, termios(3)).
func (p *process) echo(typed []byte) {
	w := &writer{p.main, p.out, guestwire.TTY}
	_, _ = w.Write(typed) // the process may have ended meanwhile
}

func (m *machine) signalProcess(r guestwire.SignalRequest) error {
	return m.withProcess(r.ID, func(p *process) error {
		switch {
		case r.Signal < 0 || r.Signal > 64:
			return errs.New(errs.InvalidArgument, "no such signal: %d", r.Signal)
		case r.Tree && r.Signal == int(syscall.SIGKILL):
			p.kill(guestwire.EndCanceled)
		case r.Tree:
			p.signalTree(r.Signal)
		case p.snapshot().End != guestwire.EndNone:
			return errs.New(errs.FailedPrecondition, "process %s has ended", r.ID)
		default:
			p.main.signal(r.Signal)
		}
		return nil
	})
}

func (p *process) resize(r guestwire.ResizeRequest) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.info.TTY {
		return errs.New(errs.FailedPrecondition, "process %s has no terminal", r.ID)
	}
	p.size = winsize{r.Rows, r.Cols}
	return nil
}

func (m *machine) getProcess(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.ProcessRef](call)
	if err != nil {
		return err
	}
	return m.withProcess(r.ID, func(p *process) error {
		if call.Method == guestwire.MethodWait {
			gone := make(chan struct{})
			go func() {
				var b [1]byte
				_, _ = c.Read(b[:])
				close(gone)
			}()
			select {
			case <-p.drained:
			case <-gone:
				return io.EOF
			}
		}
		return c.Reply(p.snapshot())
	})
}

func (m *machine) listProcesses(c *guestwire.Conn) error {
	m.mu.Lock()
	order := slices.Clone(m.order)
	m.mu.Unlock()
	for _, id := range order {
		p := m.process(id)
		if p == nil {
			continue // forgotten meanwhile
		}
		if err := c.Event(p.snapshot()); err != nil {
			return err
		}
	}
	return c.End(nil)
}

func (m *machine) forget(id string) error {
	return m.withProcess(id, func(p *process) error {
		if p.snapshot().End == guestwire.EndNone {
			return errs.New(errs.FailedPrecondition, "process %s still runs", id)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.processes, id)
		m.order = slices.DeleteFunc(m.order, func(other string) bool { return other == id })
		return nil
	})
}

func (m *machine) listenings() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	ports := make([]int, 0, len(m.ports))
	for p := range m.ports {
		ports = append(ports, p)
	}
	slices.Sort(ports)
	return ports
}

func (m *machine) dialPort(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.DialRequest](call)
	if err != nil {
		return err
	}
	m.mu.Lock()
	serve := m.ports[r.Port]
	m.mu.Unlock()
	if serve == nil {
		return syscall.ECONNREFUSED
	}
	if err := c.Reply(nil); err != nil {
		return err
	}
	serve(c.Conn)
	return nil
}
