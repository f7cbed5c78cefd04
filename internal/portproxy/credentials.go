package portproxy

import (
	"bytes"
	"encoding/base64"
	"net/http"
	"strings"
)

// StripCredentials takes every credential of ours and of E2B's off a request: whatever a sandbox is
// sent, its code can read. used is the header that the request was authenticated by. An Authorization
// that was not used and holds none of our keys belongs to the application.
func StripCredentials(h http.Header, used string) {
	if used != "" {
		h.Del(used)
	}
	for name, values := range h {
		lower := strings.ToLower(name)
		switch {
		case lower == "x-api-key", lower == "x-access-token", lower == "proxy-authorization":
		case strings.HasPrefix(lower, "casemate-"), strings.HasPrefix(lower, "e2b-"), strings.HasPrefix(lower, "x-e2b-"):
		case lower == "authorization" && anyKey(values):
		default:
			continue
		}
		delete(h, name)
	}
}

// anyKey reports whether one of an Authorization header's values carries one of our keys, in
// whatever scheme, also inside Basic's encoding.
func anyKey(values []string) bool {
	for _, v := range values {
		words := strings.FieldsFunc(v, func(r rune) bool { return strings.ContainsRune(" ,\"=:", r) })
		for _, word := range words {
			plain, err := base64.RawStdEncoding.DecodeString(word)
			if looksLikeKey(word) || (err == nil && (bytes.Contains(plain, []byte("csm_")) || bytes.Contains(plain, []byte("e2b_")))) {
				return true
			}
		}
	}
	return false
}

func looksLikeKey(token string) bool {
	return strings.HasPrefix(token, "csm_") || strings.HasPrefix(token, "e2b_")
}
