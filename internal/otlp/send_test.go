package otlp

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
)

// TestErrorsHoldNoCredentials: an endpoint may have them, and what is wrong with it goes into logs.
func TestErrorsHoldNoCredentials(t *testing.T) {
	away := httptest.NewServer(http.NotFoundHandler())
	away.Close() // nobody listens there any longer
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	for _, base := range []string{away.URL, other.URL} {
		u := strings.Replace(base, "http://", "http://me:pass-word@", 1) + "/v1/traces?key=que-ry"
		_, err := Collector{URL: u, Pause: time.Millisecond}.Send(t.Context(), [][]byte{[]byte("{}")})
		if err == nil {
			t.Fatal("sent to nobody")
		}
		text, hint := errs.PublicText(err)
		if all := err.Error() + text + hint; strings.Contains(all, "pass-word") || strings.Contains(all, "que-ry") || !strings.Contains(all, strings.TrimPrefix(base, "http://")) {
			t.Errorf("%v; %s; %s", err, text, hint)
		}
	}
}

// TestPartialSuccess: a collector says how many spans it refused, as a number or as text.
func TestPartialSuccess(t *testing.T) {
	for answer, want := range map[string]int64{
		``: 0, `{}`: 0, `{"partialSuccess":{"rejectedSpans":3}}`: 3, `{"partialSuccess":{"rejectedSpans":"4"}}`: 4, `nonsense`: 0,
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(answer)) }))
		if n, err := (Collector{URL: s.URL}).Send(t.Context(), [][]byte{[]byte("{}")}); n != want || err != nil {
			t.Errorf("%q: %d, %v", answer, n, err)
		}
		s.Close()
	}
}
