package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
)

// Config is what Open needs.
type Config struct {
	// DataDir is the server's; the store takes the directory rootfs in it for itself.
	DataDir string
	// Log defaults to nowhere.
	Log *slog.Logger
	// Mechanism forces one of the names of DiskLimit.Mechanism; "" probes for the best one.
	Mechanism string
	// ImageBytes is the size of the preallocated btrfs image; 0 takes a quarter of what is free, at most
	// 32 GiB. An image that exists keeps its size.
	ImageBytes int64
	// Spares is how many writable layers are made ahead; 0 means 32, below 0 none.
	Spares int
}

// Store keeps the layers of one server: the writable ones, each with a limit, and the templates'.
// Methods are safe for concurrent use.
//
// The process must be in a private mount namespace (linux/mount.EnterPrivate): the store mounts its
// image where only the server sees it. Layers hold setuid files and capabilities that sandboxes made,
// which the host's users must never reach.
type Store struct {
	dir  string
	log  *slog.Logger
	lock *os.File
	disk disk

	spares    chan *layer
	discarded chan struct{}
	stop      context.CancelFunc
	workers   sync.WaitGroup
	closeOnce sync.Once
	closeErr  error

	templates templates
	kept      kept
	staged    staged
	// comparing holds a token for each comparison of two points.
	comparing chan struct{}
}

// disk is one way to hold layers to their limits. Layers are named directories.
type disk interface {
	mechanism() string
	// root is the directory below which layers lie, in live/, spare/ and trash/.
	root() string
	// create makes an empty layer, a directory, at path. It holds no limit yet.
	create(path string) (*layer, error)
	// files returns the directory in a layer that its limit holds for.
	files(path string) string
	// limit sets the limits of a layer and returns those that hold.
	limit(l *layer, bytes, inodes int64) (DiskLimit, error)
	// adopt takes up a layer of an earlier server, with its limits.
	adopt(path string) error
	// moved tells that a layer was renamed.
	moved(from, to string)
	// remove deletes a layer with everything in it, however full, deep or nested.
	remove(path string) error
	// used returns the bytes that a layer holds.
	used(path string) (int64, error)
	// rest takes back what a layer was given beyond what it holds, since nobody writes to it for a while, and
	// rouse gives it room again. ResourceExhausted: there is none.
	rest(path string) error
	rouse(path string) error
	// lend raises a layer's limit by a reserve for mounts and deletes until back is called.
	lend(path string) (back func() error, err error)
	// snapshot returns a directory that shows the layer as it is now and does not change, and what
	// drops it. Where the mechanism has no snapshots, it is the layer itself.
	snapshot(path string) (dir string, drop func() error, err error)
	// flush writes out what a layer's files hold in memory, so that a keep soon after it is short; without
	// all only where it is much.
	flush(path string, all bool) error
	// keep makes dst, in commits/, what the layer at path holds now, for good. Nobody may write to the layer until
	// it calls fixed, or returns. It returns how many bytes that takes.
	// ResourceExhausted: there is no room to keep it.
	keep(ctx context.Context, path, dst string, fixed func()) (int64, error)
	// unchanged reports whether it is certain that the layer at path holds what is kept at kept.
	unchanged(path, kept string) bool
	// begin makes dst, in snapshots/, an empty directory, to be filled and then kept.
	begin(dst string) error
	// grow makes dst, in snapshots/, a copy of what is kept at path, to be changed and then kept.
	grow(ctx context.Context, path, dst string) error
	// annex takes room for bytes that are to be added to path, in snapshots/, and holds it to a limit, until back is
	// called. ResourceExhausted: there is no room, or the limit is too small.
	annex(path string, bytes, limit int64) (back func(), err error)
	// dropKept deletes what is kept at path.
	dropKept(path string) error
	// frees returns how many bytes deleting what is kept at path would give back at least.
	frees(path string) (int64, error)
	close() error
}

// layer is a writable layer that was just made; dir is open so that no path is resolved on the way
// to its limit.
type layer struct {
	path string
	dir  *os.File
}

func (l *layer) close() { _ = l.dir.Close() }

const defaultSpares = 32

