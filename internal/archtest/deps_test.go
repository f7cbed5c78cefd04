package archtest

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the lists of dependencies anew")

// linked returns the packages that a package of this module links, with those of the standard
// library marked by "std ".
func linked(t *testing.T, pkg string) []string {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "list", "-deps", "-f", "{{if .Standard}}std {{end}}{{.ImportPath}}", pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=amd64")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list -deps %s: %v", pkg, err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	return lines
}

// TestProgramDependencies compares what the main program links with a list in the repository, so
// that a new dependency shows in every diff that brings one.
func TestProgramDependencies(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	var now []string
	for _, p := range linked(t, "./cmd/casemate") {
		if !strings.HasPrefix(p, "std ") && !strings.HasPrefix(p, module) {
			now = append(now, p)
		}
	}
	path := filepath.Join(root, "docs/deps.txt")
	text := "# Packages of others that bin/casemate links. Written by: go test ./internal/archtest -run Dependencies -update\n" +
		strings.Join(now, "\n") + "\n"
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text == string(was) {
		return
	}
	old := strings.Split(string(was), "\n")
	for _, p := range now {
		if !slices.Contains(old, p) {
			t.Errorf("new: %s", p)
		}
	}
	for _, p := range old {
		if p != "" && p[0] != '#' && !slices.Contains(now, p) {
			t.Errorf("gone: %s", p)
		}
	}
	t.Error("docs/deps.txt does not say what the program links; look at each, then run this test with -update")
}

// TestGuestDependencies holds the guest to an allow list: it is executed once per create, and what
// it links is what a sandbox can attack first.
func TestGuestDependencies(t *testing.T) {
	checkLinked(t, "./cmd/casemate-guest", []string{
		module + "cmd/casemate-guest/", module + "internal/guest/", module + "internal/guestwire/",
		module + "internal/linux/", module + "internal/errs/", module + "internal/cleanup/", "golang.org/x/sys/unix/",
	}, []string{
		"net/http/", "crypto/tls/", "crypto/x509/", "html/", "text/template/", "regexp/", "database/sql/", "os/exec/", "os/user/",
		"flag/", "log/slog/", "encoding/xml/", "archive/tar/", "testing/", "go/",
	})
}

// TestClientDependencies holds the public client to an allow list: others link it.
func TestClientDependencies(t *testing.T) {
	checkLinked(t, "./client", []string{
		module + "client/", module + "proto/", "connectrpc.com/connect/", "google.golang.org/protobuf/",
		"google.golang.org/genproto/googleapis/api/", "golang.org/x/net/", "golang.org/x/text/",
	}, []string{"database/sql/", "os/exec/"})
}

func checkLinked(t *testing.T, pkg string, allow, denyStd []string) {
	t.Helper()
	for _, p := range linked(t, pkg) {
		if std, ok := strings.CutPrefix(p, "std "); ok {
			if matches(std, denyStd) {
				t.Errorf("%s links %s, which it must do without", pkg, std)
			}
			continue
		}
		if !matches(p, allow) {
			t.Errorf("%s links %s, which is not on its allow list", pkg, p)
		}
	}
}
