package sandbox

import (
	"context"
	"net"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

const (
	// maxInside bounds the connections from inside a sandbox that are served at once.
	maxInside = 32
	// insideRetry bounds the pause between two tries to listen: something inside may have the port.
	insideRetry = 5 * time.Second
)

// ListenInside listens on a TCP port of a sandbox's own loopback device and has serve answer what is inside, in
// a goroutine for each connection, which closes it. It returns when ctx ends or the sandbox does not run any
// more, once all that it served is over; where the port is taken it goes on trying. It does not count as activity.
// What comes over a connection is the word of the sandbox's code.
func (m *Manager) ListenInside(ctx context.Context, p Principal, ref string, port int, serve func(net.Conn)) error {
	b, err := m.alive(ctx, p, ref)
	if err != nil {
		return err
	}
	var served sync.WaitGroup
	defer served.Wait()
	slots := make(chan struct{}, maxInside)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, insideRetry) {
		err := m.acceptInside(ctx, b, port, func(c net.Conn) {
			select {
			case slots <- struct{}{}:
			default:
				_ = c.Close()
				return
			}
			served.Go(func() {
				defer func() { <-slots }()
				serve(c)
			})
		})
		if errs.Is(err, errs.Unsupported) || errs.Is(err, errs.InvalidArgument) {
			return err // a guest from before there was this
		}
		late := time.NewTimer(pause)
		select {
		case <-late.C:
		case <-b.ended:
		case <-ctx.Done():
		}
		late.Stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case <-b.ended:
			return &TransitionError{ID: b.id, From: Stopped}
		default:
		}
	}
}

// acceptInside hands out connections until the port can't be listened on any more.
func (m *Manager) acceptInside(ctx context.Context, b *box, port int, each func(net.Conn)) error {
	s, err := b.guest.ListenPort(ctx, guestwire.ListenRequest{Port: port})
	if err != nil {
		return err
	}
	defer s.Close()
	for {
		a, err := s.Next()
		if err != nil {
			return err
		}
		tctx, cancel := m.prompt(ctx, b.guest)
		c, err := b.guest.TakePort(tctx, a)
		cancel()
		if err == nil {
			each(c)
		}
	}
}
