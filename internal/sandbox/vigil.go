package sandbox

import (
	"context"
	"sync"
	"time"

	"casemate.dev/internal/errs"
)

// vigil watches over one call to a guest. A guest that lives, and is slow because the machine has more to do than it
// can, is waited for; one that does not even answer a status is given up, since a hostile one could hold its callers for
// ever.
type vigil struct {
	guest guest
	ctx   context.Context // ends what is asked
	asker context.Context // whom the answer is for
	every time.Duration
	begun time.Time
	limit time.Duration // 0: none
	lost  context.CancelCauseFunc

	// mu guards the fields below.
	mu    sync.Mutex
	timer *time.Timer
	left  bool // the asker was found gone
	over  bool
}

// vigil begins one. It calls lost with the reason when the guest is given up, when limit (0: none) has passed, or when
// asker has ended and the connect timeout passed since; the caller calls end once it has the answer, and from then on
// lost is not called. ctx is the call's, and ends what the vigil itself asks.
func (m *Manager) vigil(ctx, asker context.Context, g guest, limit time.Duration, lost context.CancelCauseFunc) *vigil {
	v := &vigil{guest: g, ctx: ctx, asker: asker, every: m.cfg.Defaults.Connect, begun: time.Now(), limit: limit, lost: lost}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timer = time.AfterFunc(v.every, v.look)
	return v
}

func (v *vigil) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.over = true
	v.timer.Stop()
}

// look asks whether the guest lives, and whether there is still something to wait for.
func (v *vigil) look() {
	err := v.ask()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.over {
		return
	}
	if err == nil {
		err = v.tired()
	}
	if err != nil {
		v.over = true
		v.lost(err)
		return
	}
	v.timer.Reset(v.every)
}

// tired is why a guest that lives is not waited for any longer. The caller holds mu.
func (v *vigil) tired() error {
	if v.limit > 0 && time.Since(v.begun) >= v.limit {
		return errs.New(errs.DeadlineExceeded, "the guest lives, but did not answer within %s (start timeout)", v.limit).
			WithHint("the sandbox, or the machine, has more to do than it can: try again, or do less at a time")
	}
	gone := v.asker.Err() != nil
	if gone && v.left {
		return errs.New(errs.DeadlineExceeded, "the guest lives, but did not answer before its caller left")
	}
	v.left = gone
	return nil
}

func (v *vigil) ask() error {
	ctx, cancel := context.WithTimeoutCause(v.ctx, v.every, errs.New(errs.DeadlineExceeded,
		"the guest did not answer within %s (connect timeout)", v.every))
	defer cancel()
	_, err := v.guest.Status(ctx)
	return cause(ctx, err)
}

// attended is for a call that may rightly take long, as on a large file. What it returns ends with ctx, and also when
// the guest answers nothing any more. The caller calls stop when it is through.
func (m *Manager) attended(ctx context.Context, g guest) (_ context.Context, stop func()) {
	return m.watched(ctx, ctx, g, 0)
}

// prompt is attended for a call that a guest in good order answers at once: it also ends after the start timeout.
func (m *Manager) prompt(ctx context.Context, g guest) (_ context.Context, stop func()) {
	return m.watched(ctx, ctx, g, m.cfg.Defaults.Start)
}

// detached is prompt for a call that should come to its end where ctx ends too: then the connect timeout is left for it.
func (m *Manager) detached(ctx context.Context, g guest) (_ context.Context, stop func()) {
	return m.watched(context.WithoutCancel(ctx), ctx, g, m.cfg.Defaults.Start)
}

func (m *Manager) watched(ctx, asker context.Context, g guest, limit time.Duration) (_ context.Context, stop func()) {
	wctx, cancel := context.WithCancelCause(ctx)
	v := m.vigil(wctx, asker, g, limit, cancel)
	return wctx, func() {
		v.end()
		cancel(nil)
	}
}
