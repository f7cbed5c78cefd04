package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"casemate.dev/internal/egress"
	looks "casemate.dev/internal/egress/inspect"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/content"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// inspected returns a gateway that looks into connections, and what its sandboxes have to trust.
func inspected(t *testing.T, w *world.World) (*Gateway, *x509.CertPool) {
	t.Helper()
	cert, key, err := looks.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p, err := looks.Shared{CertPEM: cert, KeyPEM: key, RootsPEM: w.CAPEM()}.Private()
	if err != nil {
		t.Fatal(err)
	}
	in := looks.New()
	if err := in.Setup(p); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(cert)
	return newGateway(t, in), pool
}

// recordedPolicy is one under which nothing leaves.
func recordedPolicy(t *testing.T, list ...string) egress.Policy {
	p := policyOf(t, list...)
	p.Recorded, p.Keep = true, true
	return p
}

// said is a recorded answer of a text.
func said(method, url, body, text string) egress.RecordedAnswer {
	a := egress.RecordedAnswer{Method: method, URL: url, Status: http.StatusOK, Header: map[string][]string{"Content-Type": {"text/plain"}}, Data: []byte(text)}
	if body != "" {
		a.Salt = make([]byte, content.SaltSize)
		a.Size, a.Hash = int64(len(body)), bundle.HashBody(a.Salt, []byte(body))
	}
	return a
}

