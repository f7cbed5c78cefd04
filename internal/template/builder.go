package template

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// Config is what New needs.
type Config struct {
	Manager *sandbox.Manager
	DB      *store.DB
	// Dir is a directory for logs and uploaded files; New makes it.
	Dir string
	// Clock defaults to the system's, Log to nowhere.
	Clock clock.Clock
	Log   *slog.Logger
	// Parallel is how many builds run at once, others wait; 0: 4.
	Parallel int
	// MaxFiles bounds an upload, in bytes of its archive without compression; 0: 4 GiB.
	MaxFiles int64
	// Aliases name what stands for an image: a template, a commit, a tag, or another image, as at a mirror.
	Aliases map[string]string
	// Images pulls an image, or finds it pulled, and returns a commit of its files whose spec carries its
	// configuration; nil: images can't be built upon. auth is what its registry is shown; zero: what the server has.
	Images func(ctx context.Context, p sandbox.Principal, ref string, auth Credentials, progress func(line string)) (sandbox.Commit, error)
	// Scratch sees to it that there is a template "scratch", which holds no files; nil: it can't.
	Scratch func(ctx context.Context) error
}

// Builder builds templates. Its methods are safe for concurrent use.
type Builder struct {
	cfg   Config
	m     *sandbox.Manager
	db    *store.DB
	clock clock.Clock
	log   *slog.Logger
	turns chan struct{}
	files *fileStore

	// ctx ends with Close, and all builds with it.
	ctx    context.Context //nolint:containedctx // the life of the Builder, not of a call
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	// mu guards the fields below.
	mu      sync.Mutex
	running map[string]*running
	closed  bool
}

// running is a build that is not over.
type running struct {
	log    *buildLog
	cancel context.CancelCauseFunc
	over   chan struct{} // closed once its end is recorded

	// mu guards the field below.
	mu    sync.Mutex
	build Build
}

func (r *running) snapshot() Build {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.build.clone()
}

func (b Build) clone() Build {
	b.Tags, b.Steps, b.Env = slices.Clone(b.Tags), slices.Clone(b.Steps), slices.Clone(b.Env)
	return b
}

// change applies f to the build and returns it as it is then.
func (r *running) change(f func(*Build)) Build {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.build)
	return r.build.clone()
}

const (
	defaultParallel = 4
	defaultMaxFiles = 4 << 30
	defaultTimeout  = time.Hour
	// maxOfOwner bounds the builds of one principal that run or wait.
	maxOfOwner = 100
	// stepsFor is how long the result of a step is kept without being used.
	stepsFor = 30 * 24 * time.Hour
)

var (
	errCanceled = errs.New(errs.FailedPrecondition, "the build was canceled")
	errStopped  = errs.New(errs.Unavailable, "the server was stopped while it built").
			WithHint("build again: the steps that were done are kept")
)

// New returns a Builder, and cleans up after the one before: builds that it left unfinished have failed, and
// their sandboxes go. The Manager must have recovered.
func New(ctx context.Context, cfg Config) (*Builder, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Parallel, cfg.MaxFiles = cmp.Or(cfg.Parallel, defaultParallel), cmp.Or(cfg.MaxFiles, int64(defaultMaxFiles))
	b := &Builder{
		cfg: cfg, m: cfg.Manager, db: cfg.DB, clock: cfg.Clock, log: cfg.Log,
		turns: make(chan struct{}, cfg.Parallel), running: map[string]*running{},
	}
	b.ctx, b.cancel = context.WithCancelCause(context.Background())
	if err := os.MkdirAll(b.logDir(), 0o700); err != nil {
		return nil, err
	}
	var err error
	if b.files, err = openFiles(filepath.Join(cfg.Dir, "files"), cfg.MaxFiles); err != nil {
		return nil, err
	}
	if err := b.recover(ctx); err != nil {
		return nil, fmt.Errorf("clean up after earlier builds: %w", err)
	}
	return b, nil
}

func (b *Builder) logDir() string           { return filepath.Join(b.cfg.Dir, "logs") }
func (b *Builder) logPath(id string) string { return filepath.Join(b.logDir(), id+".log") }

