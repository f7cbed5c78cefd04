package contexts

import (
	"net"
	"os"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// Serves reports whether a call is for a Set.
func Serves(m guestwire.Method) bool { return strings.HasPrefix(string(m), "context.") }

// Serve answers a call, or returns why it can't. It takes over files.
func (s *Set) Serve(c *guestwire.Conn, call guestwire.Call, files []*os.File) error {
	switch call.Method {
	case guestwire.MethodContextCreate:
		r, err := body[guestwire.CreateContext](call)
		if err != nil {
			closeFiles(files)
			return err
		}
		info, err := s.create(r, files)
		return reply(c, info, err)
	case guestwire.MethodContextFork:
		return s.fork(c, call, files)
	case guestwire.MethodContextRun:
		return s.run(c, call, files)
	}
	closeFiles(files)
	switch call.Method {
	case guestwire.MethodContextList:
		for _, n := range s.all() {
			if err := c.Event(n.snapshot()); err != nil {
				return err
			}
		}
		return c.End(nil)
	case guestwire.MethodContextItems:
		return s.items(c, call)
	case guestwire.MethodContextRuns:
		return s.runs(c, call)
	case guestwire.MethodContextWait:
		return s.wait(c, call)
	case guestwire.MethodContextRunWait:
		return s.waitRun(c, call)
	case guestwire.MethodContextInterrupt:
		return s.interrupt(c, call)
	case guestwire.MethodContextRestart:
		n, err := s.named(call)
		if err != nil {
			return err
		}
		info, err := n.restart()
		return reply(c, info, err)
	case guestwire.MethodContextDelete:
		r, err := body[guestwire.ContextRef](call)
		if err != nil {
			return err
		}
		return reply(c, nil, s.remove(r.ID))
	case guestwire.MethodContextDrop:
		r, err := body[guestwire.ContextRefs](call)
		if err != nil {
			return err
		}
		s.drop(r.IDs)
		return c.End(nil)
	}
	return errs.New(errs.Unsupported, "the guest knows no method %s", quote(string(call.Method)))
}

func body[T any](call guestwire.Call) (T, error) {
	var r T
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return r, errs.Wrap(err, errs.InvalidArgument, "the request's body is malformed: %v", err)
	}
	return r, nil
}

func reply(c *guestwire.Conn, v any, err error) error {
	if err != nil {
		return err
	}
	return c.Reply(v)
}

// named returns the context that a ContextRef names.
func (s *Set) named(call guestwire.Call) (*interpreter, error) {
	r, err := body[guestwire.ContextRef](call)
	if err != nil {
		return nil, err
	}
	return s.get(r.ID)
}

// run answers context.run: it queues the code and follows it.
func (s *Set) run(c *guestwire.Conn, call guestwire.Call, files []*os.File) error {
	defer closeFiles(files)
	r, err := body[guestwire.RunCode](call)
	if err != nil {
		return err
	}
	code, err := c.ReadText(guestwire.MaxCode)
	if err != nil {
		return err
	}
	if r.ID == "" || len(r.ID) > maxID || r.TimeoutMS < 0 || r.GraceMS < 0 || r.Items.Offset < 0 {
		return errs.New(errs.InvalidArgument, "the run has no id of 1 to %d characters, or a negative limit or offset", maxID)
	}
	n, err := s.get(r.Context)
	if err != nil {
		return err
	}
	made, attached, err := n.submit(r, code)
	if err != nil {
		return err
	}
	info := made.snapshot()
	info.Attached = attached
	c.Hold()
	if err := c.Reply(info); err != nil {
		return nil // nobody is there to tell
	}
	return s.follow(c, made, r.Items)
}

const (
	// promptly is how long what a run says may wait to be sent together with what comes next: most runs are
	// over by then, and each message of its own costs a switch to the server and back.
	promptly = time.Millisecond
	// enough is how much of it waits at most.
	enough = 16 << 10
)

