package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/codecontext/drivers"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
)

// Fresh runs: each has an interpreter of its own, forked from one that is warm, in a process and a control
// group of its own, and thrown away afterwards. Forks are made ahead, so that a run is only a hand-over.

const (
	// freshAhead is how many forks wait in a pool. Each has about a megabyte of its own.
	freshAhead = 8
	// freshAtOnce is how many forks for a pool are under way at a time: one is forked while another one
	// makes itself ready.
	freshAtOnce = 2
	// freshPools bounds the warm interpreters of a sandbox, one for each set of imports.
	freshPools = 4
	// maxImports bounds the modules that one has imported.
	maxImports = 64
)

// freshPool is one warm interpreter with its forks.
type freshPool struct {
	name   string // of the set of imports
	ready  chan struct{}
	err    error // set before ready is closed
	zygote string
	forks  chan *codeContext
	making chan struct{} // a token for each fork that is under way
}

// poolName tells sets of imports apart.
func poolName(imports []string) string {
	sum := sha256.Sum256([]byte(strings.Join(imports, "\x00")))
	return hex.EncodeToString(sum[:8])
}

// moduleName reports whether s can name a Python module.
func moduleName(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if !envName(part) {
			return false
		}
	}
	return len(s) <= 128
}

// freshContext takes a fork for one run. The caller gives it back by dropFork.
func (m *Manager) freshContext(ctx context.Context, p Principal, b *box, s CodeSpec) (*codeContext, error) {
	d, err := drivers.Find(or(s.Language, defaultLanguage))
	if err != nil {
		return nil, err
	}
	if d.Language != defaultLanguage {
		return nil, errs.New(errs.Unsupported, "fresh runs are for %s, not %s", defaultLanguage, d.Language).WithHint("leave fresh out")
	}
	imports := slices.Compact(slices.Sorted(slices.Values(s.Imports)))
	for attempt := 0; ; attempt++ {
		pool, err := m.freshPool(ctx, p, b, d, imports)
		if err != nil {
			return nil, err
		}
		select {
		case c := <-pool.forks:
			m.background(func() { m.refill(p, b, pool) })
			return c, nil
		default:
		}
		c, err := m.fork(ctx, p, b, pool)
		if err == nil {
			m.background(func() { m.refill(p, b, pool) })
			return c, nil
		}
		// The warm interpreter may have been killed by what runs beside it: one more is made.
		if kind := errs.KindOf(err); attempt > 0 || kind != errs.FailedPrecondition && kind != errs.NotFound {
			return nil, err
		}
		m.dropPool(b, pool)
	}
}

// freshPool returns the pool of a set of imports, and makes it where there is none.
func (m *Manager) freshPool(ctx context.Context, p Principal, b *box, d drivers.Driver, imports []string) (*freshPool, error) {
	name := poolName(imports)
	b.mu.Lock()
	pool := b.fresh[name]
	made := pool == nil
	if made && len(b.fresh) >= freshPools {
		b.mu.Unlock()
		return nil, errs.New(errs.ResourceExhausted, "the sandbox has %d warm interpreters already, one for each set of imports", freshPools).
			WithHint("use the same imports for all fresh runs")
	}
	if made {
		if b.fresh == nil {
			b.fresh = make(map[string]*freshPool)
		}
		pool = &freshPool{name: name, ready: make(chan struct{}), forks: make(chan *codeContext, freshAhead), making: make(chan struct{}, freshAtOnce)}
		b.fresh[name] = pool
	}
	b.mu.Unlock()
	if made {
		pool.zygote = id.New(id.Context)
		_, _, pool.err = m.createContext(context.WithoutCancel(ctx), p, b, CodeContextSpec{
			ID: pool.zygote, Language: d.Language, zygote: true, imports: imports,
		}, d)
		if pool.err != nil {
			m.dropPool(b, pool)
		}
		close(pool.ready)
	}
	select {
	case <-pool.ready:
		return pool, pool.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (m *Manager) dropPool(b *box, pool *freshPool) {
	b.mu.Lock()
	if b.fresh[pool.name] == pool {
		delete(b.fresh, pool.name)
	}
	c := b.codes[pool.zygote]
	b.mu.Unlock()
	if c != nil {
		m.background(func() { m.dropFork(c) })
	}
}

// fork makes a context of a warm interpreter.
func (m *Manager) fork(ctx context.Context, p Principal, b *box, pool *freshPool) (*codeContext, error) {
	c, _, err := m.createContext(ctx, p, b, CodeContextSpec{ID: id.New(id.Context), Language: defaultLanguage, fork: pool.zygote}, drivers.Driver{Language: defaultLanguage})
	return c, err
}

// refill forks ahead until the pool is full.
func (m *Manager) refill(p Principal, b *box, pool *freshPool) {
	for m.forkAhead(p, b, pool) {
	}
}

// forkAhead adds a fork to a pool. It reports false where there are enough, those under way included, or
// none can be had: the next run tells why.
func (m *Manager) forkAhead(p Principal, b *box, pool *freshPool) bool {
	select {
	case pool.making <- struct{}{}:
	default:
		return false
	}
	defer func() { <-pool.making }()
	if len(pool.forks)+len(pool.making) > cap(pool.forks) {
		return false
	}
	c, err := m.fork(m.ctx, p, b, pool)
	if err != nil {
		return false
	}
	select {
	case pool.forks <- c:
		return true
	default:
		m.dropFork(c)
		return false
	}
}

// keepFork is how long what a fresh run said can still be read where its caller has left before its end.
const keepFork = 30 * time.Second

// dropForkAfter throws a fork away once its run has ended, and that long after it.
func (m *Manager) dropForkAfter(c *codeContext, runID string, after time.Duration) {
	m.background(func() {
		if r, err := c.run(runID); err == nil {
			select {
			case <-r.ended:
			case <-c.box.ended:
			case <-m.ctx.Done():
				return
			}
		}
		if after > 0 {
			late := time.NewTimer(after)
			defer late.Stop()
			select {
			case <-late.C:
			case <-c.box.ended:
			case <-m.ctx.Done():
				return
			}
		}
		m.dropFork(c)
	})
}

// dropFork ends a context that nobody is told about.
func (m *Manager) dropFork(c *codeContext) {
	ctx, cancel := m.prompt(context.WithoutCancel(m.ctx))
	defer cancel()
	err := c.box.guest.DeleteContext(ctx, c.id)
	if err != nil && !errs.Is(err, errs.NotFound) {
		return // the guest is gone, or the sandbox is paused: what is left goes with it
	}
	m.endRuns(c, RunCanceled)
	if scope := c.takeOut(); scope != nil && !scope.Recycle() {
		_ = scope.Close()
	}
}

// takeOut takes a context out of its box and returns its scope.
func (c *codeContext) takeOut() isolation.Scope {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	if c.box.codes[c.id] == c {
		delete(c.box.codes, c.id)
	}
	c.gone = true
	scope := c.scope
	c.scope = nil
	return scope
}

// hidden reports whether a context belongs to fresh runs.
func hidden(i guestwire.ContextInfo) bool { return i.Zygote || i.Fork }
