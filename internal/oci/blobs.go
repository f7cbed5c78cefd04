package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/rootfs"
)

func (s *Service) blobPath(h v1.Hash) string { return filepath.Join(s.blobDir(), h.Hex) }

// hasBlob reports whether a blob is there.
func (s *Service) hasBlob(h v1.Hash) bool {
	_, err := os.Stat(s.blobPath(h))
	return err == nil
}

// fetchBlob brings a blob of a registry here, unless it is here, and shares the work with others who want it.
func (s *Service) fetchBlob(ctx context.Context, repo *registry.Repo, d v1.Descriptor, done *atomic.Int64) error {
	if s.hasBlob(d.Digest) {
		done.Store(d.Size)
		return nil
	}
	counter := &atomic.Int64{}
	var seen *atomic.Int64
	stop := make(chan struct{})
	defer close(stop)
	_, err := s.fetches.do(ctx, d.Digest.Hex, counter, func(shared any) {
		seen, _ = shared.(*atomic.Int64)
		go mirror(seen, done, stop)
	}, func(ctx context.Context) (any, error) { return nil, s.fetchAlone(ctx, repo, d, counter) })
	if err == nil {
		done.Store(d.Size)
	}
	return err
}

func (s *Service) fetchAlone(ctx context.Context, repo *registry.Repo, d v1.Descriptor, done *atomic.Int64) error {
	if s.hasBlob(d.Digest) {
		return nil
	}
	path := filepath.Join(s.partialDir(), d.Digest.Hex)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := s.room(d.Size); err != nil {
		return err
	}
	if err := repo.Fetch(ctx, d, f, done); err != nil {
		return err
	}
	return s.keepBlob(f, path, d.Digest)
}

// keepBlob gives a file whose digest was checked its name, for good.
func (s *Service) keepBlob(f *os.File, path string, h v1.Hash) error {
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(path, s.blobPath(h))
}

// room refuses what would fill the disk.
func (s *Service) room(bytes int64) error {
	free, err := rootfs.FreeBytes(s.cfg.Dir)
	if err != nil {
		return err
	}
	if bytes > free-reserve {
		return errs.New(errs.ResourceExhausted, "there is no room for %d MB more: %d MB are free", bytes>>20, free>>20).
			WithHint("make room on the disk of the server's data directory")
	}
	return nil
}

// takeBlob keeps what r holds as a blob; want, where it is set, is what its digest must be. It returns the digest
// and the size.
func (s *Service) takeBlob(r io.Reader, want *v1.Hash) (v1.Hash, int64, error) {
	f, err := os.CreateTemp(s.workDir(), "blob-")
	if err != nil {
		return v1.Hash{}, 0, err
	}
	defer func() {
		_ = f.Close()
		if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("remove a blob", "error", err)
		}
	}()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), r)
	if err != nil {
		return v1.Hash{}, 0, err
	}
	h := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	if want != nil && *want != h {
		return h, n, badImage("the archive's blob %s has the digest %s: it is damaged", want, h)
	}
	if s.hasBlob(h) {
		return h, n, nil
	}
	if err := s.keepBlob(f, f.Name(), h); err != nil {
		return h, n, fmt.Errorf("keep blob %s: %w", h, err)
	}
	return h, n, nil
}
