package inspect

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// got is what a server has received.
type got struct {
	mu   sync.Mutex
	reqs []received
}

type received struct {
	proto, method, host, uri, body string
	header                         http.Header
}

func (g *got) handler(answer http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		g.mu.Lock()
		g.reqs = append(g.reqs, received{r.Proto, r.Method, r.Host, r.RequestURI, string(b), r.Header.Clone()})
		g.mu.Unlock()
		if answer != nil {
			answer(w, r)
		}
	}
}

func (g *got) last() received {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.reqs) == 0 {
		return received{}
	}
	return g.reqs[len(g.reqs)-1]
}

func (g *got) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.reqs)
}

// text is everything that a server has seen of a request.
func (r received) text() string { return fmt.Sprint(r.uri, r.host, r.header, r.body) }

func bindTo(scheme secret.Scheme, name string) secret.Binding {
	return secret.Binding{Place: secret.Place{Scheme: scheme, Name: name}}
}

// send makes a request and returns the answer's body.
func send(t *testing.T, c *http.Client, method, url, body string, header ...string) (answer, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return answer{resp.StatusCode, resp.Header, resp.Trailer}, string(b)
}

// answer is a response that was read and closed.
type answer struct {
	StatusCode      int
	Header, Trailer http.Header
}

func basic(user, pass string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+pass))
}

// TestPlaces puts a placeholder into each place and looks at what the server gets: the value in the
// bound place, the placeholder everywhere else.
func TestPlaces(t *testing.T) {
	always := func(b secret.Binding) secret.Binding { b.Always = true; return b }
	p, v := placeholder(1), value(1)
	for _, c := range []struct {
		name   string
		b      secret.Binding
		path   string
		header []string
		want   func(received) bool
		stray  string // where a placeholder is noted
	}{
		{"bearer", bindTo(secret.Bearer, "Authorization"), "/", []string{"Authorization", "Bearer " + p}, func(r received) bool { return r.header.Get("Authorization") == "Bearer "+v }, ""},
		{"bearer in lower case", bindTo(secret.Bearer, "Authorization"), "/", []string{"authorization", "bearer " + p}, func(r received) bool { return r.header.Get("Authorization") == "Bearer "+v }, ""},
		{"bearer, another token", bindTo(secret.Bearer, "Authorization"), "/", []string{"Authorization", "Bearer mine"}, func(r received) bool { return r.header.Get("Authorization") == "Bearer mine" }, ""},
		{"bearer, part of a token", bindTo(secret.Bearer, "Authorization"), "/", []string{"Authorization", "Bearer x" + p}, nil, "the header Authorization"},
		{"bearer, other header", bindTo(secret.Bearer, "Authorization"), "/", []string{"X-Api-Key", p}, nil, "the header X-Api-Key"},
		{"basic password", bindTo(secret.Basic, "Authorization"), "/", []string{"Authorization", basic("me", p)}, func(r received) bool { return r.header.Get("Authorization") == basic("me", v) }, ""},
		{"basic user", bindTo(secret.Basic, "Authorization"), "/", []string{"Authorization", basic(p, "")}, func(r received) bool { return r.header.Get("Authorization") == basic(v, "") }, ""},
		{"basic for bearer", bindTo(secret.Bearer, "Authorization"), "/", []string{"Authorization", basic("me", p)}, nil, "the header Authorization"},
		{"header", bindTo(secret.Header, "X-Api-Key"), "/", []string{"X-Api-Key", p}, func(r received) bool { return r.header.Get("X-Api-Key") == v }, ""},
		{"header with more in it", bindTo(secret.Header, "Authorization"), "/", []string{"Authorization", "token " + p}, func(r received) bool { return r.header.Get("Authorization") == "token "+v }, ""},
		{"query", bindTo(secret.Query, "key"), "/?a=1&key=" + p + "&b=%20", nil, func(r received) bool { return r.uri == "/?a=1&key="+queryEscaped(v)+"&b=%20" }, ""},
		{"query, other parameter", bindTo(secret.Query, "key"), "/?token=" + p, nil, nil, "the URL"},
		{"in the path", bindTo(secret.Query, "key"), "/" + p, nil, nil, "the URL"},
		{"in a cookie", bindTo(secret.Bearer, "Authorization"), "/", []string{"Cookie", "a=" + p}, nil, "the header Cookie"},
		{"always bearer", always(bindTo(secret.Bearer, "Authorization")), "/", []string{"Authorization", "Bearer mine"}, func(r received) bool {
			return len(r.header["Authorization"]) == 1 && r.header.Get("Authorization") == "Bearer "+v
		}, ""},
		{"always basic", always(bindTo(secret.Basic, "Authorization")), "/", nil, func(r received) bool { return r.header.Get("Authorization") == basic("x-access-token", v) }, ""},
		{"always format", always(secret.Binding{Place: secret.Place{Scheme: secret.Header, Name: "Authorization", Format: "token {}"}}), "/", nil, func(r received) bool { return r.header.Get("Authorization") == "token "+v }, ""},
		{"always query", always(bindTo(secret.Query, "key")), "/?key=mine&a=1", nil, func(r received) bool { return r.uri == "/?a=1&key="+queryEscaped(v) }, ""},
		{"two headers", bindTo(secret.Header, "X-Api-Key"), "/", []string{"X-Api-Key", "mine", "X-Api-Key", p}, func(r received) bool { return strings.Join(r.header["X-Api-Key"], ",") == "mine,"+v }, ""},
		{"not that method", secret.Binding{Place: secret.Place{Scheme: secret.Bearer, Name: "Authorization"}, Methods: []string{"GET"}}, "/", []string{"Authorization", "Bearer " + p}, nil, "the header Authorization"},
		{"that path", secret.Binding{Place: secret.Place{Scheme: secret.Bearer, Name: "Authorization"}, Paths: []string{"/v1/*"}}, "/v1/x", []string{"Authorization", "Bearer " + p}, func(r received) bool { return r.header.Get("Authorization") == "Bearer "+v }, ""},
		{"not that path", secret.Binding{Place: secret.Place{Scheme: secret.Bearer, Name: "Authorization"}, Paths: []string{"/v1/*"}}, "/v2/x", []string{"Authorization", "Bearer " + p}, nil, "the header Authorization"},
		{"out of the path", secret.Binding{Place: secret.Place{Scheme: secret.Bearer, Name: "Authorization"}, Paths: []string{"/v1/*"}}, "/v1/%2e%2e/v2", []string{"Authorization", "Bearer " + p}, nil, "the header Authorization"},
	} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, " h2=", h2), func(t *testing.T) {
				w := newWorld(t)
				var g got
				w.server(apiHost, 443, apiHost, g.handler(nil))
				w.configure([]secret.Credential{cred(1, c.b)})
				send(t, w.client(h2), "POST", "https://"+apiHost+c.path, "the body", c.header...)
				r := g.last()
				if want := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[h2]; r.proto != want || r.method != "POST" || r.body != "the body" || r.host != apiHost {
					t.Errorf("the server got %+v", r)
				}
				if c.want == nil {
					if strings.Contains(r.text(), v) || len(w.seen(egress.EventSecret)) > 0 {
						t.Errorf("the value went out: %s", r.text())
					}
					if !strings.Contains(r.text(), "placeholder") && !strings.Contains(r.text(), base64.RawStdEncoding.EncodeToString([]byte("me:csm-place"))) {
						t.Errorf("the placeholder was changed: %s", r.text())
					}
				} else if !c.want(r) {
					t.Errorf("the server got %s", r.text())
				} else if used := w.seen(egress.EventSecret); !strings.Contains(r.text(), "mine") && (len(used) != 1 || used[0].Secret != "sec_1") {
					t.Errorf("events of use: %+v", used)
				}
				stray := w.seen(egress.EventMisplaced)
				if c.stray == "" && len(stray) > 0 || c.stray != "" && (len(stray) != 1 || stray[0].Note != c.stray || stray[0].Secret != "sec_1") {
					t.Errorf("strays: %+v, want %q", stray, c.stray)
				}
			})
		}
	}
}