// buildLabel is the label of a build's sandboxes; its value is the build's id.
const buildLabel = "casemate.dev/build"

// recover ends what an earlier Builder left.
func (b *Builder) recover(ctx context.Context) error {
	everybody := sandbox.Principal{ID: "server", Admin: true}
	for _, state := range []State{Queued, Building} {
		rows, err := b.db.Builds(ctx, store.BuildQuery{State: string(state)})
		if err != nil {
			return err
		}
		for _, row := range rows {
			build, err := ofBuildRow(row)
			if err != nil {
				return err
			}
			if err := b.dropSandboxes(ctx, everybody, build.ID); err != nil {
				return err
			}
			build.fail(errStopped, StepBase)
			if last := len(build.Steps); last > 0 {
				build.Reason.Step = build.Steps[last-1].Step
			}
			build.EndedAt = b.now()
			if err := b.save(build); err != nil {
				return err
			}
		}
	}
	return b.db.Write(store.DropBuildSteps(b.now().Add(-stepsFor).UnixNano()))
}

// dropSandboxes deletes what a build left running.
func (b *Builder) dropSandboxes(ctx context.Context, p sandbox.Principal, buildID string) error {
	for {
		page, _, err := b.m.List(ctx, p, sandbox.Query{Labels: map[string]string{buildLabel: buildID}})
		if err != nil || len(page) == 0 {
			return err
		}
		for _, s := range page {
			if _, err := b.m.Delete(ctx, p, s.ID); err != nil {
				return err
			}
		}
	}
}

// now is the time without its monotonic reading, as it is stored.
func (b *Builder) now() time.Time { return b.clock.Now().UTC().Round(0) }

// Close ends all builds; when it returns they are recorded and their sandboxes gone, unless ctx ended first.
func (b *Builder) Close(ctx context.Context) error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel(errStopped)
	rest := make(chan struct{})
	go func() {
		b.wg.Wait()
		close(rest)
	}()
	select {
	case <-rest:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("end builds: %w", ctx.Err())
	}
}

// Start records a build and begins it; it does not wait for it. Kinds: InvalidArgument (the request, or its
// Dockerfile, whose line the text names), AlreadyExists (the id), NotFound (files).
func (b *Builder) Start(ctx context.Context, p sandbox.Principal, r Request) (Build, error) {
	if err := r.check(); err != nil {
		return Build{}, err
	}
	todo, err := compile(r)
	if err != nil {
		return Build{}, err
	}
	if r.Epoch, err = epochOf(r); err != nil {
		return Build{}, err
	}
	r.ID = cmp.Or(r.ID, id.New(id.Build))
	r.Timeout = cmp.Or(r.Timeout, defaultTimeout)
	build := Build{
		ID: r.ID, Owner: p.ID, Name: r.Name, Tags: slices.Clone(r.Tags), State: Queued, CreatedAt: b.now(), From: todo.from(),
		Of: todo.count(), Limits: r.Limits, Start: r.Start, Ready: r.Ready,
	}
	files, err := b.openBuildFiles(p, r)
	if err != nil {
		return Build{}, err
	}
	run, bctx, err := b.enlist(ctx, build)
	if err != nil {
		files.close()
		return Build{}, err
	}
	if err := b.save(build); err != nil {
		b.forget(run)
		files.close()
		b.wg.Done()
		return Build{}, err
	}
	x := &execution{b: b, p: p, req: r, todo: todo, run: run, log: run.log, files: files}
	go func() {
		defer b.wg.Done()
		defer files.close()
		b.carryOut(bctx, x)
	}()
	return build, nil
}