// asks makes a request from inside, and returns the status and what it says.
func (b *box) asks(pool *x509.CertPool, method, url, body string) string {
	b.t.Helper()
	c := b.client()
	tr := c.Transport.(*http.Transport)
	tr.DisableKeepAlives = true
	tr.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	resp, err := c.Do(r)
	if err != nil {
		b.t.Fatalf("%s %s: %v", method, url, err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return fmt.Sprint(resp.StatusCode, " ", strings.TrimSpace(string(text)))
}

// TestAnsweredFromTheRecord: the n-th request of a method, URL and body gets the n-th answer; what is not there is refused,
// and said.
func TestAnsweredFromTheRecord(t *testing.T) {
	w := world.New(t)
	g, pool := inspected(t, w)
	b := newBox(t, g, "one", recordedPolicy(t, "allow https://*.test", "allow http://*.test:8080"))
	give := func(more bool, list ...egress.RecordedAnswer) {
		t.Helper()
		if err := g.SetAnswers("one", list, more); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("long ", 20_000)
	give(false, said("GET", "https://api.test/a?x=1", "", "first"), said("GET", "https://api.test/a?x=1", "", "second"))
	give(true, said("POST", "https://api.test/b", "question", "answer"), said("POST", "https://api.test/b", long, "long answer"),
		said("GET", "http://plain.test:8080/", "", "without TLS"))
	for _, tt := range []struct{ method, url, body, want string }{
		{"GET", "https://api.test/a?x=1", "", "200 first"},
		{"POST", "https://api.test/b", long, "200 long answer"},
		{"GET", "https://api.test/a?x=1", "", "200 second"},
		{"GET", "https://api.test/a?x=1", "", "403 casemate: GET https://api.test/a is asked for once more than it is in the record"},
		{"GET", "https://api.test/a?x=2", "", "403 casemate: GET https://api.test/a is not in the record"},
		{"POST", "https://api.test/b", "another question", "403 casemate: POST https://api.test/b is in the record with another body"},
		{"POST", "https://api.test/b", "question", "200 answer"},
		{"PUT", "https://api.test/b", "question", "403 casemate: PUT https://api.test/b is not in the record"},
	} {
		if got := b.asks(pool, tt.method, tt.url, tt.body); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s %s: %s, want %s", tt.method, tt.url, got, tt.want)
		}
	}
	c, err := b.dialName("plain.test", "8080")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: plain.test:8080\r\nConnection: close\r\n\r\n")
	if text, _ := io.ReadAll(c); !strings.Contains(string(text), "without TLS") {
		t.Errorf("without TLS: %s", text)
	}
	if r := b.refused(rules.NotRecorded); !strings.Contains(r.Target, "https://api.test/") || strings.Contains(r.Target, "x=") {
		t.Errorf("refused %+v", r)
	}
	// What was given before is gone with what comes in its place, and so are refusals: they are told again.
	give(false)
	if list, err := g.Refused("one", time.Time{}); err != nil || len(list) != 0 {
		t.Errorf("refused before: %+v, %v", list, err)
	}
	if m, err := b.resolve("api.test", dns.TypeA); err != nil || m.Rcode != dns.RcodeNameError {
		t.Errorf("a name that was known before: %v, %v", m, err)
	}
}

// TestAnsweredRequestsAreToldBeforeTheirEnd: when a client has all of an answer, the event with it is there already.
func TestAnsweredRequestsAreToldBeforeTheirEnd(t *testing.T) {
	w := world.New(t)
	g, pool := inspected(t, w)
	b := newBox(t, g, "one", recordedPolicy(t, "allow https://api.test"))
	const url = "https://api.test/big"
	big := said("GET", url, "", strings.Repeat("x", content.Most))
	big.Header["Content-Length"] = []string{fmt.Sprint(content.Most)}
	for range 20 {
		if err := g.SetAnswers("one", []egress.RecordedAnswer{big}, false); err != nil {
			t.Fatal(err)
		}
		before := g.stats.events.Load()
		if got := b.asks(pool, "GET", url, ""); !strings.HasPrefix(got, "200 xxx") {
			t.Fatal(got[:min(len(got), 80)])
		}
		g.events.mu.Lock()
		told := slices.ContainsFunc(g.events.list[before:], func(e egress.Event) bool {
			return e.Type == egress.EventRequest && e.Status == http.StatusOK && len(e.Unfinished) == 0 && !e.Began.IsZero() && !e.Began.After(e.Time)
		})
		g.events.mu.Unlock()
		if !told {
			t.Fatal("the answer is there, and nothing tells of it")
		}
	}
}

// TestNothingLeavesWhatIsAnsweredFromARecord tries every way out of a sandbox that is answered from a record, whose rules
// allow all of it: names, connections to names and addresses, requests that the record has and others, UDP, and DNS by other
// types and over TCP. Servers at the other ends, and the name server, see nothing. Twin: the same in a sandbox of the same
// rules that may leave arrives, each of it.
func TestNothingLeavesWhatIsAnsweredFromARecord(t *testing.T) {
	w := world.New(t)
	var connections, packets atomic.Int64
	for _, addr := range []string{world.Web + ":80", world.Web + ":7000", world.Private + ":7000"} {
		w.Serve(addr, func(c net.Conn) {
			connections.Add(1)
			if _, err := c.Read(make([]byte, 4<<10)); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
			}
		})
	}
	u := w.ListenUDP(world.Web + ":9000")
	go func() {
		buf := make([]byte, 64)
		for {
			_, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			packets.Add(1)
			_, _ = u.WriteTo([]byte("ok"), from)
		}
	}()
	for _, name := range []string{"known.test", "other.test"} {
		w.Name(name, world.Web)
	}
	list := []string{"allow http://*.test", "allow *.test:7000", "allow " + world.Web + ":*", "allow " + world.Private + ":*", "allow udp://" + world.Web + ":9000"}
	g, pool := inspected(t, w)
	tries := func(b *box) {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeMX, dns.TypeSRV} {
			for _, name := range []string{"known.test", "other.test"} {
				if _, err := b.resolve(name, kind); err != nil {
					t.Error(err)
				}
			}
		}
		for _, addr := range []string{world.Web + ":7000", world.Private + ":7000"} {
			if c, err := b.dial("tcp", addr); err == nil {
				speakFirst(c)
			} else if !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s: %v", addr, err)
			}
		}
		if c, err := b.dialName("known.test", "7000"); err == nil {
			speakFirst(c)
		}
		if c, err := b.dial("udp", world.Web+":9000"); err == nil {
			speakFirst(c)
		}
		if got := b.asks(pool, "GET", "http://known.test/recorded", ""); !strings.HasPrefix(got, "200") {
			t.Error(got)
		}
		_ = b.asks(pool, "GET", "http://known.test/other", "")
	}
	attacked := newBox(t, g, "recorded", recordedPolicy(t, list...))
	if err := g.SetAnswers("recorded", []egress.RecordedAnswer{said("GET", "http://known.test/recorded", "", "from the record")}, false); err != nil {
		t.Fatal(err)
	}
	tries(attacked)
	if c, p, asked := connections.Load(), packets.Load(), w.Asked(); c != 0 || p != 0 || len(asked) != 0 {
		t.Errorf("%d connections and %d packets left, and names were asked for: %v", c, p, asked)
	}
	tries(newBox(t, g, "open", policyOf(t, list...)))
	testenv.Eventually(t, time.Minute, "all of it arrives from the twin", func() bool {
		return connections.Load() == 5 && packets.Load() == 1 && len(w.Asked()) >= 5
	})
}

// speakFirst says something and waits for an answer, or the end.
func speakFirst(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(c, "x")
	_, _ = c.Read(make([]byte, 64))
	_ = c.Close()
}

