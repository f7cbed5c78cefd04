package secret

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// The settings of the data directory that the vault keeps.
const (
	settingClasses = "secret_classes"
	settingRoutes  = "model_routes"
)

// ClassPolicy limits what secrets of a class may be bound to. Its zero value limits nothing.
type ClassPolicy struct {
	// Hosts are the only ones that bindings may name, as ParseHost reads them; empty: any.
	Hosts []string `json:"hosts,omitempty"`
	// Templates are the only ones whose sandboxes get such secrets; empty: any.
	Templates []string `json:"templates,omitempty"`
	// RoutesOnly allows their use through model routes and not in requests of the sandbox's own.
	RoutesOnly bool `json:"routes_only,omitempty"`
}

// admit says why a binding breaks the policy; nil: it does not.
func (p ClassPolicy) admit(class Class, b Binding) error {
	if p.RoutesOnly {
		return errs.New(errs.PermissionDenied, "secrets of class %s may be used through model routes only", class)
	}
	for _, text := range b.Hosts {
		if len(p.Hosts) > 0 && !slices.ContainsFunc(p.Hosts, func(allowed string) bool { return covers(allowed, text) }) {
			return errs.New(errs.PermissionDenied, "secrets of class %s may not be bound to %s", class, text).
				WithHint("an admin can change that: casemate secrets policy %s", class)
		}
	}
	return nil
}

// covers reports whether every host that inner stands for is one of outer's.
func covers(outer, inner string) bool {
	o, err := ParseHost(outer)
	if err != nil {
		return false
	}
	i, err := ParseHost(inner)
	if err != nil || i.Port != o.Port {
		return false
	}
	if i.Below {
		return o.Below && (i.Name == o.Name || o.Matches(i.Name, i.Port))
	}
	return o.Matches(i.Name, i.Port)
}

func (p ClassPolicy) forTemplate(template string) bool {
	return len(p.Templates) == 0 || slices.Contains(p.Templates, template)
}

// ClassPolicies returns the policies of all classes that have one.
func (v *Vault) ClassPolicies(c Caller) (map[Class]ClassPolicy, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return maps.Clone(v.classes), nil
}

// SetClassPolicy replaces the policy of a class. It holds at once, also for bindings that are there.
// Kinds: InvalidArgument, PermissionDenied (not an admin).
func (v *Vault) SetClassPolicy(_ context.Context, c Caller, class Class, p ClassPolicy) error {
	if err := c.admin(); err != nil {
		return err
	}
	if class != ModelKey && class != ToolKey && class != Other {
		return invalid("class %.40q is unknown", class).WithHint("use model, tool or other")
	}
	for i, text := range p.Hosts {
		h, err := ParseHost(text)
		if err != nil {
			return err
		}
		p.Hosts[i] = h.String()
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.Lock()
	next := maps.Clone(v.classes)
	v.mu.Unlock()
	next[class] = p
	//casemate:fact server secret.policy class text
	//casemate:fact server secret.policy policy object
	e := journal.Event{Sandbox: journal.ServerStream, Type: journal.SecretPolicy, Actor: c.ID}.
		With(journal.Server, map[string]any{"class": class, "policy": p})
	if err := v.writeSetting(settingClasses, next, e); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.classes = next
	v.tellLocked()
	return nil
}

func (c Caller) admin() error {
	if err := c.check(); err != nil {
		return err
	}
	if !c.Admin {
		return errs.New(errs.PermissionDenied, "this needs an admin key")
	}
	return nil
}

// writeSetting stores v as JSON together with the event that says so.
func (v *Vault) writeSetting(name string, value any, e journal.Event) error {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if _, err := v.cfg.Journal.Record(context.Background(), e, store.PutSetting(name, string(text))); err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	return nil
}

// openSettings reads what Open finds besides the secrets themselves.
func (v *Vault) openSettings(ctx context.Context) error {
	v.classes, v.routes = make(map[Class]ClassPolicy), make(map[string]Route)
	for name, into := range map[string]any{settingClasses: &v.classes, settingRoutes: &v.routes} {
		text, err := v.cfg.DB.Setting(ctx, name)
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		if text == "" {
			continue
		}
		if err := json.Unmarshal([]byte(text), into); err != nil {
			return fmt.Errorf("decode %s: %w", name, err)
		}
	}
	return nil
}