// enlist makes room for a build; the caller owns one count of wg.
func (b *Builder) enlist(ctx context.Context, build Build) (*running, context.Context, error) {
	known, err := b.db.Builds(ctx, store.BuildQuery{ID: build.ID, Limit: 1})
	if err != nil {
		return nil, nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return nil, nil, errs.New(errs.Unavailable, "the server is shutting down").WithHint("try again later")
	case b.running[build.ID] != nil || len(known) > 0:
		return nil, nil, errs.New(errs.AlreadyExists, "build %s exists", build.ID)
	case b.ofOwner(build.Owner) >= maxOfOwner:
		return nil, nil, errs.New(errs.ResourceExhausted, "%d builds of yours run or wait", maxOfOwner).
			WithHint("wait until one is over, or cancel one: casemate template cancel")
	}
	log, err := newBuildLog(b.logPath(build.ID), b.clock.Now)
	if err != nil {
		return nil, nil, err
	}
	run := &running{log: log, over: make(chan struct{}), build: build}
	var bctx context.Context
	bctx, run.cancel = context.WithCancelCause(b.ctx)
	b.running[build.ID] = run
	b.wg.Add(1)
	return run, bctx, nil
}

// ofOwner counts a principal's builds that are not over. The caller holds mu.
func (b *Builder) ofOwner(owner string) int {
	n := 0
	for _, run := range b.running {
		if run.snapshot().Owner == owner {
			n++
		}
	}
	return n
}

func (b *Builder) forget(run *running) {
	b.mu.Lock()
	delete(b.running, run.snapshot().ID)
	b.mu.Unlock()
	run.cancel(nil)
	_ = run.log.close() // nobody can read it any more than what is in the file
	close(run.over)
}

// carryOut runs a build to its end, and records that.
func (b *Builder) carryOut(ctx context.Context, x *execution) {
	ctx, cancel := context.WithTimeoutCause(ctx, x.req.Timeout, errs.New(errs.DeadlineExceeded,
		"the build took longer than %s (build timeout)", x.req.Timeout).WithHint("give it more time: --timeout"))
	defer cancel()
	err := b.inTurn(ctx, x)
	if cause := context.Cause(ctx); err != nil && cause != nil && ctx.Err() != nil {
		err = cause
	}
	// Whatever was left running goes, also where the step itself could not see to it.
	clean, done := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer done()
	if derr := b.dropSandboxes(clean, x.p, x.req.ID); derr != nil {
		b.log.Error("cannot delete a build's sandboxes", "build", x.req.ID, "error", derr)
	}
	build := x.run.change(func(bd *Build) {
		bd.EndedAt = b.now()
		switch {
		case err == nil:
			bd.State = Ready
		case errors.Is(err, errCanceled):
			bd.State = Canceled
		default:
			bd.fail(err, x.step)
		}
	})
	x.sayEnd(build, err)
	if err := b.save(build); err != nil {
		b.log.Error("cannot record the end of a build", "build", build.ID, "error", err)
	}
	b.forget(x.run)
}

// inTurn waits until the build may run, and runs it.
func (b *Builder) inTurn(ctx context.Context, x *execution) error {
	select {
	case b.turns <- struct{}{}:
		defer func() { <-b.turns }()
	case <-ctx.Done():
		return ctx.Err()
	}
	build := x.run.change(func(bd *Build) { bd.State, bd.StartedAt = Building, b.now() })
	if err := b.save(build); err != nil {
		return err
	}
	if err := x.files.index(ctx); err != nil { // only now: it takes memory, and many may wait
		return err
	}
	return x.build(ctx)
}

// fail notes why a build failed.
func (bd *Build) fail(err error, step string) {
	bd.State = Failed
	text, hint := errs.PublicText(err)
	bd.Reason = &Reason{Message: text, Hint: hint, Step: cmp.Or(step, StepBase), Kind: errs.KindOf(err), ExitCode: -1}
	var at *stepError
	if errors.As(err, &at) {
		bd.Reason.At, bd.Reason.Command, bd.Reason.ExitCode = at.at, at.text, at.code
	}
}

// Get returns a build by its id, or the newest of a template by the template's name; of several that are over, the
// newest that is ready. NotFound: there is none that p may see.
func (b *Builder) Get(ctx context.Context, p sandbox.Principal, ref string) (Build, error) {
	if strings.HasPrefix(ref, id.Build) {
		return b.byID(ctx, p, ref)
	}
	all, err := b.List(ctx, p, Query{Name: ref, Latest: true, Limit: 1})
	if err != nil {
		return Build{}, err
	}
	if len(all) == 0 || ref == "" {
		return Build{}, errs.New(errs.NotFound, "no template %q was built here", ref).WithHint("casemate template ls shows them")
	}
	return all[0], nil
}

