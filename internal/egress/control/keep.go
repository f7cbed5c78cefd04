package control

import (
	"context"
	"fmt"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/errs"
)

// ready sees to it that a gateway runs, is connected and serves everything that it should. The caller holds
// mu.
func (g *Gateway) ready(ctx context.Context) error {
	if g.closed {
		return errs.New(errs.Unavailable, "the server is shutting down")
	}
	if g.conn != nil && g.proc.Handle.Alive() {
		return nil
	}
	lost := g.proc != nil
	g.kill()
	p, err := g.start()
	if err != nil {
		return errs.Wrap(err, errs.Unavailable, "the gateway could not be started")
	}
	g.proc = p
	g.taken.note(0) // it counts from the beginning
	if err := g.connect(ctx); err != nil {
		g.kill()
		return errs.Wrap(err, errs.Unavailable, "the gateway does not answer after its start; see %s", g.spec(0).Log())
	}
	for id, s := range g.sandboxes {
		if err := g.attach(ctx, s); err != nil {
			if g.cfg.Failed != nil {
				g.cfg.Failed(id, err)
			}
			continue
		}
		if lost {
			g.gap(id)
		}
	}
	g.watch()
	return nil
}

// gap says that a sandbox's connections ended with the gateway before, and what it saw last is not known.
func (g *Gateway) gap(id string) {
	if g.cfg.Events == nil {
		return
	}
	err := g.cfg.Events([]egress.Event{{
		Sandbox: id, Time: time.Now(), Type: egress.EventDropped, Note: "the gateway ended and was started again; its connections are cut",
	}})
	if err != nil {
		g.cfg.Log.Error("cannot record that the gateway was started again", "sandbox", id, "err", err)
	}
}

// connect waits until a started gateway answers.
func (g *Gateway) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var err error
	// Its socket takes connections from before it runs, so there is nothing to wait for but its answer.
	if g.conn, err = g.dial(); err != nil {
		return err
	}
	_, err = g.hello(ctx, max(g.patience, startTimeout))
	return err
}

// hello begins a connection and returns the sandboxes that the gateway serves, unless it does not answer in time.
func (g *Gateway) hello(ctx context.Context, within time.Duration) ([]string, error) {
	r := Request{Op: OpHello}
	if g.cfg.Shared != nil {
		var err error
		if r.Shared, err = g.cfg.Shared(ctx); err != nil {
			return nil, fmt.Errorf("gather the gateway's own secrets: %w", err)
		}
	}
	if g.cfg.Proxy != nil {
		r.Proxy = g.cfg.Proxy(ctx)
	}
	reply, err := g.callWithin(within, r, nil)
	if err != nil {
		return nil, err
	}
	if reply.Protocol != Protocol {
		return nil, fmt.Errorf("it speaks version %d of the protocol, not %d", reply.Protocol, Protocol)
	}
	return reply.Sandboxes, nil
}

// watch begins to take events, once. The caller holds mu.
func (g *Gateway) watch() {
	if g.watching {
		return
	}
	g.watching = true
	g.wg.Go(g.takeEvents)
}

// takeEvents takes events until Close. A connection that breaks means that the gateway has ended: then
// another is started.
func (g *Gateway) takeEvents() {
	pause := restartPause
	for g.ctx.Err() == nil {
		began := time.Now()
		err := g.follow()
		if g.ctx.Err() != nil {
			return
		}
		g.cfg.Log.Warn("lost the gateway's events", "err", err)
		if time.Since(began) > restartMost {
			pause = restartPause
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-g.ctx.Done():
			t.Stop()
			return
		}
		pause = min(2*pause, restartMost)
		g.mu.Lock()
		if !g.closed {
			if err := g.ready(g.ctx); err != nil {
				g.cfg.Log.Error("cannot start the gateway again", "err", err)
			}
		}
		g.mu.Unlock()
	}
}

// follow takes events over a connection of its own until it breaks.
func (g *Gateway) follow() error {
	c, err := g.dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(g.ctx, func() { _ = c.Close() })
	defer stop()
	var after uint64
	for {
		reply, err := exchange(c, Request{Op: OpEvents, After: after}, nil, time.Time{})
		if err != nil {
			return err
		}
		if err := reply.Err(); err != nil {
			return err
		}
		if g.cfg.Events != nil {
			if err := g.cfg.Events(reply.Events); err != nil {
				return fmt.Errorf("record events: %w", err)
			}
		}
		after = reply.Last
		g.taken.note(after)
	}
}
