package server

import (
	"context"
	"fmt"
	"path/filepath"

	"casemate.dev/internal/api"
	"casemate.dev/internal/isolation"
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
		SpareLimits: sandbox.DefaultLimits(s.cfg.Defaults.Limits), Log: s.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open backend %s: %w", namespace.Name, err)
	}
	s.undo.Add(func() { s.failed("close backend "+namespace.Name, b.Close()) })
	s.openGateway(b)
	if err := s.openImages(roots, b); err != nil {
		return nil, nil, err
	}
	s.backends = map[string]isolation.Backend{namespace.Name: b}
	return roots, roots.Build, nil
}
