package sandbox

import (
	"context"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

// HasImages reports whether sandboxes of an isolation can be saved with their processes on this server.
func (m *Manager) HasImages(ctx context.Context, isolationName string) bool {
	backend := m.cfg.Backends[isolationName]
	if backend == nil || !m.cfg.Roots.Durable() {
		return false
	}
	for _, c := range backend.Capabilities(ctx) {
		if c.Name == isolation.MemoryImages {
			return c.OK
		}
	}
	return false
}

// PauseToDisk pauses a sandbox and saves its processes with their memory as a memory image beside its files: nothing of
// it is on the host then but these, and Resume goes on where it was, also after a restart of the server. Connections
// to and from outside end. One that is paused otherwise with its memory kept becomes one that is on disk, for which its
// processes run for a moment. Idempotent. Kinds: Unsupported (its isolation has no memory images),
// ResourceExhausted (the image does not fit into its disk limit), FailedPrecondition (its state).
func (m *Manager) PauseToDisk(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	b, err := m.toPause(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	defer b.release()
	return m.hibernate(ctx, p.ID, b, nil)
}

// PauseRemembering pauses a sandbox with its memory kept: on disk where its isolation can save it and the image has room, else in
// memory. Idempotent. Kinds: FailedPrecondition (its state).
func (m *Manager) PauseRemembering(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	if b == nil {
		return Sandbox{}, &TransitionError{ID: stopped.ID, From: stopped.State, To: Paused}
	}
	if m.HasImages(ctx, b.snapshot().Spec.Isolation) {
		return m.rememberBox(ctx, p.ID, b, nil)
	}
	return m.freezeBox(ctx, p.ID, b, Paused, nil)
}

// hibernate pauses b with its memory on disk, on behalf of actor. Where still is given, it is asked under b.mu, and
// nothing changes where it says no. Preconditions: the caller holds the life token.
func (m *Manager) hibernate(ctx context.Context, actor string, b *box, still func() bool) (Sandbox, error) {
	now := b.snapshot()
	if now.OnDisk {
		return now, nil
	}
	if now.FilesOnly || now.State != Running && now.State != Paused {
		return Sandbox{}, &TransitionError{ID: b.id, From: now.State, To: Paused}
	}
	if !m.HasImages(ctx, now.Spec.Isolation) {
		return Sandbox{}, m.noImages(now.Spec.Isolation)
	}
	undo, _, bytes, err := m.image(ctx, b, now)
	if err != nil {
		return Sandbox{}, err
	}
	defer undo.Run()
	if err := m.cfg.Roots.Flush(b.id, true); err != nil {
		return Sandbox{}, err
	}
	b.mu.Lock()
	if b.sb.State != now.State { // it ends meanwhile
		defer b.mu.Unlock()
		return Sandbox{}, &TransitionError{ID: b.id, From: b.sb.State, To: Paused}
	}
	if still != nil && !still() {
		defer b.mu.Unlock()
		return b.snapshotLocked(), nil
	}
	// First the state, then the deed, as in sleep.
	b.leaving, b.sb.OnDisk = true, true
	b.sb.LastActive = wall(m.clock.Now())
	saved := m.saveLockedAs(b, Paused, event(journal.SandboxPaused, actor, pausedFacts{OnDisk: true, Bytes: bytes}))
	b.mu.Unlock()
	if _, err := saved.Wait(); err != nil {
		m.wakeUnrecorded(b, now)
		return Sandbox{}, err
	}
	undo.Release()
	m.detach(m.ctx, b)
	if !m.destroy(b) {
		return Sandbox{}, shuttingDown()
	}
	b.inst.put(nil)
	m.rest(b)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leaving = false
	return b.snapshotLocked(), nil
}

func (m *Manager) noImages(name string) error {
	if !m.cfg.Roots.Durable() {
		return errs.New(errs.Unsupported, "this server keeps files of sandboxes in memory only, and so can't keep their memory either").
			WithHint("install btrfs-progs and use a new data directory")
	}
	return isolation.NoMemoryImages(name)
}

// image makes the memory image of b, whose instance is frozen then, and its files at rest. What it returns lets it go on
// without one, since when it stands still, and the image's size. Preconditions: as hibernate's.
func (m *Manager) image(ctx context.Context, b *box, now Sandbox) (*cleanup.Stack, time.Time, int64, error) {
	if err := m.keepEnv(ctx, b); err != nil {
		return nil, time.Time{}, 0, err
	}
	if err := m.cfg.Roots.Flush(b.id, false); err != nil {
		return nil, time.Time{}, 0, err
	}
	return m.checkpoint(ctx, b, now)
}

// checkpoint is image without what is to be done before.
func (m *Manager) checkpoint(ctx context.Context, b *box, now Sandbox) (*cleanup.Stack, time.Time, int64, error) {
	var since time.Time
	dir, err := m.cfg.Roots.NewMemory(b.id)
	if err != nil {
		return nil, since, 0, err
	}
	stood, err := b.inst.Checkpoint(ctx, dir)
	if err != nil {
		m.dropImage(b)
		return nil, since, 0, cause(ctx, err)
	}
	since = m.clock.Now().Add(-stood)
	undo := cleanup.New()
	if now.State == Running {
		undo.Add(func() { m.thaw(b) })
	}
	undo.Add(func() { m.dropImage(b) }) // first, since what runs writes to the disk that it takes room of
	bytes := sizeOf(dir)
	if err := m.cfg.Roots.KeepMemory(b.id); err != nil {
		undo.Run()
		return nil, since, 0, err
	}
	return undo, since, bytes, nil
}

// sizeOf is how many bytes the files in a directory of the server's own have.
func sizeOf(dir string) int64 {
	var size int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // for the record only
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			size += info.Size()
		}
		return nil
	})
	return size
}