func (s *Set) items(c *guestwire.Conn, call guestwire.Call) error {
	r, err := body[guestwire.ItemsRequest](call)
	if err != nil {
		return err
	}
	if r.Offset < 0 {
		return errs.New(errs.InvalidArgument, "the number of an item is not negative")
	}
	made, err := s.runOf(r.Context, r.Run)
	if err != nil {
		return err
	}
	return s.follow(c, made, r)
}

func (s *Set) runOf(context, id string) (*run, error) {
	n, err := s.get(context)
	if err != nil {
		return nil, err
	}
	return n.find(id)
}

// follow sends what a run said, and with Follow all until its end. It returns nil when the caller has
// gone.
func (s *Set) follow(c *guestwire.Conn, r *run, q guestwire.ItemsRequest) error {
	rd := r.log.newReader(q.Offset, q.Hold)
	defer rd.close()
	w := waiter{set: s, c: c}
	defer w.stop()
	for {
		it, gap, news, finished := rd.take()
		var err error
		switch {
		case finished:
			<-r.done
			return w.end(r)
		case gap > 0:
			err = c.Gap(it.number, it.number+gap)
		case news == nil:
			err = c.Item(it.kind, it.number, it.data)
			if w.sent += len(it.data); err == nil && w.sent > enough {
				err = c.Flush()
			}
		case !q.Follow:
			return w.end(r)
		default:
			err = w.await(news)
		}
		if err != nil {
			return nil // the connection is gone, so there is nobody to tell
		}
	}
}

// waiter waits for what a run says next, on behalf of a caller who may leave.
type waiter struct {
	set    *Set
	c      *guestwire.Conn
	sent   int // bytes
	late   *time.Timer
	waited bool // late is over
	caller Hangup
}

// await returns nil when there is news.
func (w *waiter) await(news <-chan struct{}) error {
	if !w.waited {
		if w.late == nil {
			w.late = time.NewTimer(promptly)
		}
		select {
		case <-news:
			return nil
		case <-w.late.C:
			w.waited = true
		}
		if err := w.c.Flush(); err != nil {
			return err
		}
		w.caller = w.set.cfg.Hangup(w.c)
	}
	select {
	case <-news:
		return nil
	case <-w.caller.Gone():
		return net.ErrClosed
	}
}

// end sends the run's state, after which the connection may carry another call.
func (w *waiter) end(r *run) error {
	if w.caller != nil {
		if err := w.caller.Stop(); err != nil {
			return err
		}
	}
	if err := w.c.End(r.snapshot()); err != nil {
		return err
	}
	return w.c.Flush()
}

func (w *waiter) stop() {
	if w.late != nil {
		w.late.Stop()
	}
}

func (s *Set) runs(c *guestwire.Conn, call guestwire.Call) error {
	n, err := s.named(call)
	if err != nil {
		return err
	}
	for _, r := range n.allRuns() {
		if err := c.Event(r.snapshot()); err != nil {
			return err
		}
	}
	return c.End(nil)
}

func (s *Set) wait(c *guestwire.Conn, call guestwire.Call) error {
	r, err := body[guestwire.WaitContext](call)
	if err != nil {
		return err
	}
	n, err := s.get(r.ID)
	if err != nil {
		return err
	}
	caller := s.cfg.Hangup(c)
	for {
		changed, over := n.wait(r.Starts)
		if over {
			return c.Reply(n.snapshot())
		}
		select {
		case <-changed:
		case <-caller.Gone():
			return nil
		}
	}
}

func (s *Set) waitRun(c *guestwire.Conn, call guestwire.Call) error {
	r, err := body[guestwire.RunRef](call)
	if err != nil {
		return err
	}
	made, err := s.runOf(r.Context, r.Run)
	if err != nil {
		return err
	}
	select {
	case <-made.done:
		return c.Reply(made.snapshot())
	case <-s.cfg.Hangup(c).Gone():
		return nil
	}
}

func (s *Set) interrupt(c *guestwire.Conn, call guestwire.Call) error {
	r, err := body[guestwire.RunRef](call)
	if err != nil {
		return err
	}
	n, err := s.get(r.Context)
	if err != nil {
		return err
	}
	id, err := n.interrupt(r.Run)
	return reply(c, guestwire.InterruptReply{Run: id}, err)
}
