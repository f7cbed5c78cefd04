package oci

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/oci/worker"
	"casemate.dev/internal/rootfs"
)

// Store is what images need of package rootfs; rootfs.Store implements it.
type Store interface {
	NewDraft() (*rootfs.Draft, error)
	ImportedLayer(id string) (rootfs.LayerNote, string, error)
	ImportedLayers() ([]string, error)
	ShowsDir(layers []string, path string) (bool, error)
	PutImage(ctx context.Context, img rootfs.Image) error
	Image(id string) (rootfs.Image, error)
	PutTemplate(t rootfs.Stored) error
	StoredTemplate(name string) (rootfs.Stored, error)
	StoredTemplates() []rootfs.Stored
	DropTemplate(name string) error
	HoldTemplates() (release func())
	Stack(from rootfs.StackOf) (rootfs.Stack, func(), error)
	TreeDigest(ctx context.Context, dirs []string) (rootfs.Digest, error)
}

// Config is what New needs.
type Config struct {
	// Dir is the directory for images, which New makes.
	Dir   string
	Store Store
	// ReserveID hands out the first of 65,536 ids of the host that nothing runs as, and what gives them back.
	ReserveID func() (uint32, func(), error)
	Registry  registry.Config
	// Limits bound what one layer unpacks to, and their Bytes also an image as a whole.
	Limits layer.Limits
	// DockerConfig is a file of credentials as docker login writes it; "": none.
	DockerConfig string
	// Log defaults to nowhere, Unpack to worker.Unpack.
	Log    *slog.Logger
	Unpack func(ctx context.Context, j worker.Job) (layer.Result, error)
}

// reserve is what imports leave free at least of the data directory's disk.
const reserve = 1 << 30

// jobs is how many blobs are fetched at once for one image.
const jobs = 3

// Service moves images. Safe for concurrent use.
type Service struct {
	cfg     Config
	log     *slog.Logger
	remote  *registry.Client
	images  *flights // imports under way, by the manifest's digest
	fetches *flights // blobs under way, by digest
	unpacks chan struct{}

	// active counts operations: blobs are swept when there are none.
	active atomic.Int64
	// sweeping is held for reading while an operation begins, and for writing by the sweep.
	sweeping sync.RWMutex
}

// New opens the directory, and removes what operations left that were killed.
func New(cfg Config) (*Service, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Unpack == nil {
		cfg.Unpack = worker.Unpack
	}
	s := &Service{
		cfg: cfg, log: cfg.Log, remote: registry.New(cfg.Registry), images: newFlights(), fetches: newFlights(),
		unpacks: make(chan struct{}, runtime.NumCPU()),
	}
	if err := os.RemoveAll(s.workDir()); err != nil {
		return nil, err
	}
	for _, dir := range []string{s.blobDir(), s.partialDir(), s.workDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	s.sweep(keepPartial) // an import that a server's death cut short goes on with what it had
	return s, nil
}

// Close drops idle connections. Operations under way end with their contexts.
func (s *Service) Close() { s.remote.Close() }

// Images returns the templates that were made of images, by name.
func (s *Service) Images() []rootfs.Stored {
	var all []rootfs.Stored
	for _, t := range s.cfg.Store.StoredTemplates() {
		if t.Image != "" {
			all = append(all, t)
		}
	}
	return all
}

// Delete removes a template that was made of an image. What sandboxes and commits stand on stays. NotFound: there
// is none of that name.
func (s *Service) Delete(name string) (rootfs.Stored, error) {
	defer s.begin()()
	t, err := s.cfg.Store.StoredTemplate(name)
	if err == nil && t.Image == "" {
		err = errs.New(errs.NotFound, "template %s was not made of an image", name)
	}
	if err != nil {
		return t, err
	}
	return t, s.cfg.Store.DropTemplate(name)
}

func (s *Service) blobDir() string    { return filepath.Join(s.cfg.Dir, "blobs") }
func (s *Service) partialDir() string { return filepath.Join(s.cfg.Dir, "partial") }
func (s *Service) workDir() string    { return filepath.Join(s.cfg.Dir, "tmp") }

// begin notes an operation; the caller calls end.
func (s *Service) begin() (end func()) {
	s.sweeping.RLock()
	s.active.Add(1)
	s.sweeping.RUnlock()
	release := s.cfg.Store.HoldTemplates()
	return func() {
		release()
		s.active.Add(-1)
		s.sweep(0)
	}
}

// keepPartial is how long the beginning of a blob is kept for an import that goes on with it.
const keepPartial = 24 * time.Hour

// sweep removes blobs that no imported layer came from and that are of some age, unless something is under way.
func (s *Service) sweep(age time.Duration) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	if s.active.Load() > 0 {
		return
	}
	ids, err := s.cfg.Store.ImportedLayers()
	if err != nil {
		s.log.Warn("list imported layers", "error", err)
		return
	}
	needed := map[string]bool{}
	for _, id := range ids {
		if n, err := s.layerNote(id); err == nil {
			needed[n.Digest.Hex] = true
		}
	}
	for dir, old := range map[string]time.Duration{s.blobDir(): age, s.partialDir(): keepPartial} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			s.log.Warn("list blobs", "error", err)
			continue
		}
		for _, e := range entries {
			st, err := e.Info()
			if err != nil || dir == s.blobDir() && needed[e.Name()] || time.Since(st.ModTime()) < old {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				s.log.Warn("remove a blob", "error", err)
			}
		}
	}
}