// Open opens the store in cfg.DataDir, and makes what is missing. A second server on the same
// directory is refused; one that was killed left nothing that stands in the way.
// Kinds: FailedPrecondition (in use), Unsupported (no way to limit layers).
func Open(ctx context.Context, cfg Config) (*Store, error) {
	s := &Store{dir: filepath.Join(cfg.DataDir, "rootfs"), log: cfg.Log}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	undo := cleanup.New()
	defer undo.Run()
	// 0700, and no way around it: files of sandboxes keep their setuid bits and capabilities here.
	for _, d := range []string{cfg.DataDir, s.dir, s.templateDir()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(s.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if s.lock, err = lockFile(filepath.Join(s.dir, "lock")); err != nil {
		return nil, err
	}
	undo.Add(func() { _ = s.lock.Close() })
	if s.disk, err = openDisk(s.dir, cfg, s.log); err != nil {
		return nil, err
	}
	undo.Add(func() { _ = s.disk.close() })
	s.discarded = make(chan struct{}, 1)
	s.comparing = make(chan struct{}, maxComparing)
	s.discarded <- struct{}{} // look once for what an earlier server left
	if err := s.recoverLayers(); err != nil {
		return nil, err
	}
	if err := s.openTemplates(ctx); err != nil {
		return nil, err
	}
	s.startWorkers(cfg.Spares)
	undo.Release()
	return s, nil
}

// lockFile takes the store for this process; the kernel gives it back however the process ends.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errs.Wrap(err, errs.FailedPrecondition, "another server uses this data directory").
				WithHint("stop it, or start this one with another --data-dir")
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// Mechanism returns how layers are limited, as in DiskLimit.
func (s *Store) Mechanism() string { return s.disk.mechanism() }

func (s *Store) area(name string) string     { return filepath.Join(s.disk.root(), name) }
func (s *Store) live(id string) string       { return filepath.Join(s.disk.root(), "live", id) }
func (s *Store) templateDir() string         { return filepath.Join(s.dir, "templates") }
func (s *Store) useDir() string              { return filepath.Join(s.dir, "uses") }
func (s *Store) emptyDir() string            { return filepath.Join(s.templateDir(), "empty") }
func notThere(err error) bool                { return errors.Is(err, fs.ErrNotExist) }
func (s *Store) warn(what string, err error) { s.log.Warn(what, "error", err) }
func (s *Store) warnIf(what string, e error) {
	if e != nil {
		s.warn(what, e)
	}
}

// recoverLayers takes up what an earlier server left: live layers keep their limits, the rest goes.
func (s *Store) recoverLayers() error {
	for _, name := range []string{"live", "spare", "trash", "snapshots", "commits", "points"} {
		if err := os.MkdirAll(s.area(name), 0o700); err != nil {
			return err
		}
	}
	live, err := os.ReadDir(s.area("live"))
	if err != nil {
		return err
	}
	for _, e := range live {
		if err := s.disk.adopt(s.live(e.Name())); err != nil {
			return fmt.Errorf("adopt layer %s: %w", e.Name(), err)
		}
	}
	spare, err := os.ReadDir(s.area("spare"))
	if err != nil {
		return err
	}
	for _, e := range spare {
		if err := s.throwAway(filepath.Join(s.area("spare"), e.Name())); err != nil {
			return err
		}
	}
	snapshots, err := os.ReadDir(s.area("snapshots"))
	if err != nil {
		return err
	}
	for _, e := range snapshots { // read-only ones can't be renamed
		if err := s.disk.dropKept(filepath.Join(s.area("snapshots"), e.Name())); err != nil {
			return fmt.Errorf("drop snapshot: %w", err)
		}
	}
	if err := s.recoverPoints(); err != nil {
		return err
	}
	if err := s.dropStages(); err != nil {
		return err
	}
	return s.recoverKept()
}

// Close stops the store's work and unmounts it. Layers of running sandboxes go on: their own mounts
// hold them. Idempotent.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		s.stop()
		s.workers.Wait()
		for {
			select {
			case l := <-s.spares:
				l.close()
				continue
			default:
			}
			break
		}
		s.closeErr = errors.Join(s.disk.close(), s.lock.Close())
	})
	return s.closeErr
}