func (m *Manager) dropImage(b *box) {
	if err := m.cfg.Roots.DropMemory(b.id); err != nil {
		m.log.Warn("cannot remove the memory image of a sandbox", "sandbox", b.id, "error", err)
	}
}

func fromDisk() pausedFacts { return pausedFacts{OnDisk: true} }

// canKeepMemory refuses a commit with memory where there can be none.
func (m *Manager) canKeepMemory(ctx context.Context, now Sandbox, o CommitOptions) error {
	switch {
	case !o.Memory:
		return nil
	case now.FilesOnly:
		return errs.New(errs.FailedPrecondition, "the sandbox is paused without memory, so that a commit can have none").
			WithHint("resume it first, or commit its files")
	case !m.HasImages(ctx, now.Spec.Isolation):
		return m.noImages(now.Spec.Isolation)
	}
	return nil
}

// imageRoom is what a memory image may take beside the memory that is in use: what describes it.
const imageRoom = 64 << 20

// keepWithMemory keeps b's files with a memory image beside them, and returns how long it stood still for that. The image
// is made in memory, where the host has room, and brought to the disk when b goes on again.
func (m *Manager) keepWithMemory(ctx context.Context, b *box, now Sandbox, plan rootfs.Plan) (rootfs.Layer, time.Duration, error) {
	used, err := b.inst.Usage(ctx)
	if err != nil {
		return rootfs.Layer{}, 0, cause(ctx, err)
	}
	dir, drop, err := m.cfg.Roots.StageMemory(used.MemoryBytes + imageRoom)
	if errs.Is(err, errs.ResourceExhausted) {
		return m.keepWithMemoryOnDisk(ctx, b, now, plan)
	}
	if err != nil {
		return rootfs.Layer{}, 0, err
	}
	defer func() {
		if err := drop(); err != nil {
			m.log.Warn("cannot free the memory of a memory image", "sandbox", b.id, "error", err)
		}
	}()
	var frozen time.Duration
	var since time.Time
	var saved error
	layer, err := m.cfg.Roots.Commit(ctx, b.id, plan, func() error {
		var stood time.Duration
		stood, saved = b.inst.Checkpoint(ctx, dir)
		since = m.clock.Now().Add(-stood)
		return cause(ctx, saved)
	}, func() error {
		if now.State == Running {
			m.thaw(b)
		}
		frozen = m.clock.Now().Sub(since)
		return nil
	})
	if errs.Is(saved, errs.ResourceExhausted) { // it took more than was to be expected
		return m.keepWithMemoryOnDisk(ctx, b, now, plan)
	}
	if err == nil {
		layer, err = m.cfg.Roots.AddMemory(ctx, layer.ID, dir, plan.Disk.Bytes)
	}
	return layer, frozen, err
}

