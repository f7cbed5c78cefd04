package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// A memory image is a directory with what runsc saves (pkg/sentry/state/checkpointfiles), and beside it what a restore
// has to know before it begins. That is written last: where it is, the image is whole.
const (
	stateFile = "checkpoint.img"
	indexFile = "pages_meta.img"
	pagesFile = "pages.img"
	aboutFile = "about.json"
)

// about is what aboutFile holds.
type about struct {
	Version int               `json:"v"`
	Runsc   string            `json:"runsc"` // that made it
	Profile isolation.Profile `json:"profile"`
	Network bool              `json:"network"`
	Limits  isolation.Limits  `json:"limits"`
	// Bundle is the specification of the sandbox: runsc restores only what has the same.
	Bundle json.RawMessage      `json:"bundle"`
	Walls  isolation.ImageWalls `json:"walls"`
	Mark   uint64               `json:"mark,omitempty"` // see record.Mark
	Made   time.Time            `json:"made"`
}

const aboutVersion = 1

// maxAbout bounds aboutFile.
const maxAbout = 1 << 20

// Checkpoint implements isolation.Instance.
func (i *Instance) Checkpoint(ctx context.Context, dir string) (stood time.Duration, err error) {
	if len(i.record.Bundle) == 0 {
		return 0, errs.New(errs.Unsupported, "the sandbox was started by an earlier version of Casemate, whose sandboxes have no memory images").
			WithHint("commit its files and start it anew")
	}
	a := i.Applied()
	thaw := func() error { return nil }
	// What runs writes to the disk that half of an image may have filled: it goes on when that has its room again.
	undo := cleanup.New(func() { err = errors.Join(err, clearDir(dir), thaw()) })
	defer undo.Run()
	u, err := i.Usage(ctx)
	if err != nil {
		return 0, err
	}
	image, err := openFiles(dir, u.MemoryBytes)
	if err != nil {
		return 0, err
	}
	defer image.close()
	since, back, err := i.quiet(ctx)
	if err != nil {
		return 0, err
	}
	thaw = back
	if err := i.save(ctx, image); err != nil {
		return 0, err
	}
	if err := writeAbout(dir, about{
		Version: aboutVersion, Runsc: i.record.Version, Profile: a.Profile, Network: i.record.Network, Limits: i.limitsNow(),
		Bundle: i.record.Bundle, Walls: isolation.ImageWalls{Capabilities: a.Capabilities, NoNewPrivs: a.NoNewPrivs},
		Mark: i.record.Mark, Made: time.Now().UTC(),
	}); err != nil {
		return 0, err
	}
	undo.Release()
	return time.Since(since), nil
}

// quiet brings the guest to close its connections, and freezes the sandbox before another can come. It returns when it
// began to freeze, and what makes the sandbox as it was.
func (i *Instance) quiet(ctx context.Context) (since time.Time, back func() error, err error) {
	i.mu.Lock()
	was := i.frozen
	i.mu.Unlock()
	if was { // its guest must answer
		if err := i.Thaw(ctx); err != nil {
			return since, nil, err
		}
	}
	i.gate.Lock()
	defer i.gate.Unlock()
	before := func(context.Context) error { return nil }
	if was {
		before = func(ctx context.Context) error { return i.hold(ctx, true, methodPause) }
	}
	guest := guestwire.NewClient(i.Cell.Dial) // past the gate
	st, err := guest.Status(ctx)
	if err == nil {
		i.mu.Lock()
		i.told = st // for Usage meanwhile
		i.mu.Unlock()
		err = guest.Prepare(ctx)
	}
	if err == nil {
		since = time.Now()
		err = i.hold(ctx, true, methodPause)
	}
	if err != nil {
		return since, nil, errors.Join(err, before(context.WithoutCancel(ctx)))
	}
	return since, func() error {
		if was {
			return nil
		}
		return i.Thaw(context.WithoutCancel(ctx))
	}, nil
}

func (i *Instance) limitsNow() isolation.Limits {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.limits
}

// files are those of an image that the Sentry writes: it can open none itself.
type files []*os.File

// openFiles makes them in dir. Where that lies in memory, the room for so many bytes is taken beforehand, while nobody
// waits for it.
func openFiles(dir string, bytes int64) (files, error) {
	var all files
	for _, name := range []string{stateFile, indexFile, pagesFile} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			all.close()
			return nil, fmt.Errorf("make memory image: %w", err)
		}
		all = append(all, f)
	}
	pages := all[len(all)-1]
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(pages.Fd()), &st); err != nil || st.Type != unix.TMPFS_MAGIC || bytes <= 0 {
		return all, nil //nolint:nilerr // then room is taken as it is written
	}
	// What is taken here counts as the server's. What the Sentry took itself would count as the sandbox's, whose limit has no
	// room for its memory twice.
	if err := unix.Fallocate(int(pages.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, bytes); err != nil {
		all.close()
		return nil, explainSave(fmt.Errorf("make memory image: %w", err))
	}
	return all, nil
}

func (all files) close() {
	for _, f := range all {
		_ = f.Close()
	}
}

// save has the Sentry write its state.
func (i *Instance) save(ctx context.Context, all files) error {
	err := i.call(ctx, methodSave, &saveOptions{
		Metadata: map[string]string{"compression": "none"}, Pages: true, NoZero: true, Resume: true,
	}, all...)
	if err != nil {
		return explainSave(err)
	}
	for _, f := range all {
		if err := f.Sync(); err != nil {
			return explainSave(fmt.Errorf("write memory image: %w", err))
		}
	}
	return nil
}

