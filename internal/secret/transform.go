package secret

import (
	"bytes"
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
	Host string // as ParseHost reads it
	// Except are hosts among those that Host stands for which it is not for.
	Except []string
	Header string
	// Value is the header's. Each NUL byte in it stands for the current value of a secret: of the next one in Fills.
	Value Value
	// Fills are names of secrets of whoever sets the transform. They need not be there yet, but then, and where the
	// policy of their class does not allow it, requests that need them are refused.
	Fills []string
}

// FillMark is what stands in a Transform's value for a secret's.
const FillMark = "\x00"

// maxTransforms bounds those of one sandbox, and sweepAfter is how old they are before they are swept.
const (
	maxTransforms = 100
	maxFills      = 16
	sweepAfter    = 10 * time.Minute
)

// SetTransforms replaces the transforms of a sandbox, which need not be there yet, and its proxy: what whoever connects for
// it must know, which the vault keeps and does not read; empty: none. Kinds: InvalidArgument, PermissionDenied (a sandbox
// asks), ResourceExhausted.
func (v *Vault) SetTransforms(_ context.Context, c Caller, sandbox string, list []Transform, proxy Value) error {
	if err := c.check(); err != nil {
		return err
	}
	owners := make([]string, len(list))
	for i := range owners {
		owners[i] = c.owner()
	}
	return v.setTransforms(c, sandbox, list, owners, proxy)
}

