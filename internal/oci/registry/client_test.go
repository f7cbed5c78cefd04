package registry

import (
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

func TestParseRef(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	for text, want := range map[string]struct{ whole, short, host string }{
		"python":                                {"index.docker.io/library/python:latest", "python:latest", "index.docker.io"},
		"python:3.12-slim":                      {"index.docker.io/library/python:3.12-slim", "python:3.12-slim", "index.docker.io"},
		"team/app:1":                            {"index.docker.io/team/app:1", "team/app:1", "index.docker.io"},
		"docker://registry.example.org/a/b/c:x": {"registry.example.org/a/b/c:x", "registry.example.org/a/b/c:x", "registry.example.org"},
		"localhost:5000/app":                    {"localhost:5000/app:latest", "localhost:5000/app:latest", "localhost:5000"},
		"registry.example.com/a@" + digest:      {"registry.example.com/a:latest@" + digest, "registry.example.com/a:latest", "registry.example.com"},
	} {
		r, err := ParseRef(text)
		if err != nil || r.String() != want.whole || r.Short() != want.short || r.Host() != want.host {
			t.Errorf("%s: %s, %s, %s, %v", text, r, r.Short(), r.Host(), err)
		}
	}
	for _, bad := range []string{"", "UPPER", "a b", "a:b:c", "https://example.com/a", "a@sha256:12", "a@md5:" + strings.Repeat("0", 32), "../x", "example.com/", "a//b", strings.Repeat("n", 5000)} {
		if r, err := ParseRef(bad); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%.40q: %s, %v", bad, r, err)
		}
	}
	r, err := ParseRef("Registry.example.com:5443/a")
	if err != nil {
		t.Fatal(err)
	}
	if host, port := r.HostPort(); host != "registry.example.com" || port != 5443 {
		t.Errorf("%s, %d", host, port)
	}
}

// TestTrusts: to whom credentials of a registry may go.
func TestTrusts(t *testing.T) {
	for _, tt := range []struct {
		registry, to string
		want         bool
	}{
		{"registry.example.com", "registry.example.com", true},
		{"registry.example.com", "auth.example.com", true},
		{"registry.example.com:5000", "auth.example.com", true},
		{"index.docker.io", "auth.docker.io", true},
		{"registry.gitlab.com", "gitlab.com", true},
		{"registry.example.com", "example.org", false},
		{"registry.example.com", "evil-example.com", false},
		{"registry.example.com", "example.com.evil.org", false},
		{"a.github.io", "b.github.io", false}, // everybody has a name there
		{"a.co.uk", "b.co.uk", false},
		{"127.0.0.1:5000", "127.0.0.1:5001", false},
		{"127.0.0.1:5000", "127.0.0.1:5000", true},
		{"localhost:5000", "localhost:22", false},
		{"[::1]:5000", "[::1]:22", false},
		{"registry.example.com", "169.254.169.254", false},
	} {
		if got := (&guard{host: tt.registry}).trusts(tt.to); got != tt.want {
			t.Errorf("%s sends to %s: %v", tt.registry, tt.to, got)
		}
	}
}
