package api

import (
	"context"
	"net/http"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
)

// caller is who asks, as far as the request shows it.
type caller struct {
	principal sandbox.Principal
	// err says why there is no principal.
	err error
	// header names the header whose credential was used, "" for the server's own socket.
	header string
}

type (
	callerKey struct{}
	localKey  struct{}
)

// WithLocalPeer marks the connections of a listener that only the server's owner can reach: requests
// on them need no key.
func WithLocalPeer(ctx context.Context) context.Context {
	return context.WithValue(ctx, localKey{}, true)
}

func isLocalPeer(ctx context.Context) bool { return ctx.Value(localKey{}) != nil }

// callerOf returns who identify found. Without identify it is nobody.
func callerOf(ctx context.Context) *caller {
	if c, ok := ctx.Value(callerKey{}).(*caller); ok {
		return c
	}
	return &caller{err: errNoKey()}
}

// principalOf returns the principal behind a request that the gate has admitted.
func principalOf(ctx context.Context) sandbox.Principal { return callerOf(ctx).principal }

func errNoKey() error {
	return errs.New(errs.Unauthenticated, "no API key").
		WithHint("send `Authorization: Bearer KEY` (or set CASEMATE_API_KEY); `casemate keys create` makes a key")
}

// identify puts who asks into the request's context. It refuses nothing, since the gate knows which
// methods are open; but a stranger's request must be small and quick, because its body is read before
// the gate is asked.
func (a *API) identify(w http.ResponseWriter, r *http.Request) *http.Request {
	c := a.authenticate(r)
	if c.err != nil {
		rc := http.NewResponseController(w)
		_ = rc.SetReadDeadline(time.Now().Add(anonymousRead)) // not every writer has one: then the size limit holds alone
		r.Body = http.MaxBytesReader(w, r.Body, maxAnonymous)
		w.Header().Set("Connection", "close") // the deadline would outlive the request
	}
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, c))
}

// authenticate finds the credential. X-API-Key comes first, so that a request to a port can carry an
// Authorization of its own; a key wins over the local socket, so that its owner can act as a key.
func (a *API) authenticate(r *http.Request) *caller {
	if key := r.Header.Get("X-API-Key"); key != "" {
		return a.byKey(r.Context(), key, "X-Api-Key")
	}
	if key, ok := bearer(r.Header.Get("Authorization")); ok && (!isLocalPeer(r.Context()) || looksLikeKey(key)) {
		return a.byKey(r.Context(), key, "Authorization")
	}
	if isLocalPeer(r.Context()) {
		return &caller{principal: policy.Local()}
	}
	return &caller{err: errNoKey()}
}

func (a *API) byKey(ctx context.Context, key, header string) *caller {
	p, err := a.cfg.Keys.Authenticate(ctx, key)
	return &caller{principal: p, err: err, header: header}
}

// bearer returns the token of an Authorization header.
func bearer(header string) (string, bool) {
	const scheme = "bearer "
	if len(header) <= len(scheme) || !strings.EqualFold(header[:len(scheme)], scheme) {
		return "", false
	}
	return strings.TrimSpace(header[len(scheme):]), true
}

// looksLikeKey reports whether a bearer token has the form of one of our keys or E2B's.
func looksLikeKey(token string) bool {
	return strings.HasPrefix(token, "csm_") || strings.HasPrefix(token, "e2b_")
}
