package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/store"
)

// request is a call that is to happen once for its key.
type request struct {
	principal string
	scope     string // what kind of call, and on what
	key       string
	body      []any // what must be the same in a repeated call
	// run makes the call's thing and returns its id. remember gives the write that remembers an answer,
	// to be committed with the first record of the thing.
	run func(ctx context.Context, remember func(answer string) store.Write) (string, error)
	// stale reports whether a remembered answer came to nothing, so that the call may run again.
	stale func(ctx context.Context, answer string) (bool, error)
}

// onceGroup holds the calls with a key that are under way.
type onceGroup struct {
	// mu guards the field below.
	mu      sync.Mutex
	flights map[[3]string]*flight
}

type flight struct {
	hash   [sha256.Size]byte
	done   chan struct{}
	answer string
	err    error
}

// do runs r, unless it was run before or is under way: then it returns the same answer. Conflict:
// the key was used for something else. A call that failed may be made again with its key.
//
// Once begun, the call no longer depends on ctx: a caller that goes away and asks again must find
// what its first call made.
func (g *onceGroup) do(ctx context.Context, m *Manager, r request) (string, error) {
	text, err := json.Marshal(r.body)
	if err != nil {
		return "", fmt.Errorf("encode request: %w", err)
	}
	hash := sha256.Sum256(text)
	name := [3]string{r.principal, r.scope, r.key}
	g.mu.Lock()
	f, ok := g.flights[name]
	if !ok {
		if g.flights == nil {
			g.flights = make(map[[3]string]*flight)
		}
		f = &flight{hash: hash, done: make(chan struct{})}
		g.flights[name] = f
	}
	g.mu.Unlock()
	if !ok {
		land := func() {
			g.mu.Lock()
			delete(g.flights, name)
			g.mu.Unlock()
			close(f.done)
		}
		if !m.background(func() {
			f.answer, f.err = m.runOnce(context.WithoutCancel(ctx), r, hash)
			land()
		}) {
			f.err = shuttingDown()
			land()
		}
	}
	if f.hash != hash {
		return "", conflict(r.key)
	}
	select {
	case <-f.done:
		return f.answer, f.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func conflict(key string) error {
	return errs.New(errs.Conflict, "idempotency key %s was used for another request", quote(key)).
		WithHint("use a new key for a new request")
}

func (m *Manager) runOnce(ctx context.Context, r request, hash [sha256.Size]byte) (string, error) {
	seen, ok, err := m.db.GetAnswered(ctx, r.principal, r.scope, r.key)
	if err != nil {
		return "", err
	}
	now := m.clock.Now()
	if ok && timeOf(seen.Created).Add(m.cfg.Defaults.Retain).After(now) {
		stale, err := r.stale(ctx, seen.Answer)
		if err != nil {
			return "", err
		}
		switch {
		case stale:
		case !bytes.Equal(seen.Request, hash[:]):
			return "", conflict(r.key)
		default:
			return seen.Answer, nil
		}
	}
	return r.run(ctx, func(answer string) store.Write {
		return store.PutAnswered(store.Answered{
			Principal: r.principal, Scope: r.scope, Key: r.key,
			Request: hash[:], Answer: answer, Created: now.UnixNano(),
		})
	})
}

// purgeEvery is how often old idempotency keys are dropped.
const purgeEvery = time.Hour

// purgeKeys drops the keys that are past their time, and automatic commits, now and every hour.
func (m *Manager) purgeKeys() {
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	if closed {
		return
	}
	err := m.db.Write(store.ForgetAnsweredBefore(m.clock.Now().Add(-m.cfg.Defaults.Retain).UnixNano()))
	if err != nil {
		m.log.Warn("cannot drop old idempotency keys", "error", err)
	}
	if _, err := m.Collect(m.ctx, Principal{ID: "server", Admin: true}, CollectOptions{}); err != nil {
		m.log.Warn("cannot remove commits that nobody needs", "error", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.purge = m.clock.AfterFunc(purgeEvery, m.purgeKeys)
	}
}
