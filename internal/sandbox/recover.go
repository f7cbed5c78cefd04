package sandbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// RecoverReport tells what Recover did.
type RecoverReport struct {
	Adopted   []string // sandboxes taken up again
	Waiting   []string // sandboxes whose guests had not told by then what runs in them
	Lost      []string // sandboxes found dead, or that never came to run
	Processes int      // running processes followed again
	Removed   []string // leftovers, one line each
	Took      time.Duration
}

// recovery is a report in the making.
type recovery struct {
	asking sync.WaitGroup // guests
	// mu guards the fields below.
	mu      sync.Mutex
	report  RecoverReport
	waiting map[string]bool // sandboxes whose guests are being asked
}

// adopters is how many sandboxes are looked at side by side.
const adopters = 16

// asked says that a sandbox's guest is asked what runs in it.
func (r *recovery) asked(b *box) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asking.Add(1)
	r.waiting[b.id] = true
}

// told says that a guest has told of n processes, or err: that the sandbox is lost.
func (r *recovery) told(b *box, n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.asking.Done()
	delete(r.waiting, b.id)
	if err != nil {
		r.report.Lost = append(r.report.Lost, b.id)
		return
	}
	r.report.Adopted = append(r.report.Adopted, b.id)
	r.report.Processes += n
}

// wait returns when all guests have told, or after limit: one that is slow, or says that it is, must not hold all others up.
func (r *recovery) wait(ctx context.Context, limit time.Duration) error {
	all := make(chan struct{})
	go func() {
		r.asking.Wait()
		close(all)
	}()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-all:
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// done returns the report as it is by now.
func (r *recovery) done() RecoverReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	report := r.report
	report.Adopted, report.Lost = slices.Sorted(slices.Values(report.Adopted)), slices.Sorted(slices.Values(report.Lost))
	report.Waiting = slices.Sorted(maps.Keys(r.waiting))
	return report
}