// TestRecordedCantBeTakenBack: no policy lets a sandbox out that was answered from a record, and none that was let out is
// answered so; answers that can't be given are refused, and leave none.
func TestRecordedCantBeTakenBack(t *testing.T) {
	w := world.New(t)
	g, _ := inspected(t, w)
	b := newBox(t, g, "recorded", recordedPolicy(t, "allow *.test"))
	newBox(t, g, "open", policyOf(t, "allow *.test"))
	for id, p := range map[string]egress.Policy{"recorded": policyOf(t, "allow *.test"), "open": recordedPolicy(t, "allow *.test")} {
		if err := g.Configure(id, p); !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("%s: %v", id, err)
		}
	}
	if err := g.Configure("recorded", recordedPolicy(t, "allow other.test")); err != nil {
		t.Error(err)
	}
	if err := g.SetAnswers("open", nil, false); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("answers for one that leaves: %v", err)
	}
	good := said("GET", "https://other.test/", "", "yes")
	for what, change := range map[string]func(*egress.RecordedAnswer){
		"no URL":       func(a *egress.RecordedAnswer) { a.URL = "other.test" },
		"no host":      func(a *egress.RecordedAnswer) { a.URL = "https:///x" },
		"port 0":       func(a *egress.RecordedAnswer) { a.URL = "https://other.test:0/" },
		"no method":    func(a *egress.RecordedAnswer) { a.Method = "" },
		"status 101":   func(a *egress.RecordedAnswer) { a.Status = 101 },
		"no hash":      func(a *egress.RecordedAnswer) { a.Size = 3 },
		"too much":     func(a *egress.RecordedAnswer) { a.Data = make([]byte, content.Most+1) },
		"another name": func(a *egress.RecordedAnswer) { a.URL = "https://other.test%00.evil.test/" },
	} {
		bad := good
		change(&bad)
		if err := g.SetAnswers("recorded", []egress.RecordedAnswer{good, bad}, false); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
		if m, err := b.resolve("other.test", dns.TypeA); err != nil || m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: an answer is there", what)
		}
	}
	if err := g.SetAnswers("recorded", []egress.RecordedAnswer{good}, false); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := &conn{s: mustFind(t, g, "recorded"), proto: rules.TCP, ctx: t.Context()}
	for name, dial := range map[string]func() error{
		"dial":    func() error { _, err := c.dial(ctx); return err },
		"dialUDP": func() error { _, err := c.dialUDP(); return err },
	} {
		var refused *egress.RefusedError
		if err := dial(); !errors.As(err, &refused) || refused.Verdict.Code != rules.NotRecorded {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestAnswersAreBounded: whatever of answers weighs, a sandbox gets so much of it, and all together. Twin: one answer of each
// kind is taken. What a sandbox had is there for others when it goes.
func TestAnswersAreBounded(t *testing.T) {
	w := world.New(t)
	g, _ := inspected(t, w)
	newBox(t, g, "recorded", recordedPolicy(t, "allow *.test"))
	names := map[string][]string{}
	for i := range 1000 {
		names[fmt.Sprint("X-", i)] = nil
	}
	long := strings.Repeat("x", content.Most)
	good := said("GET", "https://other.test/", "", "yes")
	for what, change := range map[string]func(*egress.RecordedAnswer){
		"body":   func(a *egress.RecordedAnswer) { a.Data = []byte(long) },
		"fields": func(a *egress.RecordedAnswer) { a.Header = names },
		"values": func(a *egress.RecordedAnswer) { a.Header = map[string][]string{"X": make([]string, 5000)} },
		"hash":   func(a *egress.RecordedAnswer) { a.Hash = long },
		"salt":   func(a *egress.RecordedAnswer) { a.Salt = []byte(long) },
		"URL":    func(a *egress.RecordedAnswer) { a.URL += long },
		"method": func(a *egress.RecordedAnswer) { a.Method = long },
	} {
		big := good
		change(&big)
		err := g.SetAnswers("recorded", []egress.RecordedAnswer{big}, false)
		if err != nil {
			t.Errorf("%s: one answer: %v", what, err)
		}
		for range 1200 {
			if err = g.SetAnswers("recorded", []egress.RecordedAnswer{big}, true); err != nil {
				break
			}
		}
		if !errs.Is(err, errs.ResourceExhausted) || g.answers.Load() != 0 {
			t.Errorf("%s without end: %v, and %d are held", what, err, g.answers.Load())
		}
	}
	g.answers.Store(maxAnswersAll)
	if err := g.SetAnswers("recorded", []egress.RecordedAnswer{good}, false); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("where others have all: %v", err)
	}
	g.answers.Store(0)
	s := mustFind(t, g, "recorded")
	if err := g.SetAnswers("recorded", []egress.RecordedAnswer{good}, false); err != nil || g.answers.Load() == 0 {
		t.Errorf("%v, and %d are held", err, g.answers.Load())
	}
	g.Detach("recorded")
	if err := s.recorded.take([]egress.RecordedAnswer{good}, true); !errs.Is(err, errs.NotFound) || g.answers.Load() != 0 {
		t.Errorf("of a sandbox that has gone: %v, and %d are held", err, g.answers.Load())
	}
}

func mustFind(t *testing.T, g *Gateway, id string) *sandbox {
	t.Helper()
	s, err := g.find(id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
