package secret

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/store"
)

// Credential is one secret as one sandbox may use it.
type Credential struct {
	Secret  string // id
	Name    string
	Class   Class
	Version uint64
	// Placeholder is what the sandbox sees in its place.
	Placeholder string
	// Value is empty where it could not be read: then requests that need it are refused.
	Value Value
	// Previous is the value before the last rotation, for taking it out of responses; may be empty.
	Previous Value
	// Also are further values that must not come back.
	Also     []Value
	Bindings []Binding
	// Header says that it is a header of the sandbox's own rules, which has no name of its own.
	Header bool
}

// For reports whether one of its bindings is for a name at a port.
func (c Credential) For(name string, port uint16) bool {
	matches := func(text string) bool {
		h, err := ParseHost(text)
		return err == nil && h.Matches(name, port)
	}
	return slices.ContainsFunc(c.Bindings, func(b Binding) bool {
		return slices.ContainsFunc(b.Hosts, matches) && !slices.ContainsFunc(b.Except, matches)
	})
}

// Grants returns what the sandbox may use, by name: the secrets of its owner and of the server that
// have a binding for it. Values that can't be opened are empty, and the log says why.
func (v *Vault) Grants(ctx context.Context, sub Subject) []Credential {
	fills := v.fillsOf(sub)
	v.refresh(ctx, func(e *entry) bool {
		e.needed = e.needed || e.grantedTo(sub) || fills[e.Name]
		return !e.loaded && v.due(e)
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []Credential
	for _, e := range v.entries {
		policy := v.classes[e.Class]
		if e.Sandbox != "" {
			policy = ClassPolicy{} // whoever made the sandbox brought it along
		}
		if policy.RoutesOnly || !policy.forTemplate(sub.Template) || !e.grantedTo(sub) {
			continue
		}
		c := Credential{
			Secret: e.ID, Name: e.Name, Class: e.Class, Version: e.Version,
			Placeholder: v.sealer.placeholder(e.Shape, sub.ID, e.ID),
			Bindings:    slices.DeleteFunc(slices.Clone(e.Bindings), func(b Binding) bool { return !b.For.Matches(sub) || policy.admit(e.Class, b) != nil }),
		}
		if len(c.Bindings) == 0 {
			continue
		}
		v.loadLocked(e)
		c.Value, c.Previous = e.value, e.previous
		if e.Sandbox != "" {
			c.Header = true
			v.transformLocked(&c, e, sub.Template)
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b Credential) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Secret, b.Secret))
	})
	return all
}

// transformLocked completes the credential of a transform: with the values of the secrets that it names.
func (v *Vault) transformLocked(c *Credential, e *entry, template string) {
	if len(e.Fills) == 0 {
		c.Also = words(e.value)
		return
	}
	var missing string
	if c.Value, c.Previous, c.Also, missing = v.filledLocked(e, template); missing != "" {
		c.Name = missing // whose lack refusals tell of
		return
	}
	c.Name = strings.Join(e.Fills, ", ")
	if f := v.fillLocked(e, e.Fills[0], template); f != nil {
		c.Version = f.Version
	}
}

// fillsOf returns the names of secrets that a sandbox's transforms need.
func (v *Vault) fillsOf(sub Subject) map[string]bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	names := make(map[string]bool)
	for _, e := range v.entries {
		if e.Sandbox == sub.ID && e.Sandbox != "" {
			for _, name := range e.Fills {
				names[name], names[strings.ToLower(name)] = true, true
			}
		}
	}
	return names
}

func (e *entry) grantedTo(sub Subject) bool {
	if e.Sandbox != "" {
		return e.Sandbox == sub.ID // whoever may change that sandbox has given it to it
	}
	if e.Owner != "" && e.Owner != sub.Owner {
		return false
	}
	return slices.ContainsFunc(e.Bindings, func(b Binding) bool { return b.For.Matches(sub) })
}

// EnvOf returns the variables that hold placeholders.
func EnvOf(all []Credential) map[string]string {
	env := make(map[string]string)
	for _, c := range all {
		for _, b := range c.Bindings {
			if b.Env != "" {
				env[b.Env] = c.Placeholder
			}
		}
	}
	return env
}

