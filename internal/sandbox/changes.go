package sandbox

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

// FileChanges says how much is recorded of the files that processes and runs change.
type FileChanges string

// How much is recorded.
const (
	FileChangesOff     FileChanges = "off"     // nothing, which costs nothing
	FileChangesSummary FileChanges = "summary" // how many files were created, modified, deleted, renamed
	FileChangesFull    FileChanges = "full"    // which ones, in which respect, and hashes of what they hold
)

// compareWithin is how long finding out what changed may take: whoever asked for the process waits for it. On a quiet machine
// it takes milliseconds.
const compareWithin = 10 * time.Second

// tracker records which files of one sandbox differ from one moment to the next. The moments are the start and the end
// of every process and run, where anything changed; between them the server doesn't look. So what a process changed is
// told apart from what others did before it and after it, but not from what others did while it ran: each record names
// everybody who could have. A nil tracker records nothing.
//
// Lock order: mu, then the box's.
type tracker struct {
	m    *Manager
	b    *box
	full bool

	// mu guards the fields below, and is held while files are compared, so that records follow each other.
	mu sync.Mutex
	// at is the moment that the next record begins with; its Name is "" where nobody knows what files were.
	at rootfs.Point
	// alive are the processes and runs that have begun and not ended, and seen those that were alive at any time
	// since at.
	alive, seen map[string]bool
	// left are ended processes that left others running.
	left map[string]*proc

	// calls are calls of the file API.
	calls callCount
}

// callCount counts calls that are under way, and that have been since it was last asked.
type callCount struct {
	// mu guards the fields below.
	mu       sync.Mutex
	now, all int
}

func (c *callCount) enter() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now++
	c.all++
}

func (c *callCount) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now--
}

// take returns how many there were, and begins to count anew.
func (c *callCount) take() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.all
	c.all = c.now
	return n
}

func (m *Manager) newTracker(b *box, level FileChanges) *tracker {
	if level == "" {
		return nil
	}
	return &tracker{
		m: m, b: b, full: level == FileChangesFull, alive: map[string]bool{}, seen: map[string]bool{}, left: map[string]*proc{},
	}
}

// startTracking begins with the files that a new sandbox starts with. event is the counter of the one that made it.
func (m *Manager) startTracking(ctx context.Context, b *box, level FileChanges, event uint64) (*tracker, error) {
	t := m.newTracker(b, level)
	if t == nil {
		return nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t, t.beginLocked(ctx, event)
}

// beginLocked makes what files are now the moment that the next record begins with.
func (t *tracker) beginLocked(ctx context.Context, event uint64) error {
	t.at = rootfs.Point{}
	p, err := t.m.cfg.Roots.MakePoint(ctx, t.b.id)
	if err != nil {
		return err
	}
	return t.keepLocked(p, event)
}

func (t *tracker) keepLocked(p rootfs.Point, event uint64) error {
	p.Event = event
	if err := t.m.cfg.Roots.KeepPoint(t.b.id, p); err != nil {
		t.at = rootfs.Point{}
		return errors.Join(err, t.m.cfg.Roots.DropPoint(p))
	}
	t.at = p
	return nil
}

// resumeTracking goes on from the moment that an earlier server kept.
func (m *Manager) resumeTracking(ctx context.Context, b *box) {
	if b.changes != nil {
		return
	}
	t := m.newTracker(b, b.sb.Spec.FileChanges)
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var err error
	if t.at, err = m.cfg.Roots.PointOf(b.id); err != nil {
		m.log.Warn("cannot read what files were", "sandbox", b.id, "error", err)
	}
	rows, err := m.db.OpenProcesses(ctx, b.id)
	if err != nil {
		m.log.Warn("cannot read which processes ran", "sandbox", b.id, "error", err)
	}
	for _, row := range rows {
		t.alive[row.ID], t.seen[row.ID] = true, true
	}
	b.changes = t
}

// restart begins anew with what files are now, as after all of them were replaced, which event told of.
func (t *tracker) restart(ctx context.Context, event uint64) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls.take()
	if err := t.beginLocked(ctx, event); err != nil {
		t.m.log.Warn("cannot keep what files are", "sandbox", t.b.id, "error", err)
	}
}

