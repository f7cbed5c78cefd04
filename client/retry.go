package client

import (
	"context"
	"errors"
	"time"
)

// retry decides whether a broken stream is worth another connection: for a while after the last
// progress, with growing pauses.
type retry struct {
	window time.Duration
	last   time.Time
	pause  time.Duration
}

const (
	firstPause = 20 * time.Millisecond
	longPause  = time.Second
)

func newRetry(window time.Duration) *retry {
	return &retry{window: window, last: time.Now(), pause: firstPause}
}

// progress notes that something came.
func (r *retry) progress() { r.last, r.pause = time.Now(), firstPause }

// worth reports whether to try again after err, and waits before it says yes.
func (r *retry) worth(ctx context.Context, err error) bool {
	var own callerError
	if errors.As(err, &own) || KindOf(err) != Unavailable || ctx.Err() != nil {
		return false
	}
	if time.Since(r.last) > r.window {
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