func (b *Builder) byID(ctx context.Context, p sandbox.Principal, buildID string) (Build, error) {
	if run := b.find(buildID); run != nil {
		if build := run.snapshot(); sees(p, build.Owner) {
			return build, nil
		}
		return Build{}, noBuild(buildID)
	}
	rows, err := b.db.Builds(ctx, store.BuildQuery{ID: buildID, Limit: 1})
	if err != nil {
		return Build{}, err
	}
	if len(rows) == 0 || buildID == "" || !sees(p, rows[0].Owner) {
		return Build{}, noBuild(buildID)
	}
	return ofBuildRow(rows[0])
}

func (b *Builder) find(buildID string) *running {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running[buildID]
}

// sees reports whether p may see what owner built: its own, or an administrator everything. A sandbox that
// calls back builds nothing and sees nothing.
func sees(p sandbox.Principal, owner string) bool {
	return p.Sandbox == "" && (p.Admin || p.ID != "" && p.ID == owner)
}

func noBuild(buildID string) error {
	return errs.New(errs.NotFound, "no build %q", buildID).WithHint("casemate template history NAME shows them")
}

// Logs returns entries of a build's log from an offset on, at most limit; 0: all.
func (b *Builder) Logs(ctx context.Context, p sandbox.Principal, ref string, offset, limit int) ([]LogEntry, error) {
	build, err := b.Get(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	if run := b.find(build.ID); run != nil {
		page, _ := run.log.page(offset, limit)
		return page, nil
	}
	all, err := readLog(ctx, b.logPath(build.ID))
	return pageOf(all, offset, limit), err
}

// Follow calls each for the entries of a build's log from an offset on, those to come included, until the build
// is over, and returns it.
func (b *Builder) Follow(ctx context.Context, p sandbox.Principal, ref string, offset int, each func(LogEntry) error) (Build, error) {
	build, err := b.Get(ctx, p, ref)
	if err != nil {
		return Build{}, err
	}
	run := b.find(build.ID)
	if run == nil {
		return b.replay(ctx, p, build.ID, offset, each)
	}
	for {
		page, more := run.log.page(offset, 0)
		for _, e := range page {
			if err := each(e); err != nil {
				return Build{}, err
			}
		}
		offset += len(page)
		if len(page) > 0 {
			continue
		}
		select {
		case <-more:
		case <-run.over:
			if page, _ := run.log.page(offset, 1); len(page) == 0 {
				return run.snapshot(), nil
			}
		case <-ctx.Done():
			return Build{}, ctx.Err()
		}
	}
}

func (b *Builder) replay(ctx context.Context, p sandbox.Principal, buildID string, offset int, each func(LogEntry) error) (Build, error) {
	all, err := readLog(ctx, b.logPath(buildID))
	if err != nil {
		return Build{}, err
	}
	for _, e := range pageOf(all, offset, 0) {
		if err := each(e); err != nil {
			return Build{}, err
		}
	}
	return b.Get(ctx, p, buildID)
}

// Wait returns a build once it is over.
func (b *Builder) Wait(ctx context.Context, p sandbox.Principal, ref string) (Build, error) {
	return b.Follow(ctx, p, ref, maxLogEntries*2, func(LogEntry) error { return nil })
}

// Cancel ends a build, and returns it once nothing is left of it. One that is over stays as it is.
func (b *Builder) Cancel(ctx context.Context, p sandbox.Principal, ref string) (Build, error) {
	build, err := b.Get(ctx, p, ref)
	if err != nil {
		return Build{}, err
	}
	run := b.find(build.ID)
	if run == nil {
		return b.byID(ctx, p, build.ID)
	}
	run.cancel(errCanceled)
	select {
	case <-run.over:
		return run.snapshot(), nil
	case <-ctx.Done():
		return Build{}, ctx.Err()
	}
}

// Query selects builds.
type Query struct {
	// Name is a template's; "": any.
	Name string
	// Latest leaves only the newest of each template that is ready, or the newest where none is.
	Latest bool
	Limit  int // 0: no limit
}

// List returns builds, the newest first. Of the templates of a name that several keys have, an administrator's own goes
// before all others.
func (b *Builder) List(ctx context.Context, p sandbox.Principal, q Query) ([]Build, error) {
	sq := store.BuildQuery{Name: q.Name}
	switch {
	case p.Sandbox != "":
		return nil, nil
	case !p.Admin:
		sq.Owner = p.ID
	}
	if !q.Latest && (sq.Owner != "" || q.Name == "") {
		sq.Limit = q.Limit
	}
	rows, err := b.db.Builds(ctx, sq)
	if err != nil {
		return nil, err
	}
	isOwn := func(r store.Build) bool { return r.Owner == p.ID }
	if q.Name != "" && slices.ContainsFunc(rows, isOwn) {
		rows = slices.DeleteFunc(rows, func(r store.Build) bool { return !isOwn(r) })
	}
	var all []Build
	for _, row := range rows {
		build, err := ofBuildRow(row)
		if err != nil {
			return nil, err
		}
		if run := b.find(build.ID); run != nil {
			build = run.snapshot()
		}
		all = append(all, build)
	}
	if q.Latest {
		all = latest(all)
	}
	if q.Limit > 0 {
		all = all[:min(len(all), q.Limit)]
	}
	return all, nil
}

// latest leaves one build of each template: the newest that is ready, or the newest where none is.
func latest(all []Build) []Build {
	var out []Build
	at := map[[2]string]int{}
	for _, build := range all {
		key := [2]string{build.Owner, build.Name}
		i, known := at[key]
		switch {
		case !known:
			at[key] = len(out)
			out = append(out, build)
		case out[i].State != Ready && build.State == Ready:
			out[i] = build
		}
	}
	return out
}

// Delete removes a template: all its builds, their logs, and the commits that came of them with their tags.
// Sandboxes that were started from them keep what they need. Kinds: NotFound, FailedPrecondition (it is being
// built).
func (b *Builder) Delete(ctx context.Context, p sandbox.Principal, name string) error {
	all, err := b.List(ctx, p, Query{Name: name})
	if err != nil {
		return err
	}
	if len(all) == 0 || name == "" {
		return errs.New(errs.NotFound, "no template %q was built here", name).WithHint("casemate template ls shows them")
	}
	for _, build := range all {
		if build.Owner != all[0].Owner {
			return errs.New(errs.FailedPrecondition, "several keys have a template %s", name).
				WithHint("remove it with the key whose template it is, or its builds' commits: casemate template history %s", name)
		}
		if !build.State.Over() {
			return errs.New(errs.FailedPrecondition, "template %s is being built: %s", name, build.ID).WithHint("cancel that first")
		}
	}
	for _, build := range all {
		if build.Commit != "" {
			if _, err := b.m.DeleteCommit(ctx, p, build.Commit); err != nil && !errs.Is(err, errs.NotFound) {
				return err
			}
		}
		if err := b.db.Write(store.DropBuild(build.ID)); err != nil {
			return err
		}
		if err := os.Remove(b.logPath(build.ID)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return b.m.TemplateGone(ctx, p, all[0].Owner, name)
}

// save writes a build's row.
func (b *Builder) save(build Build) error {
	body, err := json.Marshal(build)
	if err != nil {
		return fmt.Errorf("encode build %s: %w", build.ID, err)
	}
	return b.db.Write(store.PutBuild(store.Build{
		ID: build.ID, Owner: build.Owner, Name: build.Name, State: string(build.State), Created: build.CreatedAt.UnixNano(),
		Target: build.Commit, Body: body,
	}))
}

func ofBuildRow(r store.Build) (Build, error) {
	var b Build
	if err := json.Unmarshal(r.Body, &b); err != nil {
		return Build{}, fmt.Errorf("decode build %s: %w", r.ID, err)
	}
	return b, nil
}