// keepWithMemoryOnDisk is keepWithMemory where the image is written while b stands still.
func (m *Manager) keepWithMemoryOnDisk(ctx context.Context, b *box, now Sandbox, plan rootfs.Plan) (rootfs.Layer, time.Duration, error) {
	var undo *cleanup.Stack
	var frozen time.Duration
	var since time.Time
	layer, err := m.cfg.Roots.Commit(ctx, b.id, plan, func() (err error) {
		undo, since, _, err = m.checkpoint(ctx, b, now)
		return err
	}, func() error {
		undo.Run() // the layer has the image
		frozen = m.clock.Now().Sub(since)
		return nil
	})
	return layer, frozen, err
}

// restorable returns the memory image that a starting sandbox goes on from, "" where it starts anew: that of the
// committed layer that it starts from.
func (m *Manager) restorable(plan rootfs.Plan) (string, error) {
	if len(plan.Committed) == 0 {
		return "", nil
	}
	dir, err := m.cfg.Roots.LayerMemory(plan.Committed[0])
	if errs.Is(err, errs.NotFound) {
		return "", nil
	}
	return dir, err
}

// restoreImage makes an instance of b's memory image.
func (m *Manager) restoreImage(ctx context.Context, b *box, s isolation.Spec) (isolation.Instance, error) {
	dir, err := m.cfg.Roots.Memory(b.id)
	if err != nil {
		return nil, err
	}
	return b.backend.Restore(ctx, s, dir)
}

func (m *Manager) tellRestored(ctx context.Context, g *guestwire.Client, r guestwire.Restored) error {
	ctx, cancel := m.prompt(ctx, g)
	defer cancel()
	return cause(ctx, g.Restored(ctx, r))
}

// rejoin takes up the processes and contexts of a sandbox whose memory was on disk: those that this server knows go on
// being watched, and what an earlier one began is adopted as at its start.
func (m *Manager) rejoin(ctx context.Context, b *box) error {
	b.mu.Lock()
	known := len(b.procs) + len(b.codes)
	for _, pr := range b.procs {
		if pr.scope != nil {
			pr.scope = m.rescopeLocked(b, pr.scope, pr.id)
		}
	}
	for _, c := range b.codes {
		if c.scope != nil {
			c.scope = m.rescopeLocked(b, c.scope, scopePrefix+c.id)
		}
	}
	b.mu.Unlock()
	if known > 0 {
		return nil
	}
	return m.join(ctx, b)
}

// rescopeLocked returns the scope of a process in the instance that there is now.
func (m *Manager) rescopeLocked(b *box, old isolation.Scope, name string) isolation.Scope {
	scope, err := b.inst.OpenScope(name)
	if err != nil {
		m.log.Warn("cannot find a process's control group again", "sandbox", b.id, "process", name, "error", err)
		return old
	}
	return scope
}

// inherit takes up the processes of a sandbox that began with those of another one: as far as they run.
func (m *Manager) inherit(ctx context.Context, b *box) error {
	return m.joinThose(ctx, b, func(i guestwire.ProcessInfo) bool { return i.End == guestwire.EndNone })
}

// join takes up the processes and contexts that a guest has and this server does not know.
func (m *Manager) join(ctx context.Context, b *box) error {
	return m.joinThose(ctx, b, func(guestwire.ProcessInfo) bool { return true })
}

func (m *Manager) joinThose(ctx context.Context, b *box, which func(guestwire.ProcessInfo) bool) error {
	lctx, cancel := m.prompt(ctx, b.guest)
	infos, err := b.guest.List(lctx)
	cancel()
	if err != nil {
		return cause(lctx, err)
	}
	infos = slices.DeleteFunc(infos, func(i guestwire.ProcessInfo) bool { return !which(i) })
	m.readOOM(b)
	running, err := m.takeUpProcesses(ctx, b, infos)
	if err != nil {
		return err
	}
	if err := m.takeUpContexts(ctx, b); err != nil {
		return err
	}
	for _, pr := range running {
		m.watch(pr)
	}
	return nil
}
