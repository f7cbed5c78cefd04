package oci

import (
	"context"
	"sync"
)

// flights lets callers that want the same thing at the same time share the work. It goes on as long as one of
// them waits for it.
type flights struct {
	// mu guards the field below, and the waiters in it.
	mu  sync.Mutex
	all map[string]*flight
}

type flight struct {
	waiters int
	cancel  context.CancelFunc
	done    chan struct{}
	value   any
	err     error
	// shared is what the caller who began gave for others to look at.
	shared any
}

func newFlights() *flights { return &flights{all: map[string]*flight{}} }

// do runs f, or waits for one that runs already under the same key. look is called with what the caller who began
// it shares, at once.
func (g *flights) do(ctx context.Context, key string, shared any, look func(shared any), f func(ctx context.Context) (any, error)) (any, error) {
	g.mu.Lock()
	fl, ok := g.all[key]
	if !ok {
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		fl = &flight{cancel: cancel, done: make(chan struct{}), shared: shared}
		g.all[key] = fl
		go func() {
			fl.value, fl.err = f(run)
			g.mu.Lock()
			if g.all[key] == fl {
				delete(g.all, key)
			}
			g.mu.Unlock()
			cancel()
			close(fl.done)
		}()
	}
	fl.waiters++
	g.mu.Unlock()
	look(fl.shared)
	select {
	case <-fl.done:
		return fl.value, fl.err
	case <-ctx.Done():
		g.leave(key, fl)
		return nil, ctx.Err()
	}
}

// leave ends the work when nobody waits for it any more; who comes then begins anew. It returns when the
// work has ended, so that the next one does not meet it.
func (g *flights) leave(key string, fl *flight) {
	g.mu.Lock()
	fl.waiters--
	last := fl.waiters == 0
	if last && g.all[key] == fl {
		delete(g.all, key)
	}
	g.mu.Unlock()
	if last {
		fl.cancel()
		<-fl.done
	}
}
