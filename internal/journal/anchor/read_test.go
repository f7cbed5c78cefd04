package anchor

import (
	"bytes"
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

// The checkpoints of a log; the origin of the second could be base64.
const (
	first  = "casemate.test/log\n1\nAAAA\n\n\u2014 casemate.test/log c2ln\n"
	second = "casemate\n2\nBBBB\n\n\u2014 casemate c2ln\n\u2014 witness c2ln\n"
)

func encoded(note string) string { return base64.StdEncoding.EncodeToString([]byte(note)) + "\n" }

// TestReadTakesWhatAnchorsHold reads what a server appends to a file, what it posts to a URL that appends, and one as it is.
func TestReadTakesWhatAnchorsHold(t *testing.T) {
	for name, c := range map[string]struct {
		held string
		want []string
	}{
		"a file of a server":      {encoded(first) + encoded(second), []string{first, second}},
		"what was posted":         {first + second, []string{first, second}},
		"posted, with space":      {first + "\n" + second + "\n", []string{first, second}},
		"one":                     {second, []string{second}},
		"both kinds":              {encoded(first) + second, []string{first, second}},
		"nothing":                 {"\n", nil},
		"no checkpoints":          {"hello\nworld\n", []string{"hello\nworld\n"}},
		"a line that was cut off": {encoded(first) + encoded(second)[:37] + "\n" + encoded(second), []string{first, encoded(second)[:37] + "\n", second}},
		"base64 of no checkpoint": {encoded("hello"), []string{encoded("hello")}},
	} {
		path := filepath.Join(t.TempDir(), "held")
		if err := os.WriteFile(path, []byte(c.held), 0o600); err != nil {
			t.Fatal(err)
		}
		at := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(c.held)) }))
		for _, place := range []string{path, at.URL} {
			got, err := Read(t.Context(), place)
			if err != nil || !slices.EqualFunc(got, c.want, func(b []byte, s string) bool { return string(b) == s }) {
				t.Errorf("%s at %s: %q, %v", name, place, got, err)
			}
		}
		at.Close()
	}
}

// TestReadSaysWhatIsWrong tells no credential of a URL.
func TestReadSaysWhatIsWrong(t *testing.T) {
	at := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/much" {
			piece := bytes.Repeat([]byte("x"), 1<<20)
			for range maxRead>>20 + 1 {
				if _, err := w.Write(piece); err != nil {
					return
				}
			}
			return
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	defer at.Close()
	for place, want := range map[string]struct {
		kind errs.Kind
		text string
	}{
		filepath.Join(t.TempDir(), "none"):                           {errs.NotFound, "no such file"},
		at.URL + "/log?token=hidden":                                 {errs.Unavailable, "403"},
		at.URL + "/much?token=hidden":                                {errs.InvalidArgument, "64 MiB"},
		closed.URL + "/log?token=hidden":                             {errs.Unavailable, "refused"},
		"https:///log":                                               {errs.InvalidArgument, "is no URL"},
		strings.Replace(at.URL, "http://", "http://user:hidden@", 1): {errs.Unavailable, "403"},
	} {
		_, err := Read(t.Context(), place)
		if errs.KindOf(err) != want.kind || !strings.Contains(err.Error(), want.text) || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: %v", place, err)
		}
	}
}
