package secret

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
)

// ForHost returns a secret's value for the server itself to show to a host, on behalf of the caller, whose secret
// it is. One that is bound to hosts goes to those and no others.
// Kinds: NotFound, PermissionDenied (it is bound to other hosts), FailedPrecondition (its value can't be read).
func (v *Vault) ForHost(ctx context.Context, c Caller, ref, host string, port uint16) (Value, error) {
	e, err := v.find(c, ref)
	if err != nil {
		return Value{}, err
	}
	v.refresh(ctx, func(other *entry) bool {
		if other == e {
			e.needed = true
		}
		return other == e && !e.loaded && v.due(e)
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	if !e.boundTo(host, port) {
		return Value{}, errs.New(errs.PermissionDenied, "secret %s is bound to other hosts than %s", e.Name, host).
			WithHint("casemate secrets bind %s --host %s, or keep another secret for it", e.Name, host)
	}
	v.loadLocked(e)
	if e.value.Empty() {
		return Value{}, errs.New(errs.FailedPrecondition, "the value of secret %s can't be read: %s", e.Name, e.Fault)
	}
	return e.value, nil
}

// boundTo reports whether a secret may go to a host: it has no bindings, or one of them names the host.
func (e *entry) boundTo(host string, port uint16) bool {
	return len(e.Bindings) == 0 || slices.ContainsFunc(e.Bindings, func(b Binding) bool {
		return slices.ContainsFunc(b.Hosts, func(text string) bool {
			h, err := ParseHost(text)
			return err == nil && h.Matches(host, port)
		})
	})
}
