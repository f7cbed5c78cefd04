package network

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// proxyAddr is where the proxies of these tests listen.
const proxyAddr = "81.2.69.2:3128"

// Behind a proxy whose credentials are a secret of the server's, connections that are passed through and such that are
// looked into leave through it, a rotation holds without a restart, and nothing goes past it.
func TestProxy(t *testing.T) {
	w := world.New(t)
	corp := w.Proxy(proxyAddr, "gate:first-word")
	p := newPlaceIn(t, w, func(c *server.Config) {
		c.ProxyURL, c.ProxySecret = "http://"+proxyAddr, "corp-proxy"
	})
	seen := p.web("passed.test", "opened.test")
	s := p.create("allow passed.test", "allow GET https://opened.test/ok/*")
	const curl = `curl -sS --max-time 60 `
	// Without the secret nothing leaves, and whoever asks is told why.
	out, end := p.sh(s, curl+`http://passed.test/`)
	if end.GetCode() == 0 || len(end.GetRefused()) == 0 || !strings.Contains(end.GetRefused()[0].GetReason(), "corp-proxy") {
		t.Errorf("without credentials: %s %v", out, end.GetRefused())
	}
	if _, err := p.Secrets.Set(t.Context(), &client.SetSecretRequest{Name: "corp-proxy", Value: "gate:first-word"}); err != nil {
		t.Fatal(err)
	}
	works := func(what string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, what, func() bool {
			out, _ := p.sh(s, curl+`http://passed.test/`)
			return out == "hello from passed.test"
		})
	}
	works("the gateway knows the secret")
	p.expect(s, curl+`https://opened.test/ok/1`, "hello from opened.test")
	p.expect(s, curl+`https://opened.test/no 2>/dev/null; echo $?`, "casemate: no rule allows GET opened.test:443/no\n0")
	p.expect(s, curl+`http://`+world.Private+`/ 2>/dev/null; echo $?`, "7")
	for _, target := range corp.Seen.All() {
		if target != world.Web+":80" && target != world.Web+":443" {
			t.Errorf("the proxy was asked for %s", target)
		}
	}
	if n := len(corp.Seen.All()); n != len(seen.All()) {
		t.Errorf("%d connections came through the proxy, %d requests in all", n, len(seen.All()))
	}
	e, err := p.Network.Explain(t.Context(), s.GetId(), "https://opened.test/ok/1", "")
	if err != nil || !e.GetAllowed() || !strings.Contains(fmt.Sprint(e.GetAnswers()), "leaves through the proxy "+proxyAddr) {
		t.Errorf("explained: %v %v", e, err)
	}
	corp.Change("gate:second-word")
	p.expect(s, curl+`http://passed.test/ 2>/dev/null; echo $?`, "7")
	if _, err := p.Secrets.Rotate(t.Context(), "corp-proxy", "gate:second-word"); err != nil {
		t.Fatal(err)
	}
	works("the gateway knows the new word")
	p.journalHas(s, "network.closed")
	p.hidden(s, "first-word", "second-word")
}

// hidden fails the test where a word stands in the journal, or in what is seen of the gateway's process.
func (p *place) hidden(s *client.Sandbox, words ...string) {
	p.t.Helper()
	list, err := p.Journal.Events(p.t.Context(), s.GetId(), 0, 1000)
	if err != nil {
		p.t.Fatal(err)
	}
	text := fmt.Sprint(list)
	for _, f := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.gatewayPID(), f))
		if err != nil {
			p.t.Fatal(err)
		}
		text += string(b)
	}
	log, err := os.ReadFile(filepath.Join(p.dir, "r", "gateway.log"))
	if err != nil {
		p.t.Fatal(err)
	}
	text += string(log)
	if !strings.Contains(text, proxyAddr) {
		p.t.Error("the journal does not name the proxy")
	}
	for _, w := range words {
		if strings.Contains(text, w) {
			p.t.Errorf("%q is seen", w)
		}
	}
}

// Settings that make no proxy stop the server, with what to do; none shows a password.
func TestProxySettings(t *testing.T) {
	w := world.New(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p := &place{t: t, dir: dir, w: w}
	for _, c := range []struct {
		set  func(*server.Config)
		want string
	}{
		{func(c *server.Config) { c.ProxyURL = "http://me:hidden@proxy.test" }, "--proxy-credentials"},
		{func(c *server.Config) { c.ProxyURL = "socks4://proxy.test" }, "http://"},
		{func(c *server.Config) { c.NoProxy = []string{"a.test"} }, "--proxy"},
		{func(c *server.Config) { c.ProxyURL, c.NoProxy = "http://p.test", []string{"10.0.0.1/8"} }, "10.0.0.0/8"},
		{func(c *server.Config) { c.ProxyURL, c.ProxyCredentials = "http://p.test", file("none", "") }, "USER:PASSWORD"},
		{func(c *server.Config) { c.ProxyURL, c.ProxyCredentials = "http://p.test", file("two", "me:hidden\nx") }, "USER:PASSWORD"},
		{func(c *server.Config) { c.ProxyURL, c.ProxyCredentials = "http://p.test", dir+"/missing" }, "missing"},
		{func(c *server.Config) {
			c.ProxyURL, c.ProxyCredentials, c.ProxySecret = "http://p.test", file("good", "me:hidden"), "x"
		}, "not in both"},
	} {
		cfg := p.config()
		cfg.ExtraCAs = nil
		c.set(&cfg)
		s, err := server.New(t.Context(), cfg)
		if err == nil {
			_ = s.Close()
			t.Errorf("%s: it starts", c.want)
			continue
		}
		public, hint := errs.PublicText(err)
		text := fmt.Sprint(err, public, hint)
		if !strings.Contains(text, c.want) || strings.Contains(text, "hidden") {
			t.Errorf("want %q in %s", c.want, text)
		}
	}
}
