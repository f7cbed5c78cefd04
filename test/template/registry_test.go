package template

import (
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	hub "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

// password is the registry's. It must be found nowhere afterwards.
const password = "not-4-everybody"

// A build by E2B's API begins with an image of a registry that asks for a password, which nothing keeps.
func testRegistry(t *testing.T, s *stage.Stage, archive string) {
	inner := hub.New(hub.Logger(log.New(io.Discard, "", 0)))
	l := s.World.Listen(world.Web + ":5000")
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, given, ok := r.BasicAuth(); !ok || user != "robot" || given != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	ref := world.Web + ":5000/private/small:1"
	tag, err := name.NewTag(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img, remote.WithAuth(&authn.Basic{Username: "robot", Password: password})); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ auth, want string }{
		{"", "401"},
		{`,"fromImageRegistry":{"type":"registry","username":"robot","password":"guess"}`, "401"},
		{`,"fromImageRegistry":{"type":"registry","username":"robot","password":"` + password + `"}`, ""},
	} {
		status, reason := buildByE2B(t, s, `{"fromImage":"`+ref+`"`+c.auth+`,"steps":[{"type":"ENV","args":["A","b"]}]}`)
		if c.want == "" && status != "ready" || c.want != "" && (status != "error" || reason == "") {
			t.Errorf("with %q: %s %s", c.auth, status, reason)
		}
		if strings.Contains(reason, password) || strings.Contains(reason, "guess") {
			t.Errorf("the reason tells the password: %s", reason)
		}
	}
	if files := s.Holding(password); len(files) > 0 {
		t.Errorf("the password is in %v", files)
	}
	if len(s.Holding(ref)) == 0 {
		t.Error("twin: the search does not find the image's name either")
	}
}

// buildByE2B builds by E2B's API, and returns how that ended.
func buildByE2B(t *testing.T, s *stage.Stage, body string) (status, reason string) {
	t.Helper()
	raw, err := os.ReadFile(s.Dir + "/r/server.json")
	var server struct{ URLs []string }
	if err == nil {
		err = json.Unmarshal(raw, &server)
	}
	if err != nil || len(server.URLs) == 0 {
		t.Fatalf("the server has no address: %v", err)
	}
	key, err := os.ReadFile(s.Dir + "/k/admin.key")
	if err != nil {
		t.Fatal(err)
	}
	call := func(method, path, body string, into any) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, server.URLs[0]+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", strings.TrimSpace(string(key)))
		req.Header.Set("Content-Type", "application/json")
		a, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		text, err := io.ReadAll(a.Body)
		if err != nil || a.StatusCode >= 300 {
			t.Fatalf("%s %s: %s %s, %v", method, path, a.Status, text, err)
		}
		if into != nil {
			if err := json.Unmarshal(text, into); err != nil {
				t.Fatal(err)
			}
		}
	}
	var asked struct{ TemplateID, BuildID string }
	call("POST", "/v3/templates", `{"name":"of-registry"}`, &asked)
	path := "/templates/" + asked.TemplateID + "/builds/" + asked.BuildID
	call("POST", "/v2"+path, body, nil)
	var now struct {
		Status string
		Reason struct{ Message string }
	}
	testenv.Eventually(t, 2*time.Minute, "the build is over", func() bool {
		call("GET", path+"/status", "", &now)
		return now.Status != "building" && now.Status != "waiting"
	})
	return now.Status, now.Reason.Message
}
