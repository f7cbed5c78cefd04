package server

import (
	"context"
	"fmt"
	"sync"

	"casemate.dev/internal/journal"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/secret"
)

// openVault opens the secrets, with the master key of the keys directory, and keeps those with an
// external source fresh until Close.
func (s *Server) openVault(ctx context.Context, events journal.Recorder) error {
	key, err := policy.KeptSecret(s.cfg.KeysDir, secret.KeyFile)
	if err != nil {
		return err
	}
	defer clear(key)
	if s.vault, err = secret.Open(ctx, secret.Config{DB: s.db, Journal: events, Key: key, Log: s.log}); err != nil {
		return fmt.Errorf("open secrets: %w", err)
	}
	s.undo.Add(s.vault.Close)
	refreshing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { s.vault.Run(refreshing) })
	s.undo.Add(func() {
		cancel()
		wg.Wait()
	})
	return nil
}
