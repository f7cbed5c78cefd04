package sandbox

import (
	"context"
	"maps"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

// CallDefault says which system calls are observed of sandboxes whose create does not. It is of a template, which may be a
// commit or its tag, of a profile, or where both are empty of all others.
type CallDefault struct {
	Template string  `json:"template,omitempty"`
	Profile  Profile `json:"profile,omitempty"`
	Calls    *Calls  `json:"calls"` // nil: no longer
}

// callDefaultFacts are the server's facts of calls.default.
//
//casemate:facts server calls.default
type callDefaultFacts struct {
	Template string  `json:"template,omitempty"`
	Profile  Profile `json:"profile,omitempty"`
	Calls    *Calls  `json:"calls"` // none: no longer
}

// What key returns begins with one of these, and none of them is the beginning of a template's name that is meant.
const (
	templateKey = "template "
	profileKey  = "profile "
)

func (d CallDefault) key() string {
	if d.Template != "" {
		return templateKey + d.Template
	}
	return profileKey + string(d.Profile)
}

// CallDefaults lists what is observed where a create does not say. The first that fits a sandbox decides; the last one is
// the server's.
func (m *Manager) CallDefaults(ctx context.Context) ([]CallDefault, error) {
	all, err := m.callDefaults.read(ctx)
	if err != nil {
		return nil, err
	}
	var out []CallDefault
	for _, key := range slices.Backward(slices.Sorted(maps.Keys(all))) { // templates come first
		c := all[key]
		d := CallDefault{Calls: &c}
		if name, ok := strings.CutPrefix(key, templateKey); ok {
			d.Template = name
		} else {
			d.Profile = Profile(strings.TrimPrefix(key, profileKey))
		}
		out = append(out, d)
	}
	last := m.cfg.Defaults.Calls
	return append(out, CallDefault{Calls: &last}), nil
}

// SetCallDefault changes what is observed of sandboxes to come of a template or a profile; without Calls it takes the
// default away. Kinds: PermissionDenied, InvalidArgument, NotFound.
func (m *Manager) SetCallDefault(ctx context.Context, p Principal, d CallDefault) error {
	if !p.admin() || p.Sandbox != "" {
		return errs.New(errs.PermissionDenied, "only an administrator may say which system calls are observed by default")
	}
	if err := m.checkCallDefault(ctx, p, &d); err != nil {
		return err
	}
	return m.callDefaults.set(ctx, d.key(), d.Calls, event(journal.CallDefault, p.ID, callDefaultFacts(d)))
}

func (m *Manager) checkCallDefault(ctx context.Context, p Principal, d *CallDefault) error {
	switch {
	case (d.Template == "") == (d.Profile == ""):
		return invalid("a default is of a template or of a profile").WithHint("name one of the two")
	case d.Profile != "" && d.Profile != Locked && d.Profile != Standard:
		return invalid("there is no profile %s", quote(string(d.Profile))).WithHint("use locked or standard")
	case d.Calls == nil:
		return nil
	}
	c, err := checkedCalls(*d.Calls)
	if err != nil {
		return err
	}
	d.Calls = &c
	if d.Template == "" {
		return nil
	}
	return m.startsFrom(ctx, p, d.Template)
}

// checkedCalls completes and checks what is to be observed.
func checkedCalls(c Calls) (Calls, error) {
	if severity(c.OnAttempt) < 0 {
		return c, invalid("on_attempt %s is unknown", quote(string(c.OnAttempt))).WithHint("use record, pause or kill")
	}
	if c.Any() {
		c.OnAttempt = or(c.OnAttempt, ReactRecord)
	}
	if severity(c.OnAttempt) > severity(ReactRecord) && !c.Attempts {
		return c, invalid("on_attempt is %s, and attempts are not observed", c.OnAttempt).WithHint("observe attempts, too")
	}
	return c, nil
}

// callsByDefault is what is observed of a sandbox whose create does not say. asked is what the create named, of which
// s.Template may be the template below.
func (m *Manager) callsByDefault(ctx context.Context, s Spec, asked string) (Calls, error) {
	all, err := m.callDefaults.read(ctx)
	if err != nil {
		return Calls{}, err
	}
	for _, key := range []string{templateKey + asked, templateKey + s.Template, profileKey + string(s.Profile)} {
		if c, ok := all[key]; ok {
			return c, nil
		}
	}
	return m.cfg.Defaults.Calls, nil
}
