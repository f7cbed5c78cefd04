package proxy

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"http://proxy.test":           "proxy.test:80",
		"http://Proxy.Test.:3128/":    "proxy.test:3128",
		"https://proxy.test":          "proxy.test:443",
		"http://10.1.2.3:8080":        "10.1.2.3:8080",
		"http://[fd00::1]:3128":       "[fd00::1]:3128",
		"https://proxy.test:8443":     "proxy.test:8443",
		"http://0x0a010203:8080":      "10.1.2.3:8080",
		"":                            "",
		"proxy.test:3128":             "",
		"socks5://proxy.test":         "proxy.test:1080",
		"socks4://proxy.test":         "",
		"http://proxy.test:0":         "",
		"http://proxy.test:70000":     "",
		"http://proxy.test/x":         "",
		"http://proxy.test?x":         "",
		"http://a b":                  "",
		"http://":                     "",
		"http://user@proxy.test":      "",
		"http://user:pass@proxy.test": "",
		"http://u:%zz@proxy.test":     "",
	} {
		p, err := Parse(text)
		switch {
		case want == "" && !errs.Is(err, errs.InvalidArgument):
			t.Errorf("%q: %v", text, err)
		case want != "" && (err != nil || p.String() != want || p.TLS != strings.HasPrefix(text, "https")):
			t.Errorf("%q: %v %v", text, p.String(), err)
		case err != nil && (strings.Contains(err.Error(), "pass") && !strings.Contains(err.Error(), "password") || strings.Contains(err.Error(), "%zz")):
			t.Errorf("the error shows the password: %v", err)
		}
	}
}

func TestDirect(t *testing.T) {
	list, err := ParseDirect([]string{"corp.test, .below.test,*.wild.test", "10.0.0.0/8,192.168.7.7", "port.test:8443", "fd00::/8", "[fd01::1]:22", ""})
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{Direct: list}
	for _, c := range []struct {
		host string
		port uint16
		want bool
	}{
		{"corp.test", 443, true},
		{"corp.test", 22, true},
		{"a.corp.test", 443, true},
		{"xcorp.test", 443, false},
		{"below.test", 443, false},
		{"a.below.test", 443, true},
		{"wild.test", 443, false},
		{"a.b.wild.test", 443, true},
		{"10.2.3.4", 5432, true},
		{"11.2.3.4", 5432, false},
		{"192.168.7.7", 1, true},
		{"192.168.7.8", 1, false},
		{"port.test", 8443, true},
		{"port.test", 443, false},
		{"port.test", 0, true},
		{"a.port.test", 8443, true},
		{"fd00::5", 443, true},
		{"fe00::5", 443, false},
		{"fd01::1", 22, true},
	} {
		name, addr := c.host, netip.Addr{}
		if a, err := netip.ParseAddr(c.host); err == nil {
			name, addr = "", a
		}
		if got := p.Bypassed(name, addr, c.port); got != c.want {
			t.Errorf("%s port %d: %v", c.host, c.port, got)
		}
	}
	var none *Proxy
	if !none.Bypassed("a.test", netip.Addr{}, 1) {
		t.Error("no proxy is for nobody")
	}
	for _, bad := range []string{"http://a.test", "a.test/x", "10.0.0.1/8", "a.test:x", "a..b", "GET a.test", "udp://a.test:1"} {
		if _, err := ParseDirect([]string{bad}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// answering serves one connection: it reads a request's head and sends answer, byte by byte where slow is set.
func answering(t *testing.T, answer string, slow bool) (net.Conn, chan *http.Request) {
	t.Helper()
	here, there := net.Pipe()
	t.Cleanup(func() { _ = there.Close() })
	got := make(chan *http.Request, 1)
	go func() {
		r, err := http.ReadRequest(bufio.NewReader(there))
		if err != nil {
			close(got)
			return
		}
		got <- r
		step := len(answer)
		if slow {
			step = 1
		}
		for i := 0; i < len(answer); i += step {
			if _, err := io.WriteString(there, answer[i:i+step]); err != nil {
				return
			}
		}
	}()
	return here, got
}

func TestConnect(t *testing.T) {
	const greeting = "220 server speaks first\r\n"
	for name, c := range map[string]struct {
		answer string
		status int    // of a refusal
		rest   string // what is read afterwards
		fails  bool
	}{
		"plain":             {answer: "HTTP/1.1 200 OK\r\n\r\n"},
		"old":               {answer: "HTTP/1.0 200 Connection established\r\nProxy-Agent: x\r\n\r\n"},
		"speaks first":      {answer: "HTTP/1.1 200 OK\r\n\r\n" + greeting, rest: greeting},
		"length is ignored": {answer: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + greeting, rest: greeting},
		"interim":           {answer: "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n"},
		"forbidden":         {answer: "HTTP/1.1 403 evil words\r\nContent-Length: 2\r\n\r\nno", status: 403},
		"asks":              {answer: "HTTP/1.1 407 Who\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n", status: 407},
		"redirects":         {answer: "HTTP/1.1 302 Found\r\nLocation: http://a.test/\r\n\r\n", status: 302},
		"switches":          {answer: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", status: 101},
		"no HTTP":           {answer: "SSH-2.0-x\r\n\r\n", fails: true},
		"endless head":      {answer: "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxAnswer), fails: true},
		"endless interim":   {answer: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 100), fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, slow := range []bool{false, true} {
				if slow && len(c.answer) > maxAnswer {
					continue
				}
				conn, got := answering(t, c.answer, slow)
				p, err := Parse("http://proxy.test:3128")
				if err != nil {
					t.Fatal(err)
				}
				p.Credentials = []byte("user:word")
				client, err := NewClient(p)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				up, err := client.Connect(ctx, conn, "fd00::1", 443)
				r := <-got
				if u, pw, ok := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth(); !ok || u != "user" || pw != "word" {
					t.Errorf("credentials %v", r.Header)
				}
				if r.Method != http.MethodConnect || r.Host != "[fd00::1]:443" {
					t.Errorf("request %s %s", r.Method, r.Host)
				}
				var refused *RefusedError
				switch {
				case c.status != 0:
					if !errors.As(err, &refused) || refused.Status != c.status || strings.Contains(err.Error(), "evil") {
						t.Errorf("error %v", err)
					}
				case c.fails != (err != nil):
					t.Errorf("error %v", err)
				case err == nil && c.rest != "":
					b := make([]byte, len(c.rest))
					if _, err := io.ReadFull(up, b); err != nil || string(b) != c.rest {
						t.Errorf("then %q %v", b, err)
					}
				}
			}
		})
	}
}

// A proxy that says nothing holds nobody longer than the caller wants.
func TestConnectSilent(t *testing.T) {
	conn, _ := answering(t, "", false)
	client, err := NewClient(Proxy{Name: "proxy.test", Port: 80})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := client.Connect(ctx, conn, "a.test", 443); err == nil {
		t.Error("connected")
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the connection is open: %v", err)
	}
}

// FuzzAnswer: whatever a proxy says, at most the head of its answer is taken, and nothing else is lost.
func FuzzAnswer(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\n\r\nrest")
	f.Add("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 407 X\r\nA: b\r\n\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		r := bufio.NewReader(io.LimitReader(strings.NewReader(text), maxAnswer))
		status, err := answer(r)
		if err == nil && (status < 0 || status > 999) {
			t.Errorf("status %d", status)
		}
	})
}
