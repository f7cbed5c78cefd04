package secret

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// Transform puts a header on every request of one sandbox to a host. Its value may be a key, so it is kept as
// secrets are; it has no name and no placeholder, and goes with the sandbox.
type Transform struct {
	Host   string // as ParseHost reads it
	Header string
	Value  Value
}

// maxTransforms bounds those of one sandbox, and sweepAfter is how old they are before they are swept.
const (
	maxTransforms = 100
	sweepAfter    = 10 * time.Minute
)

// SetTransforms replaces the transforms of a sandbox, which need not be there yet. Kinds: InvalidArgument,
// PermissionDenied (a sandbox asks), ResourceExhausted.
func (v *Vault) SetTransforms(_ context.Context, c Caller, sandbox string, list []Transform) error {
	if err := c.check(); err != nil {
		return err
	}
	if len(list) > maxTransforms {
		return invalid("%d headers to put on requests, limit %d", len(list), maxTransforms)
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	made := make([]*entry, len(list))
	writes := v.dropTransforms(sandbox)
	for i, t := range list {
		e, w, err := v.transform(c, sandbox, i, t)
		if err != nil {
			return err
		}
		made[i] = e
		writes = append(writes, w...)
	}
	if len(writes) == 0 {
		return nil
	}
	e := journal.Event{Sandbox: journal.ServerStream, Type: journal.SecretBound, Actor: c.ID}.
		With(journal.Server, map[string]any{"sandbox": sandbox, "transforms": len(list)})
	if _, err := v.cfg.Journal.Record(context.Background(), e, writes...); err != nil {
		return fmt.Errorf("store headers: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.forgetTransformsLocked(func(of string) bool { return of == sandbox })
	for _, e := range made {
		v.entries[e.ID] = e
	}
	v.tellLocked()
	return nil
}

// transform makes one, with the writes that keep it.
func (v *Vault) transform(c Caller, sandbox string, n int, t Transform) (*entry, []store.Write, error) {
	raw := t.Value.Reveal()
	defer clear(raw)
	if len(raw) == 0 || len(raw) > MaxValue || !HeaderValue(string(raw)) || strings.TrimSpace(string(raw)) != string(raw) {
		return nil, nil, invalid("header %.80q: its value must be text that a header can carry", t.Header)
	}
	b := Binding{
		For: Selector{Sandboxes: []string{sandbox}}, Hosts: []string{t.Host}, Always: true,
		Place: Place{Scheme: Header, Name: t.Header}, CreatedAt: v.now(),
	}
	if err := b.check(); err != nil {
		return nil, nil, err
	}
	b.ID = id.New(id.Binding)
	s := Secret{
		ID: id.New(id.Secret), Owner: c.owner(), Name: fmt.Sprintf("transform.%s.%03d", sandbox, n), Class: Other, Source: Source{Kind: Stored},
		Version: 1, CreatedAt: b.CreatedAt, ChangedAt: b.CreatedAt, Bindings: []Binding{b}, Sandbox: sandbox,
	}
	sealed, err := v.sealer.seal(s.ID, 1, raw)
	if err != nil {
		return nil, nil, fmt.Errorf("seal a header: %w", err)
	}
	row, err := put(s, nil)
	if err != nil {
		return nil, nil, err
	}
	version := store.AddSecretVersion(store.SecretVersion{Secret: s.ID, Version: 1, Created: s.CreatedAt.UnixNano(), Sealed: sealed})
	return &entry{Secret: s, value: t.Value, loaded: true}, []store.Write{row, version}, nil
}

// CopyTransforms gives a sandbox the transforms of another.
func (v *Vault) CopyTransforms(ctx context.Context, c Caller, from, to string) error {
	v.mu.Lock()
	var list []Transform
	for _, e := range slices.SortedFunc(maps.Values(v.entries), func(a, b *entry) int { return strings.Compare(a.Name, b.Name) }) {
		if e.Sandbox == from && (c.Admin || e.Owner == c.ID) {
			v.loadLocked(e)
			list = append(list, Transform{Host: e.Bindings[0].Hosts[0], Header: e.Bindings[0].Place.Name, Value: NewValue(e.value.Reveal())})
		}
	}
	v.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	if slices.ContainsFunc(list, func(t Transform) bool { return t.Value.Empty() }) {
		return errs.New(errs.FailedPrecondition, "the headers that are put on the requests of sandbox %s can't be read", from)
	}
	return v.SetTransforms(ctx, c, to, list)
}

// SweepTransforms removes those of sandboxes that are gone.
func (v *Vault) SweepTransforms(gone func(sandbox string) bool) error {
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.Lock()
	dead := make(map[string]bool)
	for _, e := range v.entries {
		// They are set before their sandbox is made, which may take a while.
		if e.Sandbox != "" && v.cfg.Clock.Now().Sub(e.CreatedAt) > sweepAfter {
			dead[e.Sandbox] = false
		}
	}
	v.mu.Unlock()
	var writes []store.Write
	for of := range dead {
		if dead[of] = gone(of); dead[of] { // asked without a lock
			writes = append(writes, v.dropTransforms(of)...)
		}
	}
	if len(writes) == 0 {
		return nil
	}
	if err := v.cfg.DB.Write(writes...); err != nil {
		return fmt.Errorf("remove headers of ended sandboxes: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.forgetTransformsLocked(func(of string) bool { return dead[of] })
	return nil
}

// dropTransforms are the writes that remove those of a sandbox.
func (v *Vault) dropTransforms(sandbox string) []store.Write {
	v.mu.Lock()
	defer v.mu.Unlock()
	var writes []store.Write
	for _, e := range v.entries {
		if e.Sandbox == sandbox {
			writes = append(writes, store.DeleteSecret(e.ID))
		}
	}
	return writes
}

func (v *Vault) forgetTransformsLocked(of func(sandbox string) bool) {
	for k, e := range v.entries {
		if e.Sandbox != "" && of(e.Sandbox) {
			e.wipe()
			delete(v.entries, k)
		}
	}
}