// begin is called before a process or run can change anything.
func (t *tracker) begin(id string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lookLocked(journal.Event{}, changedFacts{Between: true})
	t.alive[id], t.seen[id] = true, true
}

// found is called for one that runs and that this server did not begin.
func (t *tracker) found(id string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.alive[id], t.seen[id] = true, true
}

// leave is called for one that did not come to be.
func (t *tracker) leave(id string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.alive, id)
}

// ended records what changed up to the end of a process, which is recorded. It reports whether some of the process's
// tree live on, as the guest says or the kernel.
func (t *tracker) ended(pr *proc, leftover bool) (left bool) {
	if t == nil {
		return leftover
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	left = leftover || !pr.empty()
	t.seen[pr.id] = true // also where an earlier server started it
	t.lookLocked(journal.Event{Process: pr.id}, changedFacts{self: pr.id})
	delete(t.alive, pr.id)
	delete(t.seen, pr.id)
	if left {
		t.left[pr.id] = pr
	}
	return left
}

// runEnded is ended for a run.
func (t *tracker) runEnded(r *codeRun) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lookLocked(journal.Event{}, changedFacts{Context: r.c.id, Run: r.id, self: r.id})
	delete(t.alive, r.id)
	delete(t.seen, r.id)
}

// look records what changed since the last moment, where anything did.
func (t *tracker) look() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lookLocked(journal.Event{}, changedFacts{Between: true})
}

// call counts a call of the file API until it is over.
func (t *tracker) call() (over func()) {
	if t == nil {
		return func() {}
	}
	t.calls.enter()
	return t.calls.leave
}

// changedFacts are the server's facts of files.changed: what it found by comparing two snapshots.
//
//casemate:facts server files.changed
type changedFacts struct {
	// Since is the counter of the event after which files were what they are compared with.
	Since   uint64 `json:"since"`
	Context string `json:"context,omitempty"`
	Run     string `json:"run,omitempty"`
	// Between says that this is what changed since the record before up to the start of a process or run, or the end
	// of the sandbox: no end of one belongs to it.
	Between bool `json:"between,omitempty"`
	// Alone says that the process or run was the only one that the server knows of that could change files in
	// this time. Others are named: processes and runs that were alive at some time in it (Alive), ended processes
	// that had left some running (Left), contexts, and how many calls of the file API there were.
	Alone    bool     `json:"alone,omitempty"`
	Alive    []string `json:"alive,omitempty"`
	Left     []string `json:"left,omitempty"`
	Contexts []string `json:"contexts,omitempty"`
	Others   int      `json:"others,omitempty"` // more of them than are named
	Calls    int      `json:"calls,omitempty"`

	Created  int `json:"created"`
	Modified int `json:"modified"`
	Deleted  int `json:"deleted"` // a directory counts as one
	Renamed  int `json:"renamed"`

	// Files are the first ones by path, where they are asked for; More is how many are not among them, and MoreIn says
	// in which directories these lie.
	Files  []changedFile `json:"files,omitempty"`
	More   int           `json:"more,omitempty"`
	MoreIn []dirCount    `json:"more_in,omitempty"`

	// Unknown says why nobody knows what changed; then no count means anything.
	Unknown string `json:"unknown,omitempty"`

	self string
}