// loadLocked opens a stored value that is not in memory yet.
func (v *Vault) loadLocked(e *entry) {
	if e.loaded || e.Source.Kind != Stored {
		return
	}
	e.value = v.openLocked(e, e.Version)
	e.previous = v.openLocked(e, e.Version-1)
	e.loaded = !e.value.Empty()
}

// openLocked opens one version of a stored secret; the result is empty where that can't be done.
func (v *Vault) openLocked(e *entry, version uint64) Value {
	if version == 0 || e.Source.Kind != Stored {
		return Value{}
	}
	raw, err := v.read(e.ID, version)
	if err != nil {
		if !errors.Is(err, errDestroyed) {
			text, _ := errs.PublicText(err)
			e.Fault = text
			v.cfg.Log.Error("cannot open a secret", "secret", e.ID, "name", e.Name, "version", version, "error", err)
		}
		return Value{}
	}
	return NewValue(raw)
}

var errDestroyed = errors.New("the version was destroyed")

func (v *Vault) read(secretID string, version uint64) ([]byte, error) {
	rows, err := v.cfg.DB.SecretVersions(context.Background(), secretID)
	if err != nil {
		return nil, fmt.Errorf("read versions: %w", err)
	}
	for _, r := range rows {
		if r.Version == version {
			if len(r.Sealed) == 0 {
				return nil, errDestroyed
			}
			return v.sealer.open(secretID, version, r.Sealed)
		}
	}
	return nil, errDestroyed
}

// Run reads external values again when they are due, until ctx ends. Only values that
// somebody has needed are read.
func (v *Vault) Run(ctx context.Context) {
	for {
		wake := v.Changed()
		t := time.NewTimer(v.untilDue())
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-wake:
			t.Stop()
		case <-t.C:
			v.refresh(ctx, v.due)
		}
	}
}

func (v *Vault) due(e *entry) bool {
	return e.needed && e.Source.Kind != Stored && !v.cfg.Clock.Now().Before(e.dueAt())
}

// dueAt is when an external value shall be read: after a failure soon, but not for every caller.
func (e *entry) dueAt() time.Time {
	if e.loaded {
		return e.readAt.Add(e.Source.refresh())
	}
	return e.readAt.Add(min(e.Source.refresh(), retryAfter))
}

func (v *Vault) untilDue() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	wait := time.Hour
	for _, e := range v.entries {
		if e.needed && e.Source.Kind != Stored {
			wait = min(wait, e.dueAt().Sub(v.cfg.Clock.Now()))
		}
	}
	return max(wait, 0)
}

// refresh reads the external secrets that want it. One that fails keeps its value and says so.
func (v *Vault) refresh(ctx context.Context, want func(*entry) bool) {
	v.mu.Lock()
	var due []*entry
	for _, e := range v.entries {
		if e.Source.Kind != Stored && want(e) {
			due = append(due, e)
		}
	}
	v.mu.Unlock()
	for _, e := range due {
		v.changing.Lock()
		v.mu.Lock()
		s := e.clone()
		still := v.entries[s.ID] == e && want(e)
		v.mu.Unlock()
		if still {
			if _, err := v.reread(ctx, Caller{ID: "server", Admin: true}, e, s); err != nil {
				v.cfg.Log.Warn("cannot read a secret again; its last value stays", "secret", s.ID, "name", s.Name, "error", err)
			}
		}
		v.changing.Unlock()
	}
}

// Used notes that a secret was put on a request.
func (v *Vault) Used(secretID string, at time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	e, ok := v.entries[secretID]
	if !ok {
		return
	}
	for _, name := range e.Fills {
		if f := v.fillLocked(e, name, ""); f != nil {
			v.usedLocked(f, at)
		}
	}
	v.usedLocked(e, at)
}

func (v *Vault) usedLocked(e *entry, at time.Time) {
	if !at.After(e.UsedAt) {
		return
	}
	e.UsedAt = at.UTC()
	if at.Sub(e.usedWritten) >= usedEvery {
		e.usedWritten = at
		v.cfg.DB.Queue(store.Change{Writes: []store.Write{store.SecretUsed(e.ID, at.UnixNano())}})
		v.cfg.DB.Kick()
	}
}
