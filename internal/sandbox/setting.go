package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"sync"

	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// settingMap is a map that the server keeps as JSON under one of its settings, and reads once.
type settingMap[V any] struct {
	name    string // the setting's
	what    string // what errors call it
	db      *store.DB
	journal journal.Recorder

	changing sync.Mutex // held from reading to writing

	mu  sync.Mutex // guards the field below
	all map[string]V
}

func newSettingMap[V any](cfg Config, name, what string) *settingMap[V] {
	return &settingMap[V]{name: name, what: what, db: cfg.DB, journal: cfg.Journal}
}

// read returns all of it. The caller must not change the map.
func (s *settingMap[V]) read(ctx context.Context) (map[string]V, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all != nil {
		return s.all, nil
	}
	text, err := s.db.Setting(ctx, s.name)
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

// set gives key a value, or with nil takes away the one that it has, and records e, a fact of the server's: both or
// neither.
func (s *settingMap[V]) set(ctx context.Context, key string, v *V, e journal.Event) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	return s.setLocked(ctx, key, v, e)
}

// setLocked is set for those who decide by what there is. Preconditions: the caller holds changing.
func (s *settingMap[V]) setLocked(ctx context.Context, key string, v *V, e journal.Event) error {
	now, err := s.read(ctx)
	if err != nil {
		return err
	}
	next := maps.Clone(now)
	delete(next, key)
	if v != nil {
		next[key] = *v
	}
	text, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode %s: %w", s.what, err)
	}
	e.Sandbox = journal.ServerStream
	if _, err := s.journal.Record(ctx, e, store.PutSetting(s.name, string(text))); err != nil {
		return fmt.Errorf("store %s: %w", s.what, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = next
	return nil
}
