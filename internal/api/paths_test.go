package api

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"casemate.dev/internal/sandbox"
)

func TestParsePortPath(t *testing.T) {
	tests := []struct {
		path string
		want portPath
		ok   bool
	}{
		{"/v1/sandboxes/abcd/ports/80/", portPath{"abcd", 80, "/"}, true},
		{"/v1/sandboxes/abcd/ports/80", portPath{"abcd", 80, ""}, true},
		{"/v1/sandboxes/abcd/ports/65535/a//b/../c%2Fd", portPath{"abcd", 65535, "/a//b/../c%2Fd"}, true},
		{"/v1/sandboxes/a%2Db/ports/80/", portPath{"a-b", 80, "/"}, true},
		{"/v1/sandboxes/abcd/ports/0/", portPath{}, false},
		{"/v1/sandboxes/abcd/ports/65536/", portPath{}, false},
		{"/v1/sandboxes/abcd/ports/080/", portPath{}, false},
		{"/v1/sandboxes/abcd/ports/+80/", portPath{}, false},
		{"/v1/sandboxes/abcd/ports//", portPath{}, false},
		{"/v1/sandboxes/abcd/ports", portPath{}, false},
		{"/v1/sandboxes//ports/80/", portPath{}, false},
		{"/v1/sandboxes/a/b/ports/80/", portPath{}, false},
		{"/v1/sandboxes/%zz/ports/80/", portPath{}, false},
		{"/v1/sandboxes/abcd/files", portPath{}, false},
	}
	for _, tt := range tests {
		got, ok := parsePortPath(tt.path)
		if ok != tt.ok || got != tt.want {
			t.Errorf("parsePortPath(%q) = %+v, %v; want %+v, %v", tt.path, got, ok, tt.want, tt.ok)
		}
	}
}

// FuzzParsePortPath: whatever comes in, what is taken as ours never reaches into the rest, and the
// rest is passed on as it was.
func FuzzParsePortPath(f *testing.F) {
	f.Add("/v1/sandboxes/abcd/ports/80/x?y")
	f.Add("/v1/sandboxes/a%2Fb/ports/80/../../..")
	f.Add("/v1/sandboxes/abcd/ports/80%2F/")
	f.Fuzz(func(t *testing.T, path string) {
		p, ok := parsePortPath(path)
		if !ok {
			return
		}
		if p.port < 1 || p.port > 65535 {
			t.Fatalf("port %d", p.port)
		}
		if !strings.HasSuffix(path, p.rest) || (p.rest != "" && p.rest[0] != '/') {
			t.Fatalf("rest %q of %q", p.rest, path)
		}
	})
}

func TestDisposition(t *testing.T) {
	tests := map[string]string{
		"a.txt":           `attachment; filename="a.txt"`,
		"x y.txt":         `attachment; filename="x y.txt"`,
		"ü.txt":           `attachment; filename="_.txt"; filename*=UTF-8''%C3%BC.txt`,
		"a\"b\r\nX: y":    `attachment; filename="a_b__X: y"; filename*=UTF-8''a%22b%0D%0AX%3A%20y`,
		"\xff\xfe-broken": `attachment; filename="__-broken"; filename*=UTF-8''%FF%FE-broken`,
	}
	for name, want := range tests {
		if got := disposition(name); got != want {
			t.Errorf("disposition(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestMatches(t *testing.T) {
	for header, want := range map[string]bool{
		`W/"1-2"`: true, `"1-2"`: true, `"x", W/"1-2"`: true, `*`: true, `"x"`: false, ``: false,
	} {
		if got := matches(header, etagOf(sandbox.FileInfo{MTime: 1, Size: 2})); got != want {
			t.Errorf("matches(%q) = %v, want %v", header, got, want)
		}
	}
}

func TestSignalNumber(t *testing.T) {
	for name, want := range map[string]int{"": 15, "9": 9, "KILL": 9, "SIGterm": 15, "hup": 1, "SYS": 31, "64": 64} {
		if got, err := signalNumber(name); err != nil || got != want {
			t.Errorf("signalNumber(%q) = %d, %v; want %d", name, got, err, want)
		}
	}
	for _, name := range []string{"0", "65", "-9", "SIG", "NOTHING"} {
		if got, err := signalNumber(name); err == nil {
			t.Errorf("signalNumber(%q) = %d, want an error", name, got)
		}
	}
}

func TestResumeOffset(t *testing.T) {
	r := &http.Request{URL: &url.URL{RawQuery: "offset=5"}, Header: http.Header{}}
	if n, err := resumeOffset(r, "offset"); n != 5 || err != nil {
		t.Errorf("query: %d, %v", n, err)
	}
	r.Header.Set("Last-Event-ID", "7")
	if n, err := resumeOffset(r, "offset"); n != 7 || err != nil {
		t.Errorf("Last-Event-ID: %d, %v; want 7, since it is the later word", n, err)
	}
	r.Header.Set("Last-Event-ID", "-1")
	if n, err := resumeOffset(r, "offset"); err == nil {
		t.Errorf("negative: %d, want an error", n)
	}
}