// Recover takes up what an earlier server left, whenever and however it ended. Sandboxes that run
// are adopted: their processes went on, and what they printed is there. The others are recorded as
// lost. Everything that belongs to none is removed: instances, writable layers. Timers are set
// again; a sandbox whose time is over ends. A guest that takes longer than the connect timeout to tell what runs is waited for in
// the background, and calls to its sandbox wait with it. It must be called once, before any other method.
func (m *Manager) Recover(ctx context.Context) (RecoverReport, error) {
	began := m.clock.Now()
	rows, err := m.db.LiveSandboxes(ctx)
	if err != nil {
		return RecoverReport{}, fmt.Errorf("read sandboxes: %w", err)
	}
	if len(rows) > 0 {
		m.log.Info("adopting sandboxes", "count", len(rows))
	}
	r := &recovery{waiting: map[string]bool{}}
	var g errgroup.Group
	g.SetLimit(adopters)
	for _, row := range rows {
		g.Go(func() error {
			if err := m.recoverOne(ctx, row, r); err != nil {
				return fmt.Errorf("recover sandbox %s: %w", row.ID, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return r.done(), err
	}
	if err := r.wait(ctx, m.cfg.Defaults.Connect); err != nil {
		return r.done(), err
	}
	m.joinFamilies()
	m.adoptNetworks(ctx)
	removed := m.sweep(ctx)
	m.purgeKeys()
	report := r.done()
	report.Removed = removed
	report.Took = m.clock.Now().Sub(began)
	if len(rows) > 0 || len(report.Removed) > 0 {
		m.log.Info("adopted sandboxes", "count", len(report.Adopted), "processes", report.Processes, "waiting", len(report.Waiting), "lost", len(report.Lost),
			"leftovers_removed", len(report.Removed), "took", report.Took)
	}
	return report, nil
}

func (m *Manager) recoverOne(ctx context.Context, row store.Sandbox, r *recovery) error {
	s, kept, err := ofRow(row)
	if err != nil {
		return err
	}
	b := newBox(s)
	b.body = kept
	if s.State == Starting {
		// Nobody was told of it. If its instance came to be, Sweep removes it.
		return m.lost(ctx, b, r, ending{EndStartFailed, "the server ended while it started"})
	}
	why := ending{EndLost, "it did not run any more when the server started"}
	if s.State == Stopping {
		why = ending{s.EndReason, s.EndDetail}
	}
	if s.asleep() && s.State == Paused {
		return m.recoverAsleep(ctx, b, r)
	}
	inst, err := m.adopt(ctx, b)
	if err != nil {
		if !errs.Is(err, errs.NotFound) {
			m.log.Warn("cannot adopt a sandbox", "sandbox", b.id, "error", err)
			why.detail = "it could not be taken up when the server started"
		}
		return m.lost(ctx, b, r, m.endedBy(ctx, b, why))
	}
	b.inst = seatOf(inst)
	b.guest = guestwire.NewClient(b.inst.Dial)
	b.backend = m.cfg.Backends[s.Spec.Isolation]
	m.resumeTracking(ctx, b)
	if s.State == Stopping {
		close(b.ready)
		m.take(b)
		if err := m.closeProcesses(ctx, b.id, EndSandboxStopped); err != nil {
			return err
		}
		m.background(func() { m.finishEnd(b, journal.Pending{}) })
		return nil
	}
	m.takeUp(b, r)
	return nil
}

// endedBy corrects why a sandbox is found dead where an attempt ended it while no server ran.
func (m *Manager) endedBy(ctx context.Context, b *box, why ending) ending {
	o, ok := m.cfg.Backends[b.sb.Spec.Isolation].(isolation.Observer)
	if !ok || why.reason != EndLost {
		return why
	}
	ctx, cancel := m.brief(ctx)
	defer cancel()
	if attempt := o.EndedBy(ctx, b.id); attempt != "" {
		return ending{EndAttempt, attempt}
	}
	return why
}

func (m *Manager) adopt(ctx context.Context, b *box) (isolation.Instance, error) {
	backend := m.cfg.Backends[b.sb.Spec.Isolation]
	if backend == nil || len(b.body.Record) == 0 {
		return nil, errs.New(errs.NotFound, "no backend %s", b.sb.Spec.Isolation)
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Defaults.Stop)
	defer cancel()
	return backend.Adopt(ctx, b.body.Record)
}

// take lists a sandbox that an earlier server made: no limit applies.
func (m *Manager) take(b *box) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[b.id] = b
	m.owned[b.owner]++
}

// takeUp makes an adopted instance a box again. What runs in it is asked of its guest in the background, however long that takes;
// until then nothing but its end changes it.
func (m *Manager) takeUp(b *box, r *recovery) {
	b.gauge = newGauge(m.clock.Now())
	b.untold = true
	b.life <- struct{}{}
	up, paused, still := b.up, b.sb.State == Paused, b.sb.Applied.Runtime != ""
	m.take(b)
	r.asked(b)
	b.mu.Lock()
	m.armLifetimeLocked(b, m.cfg.Defaults.Start) // a guest that tells bit by bit must not live for ever by that
	b.mu.Unlock()
	m.background(func() {
		ctx, cancel := context.WithCancel(m.ctx)
		defer cancel()
		defer context.AfterFunc(up, cancel)()
		n, err := m.ask(ctx, b, paused, still)
		down := m.ctx.Err() != nil // then the next server asks
		if err != nil && !down {
			m.log.Warn("cannot take up a sandbox", "sandbox", b.id, "error", err)
			m.beginEnd(b, "", EndLost, "its guest did not answer when the server started") // no effect where it is being ended already
		}
		b.release()
		close(b.ready)
		if err != nil && !down {
			select {
			case <-b.ended:
			case <-m.ctx.Done():
			}
		}
		r.told(b, n, err)
	})
}

// ask makes an instance, which the kernel may not hold as its state says where the server was killed between the two, agree with
// that again, and asks its guest what runs in it. It returns how many processes do. still says that its guest stands still too
// while it is paused.
func (m *Manager) ask(ctx context.Context, b *box, paused, still bool) (int, error) {
	inst := b.inst.now() // as soon as its timers run, it may be paused without memory
	h, ok := inst.(isolation.Holder)
	held := ok && h.Held(ctx) // frozen for an attempt while no server ran
	agree := inst.Thaw
	if (paused || held) && !still { // a runtime is paused below, when its guest can still be asked
		agree = inst.Freeze
	}
	if err := m.promptly(ctx, agree); err != nil {
		return 0, err
	}
	lctx, cancel := m.prompt(ctx, b.guest)
	infos, err := b.guest.List(lctx)
	cancel()
	if err != nil {
		return 0, cause(lctx, err)
	}
	m.dropImage(b) // of a pause or a commit that was not finished
	m.readOOM(b)   // where counting begins
	running, err := m.takeUpProcesses(ctx, b, infos)
	if err == nil {
		err = m.takeUpContexts(ctx, b)
	}
	if err == nil && paused && still { // its guest stood still too, and had to be asked first
		err = m.promptly(ctx, inst.Freeze)
	}
	if err != nil {
		return 0, err
	}
	b.mu.Lock()
	b.untold = false
	if b.sb.State != Running && b.sb.State != Paused { // it ends meanwhile
		defer b.mu.Unlock()
		return 0, &TransitionError{ID: b.id, From: b.sb.State}
	}
	b.sb.LastActive = wall(m.clock.Now()) // how long nobody could use it does not count
	//casemate:fact server sandbox.adopted state text
	//casemate:fact server sandbox.adopted processes number that run
	adopted := m.saveLocked(b, event(journal.SandboxAdopted, "", map[string]any{"state": b.sb.State, "processes": len(running)}))
	m.armLocked(b)
	if b.sb.State == Running {
		m.upLocked(b)
	}
	b.mu.Unlock()
	if _, err := adopted.Wait(); err != nil {
		m.log.Error("cannot record that a sandbox was adopted", "sandbox", b.id, "error", err)
	}
	for _, pr := range running {
		m.watch(pr)
	}
	m.background(func() { m.follow(b, inst) })
	if held {
		// Whether the attempt is recorded already or comes with the keeper's next events: the state must say it.
		m.background(func() {
			m.react(CallEvent{Sandbox: b.id, Kind: isolation.CallAttempt, Call: "an attempt while no server ran", Reaction: ReactPause})
		})
	}
	return len(running), nil
}

// promptly calls what the kernel, or a runtime, does to an instance at once, within the stop timeout.
func (m *Manager) promptly(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Defaults.Stop)
	defer cancel()
	return f(ctx)
}

// takeUpProcesses compares what the guest says with what the store holds: what ended meanwhile is
// recorded, and what the guest does not know any more is lost. It returns those that run.
func (m *Manager) takeUpProcesses(ctx context.Context, b *box, infos []guestwire.ProcessInfo) ([]*proc, error) {
	rows, err := m.db.OpenProcesses(ctx, b.id)
	if err != nil {
		return nil, err
	}
	open := make(map[string]Process, len(rows))
	for _, row := range rows {
		if open[row.ID], err = ofProcessRow(row); err != nil {
			return nil, err
		}
	}
	var running []*proc
	old := len(infos) - keepEnded // these, if they have ended, need no entry: they come first
	for i, info := range infos {
		if err := ctx.Err(); err != nil { // a guest may take its time to tell what each of them said
			return nil, err
		}
		known, isOpen := open[info.ID]
		delete(open, info.ID)
		if i < old && info.End != guestwire.EndNone && !isOpen {
			continue
		}
		pr := m.restore(ctx, b, info, known, isOpen)
		switch {
		case pr == nil:
		case info.End == guestwire.EndNone:
			b.changes.found(pr.id)
			running = append(running, pr)
		case isOpen || pr.snapshot().End == EndNone:
			m.finish(pr, info, nil)
		}
	}
	for _, p := range open {
		pr := newRestored(b, p)
		b.mu.Lock()
		b.procs[p.ID] = pr
		b.mu.Unlock()
		m.finish(pr, guestwire.ProcessInfo{ID: p.ID, End: guestwire.EndLost}, nil)
	}
	return running, nil
}

func newRestored(b *box, p Process) *proc {
	pr := &proc{id: p.ID, box: b, started: make(chan struct{}), ended: make(chan struct{}), writing: make(chan struct{}, 1), info: p}
	pr.answered()
	return pr
}

// restore makes the entry of a process that the guest knows. It returns nil for an old one that
// needs none.
func (m *Manager) restore(ctx context.Context, b *box, info guestwire.ProcessInfo, known Process, isOpen bool) *proc {
	if !processID(info.ID) {
		return nil // none of ours: a guest that was taken over says strange things
	}
	if !isOpen {
		row, ok, err := m.db.GetProcess(ctx, b.id, info.ID)
		if err == nil && ok {
			known, err = ofProcessRow(row)
		}
		if err != nil || !ok {
			known = m.unrecorded(b, info)
		}
	}
	pr := newRestored(b, known)
	if scope, err := b.inst.OpenScope(info.ID); err == nil {
		pr.scope = scope
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.procs[info.ID] = pr
	if known.End != EndNone {
		pr.finishing = true
		close(pr.ended)
		m.retireLocked(b, pr)
	}
	return pr
}

// unrecorded records a process whose start the earlier server had no time to record.
func (m *Manager) unrecorded(b *box, info guestwire.ProcessInfo) Process {
	argv, _ := recordable(info.Argv)
	p := Process{
		ID: info.ID, SandboxID: b.id, Argv: argv, Dir: cut(info.Dir), User: cut(info.User),
		PID: info.PID, TTY: info.TTY, StartedAt: time.Unix(0, info.Started).UTC(),
	}
	//casemate:fact server process.started found yes_or_no its start was found out after a restart of the server
	e := b.withArgv(event(journal.ProcessStarted, "", map[string]bool{"found": true}).
		With(journal.Guest, startFacts{PID: info.PID, Dir: p.Dir, User: p.User}), journal.Guest, argv)
	e.Sandbox, e.Process = b.id, info.ID
	var with []store.Write
	if row, err := processRow(p); err == nil {
		with = append(with, store.AddProcess(row))
	}
	m.journal.Post(e, with...)
	return p
}

// lost records that a sandbox is gone.
func (m *Manager) lost(ctx context.Context, b *box, r *recovery, why ending) error {
	m.resumeTracking(ctx, b)
	if err := m.closeProcesses(ctx, b.id, EndProcessLost); err != nil {
		return err
	}
	b.changes.look()
	b.mu.Lock()
	b.sb.EndReason, b.sb.EndDetail, b.sb.EndedAt = why.reason, why.detail, wall(m.clock.Now())
	ended := m.becomeLocked(b, Stopped, event(journal.SandboxEnded, "", endFacts{Reason: why.reason, Detail: why.detail}))
	b.mu.Unlock()
	if _, err := ended.Wait(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Lost = append(r.report.Lost, b.id)
	return nil
}

// closeProcesses records the end of every open process of a sandbox that is gone.
func (m *Manager) closeProcesses(ctx context.Context, sandboxID string, end End) error {
	rows, err := m.db.OpenProcesses(ctx, sandboxID)
	if err != nil {
		return err
	}
	for _, row := range rows {
		p, err := ofProcessRow(row)
		if err != nil {
			return err
		}
		p.End, p.EndedAt = end, wall(m.clock.Now())
		e := event(journal.ProcessEnded, "", serverEndFacts{DurationMS: p.EndedAt.Sub(p.StartedAt).Milliseconds(), End: end})
		e.Sandbox, e.Process = sandboxID, p.ID
		m.recordEnd(e, p)
	}
	return nil
}

// joinFamilies ties children to their parents again; those whose parent is gone end.
func (m *Manager) joinFamilies() {
	for _, b := range m.boxes() {
		if b.parent == "" {
			continue
		}
		parent, alive := m.find(b.parent), false
		if parent != nil {
			parent.mu.Lock()
			if alive = parent.sb.State == Running || parent.sb.State == Paused; alive {
				parent.children[b.id] = b
			}
			parent.mu.Unlock()
		}
		if !alive {
			m.beginEnd(b, "", EndParent, "sandbox "+b.parent+" ended")
		}
	}
}

// sweep removes what belongs to no sandbox, and returns it. What can't be removed is no reason not
// to start.
func (m *Manager) sweep(ctx context.Context) []string {
	keep, run := make(map[string]bool), make(map[string]bool)
	for _, b := range m.boxes() {
		keep[b.id] = true
		if b.inst.now() != nil { // else what is there of an instance is a half
			run[b.id] = true
		}
	}
	var all []string
	for name, backend := range m.cfg.Backends {
		removed, err := backend.Sweep(ctx, run)
		if err != nil {
			m.log.Warn("cannot remove all leftovers", "isolation", name, "error", err)
		}
		all = append(all, removed...)
	}
	removed, err := m.cfg.Roots.Sweep(ctx, keep)
	if err != nil {
		m.log.Warn("cannot remove all leftover files", "error", err)
	}
	all = append(all, removed...)
	freed, err := m.collect(ctx, false)
	if err != nil {
		m.log.Warn("cannot remove all layers that no commit names", "error", err)
	}
	for _, f := range freed {
		all = append(all, "committed layer "+f.Layer)
	}
	return all
}
