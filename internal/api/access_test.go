package api

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
)

// TestEveryMethodNamesItsAccess walks the schema: a method without an access would be refused, and
// nobody would notice before a user does.
func TestEveryMethodNamesItsAccess(t *testing.T) {
	known := map[policy.Access]bool{
		policy.Open: true, policy.SandboxCreate: true, policy.SandboxRead: true, policy.SandboxWrite: true,
		policy.Process: true, policy.Files: true, policy.Admin: true, policy.Secrets: true, policy.State: true,
	}
	open, n := []string{}, 0
	for _, s := range schemaServices() {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			n++
			a := accessOf(m)
			if !known[a] {
				t.Errorf("%s has access %d, which package policy does not know", procedureOf(m), a)
			}
			if a == policy.Open {
				open = append(open, procedureOf(m))
			}
		}
	}
	if n < 30 {
		t.Errorf("walked %d methods, want all of the schema", n)
	}
	if want := "/casemate.v1.SystemService/GetVersion /casemate.v1.TrustService/GetAuthority"; strings.Join(open, " ") != want {
		t.Errorf("methods open to strangers: %q, want %q alone", open, want)
	}
}

// TestGateAdmits is the table of who passes where.
func TestGateAdmits(t *testing.T) {
	g := newGate(&API{cfg: Config{Calls: observe.New(nil)}})
	as := func(p sandbox.Principal) context.Context {
		return context.WithValue(t.Context(), callerKey{}, &caller{principal: p})
	}
	stranger := t.Context()
	user, admin := as(sandbox.Principal{ID: "key_1"}), as(sandbox.Principal{ID: "key_2", Admin: true})
	inside := as(sandbox.Principal{ID: "sandbox:x", Sandbox: "x", Admin: true})
	tests := []struct {
		name, procedure string
		ctx             context.Context //nolint:containedctx // a row of a table
		want            string          // kind, or "" for admitted
	}{
		{"stranger asks for the version", "/casemate.v1.SystemService/GetVersion", stranger, ""},
		{"stranger lists", "/casemate.v1.SandboxService/ListSandboxes", stranger, "unauthenticated"},
		{"stranger runs", "/casemate.v1.ProcessService/Run", stranger, "unauthenticated"},
		{"user creates", "/casemate.v1.SandboxService/CreateSandbox", user, ""},
		{"user makes a key", "/casemate.v1.SystemService/CreateKey", user, "permission_denied"},
		{"admin makes a key", "/casemate.v1.SystemService/CreateKey", admin, ""},
		{"sandbox makes a key", "/casemate.v1.SystemService/CreateKey", inside, "permission_denied"},
		{"method without access", "/casemate.v1.SystemService/Nothing", admin, "permission_denied"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if _, err := g.admit(tt.ctx, tt.procedure); err != nil {
				got = errs.KindOf(err).String()
			}
			if got != tt.want {
				t.Errorf("admit = %q, want %q", got, tt.want)
			}
		})
	}
}

// TestTwinsNameMethodsOfTheSchema: a twin's access is its RPC's, so that RPC must exist.
func TestTwinsNameMethodsOfTheSchema(t *testing.T) {
	g := newGate(&API{cfg: Config{Calls: observe.New(nil)}})
	for _, r := range Routes() {
		if _, ok := g.methods[r.Twin]; !ok {
			t.Errorf("%s %s is the twin of %s, which is not in the schema", r.Method, r.Path, r.Twin)
		}
	}
}

// TestOpenAPICoversEveryPath checks docs/openapi.yaml against the schema and the twins.
func TestOpenAPICoversEveryPath(t *testing.T) {
	got := openAPIPaths(t)
	want := map[string]bool{"GET /-/health": true, "GET /-/metrics": true, "GET /v1/sandboxes/{sandbox}/ports/{port}/{path}": true}
	for _, s := range schemaServices() {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			rule, _ := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
			switch {
			case rule == nil && !m.IsStreamingServer() && !m.IsStreamingClient():
				t.Errorf("%s has no REST path", procedureOf(m))
			case rule.GetGet() != "":
				want["GET "+rule.GetGet()] = true
			case rule.GetPost() != "":
				want["POST "+rule.GetPost()] = true
			case rule.GetPut() != "":
				want["PUT "+rule.GetPut()] = true
			case rule.GetPatch() != "":
				want["PATCH "+rule.GetPatch()] = true
			case rule.GetDelete() != "":
				want["DELETE "+rule.GetDelete()] = true
			}
		}
	}
	for _, r := range Routes() {
		want[r.Method+" "+r.Path] = true
	}
	for route := range want {
		if !got[route] {
			t.Errorf("docs/openapi.yaml lacks %s", route)
		}
	}
	for route := range got {
		if !want[route] {
			t.Errorf("docs/openapi.yaml has %s, which nobody serves", route)
		}
	}
}

// openAPIPaths reads the paths and methods of the document, which our own generator writes in one
// fixed shape.
func openAPIPaths(t *testing.T) map[string]bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "openapi.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	pathLine, methodLine := regexp.MustCompile(`^  (/\S*):$`), regexp.MustCompile(`^    (get|put|post|patch|delete):$`)
	got, path := map[string]bool{}, ""
	for line := range strings.SplitSeq(string(b), "\n") {
		if m := pathLine.FindStringSubmatch(line); m != nil {
			path = m[1]
		} else if m := methodLine.FindStringSubmatch(line); m != nil && path != "" {
			got[strings.ToUpper(m[1])+" "+path] = true
		} else if line == "components:" {
			return got
		}
	}
	t.Fatal("docs/openapi.yaml has no components")
	return nil
}
