package clients

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

// ownProxy is where the SOCKS proxy of this test listens, and its password a word that stands nowhere else.
const (
	ownProxy     = "81.2.69.2:1080"
	ownProxyWord = "socks-word-wX7wX7"
)

// TestE2BProxy lets a sandbox leave through a SOCKS5 proxy of its own, as E2B's API has it: by name, with TLS and keys
// unharmed, changed live and never gone around, and its password is seen nowhere.
func TestE2BProxy(t *testing.T) {
	s := stage.Start(t, "--listen=127.0.0.1:0")
	site := &stage.Site{Answer: echo}
	s.Serve(world.Web, site, keyed)
	s.World.Name("proxy.test", "81.2.69.2")
	s.World.Name("inside.test", world.Private)
	socks := s.World.SOCKS(ownProxy, "me:"+ownProxyWord)
	s.Secret("plain", "plain-value-wX7wX7", &client.SecretBinding{Hosts: []string{keyed + ":80", keyed}, Scheme: "bearer", Env: "KEY", Plain: true})
	admin, err := os.ReadFile(s.Dir + "/k/admin.key")
	if err != nil {
		t.Fatal(err)
	}
	url, key := listening(t, s), e2bKey(t, s)
	callAs := func(key, method, path, body string, status int) string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", key)
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != status {
			t.Fatalf("%s %s %s: %d %s", method, path, body, resp.StatusCode, b)
		}
		return string(b)
	}
	call := func(method, path, body string, status int) string {
		t.Helper()
		return callAs(key, method, path, body, status)
	}
	for _, bad := range []string{`{"address":"inside.test:1080"}`, `{"address":"10.1.2.3:1080"}`, `{"address":"nobody.test:1080"}`, `{"address":"proxy.test"}x`, `{"address":"proxy.test:0"}`, `{"address":"proxy.test:1080","password":"x"}`} {
		call("POST", "/v2/sandboxes", `{"templateID":"host","network":{"egressProxy":`+bad+`}}`, 400)
	}
	for _, private := range []string{"inside.test:1080", "10.1.2.3:1080"} { // the twin: an administrator may name it
		callAs(strings.TrimSpace(string(admin)), "POST", "/v2/sandboxes", `{"templateID":"host","network":{"egressProxy":{"address":"`+private+`"}}}`, 201)
	}
	proxy := func(word string) string {
		return fmt.Sprintf(`{"address":"proxy.test:1080","username":"me","password":%q}`, word)
	}
	var made struct{ SandboxID string }
	if err := json.Unmarshal([]byte(call("POST", "/v2/sandboxes", `{"templateID":"host","timeout":600,"network":{"egressProxy":`+proxy(ownProxyWord)+`}}`, 201)), &made); err != nil {
		t.Fatal(err)
	}
	box := made.SandboxID
	const curl = `curl -sS --max-time 60 -o /dev/null -w '%{http_code}' -H "Authorization: Bearer $KEY" `
	if got := s.Sh(box, curl+"https://"+keyed+"/proxied"); got != "200" {
		t.Errorf("through the proxy: %s", got)
	}
	if r := site.Last(t); r.Header.Get("Authorization") != "Bearer plain-value-wX7wX7" {
		t.Errorf("with TLS the key is put on: %v", r.Header)
	}
	if got := s.Sh(box, curl+"http://"+keyed+"/plain"); got != "200" {
		t.Errorf("plain: %s", got)
	}
	if r := site.Last(t); strings.Contains(r.Text(), "plain-value") {
		t.Error("a key went to the proxy in the clear")
	}
	for _, target := range socks.Seen.All() {
		if target != keyed+":443" && target != keyed+":80" {
			t.Errorf("the proxy was asked for %s", target)
		}
	}
	info := call("GET", "/sandboxes/"+box, "", 200)
	if !strings.Contains(info, `"egressProxy":{"address":"proxy.test:1080","username":"me"}`) || strings.Contains(info, ownProxyWord) {
		t.Errorf("shown: %s", info)
	}
	if out, err := s.CLI("", "net", "explain", box, "https://"+keyed+"/x"); err != nil || !strings.Contains(out, "proxy.test:1080") {
		t.Errorf("explained: %v %s", err, out)
	}
	if out, err := s.CLI("", "net", "show", box); err != nil || !strings.Contains(out, "own proxy, proxy.test:1080") || strings.Contains(out, ownProxyWord) {
		t.Errorf("shown by the command line: %v %s", err, out)
	}
	// A rotated password holds at once, a wrong one is not gone around, and without the proxy the way is direct.
	update := func(body string) { call("PUT", "/sandboxes/"+box+"/network", body, 204) }
	update(`{"egressProxy":` + proxy("wrong") + `}`)
	n := len(site.All())
	if out, end := s.Run(box, curl+"http://"+keyed+"/wrong"); out == "200" || len(site.All()) != n || len(end.GetRefused()) == 0 {
		t.Errorf("with a wrong password: %s %v", out, end.GetRefused())
	}
	if _, err := s.CLI("", "net", "set", box, "--net", "open"); err != nil { // other rules, the same proxy
		t.Error(err)
	}
	if out := s.Sh(box, curl+"http://"+keyed+"/wrong"); out == "200" || len(site.All()) != n {
		t.Errorf("with other rules: %s", out)
	}
	asked := len(socks.Seen.All())
	update(`{}`)
	if got := s.Sh(box, curl+"http://"+keyed+"/direct"); got != "200" || len(socks.Seen.All()) != asked {
		t.Errorf("directly: %s", got)
	}
	if r := site.Last(t); !strings.Contains(r.Text(), "plain-value") {
		t.Error("twin: without the proxy the key is put on in the clear, where its binding says so")
	}
	hiddenWord(t, s, box)
}

// hiddenWord fails the test where the password stands inside the sandbox, in a journal, the server's files, or the
// gateway's words.
func hiddenWord(t *testing.T, s *stage.Stage, box string) {
	t.Helper()
	inside := func(word string) bool {
		// What looks for it does not hold it.
		out := s.Sh(box, `env; set; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\0' '\n'; cat /proc/self/mountinfo
			grep -rIoh '[`+word[:1]+`]`+word[1:]+`' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 2>/dev/null; true`)
		return strings.Contains(out, word)
	}
	if inside(ownProxyWord) {
		t.Error("the password is inside")
	}
	if s.Sh(box, `printf 'planted-%s' word-kQ4 >/tmp/planted`); !inside("planted-word-kQ4") {
		t.Error("twin: the search does not find what is inside")
	}
	list, err := s.Journal.Events(t.Context(), box, 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(fmt.Sprint(list), ownProxyWord) {
		t.Error("the journal holds the password")
	}
	for _, file := range []string{"cmdline", "environ"} {
		path := fmt.Sprintf("/proc/%d/%s", s.Gateway(), file)
		if text, err := os.ReadFile(path); err != nil || bytes.Contains(text, []byte(ownProxyWord)) {
			t.Errorf("%s holds the password, or can't be read: %v", path, err)
		}
	}
	if files := s.Holding(ownProxyWord); len(files) > 0 {
		t.Errorf("the password is in %v", files)
	}
	if len(s.Holding("proxy.test:1080")) == 0 {
		t.Error("twin: the search does not find the proxy's address either")
	}
}
