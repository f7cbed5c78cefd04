package server

import (
	"context"
	"fmt"
	"path/filepath"

	"casemate.dev/internal/journal"
	"casemate.dev/internal/journal/anchor"
)

// journalDir is the directory of the data directory that holds the journal's proofs.
const journalDir = "journal"

// openJournal opens the journal, with its key from the keys directory: who can change the record in the data
// directory can't sign it.
func (s *Server) openJournal(ctx context.Context) (*journal.Log, error) {
	key, err := journal.LoadKey(s.cfg.KeysDir, "casemate.dev/journal/"+s.id)
	if err != nil {
		return nil, err
	}
	events, err := journal.OpenSigned(ctx, s.db, journal.SignedOptions{
		Options: journal.Options{Strict: s.cfg.Defaults.Sync, Log: s.log},
		Dir:     filepath.Join(s.cfg.DataDir, journalDir), Key: key,
		Keep: journal.Keep{Age: s.cfg.JournalAge, Bytes: s.cfg.JournalBytes},
	})
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	s.events = events
	s.undo.Add(func() { s.failed("close journal", events.Close()) })
	anchors, err := anchor.Start(anchor.Config{
		Places: s.cfg.Anchors, Every: s.cfg.AnchorEvery, Checkpoint: events.Checkpoint, Log: s.log,
	})
	if err != nil {
		return nil, err
	}
	s.undo.Add(anchors.Close)
	return events, nil
}
