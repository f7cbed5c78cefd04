package secret

import (
	"context"

	"casemate.dev/internal/errs"
)

// Own returns the value of one of the server's secrets, for the server's own use: no sandbox gets it by this. An
// external value is read if nobody has read it before, and kept fresh from then on. Kinds: NotFound, Unavailable.
func (v *Vault) Own(ctx context.Context, name string) (Value, error) {
	of := func(e *entry) bool { return e.Owner == "" && e.Sandbox == "" && e.Name == name }
	v.refresh(ctx, func(e *entry) bool {
		e.needed = e.needed || of(e)
		return of(e) && !e.loaded && v.due(e)
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	e := v.namedLocked("", name)
	if e == nil || !of(e) {
		return Value{}, errs.New(errs.NotFound, "the server has no secret %q", name).
			WithHint("an administrator makes it: casemate secrets set %s", name)
	}
	v.loadLocked(e)
	if e.value.Empty() {
		return Value{}, errs.New(errs.Unavailable, "the secret %q has no value that could be read", name)
	}
	return e.value, nil
}
