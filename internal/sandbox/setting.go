package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// settingMap is a map that the server keeps as JSON under one of its settings, and reads once.
type settingMap[V any] struct {
	name string // the setting's
	what string // what errors call it

	changing sync.Mutex // held from reading to writing

	mu  sync.Mutex // guards the field below
	all map[string]V
}

// read returns all of it. The caller must not change the map.
func (s *settingMap[V]) read(ctx context.Context, db *store.DB) (map[string]V, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all != nil {
		return s.all, nil
	}
	text, err := db.Setting(ctx, s.name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s.what, err)
	}
	all := map[string]V{}
	if text != "" {
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			return nil, fmt.Errorf("decode %s: %w", s.what, err)
		}
	}
	s.all = all
	return all, nil
}

// put keeps next in its place and records e, a fact of the server's, both or neither. Preconditions: the caller holds
// changing, and next is no longer the caller's.
func (s *settingMap[V]) put(ctx context.Context, j journal.Recorder, e journal.Event, next map[string]V) error {
	text, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode %s: %w", s.what, err)
	}
	e.Sandbox = journal.ServerStream
	if _, err := j.Record(ctx, e, store.PutSetting(s.name, string(text))); err != nil {
		return fmt.Errorf("store %s: %w", s.what, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = next
	return nil
}
