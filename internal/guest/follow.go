package guest

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/output"
	"casemate.dev/internal/guestwire"
)

// hangup tells when the caller has closed the connection, on which it sends nothing more for this call.
type hangup struct {
	c    *guestwire.Conn
	gone chan struct{}
	sent bool // it did send something; set before gone is closed
}

func newHangup(c *guestwire.Conn) *hangup {
	h := &hangup{c: c, gone: make(chan struct{})}
	go func() {
		defer close(h.gone)
		var one [1]byte
		n, _ := c.Read(one[:])
		h.sent = n > 0
	}()
	return h
}

// hungUp returns a channel that is closed when the caller has closed the connection. It carries no further
// call then.
func hungUp(c *guestwire.Conn) <-chan struct{} { return newHangup(c).gone }

// Gone implements contexts.Hangup.
func (h *hangup) Gone() <-chan struct{} { return h.gone }

// Stop implements contexts.Hangup: it ends the looking, so that the connection can carry another call.
func (h *hangup) Stop() error {
	_ = h.c.SetReadDeadline(time.Unix(1, 0))
	<-h.gone
	_ = h.c.SetReadDeadline(time.Time{})
	if h.sent {
		return errs.New(errs.InvalidArgument, "bytes that belong to no call came before its end")
	}
	return nil
}

// serveStart answers process.start and process.run.
func (g *Guest) serveStart(c *guestwire.Conn, call guestwire.Call, files []*os.File) error {
	var r guestwire.RunProcess
	var err error
	if call.Method == guestwire.MethodRun {
		err = guestwire.Unmarshal(call.Body, &r)
	} else {
		err = guestwire.Unmarshal(call.Body, &r.Start)
	}
	if err != nil {
		closeFiles(files)
		return badBody(err)
	}
	p, attached, err := g.start(r.Start, files)
	if err != nil {
		return err
	}
	info := p.snapshot()
	info.Attached = attached
	if err := c.Reply(info); err != nil || call.Method == guestwire.MethodStart {
		return err
	}
	return g.follow(c, p, r.Output)
}

// tell answers a process.run that has started p. It reports whether another call may follow.
func (g *Guest) tell(c *guestwire.Conn, p *process, started guestwire.ProcessInfo, r guestwire.OutputRequest) bool {
	return c.Reply(started) == nil && g.follow(c, p, r) == nil && c.Ended()
}

func (g *Guest) serveOutput(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.OutputRequest
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	return g.follow(c, p, r)
}

// follow sends output from an offset on: what there is, or with Follow all until the process is
// complete. It returns nil when the caller has gone.
func (g *Guest) follow(c *guestwire.Conn, p *process, r guestwire.OutputRequest) error {
	if r.Offset < 0 || r.Limit < 0 {
		return errs.New(errs.InvalidArgument, "offset and limit of output are not negative")
	}
	rd := p.out.NewReader(r.Offset, r.Hold)
	defer rd.Close()
	var caller *hangup
	end := func() error {
		if caller != nil {
			if err := caller.Stop(); err != nil {
				return err
			}
		}
		return c.End(p.snapshot())
	}
	left := r.Limit
	sent := 0
	var through func()
	defer func() {
		if through != nil {
			through()
		}
	}()
	for {
		if sent >= wireQueue && through == nil {
			through = g.narrow(c.Conn)
		}
		state, news, n, err := g.send(c, rd, left)
		sent += n
		if err != nil {
			return nil // the connection is gone, so there is nobody to tell
		}
		if left > 0 {
			if left -= int64(n); left == 0 {
				return end()
			}
		}
		switch {
		case state == output.More:
			continue
		case state == output.Finished:
			<-p.done // what makes it known follows at once
			return end()
		case !r.Follow:
			return end()
		}
		if caller == nil {
			caller = newHangup(c)
		}
		select {
		case <-news:
		case <-caller.gone:
			return nil
		}
	}
}

// send sends the next piece, at most limit bytes of it if limit is not 0.
func (g *Guest) send(c *guestwire.Conn, rd *output.Reader, limit int64) (output.State, <-chan struct{}, int, error) {
	frame := g.chunks.get()
	defer g.chunks.put(frame)
	room := frame[guestwire.OutputHeader:]
	if limit > 0 && limit < int64(len(room)) {
		room = room[:limit]
	}
	piece, state, news := rd.Next(room)
	if state != output.More {
		return state, news, 0, nil
	}
	if piece.Gap > 0 {
		return state, nil, 0, c.Gap(piece.Offset, piece.Offset+piece.Gap)
	}
	n := len(piece.Data)
	guestwire.PutOutput(frame[:guestwire.OutputHeader+n], piece.Stream, piece.Offset)
	_, err := c.Write(frame[:guestwire.OutputHeader+n])
	return state, nil, n, err
}

// serveRef answers process.get, process.wait and process.forget.
func (g *Guest) serveRef(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.ProcessRef
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	if call.Method == guestwire.MethodForget {
		return okay(c, g.processes.forget(r.ID))
	}
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	if call.Method == guestwire.MethodWait {
		select {
		case <-p.done:
		case <-hungUp(c):
			return nil
		}
	}
	return c.Reply(p.snapshot())
}

func (g *Guest) list(c *guestwire.Conn) error {
	for _, p := range g.processes.all() {
		if p.err != nil {
			continue
		}
		if err := c.Event(p.snapshot()); err != nil {
			return err
		}
	}
	return c.End(nil)
}

// lastSignal is SIGRTMAX.
const lastSignal = 64

func (g *Guest) signal(r guestwire.SignalRequest) error {
	if r.Signal < 0 || r.Signal > lastSignal {
		return errs.New(errs.InvalidArgument, "no such signal: %d", r.Signal)
	}
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	return p.signal(unix.Signal(r.Signal), r.Tree)
}

// serveTree tells what lives of a process.
func (g *Guest) serveTree(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.ProcessRef
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	pids, err := p.family().pids()
	if err != nil {
		return err
	}
	return c.Reply(guestwire.Tree{Alive: len(pids)})
}

func (g *Guest) resize(r guestwire.ResizeRequest) error {
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	return p.resize(r.Rows, r.Cols)
}
