package envd

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"strconv"
	"time"

	"casemate.dev/internal/errs"
)

// SignatureError says why a signed URL is refused. Its kind is Unauthenticated.
type SignatureError struct {
	// Expired says that the signature is right, but its time is over.
	Expired bool
	text    string
}

// Error implements error.
func (e *SignatureError) Error() string { return e.text }

// Unwrap gives it its kind.
func (e *SignatureError) Unwrap() error { return errs.New(errs.Unauthenticated, "%s", e.text) }

// HasSignature reports whether a request names a file by a signed URL.
func HasSignature(r *http.Request) bool {
	return r.URL.Path == "/files" && r.URL.Query().Has("signature")
}

// VerifySignature checks the signature of a request for /files against a sandbox's access token. It
// returns a SignatureError, whose text is what callers are told.
func VerifySignature(r *http.Request, token string, now time.Time) error {
	q := r.URL.Query()
	given := q.Get("signature")
	if given == "" {
		return &SignatureError{text: "missing signature query parameter"}
	}
	op := "read"
	if r.Method == http.MethodPost {
		op = "write"
	}
	exp := q.Get("signature_expiration")
	want := Sign(q.Get("path"), op, q.Get("username"), token, exp)
	if token == "" || subtle.ConstantTimeCompare([]byte(given), []byte(want)) != 1 {
		return &SignatureError{text: "invalid signature"}
	}
	if exp == "" {
		return nil
	}
	at, err := strconv.ParseInt(exp, 10, 64)
	if err != nil {
		return &SignatureError{text: "invalid signature"}
	}
	if now.Unix() > at {
		return &SignatureError{Expired: true, text: "signature is already expired"}
	}
	return nil
}

// Sign returns the signature for one operation, "read" or "write", on a path as a user, both as they
// stand in the query. expiration is in Unix seconds, "" for never.
func Sign(path, op, user, token, expiration string) string {
	text := path + ":" + op + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
