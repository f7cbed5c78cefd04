package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
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
	// freshBatch is how many are forked by one call, and how many that have had their run are thrown away by
	// one: what server, guest and warm interpreter do for one costs as much as the fork.
	freshBatch = 4
	// freshRest is how long one that has had its run waits at most for others to be thrown away with.
	freshRest = 50 * time.Millisecond
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

	// What follows is guarded by box.mu.
	making *forking // what is under way, nil for nothing
	spent  []*codeContext
}

// forking is the filling of a pool.
type forking struct {
	done chan struct{}
	err  error // set before done is closed
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

// freshContext takes a fork for one run. The caller gives it back by spend.
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
		c, err := m.takeFork(ctx, p, b, pool)
		if err == nil {
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
		pool = &freshPool{name: name, ready: make(chan struct{}), forks: make(chan *codeContext, freshAhead)}
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

// dropPool throws away a warm interpreter and the forks of it that wait.
func (m *Manager) dropPool(b *box, pool *freshPool) {
	b.mu.Lock()
	if b.fresh[pool.name] == pool {
		delete(b.fresh, pool.name)
	}
	var all []*codeContext
	if c := b.codes[pool.zygote]; c != nil {
		all = append(all, c)
	}
	b.mu.Unlock()
	for {
		select {
		case c := <-pool.forks:
			all = append(all, c)
			continue
		default:
		}
		break
	}
	m.background(func() { m.dropForks(b, all) })
}

// takeFork takes a fork that waits, or the first one that is made.
func (m *Manager) takeFork(ctx context.Context, p Principal, b *box, pool *freshPool) (*codeContext, error) {
	var failed error
	for {
		select {
		case c := <-pool.forks:
			m.forkAhead(p, b, pool)
			return c, nil
		default:
		}
		if failed != nil {
			return nil, failed
		}
		work := m.forkAhead(p, b, pool)
		if work == nil {
			continue // others have filled it meanwhile
		}
		select {
		case c := <-pool.forks:
			m.forkAhead(p, b, pool)
			return c, nil
		case <-work.done:
			failed = work.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// forkAhead fills a pool in the background where a batch has room in it, and returns what is under way.
func (m *Manager) forkAhead(p Principal, b *box, pool *freshPool) *forking {
	b.mu.Lock()
	defer b.mu.Unlock()
	if pool.making != nil || cap(pool.forks)-len(pool.forks) < freshBatch {
		return pool.making
	}
	work := &forking{done: make(chan struct{})}
	pool.making = work
	begun := m.background(func() {
		for work.err == nil && cap(pool.forks)-len(pool.forks) >= freshBatch {
			work.err = m.fork(p, b, pool)
		}
		b.mu.Lock()
		pool.making = nil
		b.mu.Unlock()
		close(work.done)
	})
	if !begun {
		pool.making, work.err = nil, shuttingDown()
		close(work.done)
	}
	return work
}

// fork adds a batch of forks to a pool, each as soon as it is ready.
func (m *Manager) fork(p Principal, b *box, pool *freshPool) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(m.ctx), startDefault+startSlack,
		errs.New(errs.DeadlineExceeded, "the guest did not answer within %s", startDefault+startSlack))
	defer cancel()
	r := guestwire.ForkContexts{Zygote: pool.zygote, StartMS: startDefault.Milliseconds()}
	var files []*os.File
	made := make(map[string]*codeContext, freshBatch)
	for range freshBatch {
		c := &codeContext{
			id: id.New(id.Context), box: b, actor: p.actor(b.id), pool: pool, fork: true,
			started: make(chan struct{}), runs: make(map[string]*codeRun),
		}
		scope, err := b.inst.NewScope(ctx, scopePrefix+c.id)
		if err != nil {
			m.unmade(made, err)
			return errs.Wrap(err, errs.KindOf(err), "cannot make a fresh run's control group")
		}
		c.scope = scope
		made[c.id] = c
		r.IDs, r.Scopes, files = append(r.IDs, c.id), append(r.Scopes, scope.Layout()), append(files, scope.Files()...)
	}
	b.mu.Lock()
	if b.codes == nil {
		b.codes = make(map[string]*codeContext)
	}
	for name, c := range made {
		b.codes[name] = c
	}
	b.mu.Unlock()
	var refused error
	err := b.guest.Fork(ctx, r, files, func(name string, info guestwire.ContextInfo, err error) {
		c := made[name]
		delete(made, name)
		if err != nil {
			refused = err
			m.unmade(map[string]*codeContext{name: c}, err)
			return
		}
		m.forked(c, info)
	})
	if err != nil {
		err = cause(ctx, err)
		m.unmade(made, err)
		return err
	}
	return refused
}

// forked puts a fork that is ready into its pool.
func (m *Manager) forked(c *codeContext, info guestwire.ContextInfo) {
	c.box.mu.Lock()
	c.info = believedContext(info)
	c.box.mu.Unlock()
	close(c.started)
	select {
	case c.pool.forks <- c:
	default:
		m.background(func() { m.dropForks(c.box, []*codeContext{c}) })
	}
}

// unmade forgets forks that did not come to be, or of which nothing is known.
func (m *Manager) unmade(all map[string]*codeContext, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
	defer cancel()
	for _, c := range all {
		if scope := c.takeOut(false); scope != nil { // else the sandbox ended meanwhile, and all with it
			if !refusal(err) {
				_ = scope.Kill(ctx) // so that nothing runs unknown
			}
			_ = scope.Close() // what is left of it goes with the sandbox
		}
		c.failed = err
		close(c.started)
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
		m.linger(c.box, after)
		m.spend(c)
	})
}

// spend throws a fork away that has had its run, together with others.
func (m *Manager) spend(c *codeContext) {
	b, pool := c.box, c.pool
	if pool == nil { // of an earlier server
		m.dropForks(b, []*codeContext{c})
		return
	}
	take := func(least int) []*codeContext {
		if len(pool.spent) < least {
			return nil
		}
		all := pool.spent
		pool.spent = nil
		return all
	}
	b.mu.Lock()
	pool.spent = append(pool.spent, c)
	first, all := len(pool.spent) == 1, take(freshBatch)
	b.mu.Unlock()
	if first {
		m.background(func() {
			m.linger(b, freshRest)
			b.mu.Lock()
			all := take(1)
			b.mu.Unlock()
			m.dropForks(b, all)
		})
	}
	if all != nil {
		m.background(func() { m.dropForks(b, all) })
	}
}

// linger waits, but not beyond the end of the box or of the Manager.
func (m *Manager) linger(b *box, d time.Duration) {
	late := time.NewTimer(d)
	defer late.Stop()
	select {
	case <-late.C:
	case <-b.ended:
	case <-m.ctx.Done():
	}
}

// dropForks ends contexts that nobody is told about.
func (m *Manager) dropForks(b *box, all []*codeContext) {
	if len(all) == 0 {
		return
	}
	ids := make([]string, len(all))
	for i, c := range all {
		ids[i] = c.id
	}
	ctx, cancel := m.detached(m.ctx, b.guest)
	defer cancel()
	if err := b.guest.Drop(ctx, ids); err != nil {
		return // the guest is gone, or the sandbox is paused: what is left goes with it
	}
	for _, c := range all {
		m.endRuns(c, RunCanceled)
		if scope := c.takeOut(false); scope != nil && !scope.Recycle() {
			_ = scope.Close()
		}
	}
}

// takeOut takes a context out of its box, which fell with its sandbox or was deleted, and returns its scope.
func (c *codeContext) takeOut(fell bool) isolation.Scope {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	if c.box.codes[c.id] == c {
		delete(c.box.codes, c.id)
	}
	c.gone, c.left, c.fell = true, true, c.fell || fell
	scope := c.scope
	c.scope = nil
	return scope
}

// hidden reports whether a context belongs to fresh runs.
func hidden(i guestwire.ContextInfo) bool { return i.Zygote || i.Fork }
