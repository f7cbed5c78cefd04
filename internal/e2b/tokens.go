package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"casemate.dev/internal/e2b/envd"
)

// tokens are what opens one sandbox's data plane. They are derived from the server's secret and the
// sandbox's id, so that they are the same after a pause and a restart, and lie nowhere.
type tokens struct{ secret []byte }

func newTokens(secret []byte) tokens { return tokens{secret: secret} }

// envd opens the agent: files and processes.
func (t tokens) envd(sandboxID string) string { return t.derive("envd", sandboxID) }

// traffic opens the other ports of a sandbox that is not public.
func (t tokens) traffic(sandboxID string) string { return t.derive("traffic", sandboxID) }

func (t tokens) derive(use, sandboxID string) string {
	m := hmac.New(sha256.New, t.secret)
	m.Write([]byte(use + "\x00" + sandboxID))
	return hex.EncodeToString(m.Sum(nil))
}

// same compares secrets in a time that tells nothing.
func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// The texts of refusals, which clients compare.
const (
	textNoToken    = "unauthorized access, please provide a valid access token or method signing if supported" //nolint:gosec // a text
	textWrongToken = "access token present in header but does not match"                                       //nolint:gosec // a text
)

// refuses says why the agent of a sandbox must not answer a request, "" where it may.
func (t tokens) refuses(r *http.Request, sandboxID string, now time.Time) string {
	token := t.envd(sandboxID)
	given := r.Header.Get("X-Access-Token")
	if given != "" && same(given, token) {
		return ""
	}
	switch {
	case r.URL.Path == "/health" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		return ""
	case r.URL.Path != "/files":
		return textNoToken
	case given != "":
		return textWrongToken
	}
	if err := envd.VerifySignature(r, token, now); err != nil {
		return err.Error()
	}
	return ""
}

// signs reports whether a request is signed with the token of a sandbox, be it too late or not.
func (t tokens) signs(r *http.Request, sandboxID string, now time.Time) bool {
	err := envd.VerifySignature(r, t.envd(sandboxID), now)
	var refused *envd.SignatureError
	return err == nil || errors.As(err, &refused) && refused.Expired
}
