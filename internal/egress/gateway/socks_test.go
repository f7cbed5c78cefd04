package gateway

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/testenv/world"
)

// ownProxyAddr is where the proxies of single sandboxes listen.
const ownProxyAddr = "81.2.69.2:1080"

// byOwn adds a sandbox's own proxy to a policy.
func byOwn(t *testing.T, p egress.Policy, address, user, password string, special bool) egress.Policy {
	t.Helper()
	x, err := proxy.Parse("socks5://" + address)
	if err != nil {
		t.Fatal(err)
	}
	x.User, x.Credentials, x.ByName, x.Special = user, egress.Private(password), true, special
	text, err := json.Marshal(x)
	if err != nil {
		t.Fatal(err)
	}
	p.Via, p.Proxy = x.String(), text
	return p
}

// A sandbox with a proxy of its own leaves through it, by name and under the same rules, and nothing of it goes past:
// with wrong credentials, with one that is not there, or where the gateway was not told how to use it. Another sandbox
// goes its own way.
func TestOwnProxy(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	w.Name("denied.test", world.Web)
	socks := w.SOCKS(ownProxyAddr, "me:hunter-seven")
	seen := comers(w, t, world.Web+":80")
	w.Serve(world.Other+":22", func(c net.Conn) { _, _ = io.WriteString(c, "SSH-2.0-x\r\n") })
	g := newGateway(t, nil)
	rulesOf := policyOf(t, "allow a.test", "allow only-there.test", "allow "+world.Web)
	b := newBox(t, g, "one", byOwn(t, rulesOf, ownProxyAddr, "me", "hunter-seven", false))
	if got := b.get("http://a.test/"); got != "hello" {
		t.Errorf("through the proxy: %q", got)
	}
	if got := socks.Seen.All(); len(got) != 1 || got[0] != "a.test:80" {
		t.Errorf("the proxy was asked for %v", got)
	}
	b.refusedName(t, "denied.test")
	for name, p := range map[string]egress.Policy{
		"wrong password":         byOwn(t, rulesOf, ownProxyAddr, "me", "other", false),
		"no credentials":         byOwn(t, rulesOf, ownProxyAddr, "", "", false),
		"nobody there":           byOwn(t, rulesOf, "81.2.69.2:1", "", "", false),
		"not SOCKS":              byOwn(t, rulesOf, world.Other+":22", "", "", false),
		"a private address":      byOwn(t, rulesOf, world.Private+":1080", "", "", false),
		"settings that are gone": {Rules: rulesOf.Rules, Via: ownProxyAddr},
		"settings of another":    {Rules: rulesOf.Rules, Via: "93.184.215.99:1080", Proxy: byOwn(t, rulesOf, ownProxyAddr, "me", "hunter-seven", false).Proxy},
	} {
		before := len(seen.All())
		if err := g.Configure("one", p); err != nil {
			t.Fatal(err)
		}
		if got := b.get("http://a.test/"); got != "error" {
			t.Errorf("%s: %q", name, got)
		}
		for _, line := range seen.All()[before:] {
			if strings.HasSuffix(line, "a.test") {
				t.Errorf("%s: %s came past the proxy", name, line)
			}
		}
		if why := b.reason(rules.Unreachable); strings.Contains(why, "hunter-seven") {
			t.Errorf("%s: the reason holds the password: %s", name, why)
		}
	}
	// The twin: without the proxy the same goes directly, and so does what another sandbox sends.
	for _, direct := range []*box{b, newBox(t, g, "two", rulesOf)} {
		if err := g.Configure(direct.id, rulesOf); err != nil {
			t.Fatal(err)
		}
		if got := direct.get("http://a.test/"); got != "hello" {
			t.Errorf("directly: %q", got)
		}
		if all := seen.All(); !strings.HasPrefix(all[len(all)-1], hostAddr+" ") {
			t.Errorf("not directly: %v", all)
		}
	}
}