func queryEscaped(s string) string { return url.QueryEscape(s) }

// TestPlaceholderInABodyIsLeftAlone: a conversation may quote it.
func TestPlaceholderInABodyIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	body := strings.Repeat("x", 100_000) + placeholder(1) + "y"
	send(t, w.client(false), "POST", "https://"+apiHost+"/", body, "Authorization", "Bearer "+placeholder(1))
	if r := g.last(); r.body != body || r.header.Get("Authorization") != "Bearer "+value(1) {
		t.Errorf("the server got %d bytes, %v", len(r.body), r.header)
	}
	if s := w.seen(egress.EventMisplaced); len(s) != 1 || s[0].Note != "the body" || s[0].Secret != "sec_1" {
		t.Errorf("strays: %+v", s)
	}
}

// TestOtherHostsGetThePlaceholder: the same client, the same header, another host.
func TestOtherHostsGetThePlaceholder(t *testing.T) {
	w := newWorld(t)
	var g, o got
	w.server(apiHost, 443, apiHost, g.handler(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://"+otherHost+"/stolen", http.StatusTemporaryRedirect)
	}))
	w.server(otherHost, 443, otherHost, o.handler(nil))
	w.server(apiHost, 80, "", o.handler(nil))
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	c := w.client(false)
	c.CheckRedirect = func(r *http.Request, via []*http.Request) error {
		r.Header = via[0].Header.Clone() // a client that takes everything along
		return nil
	}
	resp, _ := send(t, c, "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+placeholder(1))
	if g.last().header.Get("Authorization") != "Bearer "+value(1) {
		t.Fatalf("the bound host got %s: the rest proves nothing", g.last().text())
	}
	if r := o.last(); r.uri != "/stolen" || r.header.Get("Authorization") != "Bearer "+placeholder(1) {
		t.Errorf("after the redirect: %d, %s", resp.StatusCode, r.text())
	}
	// The same name without TLS is another place.
	send(t, c, "GET", "http://"+apiHost+"/plain", "", "Authorization", "Bearer "+placeholder(1))
	if r := o.last(); r.uri != "/plain" || strings.Contains(r.text(), value(1)) {
		t.Errorf("without TLS: %s", r.text())
	}
}

func TestRotationHoldsForTheNextRequest(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	one, two := cred(1, bindTo(secret.Bearer, "Authorization")), cred(1, bindTo(secret.Bearer, "Authorization"))
	two.Value = secret.NewValue([]byte(value(2)))
	c := w.client(false)
	ask := func() string {
		send(t, c, "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+placeholder(1))
		return g.last().header.Get("Authorization")
	}
	w.configure([]secret.Credential{one})
	first := ask()
	w.configure([]secret.Credential{two})
	second := ask()
	w.configure(nil)
	third := ask()
	two.Value = secret.Value{}
	w.configure([]secret.Credential{two})
	resp, text := send(t, c, "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+placeholder(1))
	if first != "Bearer "+value(1) || second != "Bearer "+value(2) || third != "Bearer "+placeholder(1) {
		t.Errorf("got %s, %s, %s", first, second, third)
	}
	if resp.StatusCode != http.StatusBadGateway || g.count() != 3 || !strings.Contains(text, "secret1") {
		t.Errorf("a value that can't be read: %d %s", resp.StatusCode, text)
	}
}
