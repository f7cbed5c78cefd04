package e2b

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/secret"
)

// Secrets keeps secrets; *secret.Vault implements it.
type Secrets interface {
	Set(ctx context.Context, c secret.Caller, r secret.SetRequest) (secret.Secret, error)
	RotateWith(ctx context.Context, c secret.Caller, ref string, value secret.Value, metadata map[string]string) (secret.Secret, error)
	Get(c secret.Caller, ref string) (secret.Secret, error)
	List(c secret.Caller) ([]secret.Secret, error)
	Remove(ctx context.Context, c secret.Caller, ref string) (secret.Secret, error)
}

// secretJSON is what is told of a secret: everything but its value.
type secretJSON struct {
	SecretID       string            `json:"secretID"`
	Name           string            `json:"name"`
	Metadata       map[string]string `json:"metadata"`
	CurrentVersion uint64            `json:"currentVersion"`
	CreatedAt      time.Time         `json:"createdAt"`
	UpdatedAt      time.Time         `json:"updatedAt"`
}

func secretShape(s secret.Secret) secretJSON {
	out := secretJSON{
		SecretID: s.ID, Name: s.Name, Metadata: s.Metadata, CurrentVersion: s.Version, CreatedAt: s.CreatedAt, UpdatedAt: s.ChangedAt,
	}
	if out.Metadata == nil {
		out.Metadata = map[string]string{}
	}
	return out
}

// newSecret is the request of create; that of an update has no name.
type newSecret struct {
	Name     string            `json:"name"`
	Value    string            `json:"value"`
	Metadata map[string]string `json:"metadata"`
}

// vault returns where secrets are, and who asks for them.
func (a *API) vault(c call) (Secrets, secret.Caller, error) {
	if a.cfg.Secrets == nil {
		return nil, secret.Caller{}, notYet("secrets")
	}
	return a.cfg.Secrets, policy.SecretCaller(c.p), nil
}

func (a *API) createSecret(c call) error {
	v, caller, err := a.vault(c)
	if err != nil {
		return err
	}
	var req newSecret
	if err := c.decode(&req); err != nil {
		return err
	}
	if strings.HasPrefix(strings.ToLower(req.Name), "sec_") {
		return fail(http.StatusBadRequest, "secret names do not begin with sec_, which identifiers do")
	}
	s, err := v.Set(c.r.Context(), caller, secret.SetRequest{
		Name: strings.ToLower(req.Name), Value: secret.NewValue([]byte(req.Value)), Metadata: req.Metadata, New: true,
	})
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, secretShape(s))
}

// secretRef is the secret that a path names: an id, or a name, which has no upper case here.
func secretRef(c call) string {
	ref := c.r.PathValue("id")
	if strings.HasPrefix(ref, "sec_") {
		return ref
	}
	return strings.ToLower(ref)
}

// errNoSecret is err, with the text of the protocol where there is no such secret.
func errNoSecret(c call, err error) error {
	if errs.Is(err, errs.NotFound) {
		return fail(http.StatusNotFound, "Secret %q not found", c.r.PathValue("id"))
	}
	return err
}

func (a *API) updateSecret(c call) error {
	v, caller, err := a.vault(c)
	if err != nil {
		return err
	}
	var req newSecret
	if err := c.decode(&req); err != nil {
		return err
	}
	s, err := v.RotateWith(c.r.Context(), caller, secretRef(c), secret.NewValue([]byte(req.Value)), req.Metadata)
	if err != nil {
		return errNoSecret(c, err)
	}
	return c.json(http.StatusOK, secretShape(s))
}

func (a *API) getSecret(c call) error {
	v, caller, err := a.vault(c)
	if err != nil {
		return err
	}
	s, err := v.Get(caller, secretRef(c))
	if err != nil {
		return errNoSecret(c, err)
	}
	return c.json(http.StatusOK, secretShape(s))
}

func (a *API) deleteSecret(c call) error {
	v, caller, err := a.vault(c)
	if err != nil {
		return err
	}
	if _, err := v.Remove(c.r.Context(), caller, secretRef(c)); err != nil {
		return errNoSecret(c, err)
	}
	return c.done()
}

// secrets lists those of whoever asks, by their identifiers, in pages whose token is the last one's.
func (a *API) secrets(c call) error {
	v, caller, err := a.vault(c)
	if err != nil {
		return err
	}
	q := c.r.URL.Query()
	size, err := pageSize(q)
	if err != nil {
		return err
	}
	all, err := v.List(caller)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b secret.Secret) int { return strings.Compare(a.ID, b.ID) })
	page := []secretJSON{}
	for _, s := range all {
		if s.ID <= q.Get("nextToken") || caller.Admin && s.Owner != "" { // an admin sees others' elsewhere
			continue
		}
		if len(page) == size {
			c.w.Header().Set("X-Next-Token", page[size-1].SecretID)
			break
		}
		page = append(page, secretShape(s))
	}
	return c.json(http.StatusOK, page)
}

// The beginnings of references in a header's value; a brace ends them.
const (
	anyReference    = "${e2b."
	secretReference = "${e2b.secrets."
	tokenReference  = "${e2b.identity."
)

// fills reads the references to secrets in a header's value. text is the value with a mark in the place of each.
func fills(value string) (text string, names []string, err error) {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(value, anyReference)
		b.WriteString(before)
		if !found {
			return b.String(), names, nil
		}
		if strings.HasPrefix(anyReference+rest, tokenReference) {
			return "", nil, fail(http.StatusNotImplemented,
				"network.rules: ${e2b.identity.…} is a token that E2B's own issuer signs, which this server does not support; keep a secret and write ${e2b.secrets.NAME}")
		}
		name, ok := strings.CutPrefix(anyReference+rest, secretReference)
		name, value, found = strings.Cut(name, "}")
		if !ok || !found || name == "" {
			return "", nil, fail(http.StatusBadRequest, "network.rules: a header holds a reference that is not ${e2b.secrets.NAME}")
		}
		names = append(names, name)
		b.WriteString(secret.FillMark)
	}
}

// shownValue is a header's value as it is kept and shown: hidden, but for references behind an authentication scheme.
func shownValue(value, text string) string {
	switch strings.ToLower(strings.TrimSpace(strings.ReplaceAll(text, secret.FillMark, ""))) {
	case "", "bearer", "basic", "token":
		return value
	}
	return hidden
}
