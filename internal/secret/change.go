package secret

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// SetRequest says what a secret shall be.
type SetRequest struct {
	Name  string
	Class Class // "": as it was, or Other
	// Value is the value of a Stored secret; the vault takes it over.
	Value  Value
	Source Source // Kind "": Stored
	// Shape is how placeholders look; nil: as it was, or Casemate's own.
	Shape *Shape
	// Metadata replaces what there was; nil: as it was.
	Metadata map[string]string
	// New fails where there is a secret of that name: AlreadyExists.
	New bool
}

// Set makes a secret, or gives the one of that name a new version; bindings stay. Kinds:
// InvalidArgument, PermissionDenied (only an admin may name an external source, since it is read with
// the server's rights), ResourceExhausted.
func (v *Vault) Set(ctx context.Context, c Caller, r SetRequest) (Secret, error) {
	if err := r.check(c); err != nil {
		return Secret{}, err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.Lock()
	e, n := v.namedLocked(c.owner(), r.Name), len(v.entries)
	var s Secret
	if e != nil {
		s = e.clone()
	}
	v.mu.Unlock()
	if e != nil && r.New {
		return Secret{}, errs.New(errs.AlreadyExists, "there is a secret called %s already", r.Name)
	}
	now := v.now()
	if e == nil {
		if n >= maxSecrets {
			return Secret{}, errs.New(errs.ResourceExhausted, "there are %d secrets already", n)
		}
		e = &entry{}
		s = Secret{ID: id.New(id.Secret), Owner: c.owner(), Name: r.Name, Class: Other, CreatedAt: now}
	}
	s.Class = or(r.Class, s.Class)
	if r.Metadata != nil {
		s.Metadata = maps.Clone(r.Metadata)
	}
	if r.Shape != nil {
		s.Shape = *r.Shape
	}
	s.Source = r.Source
	if s.Source.Kind == "" {
		s.Source.Kind = Stored
	}
	value := r.Value
	if s.Source.Kind != Stored {
		var err error
		if value, err = s.Source.read(ctx, v.cfg.Getenv); err != nil { // a source that never works is a mistake
			v.cfg.Log.Warn("cannot read a secret's source", "name", r.Name, "error", err)
			return Secret{}, err
		}
	}
	return v.newVersion(c, journal.SecretSet, e, s, value)
}

// Rotate gives a secret a new value; sandboxes use it from their next request on. An external one is
// read again instead, and value must be empty. Kinds: InvalidArgument, NotFound.
func (v *Vault) Rotate(ctx context.Context, c Caller, ref string, value Value) (Secret, error) {
	return v.RotateWith(ctx, c, ref, value, nil)
}

// RotateWith is Rotate, with metadata that replaces what there was unless it is nil.
func (v *Vault) RotateWith(ctx context.Context, c Caller, ref string, value Value, metadata map[string]string) (Secret, error) {
	if err := checkMetadata(metadata); err != nil {
		return Secret{}, err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	e, err := v.find(c, ref)
	if err != nil {
		return Secret{}, err
	}
	v.mu.Lock()
	s := e.clone()
	v.mu.Unlock()
	if metadata != nil {
		s.Metadata = maps.Clone(metadata)
	}
	if s.Source.Kind == Stored {
		if err := value.check(); err != nil {
			return Secret{}, err
		}
		return v.newVersion(c, journal.SecretRotated, e, s, value)
	}
	if !value.Empty() {
		return Secret{}, invalid("secret %s comes from a %s: change it there", s.Name, s.Source.Kind)
	}
	return v.reread(ctx, c, e, s)
}

// newVersion writes a version and makes it the current one. The value before is kept, so that it can
// still be taken out of late responses; older ones are destroyed. Preconditions: changing is held.
func (v *Vault) newVersion(c Caller, t journal.Type, e *entry, s Secret, value Value) (Secret, error) {
	s.Version++
	s.ChangedAt, s.Fault = v.now(), ""
	var sealed, print []byte
	raw := value.Reveal()
	defer clear(raw)
	if s.Source.Kind == Stored {
		var err error
		if sealed, err = v.sealer.seal(s.ID, s.Version, raw); err != nil {
			return Secret{}, fmt.Errorf("seal secret %s: %w", s.ID, err)
		}
	} else {
		sealed, print = []byte{}, v.print(s.ID, raw)
	}
	row, err := put(s, print)
	if err != nil {
		return Secret{}, err
	}
	//casemate:fact server secret.set,secret.rotated source text where its value comes from
	_, err = v.cfg.Journal.Record(context.Background(), v.event(t, c, s, map[string]any{"source": s.Source.Kind}), row,
		store.AddSecretVersion(store.SecretVersion{Secret: s.ID, Version: s.Version, Created: s.ChangedAt.UnixNano(), Sealed: sealed}),
		store.DestroySecretVersions(s.ID, s.Version-1))
	if err != nil {
		return Secret{}, fmt.Errorf("store secret: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.previous.Wipe()
	e.previous = e.value
	if !e.loaded {
		e.previous = v.openLocked(e, s.Version-1)
	}
	e.value, e.loaded, e.readAt, e.print = value, true, v.cfg.Clock.Now(), print
	e.needed = e.needed || s.Source.Kind != Stored
	s.UsedAt = e.UsedAt
	e.Secret = s
	v.entries[s.ID] = e
	v.tellLocked()
	return e.clone(), nil
}

// Remove deletes a secret with its values and bindings. Requests that carry its placeholder go out
// with the placeholder from now on. NotFound.
func (v *Vault) Remove(_ context.Context, c Caller, ref string) (Secret, error) {
	v.changing.Lock()
	defer v.changing.Unlock()
	e, err := v.find(c, ref)
	if err != nil {
		return Secret{}, err
	}
	v.mu.Lock()
	s := e.clone()
	for _, r := range v.routes {
		if r.Secret == s.ID {
			v.mu.Unlock()
			return Secret{}, errs.New(errs.FailedPrecondition, "the model route %s uses the secret", r.Provider).
				WithHint("casemate secrets model rm %s removes it", r.Provider)
		}
	}
	v.mu.Unlock()
	if _, err := v.cfg.Journal.Record(context.Background(), v.event(journal.SecretRemoved, c, s, nil), store.DeleteSecret(s.ID)); err != nil {
		return Secret{}, fmt.Errorf("delete secret: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.wipe()
	delete(v.entries, s.ID)
	v.tellLocked()
	return s, nil
}

// Bind adds a binding to a secret. Kinds: InvalidArgument, NotFound, PermissionDenied (the policy of
// its class), ResourceExhausted.
func (v *Vault) Bind(_ context.Context, c Caller, ref string, b Binding) (Secret, Binding, error) {
	if err := b.check(); err != nil {
		return Secret{}, Binding{}, err
	}
	b.ID, b.CreatedAt = id.New(id.Binding), v.now()
	s, err := v.rebind(c, ref, journal.SecretBound, map[string]any{"binding": b}, func(s *Secret) error {
		if len(s.Bindings) >= maxBindings {
			return errs.New(errs.ResourceExhausted, "secret %s has %d bindings already", s.Name, maxBindings)
		}
		v.mu.Lock()
		policy := v.classes[s.Class]
		v.mu.Unlock()
		if err := policy.admit(s.Class, b); err != nil {
			return err
		}
		s.Bindings = append(s.Bindings, b)
		return nil
	})
	return s, b, err
}

// Unbind removes a binding by its id, or all of the secret where it is "". NotFound.
func (v *Vault) Unbind(_ context.Context, c Caller, ref, bindingID string) (Secret, error) {
	return v.rebind(c, ref, journal.SecretUnbound, map[string]any{"binding": bindingID}, func(s *Secret) error {
		n := len(s.Bindings)
		s.Bindings = slices.DeleteFunc(s.Bindings, func(b Binding) bool { return bindingID == "" || b.ID == bindingID })
		if bindingID != "" && len(s.Bindings) == n {
			return errs.New(errs.NotFound, "secret %s has no binding %.80q", s.Name, bindingID)
		}
		return nil
	})
}

func (v *Vault) rebind(c Caller, ref string, t journal.Type, facts map[string]any, change func(*Secret) error) (Secret, error) {
	v.changing.Lock()
	defer v.changing.Unlock()
	e, err := v.find(c, ref)
	if err != nil {
		return Secret{}, err
	}
	v.mu.Lock()
	s, print := e.clone(), e.print
	v.mu.Unlock()
	if err := change(&s); err != nil {
		return Secret{}, err
	}
	row, err := put(s, print)
	if err != nil {
		return Secret{}, err
	}
	if _, err := v.cfg.Journal.Record(context.Background(), v.event(t, c, s, facts), row); err != nil {
		return Secret{}, fmt.Errorf("store binding: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.Bindings = s.Bindings
	v.tellLocked()
	return e.clone(), nil
}

func (r SetRequest) check(c Caller) error {
	if err := c.check(); err != nil {
		return err
	}
	if !validSecretName(r.Name) {
		return invalid("secret name %.80q: use letters, digits, _ - and ., at most %d, beginning with a letter", r.Name, maxNameBytes)
	}
	switch r.Class {
	case "", ModelKey, ToolKey, Other:
	default:
		return invalid("class %.40q is unknown", r.Class).WithHint("use model, tool or other")
	}
	if r.Shape != nil {
		if err := r.Shape.check(); err != nil {
			return err
		}
	}
	if err := checkMetadata(r.Metadata); err != nil {
		return err
	}
	if r.Source.Kind == "" || r.Source.Kind == Stored {
		return r.Value.check()
	}
	if !c.Admin {
		return errs.New(errs.PermissionDenied, "only an admin may name a %s as a secret's source", r.Source.Kind).
			WithHint("it is read with the server's rights; send the value instead")
	}
	if !r.Value.Empty() {
		return invalid("a secret has a value or an external source, not both")
	}
	return r.Source.check()
}

// The bounds of metadata, those of E2B's.
const (
	maxMetadata      = 32
	maxMetadataKey   = 128
	maxMetadataValue = 1024
	maxMetadataBytes = 8192
)

func checkMetadata(m map[string]string) error {
	size := 0
	for k, v := range m {
		size += len(k) + len(v)
		if k == "" || len(k) > maxMetadataKey || len(v) > maxMetadataValue {
			return invalid("metadata %.40q: keys have 1 to %d bytes, values at most %d", k, maxMetadataKey, maxMetadataValue)
		}
	}
	if len(m) > maxMetadata || size > maxMetadataBytes {
		return invalid("metadata has %d entries of %d bytes, limits %d and %d", len(m), size, maxMetadata, maxMetadataBytes)
	}
	return nil
}

func (v Value) check() error {
	b := v.Reveal()
	defer clear(b)
	return checkValue(b)
}

func validSecretName(s string) bool {
	for i := range len(s) {
		c := s[i]
		isLetter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !isLetter && (i == 0 || (c < '0' || c > '9') && c != '_' && c != '-' && c != '.') {
			return false
		}
	}
	return s != "" && len(s) <= maxNameBytes
}

// reread reads an external value again and makes it a new version where it has changed.
// Preconditions: changing is held.
func (v *Vault) reread(ctx context.Context, c Caller, e *entry, s Secret) (Secret, error) {
	value, err := s.Source.read(ctx, v.cfg.Getenv)
	v.mu.Lock()
	e.readAt = v.cfg.Clock.Now()
	if err != nil {
		text, _ := errs.PublicText(err)
		e.Fault = text
		v.mu.Unlock()
		return Secret{}, err
	}
	e.Fault = ""
	raw := value.Reveal()
	same := bytes.Equal(e.print, v.print(s.ID, raw))
	clear(raw)
	if same {
		if !e.loaded {
			e.value, e.loaded = value, true
			v.tellLocked()
		} else {
			value.Wipe()
		}
		s = e.clone()
		v.mu.Unlock()
		return s, nil
	}
	v.mu.Unlock()
	return v.newVersion(c, journal.SecretRotated, e, s, value)
}

// print tells external values apart without telling anything about them.
func (v *Vault) print(secretID string, raw []byte) []byte {
	return v.sealer.derived("print", secretID, string(raw))[:16]
}

func (v *Vault) now() time.Time { return v.cfg.Clock.Now().UTC().Round(0) }

// or returns v, or other where v is zero.
func or[T comparable](v, other T) T {
	var zero T
	if v == zero {
		return other
	}
	return v
}