// lookLocked records what changed since the last moment. What is no end of a process or run is recorded only where
// something changed.
func (t *tracker) lookLocked(e journal.Event, f changedFacts) {
	since := t.at.Event
	changes, next, err := t.compareLocked()
	f.Since = since
	t.whoLocked(&f)
	if err != nil {
		if errs.Is(err, errs.NotFound) && f.Between { // the files are gone, and somebody has said why
			return
		}
		text, _ := errs.PublicText(err)
		f.Unknown = text
		t.m.log.Warn("cannot tell which files changed", "sandbox", t.b.id, "error", err)
	}
	hashes := f.list(changes, t.full)
	seq := since
	if !f.Between || len(changes) > 0 || f.Unknown != "" {
		e.Sandbox, e.Type, e.Actor = t.b.id, journal.FilesChanged, "server"
		recorded, err := t.m.journal.Record(t.m.ctx, t.withHashes(e.With(journal.Server, f), hashes))
		if err != nil {
			t.m.log.Error("cannot record which files changed", "sandbox", t.b.id, "error", err)
			t.dropLocked(next)
			return // the next record tells of it, too
		}
		seq = recorded.Seq
	}
	t.seen = maps.Clone(t.alive)
	if next.Name == "" {
		t.at.Event = seq
		return
	}
	if err := t.keepLocked(next, seq); err != nil {
		t.m.log.Warn("cannot keep what files are", "sandbox", t.b.id, "error", err)
	}
}

func (t *tracker) dropLocked(p rootfs.Point) {
	if p.Name == "" {
		return
	}
	if err := t.m.cfg.Roots.DropPoint(p); err != nil {
		t.m.log.Warn("cannot drop a snapshot of a sandbox's files", "sandbox", t.b.id, "error", err)
	}
}

// compareLocked returns what changed since the last moment, and the moment that it looked at, whose Name is "" where
// nothing did.
func (t *tracker) compareLocked() ([]rootfs.FileChange, rootfs.Point, error) {
	roots := t.m.cfg.Roots
	if roots.AtPoint(t.b.id, t.at) {
		return nil, rootfs.Point{}, nil
	}
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(t.m.ctx), compareWithin, errs.New(errs.DeadlineExceeded,
		"finding out what changed took longer than %s", compareWithin))
	defer cancel()
	next, err := roots.MakePoint(ctx, t.b.id)
	if err != nil {
		t.at.Name = ""
		return nil, rootfs.Point{}, err
	}
	if t.at.Name == "" {
		return nil, next, errs.New(errs.FailedPrecondition, "what files were before is not kept")
	}
	t.b.mu.Lock()
	plan := t.b.body.Plan
	t.b.mu.Unlock()
	var sums rootfs.SumLimits
	if t.full {
		sums = hashLimits()
	}
	changes, err := roots.Between(ctx, t.b.id, plan, t.at, next, sums)
	return changes, next, cause(ctx, err)
}

// maxOthers bounds how many others a record names.
const maxOthers = 32

// whoLocked names everybody who could have changed files since the last moment.
func (t *tracker) whoLocked(f *changedFacts) {
	f.Calls = t.calls.take()
	for _, id := range slices.Sorted(maps.Keys(t.seen)) {
		if id != f.self {
			f.Alive = append(f.Alive, id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.left)) {
		f.Left = append(f.Left, id)
		if t.left[id].empty() {
			delete(t.left, id) // what it left has ended, in this time or before
		}
	}
	t.b.mu.Lock()
	for id, c := range t.b.codes {
		if id != f.Context && !hidden(c.info) {
			f.Contexts = append(f.Contexts, id)
		}
	}
	t.b.mu.Unlock()
	slices.Sort(f.Contexts)
	f.Alone = f.self != "" && len(f.Alive)+len(f.Left)+len(f.Contexts)+f.Calls == 0
	for _, list := range []*[]string{&f.Alive, &f.Left, &f.Contexts} {
		if more := len(*list) - maxOthers; more > 0 {
			*list = (*list)[:maxOthers]
			f.Others += more
		}
	}
}

// empty reports whether it is certain that nothing of an ended process lives on.
func (pr *proc) empty() bool {
	pr.box.mu.Lock()
	scope := pr.scope
	pr.box.mu.Unlock()
	if scope == nil {
		return true
	}
	empty, err := scope.Empty()
	return empty && err == nil
}
