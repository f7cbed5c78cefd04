package client

import (
	"context"
	"errors"
	"net"
	"time"
)

// retry decides whether a broken stream is worth another connection: for a while after the last
// progress, with growing pauses.
type retry struct {
	window time.Duration
	last   time.Time
	pause  time.Duration
	// reached says that the server was there before. Without that, a server that can't be dialled is
	// not one that restarts: waiting would only hide it.
	reached bool
}

const (
	firstPause = 20 * time.Millisecond
	longPause  = time.Second
)

func newRetry(window time.Duration) *retry {
	return &retry{window: window, last: time.Now(), pause: firstPause}
}

// progress notes that something came.
func (r *retry) progress() { r.last, r.pause, r.reached = time.Now(), firstPause, true }

// worth reports whether to try again after err, and waits before it says yes.
func (r *retry) worth(ctx context.Context, err error) bool {
	var own callerError
	if errors.As(err, &own) || KindOf(err) != Unavailable || ctx.Err() != nil {
		return false
	}
	if time.Since(r.last) > r.window || (!r.reached && undialled(err)) {
		return false
	}
	t := time.NewTimer(r.pause)
	defer t.Stop()
	r.pause = min(2*r.pause, longPause)
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// undialled reports whether err arose before a connection stood.
func undialled(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
