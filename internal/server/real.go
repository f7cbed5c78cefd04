package server

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"casemate.dev/internal/api"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
)

// openReal opens the store of layers, and the backend that mounts them. It is closed the other way
// round: a layer's image is unmounted after the backend has let go of it.
func (s *Server) openReal(ctx context.Context, guest []byte) (sandbox.Roots, api.BuildFunc, error) {
	roots, err := rootfs.Open(ctx, rootfs.Config{DataDir: s.cfg.DataDir, Log: s.log, ImageBytes: s.cfg.StoreBytes})
	if err != nil {
		return nil, nil, fmt.Errorf("open layers: %w", err)
	}
	s.undo.Add(func() { s.failed("close layers", roots.Close()) })
	b, err := namespace.New(namespace.Config{
		ServerID: s.id, RunDir: filepath.Join(s.cfg.RunDir, namespace.Name), Guest: guest, Spares: s.cfg.Spares,
		SpareLimits: sandbox.DefaultLimits(s.cfg.Defaults.Limits), Keeper: s.cfg.KeeperProgram, Log: s.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open backend %s: %w", namespace.Name, err)
	}
	s.undo.Add(func() { s.failed("close backend "+namespace.Name, b.Close()) })
	s.keeper = b.Keeper()
	s.openGateway(b)
	if err := s.openImages(roots, b); err != nil {
		return nil, nil, err
	}
	kernels, err := s.openGvisor(guest, b.Keeper())
	if err != nil {
		return nil, nil, err
	}
	s.backends = map[string]isolation.Backend{namespace.Name: b, gvisor.Name: kernels}
	return roots, roots.Build, nil
}

// gvisorSpares is how many cells wait for a runsc, unless fewer guests are to wait at all. Making one takes a tenth of what
// starting runsc in it does.
const gvisorSpares = 1

// cellSpares returns how many cells wait where so many guests do, as Config.Spares has it.
func cellSpares(spares int) int {
	if spares == 0 {
		return gvisorSpares // not the default of guests
	}
	return min(spares, gvisorSpares)
}

// openGvisor opens the backend with kernels of its own. Its cells have control groups, id claims and a run directory
// apart from those of the sandboxes without, so that neither takes the other's for left over.
func (s *Server) openGvisor(guest []byte, observer *keeper.Keeper) (*gvisor.Backend, error) {
	if err := gvisor.CheckPlatform(s.cfg.RunscPlatform); err != nil {
		return nil, err
	}
	cells, err := namespace.New(namespace.Config{
		ServerID: s.id + "-" + gvisor.Name, RunDir: filepath.Join(s.cfg.RunDir, gvisor.Name), Guest: guest,
		Spares: cellSpares(s.cfg.Spares), Cells: true, Observer: observer, Log: s.log,
		SpareLimits: gvisor.CellLimits(sandbox.DefaultLimits(s.cfg.Defaults.Limits)),
	})
	if err != nil {
		return nil, fmt.Errorf("open backend %s: %w", gvisor.Name, err)
	}
	b := gvisor.New(gvisor.Config{Cells: cells, Program: s.runsc(), Platform: s.cfg.RunscPlatform})
	s.undo.Add(func() { s.failed("close backend "+gvisor.Name, b.Close()) })
	return b, nil
}

// runsc returns the path of gVisor's program: the one that was named, one beside this program, or one in the PATH; ""
// where there is none.
func (s *Server) runsc() string {
	if s.cfg.Runsc != "" {
		return s.cfg.Runsc
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "runsc")
		if _, err := os.Stat(beside); err == nil {
			return beside
		}
	}
	if path, err := exec.LookPath("runsc"); err == nil && filepath.IsAbs(path) {
		return path
	}
	return ""
}
