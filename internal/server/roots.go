package server

import (
	"context"
	"errors"
	"fmt"

	"casemate.dev/internal/api"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
)

// openReal opens the store of layers and the namespace backend.
func (s *Server) openReal(ctx context.Context, guest []byte) (sandbox.Roots, api.BuildFunc, error) {
	roots, err := rootfs.Open(ctx, rootfs.Config{DataDir: s.cfg.DataDir, ImageBytes: s.cfg.StoreBytes, Log: s.log})
	if err != nil {
		return nil, nil, fmt.Errorf("open root file systems: %w", err)
	}
	s.undo.Add(func() { s.logError("close root file systems", roots.Close()) })
	backend, err := namespace.New(namespace.Config{
		ServerID: s.id, RunDir: s.cfg.RunDir, Guest: guest, Spares: s.cfg.Spares,
		SpareLimits: sandbox.DefaultLimits(s.cfg.Defaults.Limits), Log: s.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open isolation: %w", err)
	}
	s.undo.Add(func() { s.logError("close isolation", backend.Close()) })
	s.backends = map[string]isolation.Backend{backend.Name(): backend}
	return roots, nil, nil
}

// logError is for what goes wrong when the server is taken down: nobody waits for it.
func (s *Server) logError(what string, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		s.log.Error(what, "err", err)
	}
}