// explainSave tells a full disk from the rest: the Sentry passes errors on as text.
func explainSave(err error) error {
	for _, full := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		if errors.Is(err, full) || strings.Contains(err.Error(), full.Error()) {
			return errs.Wrap(err, errs.ResourceExhausted, "the memory image does not fit into the sandbox's disk limit").
				WithHint("give the sandbox a larger disk limit, or free memory or files in it")
		}
	}
	return err
}

func writeAbout(dir string, a about) error {
	data, err := json.Marshal(a)
	if err != nil {
		return fmt.Errorf("encode memory image: %w", err)
	}
	if err := durable.Replace(filepath.Join(dir, aboutFile), data); err != nil {
		return explainSave(fmt.Errorf("write memory image: %w", err))
	}
	return nil
}

// clearDir removes what a checkpoint that failed has left, and returns when its room is there for what runs. The Sentry may have the
// files open still, and btrfs counts what was freed when it has committed that.
func clearDir(dir string) error {
	var all []error
	for _, name := range []string{aboutFile, stateFile, indexFile, pagesFile} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Truncate(path, 0), os.Remove(path)); err != nil && !errors.Is(err, os.ErrNotExist) {
			all = append(all, err)
		}
	}
	d, err := os.Open(dir)
	if err != nil {
		return errors.Join(append(all, err)...)
	}
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		all = append(all, os.NewSyscallError("syncfs", err))
	}
	return errors.Join(append(all, d.Close())...)
}

func readAbout(dir string) (about, error) {
	var a about
	info, err := os.Lstat(filepath.Join(dir, aboutFile))
	if errors.Is(err, os.ErrNotExist) {
		return a, errs.Wrap(err, errs.NotFound, "there is no memory image, or only half of one")
	}
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxAbout) {
		err = errors.New("it is no file of ours")
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(filepath.Join(dir, aboutFile))
	}
	if err == nil {
		err = json.Unmarshal(data, &a)
	}
	if err != nil {
		return a, errs.Wrap(fmt.Errorf("read memory image: %w", err), errs.FailedPrecondition, "the memory image can't be read")
	}
	return a, nil
}

// fits refuses an image that runsc would not restore, or not as the spec says.
func (a about) fits(s isolation.Spec, runsc string) error {
	const hint = "give the sandbox what the image has, or start from a commit of files alone"
	bad := func(format string, args ...any) *errs.Error {
		return errs.New(errs.FailedPrecondition, format, args...)
	}
	switch {
	case a.Version != aboutVersion:
		return bad("the memory image has version %d of its format, this server knows %d", a.Version, aboutVersion)
	case a.Runsc != runsc:
		return bad("the memory image was made by runsc %s, and this server has %s: only the same one can restore it", a.Runsc, runsc).
			WithHint("start the server with that runsc (--runsc), or go on without memory: casemate pause --files-only, then casemate resume")
	case a.Profile != s.Profile:
		return bad("the memory image is of profile %s, not %s", a.Profile, s.Profile).WithHint(hint)
	case a.Network && s.Network == nil:
		return bad("the memory image is of a sandbox with a network, and this one is to have none").WithHint(hint)
	case !a.Network && s.Network != nil:
		return bad("the memory image is of a sandbox without network, and this one is to have one").WithHint(hint)
	case a.Limits.OpenFiles != s.Limits.OpenFiles:
		return bad("the memory image has a limit of %d open files, not %d", a.Limits.OpenFiles, s.Limits.OpenFiles).WithHint(hint)
	}
	return nil
}

// restoreArgs are runsc's arguments that restore a sandbox. Memory is read while its processes go on already, each page at
// the latest when it is used; runsc has the files open by then, so that the image may go.
func restoreArgs(s isolation.Spec, p platform) []string {
	return append(globalArgs(s, p), "restore", "--detach", "--background", "--bundle="+bundleDir, "--pid-file="+pidFile,
		"--image-path="+guestwire.RuntimeImage, containerID)
}

// Restore implements isolation.Backend.
func (b *Backend) Restore(ctx context.Context, s isolation.Spec, dir string) (isolation.Instance, error) {
	version, err := b.check(ctx)
	if err != nil {
		return nil, err
	}
	a, err := readAbout(dir)
	if err != nil {
		return nil, err
	}
	if err := a.fits(s, version); err != nil {
		return nil, err
	}
	kept := record{Version: version, Bundle: a.Bundle, Mark: a.Mark}
	inst, err := b.onPlatform(ctx, func(p platform) (isolation.Instance, error) {
		kept.Platform = p.name
		spec, err := b.cell(s, kept, p)
		if err != nil {
			return nil, err
		}
		spec.Runtime.Args, spec.Runtime.Image, spec.Runtime.Walls = restoreArgs(s, p), dir, a.Walls
		return b.cells.Start(ctx, spec)
	})
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { destroyQuietly(ctx, inst) })
	defer undo.Run()
	i, err := newInstance(inst, kept, s)
	if err == nil {
		err = i.checkTraced(ctx, s.Calls)
	}
	if err != nil {
		return nil, err
	}
	// It holds the limits that the image has. The call also shows that it answers.
	if err := i.guest.Bound(ctx, guestwire.Bounds{MemoryBytes: s.Limits.MemoryBytes, Pids: s.Limits.Pids}); err != nil {
		return nil, err
	}
	undo.Release()
	return i, nil
}

// destroyLimit bounds taking down what was started in vain. What is left then is found by a sweep.
const destroyLimit = 10 * time.Second

func destroyQuietly(ctx context.Context, inst isolation.Instance) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyLimit)
	defer cancel()
	_ = inst.Destroy(ctx)
}
