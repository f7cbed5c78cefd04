package api

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"connectrpc.com/grpcreflect"
)

// TestHostAndOriginAtTheDoor: the check stands before everything, open paths included (E11).
func TestHostAndOriginAtTheDoor(t *testing.T) {
	h := newHarness(t)
	for _, path := range []string{"/v1/version", "/-/health", "/casemate.v1.SystemService/GetVersion", "/v1/sandboxes/box/ports/80/"} {
		for _, evil := range []string{"Host: evil.test\r\n", "Host: 127.0.0.1\r\nOrigin: http://evil.test\r\n"} {
			if got := h.rawStatus("GET " + path + " HTTP/1.1\r\n" + evil + "Connection: close\r\nAuthorization: Bearer " + h.user + "\r\n\r\n"); got != "403" {
				t.Errorf("%s with %q: %s, want 403", path, evil, got)
			}
		}
	}
	if got := h.rawStatus("GET /v1/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"); got != "200" {
		t.Errorf("localhost: %s", got)
	}
}

// rawStatus writes bytes to the server and returns the answer's status.
func (h *harness) rawStatus(request string) string {
	h.t.Helper()
	conn, err := (&net.Dialer{}).DialContext(h.t.Context(), "tcp", strings.TrimPrefix(h.url, "http://"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(conn, request)
	b, _ := io.ReadAll(conn)
	if len(b) < 12 {
		return fmt.Sprintf("no answer but %q", b)
	}
	return string(b[9:12])
}

// TestStrangersBodiesAreBounded: what comes without a key is read to 64 KiB, the twin with a key
// further.
func TestStrangersBodiesAreBounded(t *testing.T) {
	h := newHarness(t)
	big := `{"name":"` + strings.Repeat("x", 1<<20) + `"}`
	for _, path := range []string{"/casemate.v1.SandboxService/CreateSandbox", "/v1/sandboxes"} {
		status, _, body := h.call("POST", path, big, "Authorization", "")
		if status < 400 || strings.Contains(body, "name") && !strings.Contains(body, "unauthenticated") && status != http.StatusTooManyRequests {
			t.Errorf("%s without a key: %d %.200s", path, status, body)
		}
		if status, _, body := h.call("POST", path, big); status != http.StatusBadRequest {
			t.Errorf("%s with a key: %d %.200s; want the name refused", path, status, body)
		}
	}
	huge := bytes.Repeat([]byte(" "), maxMessage+1)
	status, _, body := h.call("POST", "/casemate.v1.SandboxService/CreateSandbox", string(huge))
	if status != http.StatusTooManyRequests {
		t.Errorf("beyond the limit of messages: %d %.200s", status, body)
	}
}

// TestReflection: gRPC tools find the services, with a key.
func TestReflection(t *testing.T) {
	h := newHarness(t)
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	c := grpcreflect.NewClient(&http.Client{Transport: &http.Transport{Protocols: p}}, h.url)
	list := func(key string) (int, error) {
		s := c.NewStream(t.Context(), grpcreflect.WithRequestHeaders(http.Header{"X-Api-Key": {key}}))
		defer func() { _, _ = s.Close() }()
		names, err := s.ListServices()
		return len(names), err
	}
	if n, err := list(h.user); err != nil || n != len(schemaServices()) {
		t.Errorf("with a key: %d services, %v", n, err)
	}
	if n, err := list("csm_wrong"); err == nil {
		t.Errorf("with a wrong key: %d services", n)
	}
}

// TestDocumentedExamplesRun runs every shell block of docs/api.md and docs/state.md, in order, in one shell.
func TestDocumentedExamplesRun(t *testing.T) {
	var doc []byte
	for _, page := range []string{"api.md", "state.md"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "docs", page))
		if err != nil {
			t.Fatal(err)
		}
		doc = append(doc, text...)
	}
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllSubmatch(doc, -1)
	if len(blocks) < 8 {
		t.Fatalf("%d examples", len(blocks))
	}
	var script strings.Builder
	script.WriteString("set -euo pipefail\n")
	for _, b := range blocks {
		script.Write(b[1])
		script.WriteString("\n")
	}
	h := newHarness(t)
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script.String())
	cmd.Env = append(os.Environ(), "CASEMATE_URL="+h.url, "CASEMATE_API_KEY="+h.user)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"v-test", `"team"`, "aGVsbG8K", "one\\n", "three\\n", "event: ended", "to stderr", "sandbox.created", "deleted", `{"step": 2}`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the examples do not print %q:\n%s", want, out)
		}
	}
}
