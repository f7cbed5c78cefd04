package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"casemate.dev/internal/api"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestbin"
	"casemate.dev/internal/sandbox"
)

// guestProgram returns the guest's program, which injected backends do not need.
func guestProgram(cfg Config) ([]byte, error) {
	if cfg.Backends != nil {
		return nil, nil
	}
	return guestbin.Bytes()
}

// openBelow opens what the domain stands on: root file systems and isolation backends, the default one among them.
func (s *Server) openBelow(ctx context.Context, guest []byte) (roots sandbox.Roots, build api.BuildFunc, err error) {
	s.backends, roots = s.cfg.Backends, s.cfg.Roots
	if s.backends == nil {
		if roots, build, err = s.openReal(ctx, guest); err != nil {
			return nil, nil, err
		}
	}
	s.roots = roots
	return roots, build, s.checkIsolation(ctx)
}

// checkIsolation refuses a default isolation that can't start anything here: each create would fail, one by one.
func (s *Server) checkIsolation(ctx context.Context) error {
	name := s.cfg.Defaults.Isolation
	if name == "" {
		return nil
	}
	b := s.backends[name]
	if b == nil {
		return errs.New(errs.InvalidArgument, "there is no isolation %q", name).
			WithHint("use one of %s", strings.Join(slices.Sorted(maps.Keys(s.backends)), ", "))
	}
	for _, c := range b.Capabilities(ctx) {
		if c.Required && !c.OK {
			return errs.New(errs.Unsupported, "sandboxes are to have isolation %s, which this machine can't give: %s: %s", name, c.Name, c.Detail).
				WithHint("%s", c.Remedy)
		}
	}
	return nil
}

// lockRunDir keeps a second server out of the run directory.
func lockRunDir(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "server.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errs.New(errs.FailedPrecondition, "another server uses the run directory %s", dir).
				WithHint("give this one its own --run-dir, --data-dir and --keys-dir, or stop the other with `casemate down`")
		}
		return nil, os.NewSyscallError("flock", err)
	}
	return func() { _ = f.Close() }, nil // closing unlocks; the file stays, since removing it races with the next server
}

func errNotAbsolute(path string) error {
	return errs.New(errs.InvalidArgument, "the directory %q is no absolute path", path)
}