// A proxy inside the host's networks is one that an administrator names.
func TestOwnProxySpecial(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	socks := w.SOCKS(world.Private+":1080", "")
	comers(w, t, world.Web+":80")
	g := newGateway(t, nil)
	rulesOf := policyOf(t, "allow a.test")
	w.Name("moved.test", world.Private) // since it was named
	b := newBox(t, g, "one", rulesOf)
	for _, address := range []string{world.Private + ":1080", "moved.test:1080"} {
		before := len(socks.Seen.All())
		for _, special := range []bool{false, true} {
			if err := g.Configure("one", byOwn(t, rulesOf, address, "", "", special)); err != nil {
				t.Fatal(err)
			}
			got, asked := b.get("http://a.test/"), len(socks.Seen.All()) > before
			if (got == "hello") != special || asked != special { // the administrator's is the twin
				t.Errorf("%s, named by an administrator %v: %q, asked %v", address, special, got, asked)
			}
		}
	}
}

// Another proxy cuts what left by another way, as other rules do.
func TestOwnProxyChange(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	w.SOCKS(ownProxyAddr, "")
	echoServer(w, world.Web+":7000")
	g := newGateway(t, nil)
	rulesOf := policyOf(t, "allow a.test:7000")
	b := newBox(t, g, "one", rulesOf)
	c, err := b.dialName("a.test", "7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c, "before")
	if err := g.Configure("one", rulesOf); err != nil {
		t.Fatal(err)
	}
	speak(t, c, "the same rules")
	if err := g.Configure("one", byOwn(t, rulesOf, ownProxyAddr, "", "", false)); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the change: %v", err)
	}
	if c, err = b.dialName("a.test", "7000"); err != nil {
		t.Fatal(err)
	}
	speak(t, c, "through the proxy")
}

// The host's proxy may speak SOCKS5: it is asked for the address that was judged, or for the name where it looks names
// up, and one that does not take the credentials is not gone around.
func TestHostSOCKS(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	socks := w.SOCKS(theProxy, "me:hunter-seven")
	seen := comers(w, t, world.Web+":80")
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow a.test"))
	for _, c := range []struct {
		byName bool
		asked  string
	}{{false, world.Web + ":80"}, {true, "a.test:80"}} {
		for _, credentials := range []string{"me:hunter-eight", "me:hunter-seven"} {
			before, asked := len(seen.All()), len(socks.Seen.All())
			through(t, g, func(p *proxy.Proxy) {
				p.SOCKS, p.ByName, p.Credentials = true, c.byName, egress.Private(credentials)
			})
			got := b.get("http://a.test/")
			if credentials != "me:hunter-seven" {
				if got != "error" || len(seen.All()) != before || strings.Contains(b.reason(rules.Unreachable), "hunter") {
					t.Errorf("with wrong credentials: %q, because %s; %v", got, b.reason(rules.Unreachable), seen.All()[before:])
				}
				continue
			}
			if got != "hello" || strings.HasPrefix(seen.All()[before], hostAddr+" ") {
				t.Errorf("through the proxy: %q, %v", got, seen.All()[before:])
			}
			wantAll(t, "the proxy was asked for", socks.Seen.All()[asked:], c.asked)
		}
	}
	g.SetProxy(nil) // the twin
	if got := b.get("http://a.test/"); got != "hello" || !strings.HasPrefix(seen.All()[len(seen.All())-1], hostAddr+" ") {
		t.Errorf("directly: %q, %v", got, seen.All())
	}
}

// What leads to a sandbox's own proxy goes through the host's, and nowhere where that does not let it.
func TestOwnProxyBehindTheHosts(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	corp := w.Proxy(theProxy, "")
	socks := w.SOCKS(ownProxyAddr, "")
	comers(w, t, world.Web+":80")
	g := newGateway(t, nil)
	through(t, g, nil)
	b := newBox(t, g, "one", byOwn(t, policyOf(t, "allow a.test"), ownProxyAddr, "", "", false))
	if got := b.get("http://a.test/"); got != "hello" {
		t.Errorf("through both: %q", got)
	}
	wantAll(t, "the host's proxy was asked for", corp.Seen.All(), ownProxyAddr)
	wantAll(t, "the sandbox's was asked for", socks.Seen.All(), "a.test:80")
	corp.Change("somebody:else")
	if got := b.get("http://a.test/"); got != "error" || len(socks.Seen.All()) != 1 {
		t.Errorf("past the host's: %q, %v", got, socks.Seen.All())
	}
}