// setTransforms is SetTransforms for a list of which each one's fills are secrets of an owner.
func (v *Vault) setTransforms(c Caller, sandbox string, list []Transform, owners []string, proxy Value) error {
	if len(list) > maxTransforms {
		return invalid("%d headers to put on requests, limit %d", len(list), maxTransforms)
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	made := make([]*entry, 0, len(list)+1)
	writes := v.dropTransforms(sandbox)
	for i, t := range list {
		e, w, err := v.transform(owners[i], sandbox, i, t)
		if err != nil {
			return err
		}
		made = append(made, e)
		writes = append(writes, w...)
	}
	if !proxy.Empty() {
		e, w, err := v.sandboxEntry(Secret{Owner: c.owner(), Name: "proxy." + sandbox, Sandbox: sandbox, Proxy: true}, proxy)
		if err != nil {
			return err
		}
		made = append(made, e)
		writes = append(writes, w...)
	}
	if len(writes) == 0 {
		return nil
	}
	e := journal.Event{Sandbox: journal.ServerStream, Type: journal.SecretBound, Actor: c.ID}.
		With(journal.Server, map[string]any{"sandbox": sandbox, "transforms": len(list), "proxy": !proxy.Empty()})
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
func (v *Vault) transform(owner, sandbox string, n int, t Transform) (*entry, []store.Write, error) {
	raw := t.Value.Reveal()
	defer clear(raw)
	text := strings.ReplaceAll(string(raw), FillMark, "x")
	if len(raw) == 0 || len(raw) > MaxValue || !HeaderValue(text) || strings.TrimSpace(text) != text ||
		bytes.Count(raw, []byte(FillMark)) != len(t.Fills) || len(t.Fills) > maxFills {
		return nil, nil, invalid("header %.80q: its value must be text that a header can carry", t.Header)
	}
	b := Binding{
		For: Selector{Sandboxes: []string{sandbox}}, Hosts: []string{t.Host}, Except: t.Except, Always: true,
		Place: Place{Scheme: Header, Name: t.Header}, CreatedAt: v.now(),
	}
	if err := b.check(); err != nil {
		return nil, nil, err
	}
	b.ID = id.New(id.Binding)
	return v.sandboxEntry(Secret{
		Owner: owner, Fills: t.Fills, Name: fmt.Sprintf("transform.%s.%03d", sandbox, n), Bindings: []Binding{b}, Sandbox: sandbox,
	}, t.Value)
}

// sandboxEntry completes what belongs to one sandbox, and returns it with the writes that keep it.
func (v *Vault) sandboxEntry(s Secret, value Value) (*entry, []store.Write, error) {
	s.ID, s.Class, s.Source, s.Version, s.CreatedAt = id.New(id.Secret), Other, Source{Kind: Stored}, 1, v.now()
	s.ChangedAt = s.CreatedAt
	raw := value.Reveal()
	defer clear(raw)
	sealed, err := v.sealer.seal(s.ID, 1, raw)
	if err != nil {
		return nil, nil, fmt.Errorf("seal a header: %w", err)
	}
	row, err := put(s, nil)
	if err != nil {
		return nil, nil, err
	}
	version := store.AddSecretVersion(store.SecretVersion{Secret: s.ID, Version: 1, Created: s.CreatedAt.UnixNano(), Sealed: sealed})
	return &entry{Secret: s, value: value, loaded: true}, []store.Write{row, version}, nil
}

// filledLocked returns a transform's value, and the one before, with the secrets' values in their places, those values
// alone, and the version of the first. missing is a secret that is not there or may not be used so; then value is empty.
func (v *Vault) filledLocked(e *entry, template string) (value, previous Value, also []Value, missing string) {
	now, before := e.value.Reveal(), e.value.Reveal()
	defer func() { clear(now); clear(before) }()
	for _, name := range e.Fills {
		f := v.fillLocked(e, name, template)
		if f == nil || f.value.Empty() {
			return Value{}, Value{}, nil, name
		}
		was := f.previous
		if was.Empty() {
			was = f.value
		}
		now = bytes.Replace(now, []byte(FillMark), f.value.Reveal(), 1)
		before = bytes.Replace(before, []byte(FillMark), was.Reveal(), 1)
		also = append(also, f.value, f.previous)
	}
	return NewValue(bytes.Clone(now)), NewValue(bytes.Clone(before)), also, ""
}

// fillLocked finds the secret that a transform names, nil where there is none or its class may not be used there.
func (v *Vault) fillLocked(e *entry, name, template string) *entry {
	f := v.namedLocked(e.Owner, name)
	if f == nil {
		f = v.namedLocked(e.Owner, strings.ToLower(name))
	}
	if f == nil {
		return nil
	}
	policy := v.classes[f.Class]
	if policy.RoutesOnly || !policy.forTemplate(template) || policy.admit(f.Class, e.Bindings[0]) != nil {
		return nil
	}
	v.loadLocked(f)
	return f
}

// words returns the parts of a header's value that could be a key on their own, as behind "Bearer".
func words(value Value) []Value {
	raw := value.Reveal()
	defer clear(raw)
	var out []Value
	for _, w := range bytes.FieldsFunc(raw, func(r rune) bool { return strings.ContainsRune(" \t,;=\"'", r) }) {
		if len(w) >= MinValue && len(w) < len(raw) {
			out = append(out, NewValue(bytes.Clone(w)))
		}
	}
	return out
}

// ProxyOf returns the proxy of a sandbox; empty where it has none, or it can't be opened.
func (v *Vault) ProxyOf(sandbox string) Value {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range v.entries {
		if e.Proxy && e.Sandbox == sandbox {
			v.loadLocked(e)
			return NewValue(e.value.Reveal())
		}
	}
	return Value{}
}

// CopyTransforms gives a sandbox the transforms and the proxy of another, as far as the caller set them or is an admin. What they
// name stay secrets of whoever set them.
func (v *Vault) CopyTransforms(_ context.Context, c Caller, from, to string) error {
	if err := c.check(); err != nil {
		return err
	}
	v.mu.Lock()
	var list []Transform
	var owners []string // their fills stay those of whoever set them
	var proxy Value
	for _, e := range slices.SortedFunc(maps.Values(v.entries), func(a, b *entry) int { return strings.Compare(a.Name, b.Name) }) {
		if e.Sandbox == from && (c.Admin || e.Owner == c.ID) {
			v.loadLocked(e)
			if e.Proxy {
				proxy = NewValue(e.value.Reveal())
				continue
			}
			b := e.Bindings[0]
			list = append(list, Transform{Host: b.Hosts[0], Except: b.Except, Header: b.Place.Name, Value: NewValue(e.value.Reveal()), Fills: e.Fills})
			owners = append(owners, e.Owner)
		}
	}
	v.mu.Unlock()
	if len(list) == 0 && proxy.Empty() {
		return nil
	}
	if slices.ContainsFunc(list, func(t Transform) bool { return t.Value.Empty() }) {
		return errs.New(errs.FailedPrecondition, "the headers that are put on the requests of sandbox %s can't be read", from)
	}
	return v.setTransforms(c, to, list, owners, proxy)
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
