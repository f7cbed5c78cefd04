package inspect

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/secret"
)

// raw sends text on one TLS connection and returns everything that comes back until it ends, or until
// the number of responses has come.
func (w *world) raw(text string) string {
	w.t.Helper()
	c := w.tlsTo(apiHost)
	_, _ = io.WriteString(c, text) // which may be refused before it is sent
	_ = c.CloseWrite()
	b, _ := io.ReadAll(c)
	return string(b)
}

// TestSmuggling sends what servers read in different ways. Each must be refused, with nothing sent on,
// and nothing on the connection after it answered.
func TestSmuggling(t *testing.T) {
	const host = "Host: " + apiHost + "\r\n"
	tail := "GET /hidden HTTP/1.1\r\n" + host + "\r\n"
	for name, text := range map[string]string{
		"length and chunked":        "POST / HTTP/1.1\r\n" + host + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + tail,
		"chunked and length":        "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + tail,
		"two lengths":               "POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\nContent-Length: 43\r\n\r\n" + tail,
		"the same length twice":     "POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + tail,
		"a list of lengths":         "POST / HTTP/1.1\r\n" + host + "Content-Length: 0, 43\r\n\r\n" + tail,
		"a signed length":           "POST / HTTP/1.1\r\n" + host + "Content-Length: +0\r\n\r\n" + tail,
		"a length in hex":           "POST / HTTP/1.1\r\n" + host + "Content-Length: 0x2b\r\n\r\n" + tail,
		"an obscured encoding":      "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + tail,
		"two encodings":             "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + tail,
		"encoding list":             "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + tail,
		"space before colon":        "POST / HTTP/1.1\r\n" + host + "Content-Length : 43\r\n\r\n" + tail,
		"folded header":             "POST / HTTP/1.1\r\n" + host + "X: a\r\n Content-Length: 43\r\n\r\n" + tail,
		"bare line feed":            "POST / HTTP/1.1\n" + host + "\r\n" + tail,
		"bare line feed in header":  "GET / HTTP/1.1\r\nHost: " + apiHost + "\nX: y\r\n\r\n" + tail,
		"bare carriage return":      "GET / HTTP/1.1\r\n" + host + "X: a\rContent-Length: 43\r\n\r\n" + tail,
		"NUL":                       "GET / HTTP/1.1\r\n" + host + "X: a\x00b\r\n\r\n" + tail,
		"chunked in HTTP/1.0":       "POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + tail,
		"two hosts":                 "GET / HTTP/1.1\r\n" + host + "Host: " + otherHost + "\r\n\r\n" + tail,
		"no host":                   "GET / HTTP/1.1\r\n\r\n" + tail,
		"another host in the line":  "GET https://" + otherHost + "/ HTTP/1.1\r\n" + host + "\r\n" + tail,
		"userinfo in the line":      "GET https://" + apiHost + "@" + otherHost + "/ HTTP/1.1\r\n" + host + "\r\n" + tail,
		"userinfo in the host":      "GET / HTTP/1.1\r\nHost: " + apiHost + "@" + otherHost + "\r\n\r\n" + tail,
		"no version":                "GET /\r\n" + tail,
		"another version":           "GET / HTTP/1.2\r\n" + host + "\r\n" + tail,
		"tab in the line":           "GET\t/ HTTP/1.1\r\n" + host + "\r\n" + tail,
		"HTTP/2 without agreement":  "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + tail,
		"a proxy's request":         "CONNECT " + otherHost + ":443 HTTP/1.1\r\n" + host + "\r\n" + tail,
		"a header without a name":   "GET / HTTP/1.1\r\n" + host + ": x\r\n\r\n" + tail,
		"a header longer than that": "GET / HTTP/1.1\r\n" + host + "X: " + strings.Repeat("a", 100_000) + "\r\n\r\n" + tail,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var g got
			w.server(apiHost, 443, apiHost, g.handler(nil))
			w.server(otherHost, 443, otherHost, g.handler(nil))
			out := w.raw(text)
			if !strings.HasPrefix(out, "HTTP/1.1 4") || strings.Count(out, "HTTP/1.1") != 1 || g.count() != 0 {
				t.Errorf("answer %q; the server got %+v", out, g.reqs)
			}
		})
	}
	// The twin: what is right passes, also the request behind it.
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	out := w.raw("POST / HTTP/1.1\r\n" + host + "Content-Length: 2\r\n\r\nhi" + tail)
	if strings.Count(out, "HTTP/1.1 200") != 2 || g.count() != 2 || g.last().uri != "/hidden" {
		t.Errorf("answer %q; the server got %+v", out, g.reqs)
	}
}

// TestBadChunks: a body that stops being understood ends the connection, and the server sees no request
// that is whole.
func TestBadChunks(t *testing.T) {
	const head = "POST / HTTP/1.1\r\nHost: " + apiHost + "\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, body := range []string{"2\nhi\r\n0\r\n\r\n", "-2\r\nhi\r\n0\r\n\r\n", "2\r\nhixx0\r\n\r\n", "ffffffffffffffffff\r\n", "zz\r\n"} {
		w := newWorld(t)
		whole := make(chan error, 1)
		w.server(apiHost, 443, apiHost, func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.ReadAll(r.Body)
			whole <- err
		})
		out := w.raw(head + body + "GET /hidden HTTP/1.1\r\nHost: " + apiHost + "\r\n\r\n")
		if strings.Contains(out, " 200 ") {
			t.Errorf("%q was answered %q", body, out)
		}
		select {
		case err := <-whole:
			if err == nil {
				t.Errorf("%q: the server got a whole request", body)
			}
		default: // it never got there
		}
	}
}

// TestHostMustBeTheOneConnectedTo: by Host header and by :authority, on a connection to a host with a
// credential.
func TestHostMustBeTheOneConnectedTo(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		w := newWorld(t)
		var g got
		w.server(apiHost, 443, apiHost, g.handler(nil))
		w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
		c := w.client(h2)
		for _, host := range []string{otherHost, apiHost + ":8443", "x." + apiHost, apiHost + ".evil.test", "127.0.0.1", otherHost + ":443"} {
			req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+"/", nil)
			req.Host = host
			req.Header.Set("Authorization", "Bearer "+placeholder(1))
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusMisdirectedRequest || g.count() != 0 {
				t.Errorf("h2 %v, host %s: %d; the server got %+v", h2, host, resp.StatusCode, g.reqs)
			}
		}
		for _, host := range []string{apiHost, strings.ToUpper(apiHost), apiHost + ".", apiHost + ":443"} { // the twin
			req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+"/", nil)
			req.Host = host
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK || g.last().host != apiHost {
				t.Errorf("h2 %v, host %s: %d, sent on as %s", h2, host, resp.StatusCode, g.last().host)
			}
		}
	}
}

func TestRulesDecideOnEachRequest(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	w.judge = func(q rules.HTTP) rules.Verdict {
		if q.Method == "GET" && strings.HasPrefix(q.Path, "/open/") {
			return rules.Verdict{Allow: true, Code: rules.Allowed}
		}
		return rules.Verdict{Code: rules.Denied, Reason: "not that"}
	}
	c := w.client(false)
	for _, q := range []struct {
		method, path string
		want         int
	}{{"GET", "/open/a?b", 200}, {"POST", "/open/a", 403}, {"GET", "/shut", 403}, {"GET", "/open/b", 200}, {"CONNECT", "/open/b", 405}, {"TRACE", "/open/", 405}} {
		resp, body := send(t, c, q.method, "https://"+apiHost+q.path, "")
		if resp.StatusCode != q.want {
			t.Errorf("%s %s: %d %s", q.method, q.path, resp.StatusCode, body)
		}
		if q.want == 403 && (resp.Header.Get(headerRefused) != "denied" || !strings.Contains(body, "not that")) {
			t.Errorf("the refusal is %v %q", resp.Header, body)
		}
	}
	if g.count() != 2 {
		t.Errorf("the server got %+v", g.reqs)
	}
}

// TestServersAreVerified: a certificate for another host, and of an authority that nobody knows.
func TestServersAreVerified(t *testing.T) {
	for name, certFor := range map[string]string{"another host": otherHost, "unknown authority": "", "right": apiHost} {
		w := newWorld(t)
		var g got
		if certFor == "" {
			cert, key, err := NewAuthority("nobody's", time.Now())
			if err != nil {
				t.Fatal(err)
			}
			if w.web, err = openAuthority(cert, key); err != nil {
				t.Fatal(err)
			}
			certFor = apiHost
		}
		w.server(apiHost, 443, certFor, g.handler(nil))
		w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
		resp, body := send(t, w.client(false), "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+placeholder(1))
		if right := name == "right"; right != (resp.StatusCode == 200) || right != (g.count() == 1) || !right && !strings.Contains(body, "certificate") {
			t.Errorf("%s: %d %s; the server got %d requests", name, resp.StatusCode, body, g.count())
		}
	}
}

// TestStreams: each piece arrives before the next is sent, in both versions of HTTP, also where secrets
// are looked for.
func TestStreams(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		for _, creds := range [][]secret.Credential{nil, {cred(1, bindTo(secret.Bearer, "Authorization"))}} {
			w := newWorld(t)
			next := make(chan struct{})
			w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "text/event-stream")
				for i := range 3 {
					fmt.Fprintf(rw, "data: %d\n\n", i)
					rw.(http.Flusher).Flush()
					<-next
				}
			})
			w.configure(creds)
			req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+"/", nil)
			resp, err := w.client(h2).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(resp.Body)
			for i := range 3 {
				line, err := in.ReadString('\n')
				if err != nil || line != fmt.Sprintf("data: %d\n", i) {
					t.Errorf("h2 %v: %q, %v", h2, line, err)
				}
				_, _ = in.ReadString('\n')
				next <- struct{}{}
			}
			if _, err := in.ReadByte(); err != io.EOF {
				t.Errorf("h2 %v: the stream ends with %v", h2, err)
			}
			_ = resp.Body.Close()
		}
	}
}

// TestBrokenAnswerIsSeen: a server that ends early must not look like one that is through.
func TestBrokenAnswerIsSeen(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		w := newWorld(t)
		w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(rw, "half")
			rw.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		})
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+"/", nil)
		resp, err := w.client(h2).Do(req)
		if err != nil {
			continue // seen even earlier
		}
		if b, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("h2 %v: got %q as if it were whole", h2, b)
		}
		_ = resp.Body.Close()
	}
}

// TestContinue: the body is sent when the server asks for it, and only then.
func TestContinue(t *testing.T) {
	for _, asks := range []bool{true, false} {
		w := newWorld(t)
		w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
			if !asks {
				rw.WriteHeader(http.StatusRequestEntityTooLarge)
				return
			}
			b, _ := io.ReadAll(r.Body)
			fmt.Fprintf(rw, "got %s", b)
		})
		c := w.tlsTo(apiHost)
		fmt.Fprintf(c, "PUT / HTTP/1.1\r\nHost: %s\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", apiHost)
		in := bufio.NewReader(c)
		first, err := in.ReadString('\n')
		if want := map[bool]string{true: "HTTP/1.1 100 Continue\r\n", false: "HTTP/1.1 413 Request Entity Too Large\r\n"}[asks]; err != nil || first != want {
			t.Fatalf("asks %v: %q, %v", asks, first, err)
		}
		if !asks {
			continue
		}
		_, _ = io.WriteString(c, "body")
		_, _ = in.ReadString('\n')
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(resp.Body); string(b) != "got body" {
			t.Errorf("answer %q", b)
		}
		_ = resp.Body.Close()
	}
}

func TestEarlyHintsTrailersAndHead(t *testing.T) {
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == "HEAD" {
			rw.Header().Set("Content-Length", "12345")
			return
		}
		rw.Header().Set("Link", "</a.css>")
		rw.WriteHeader(http.StatusEarlyHints)
		b, _ := io.ReadAll(r.Body)
		rw.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(rw, "%s %s", b, r.Trailer.Get("X-In"))
		rw.Header().Set("X-Sum", "7")
	})
	c := w.tlsTo(apiHost)
	fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: %s\r\nTE: trailers\r\nTrailer: X-In\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-In: there\r\n\r\n", apiHost)
	in := bufio.NewReader(c)
	hints, err := http.ReadResponse(in, nil) //nolint:bodyclose // it has none
	if err != nil || hints.StatusCode != http.StatusEarlyHints || hints.Header.Get("Link") != "</a.css>" {
		t.Fatalf("%+v, %v", hints, err)
	}
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	if string(b) != "hi there" || resp.Trailer.Get("X-Sum") != "7" || resp.Header.Get("Trailer") == "" && len(resp.Trailer) == 0 {
		t.Errorf("%q, trailer %v", b, resp.Trailer)
	}
	_ = resp.Body.Close()
	fmt.Fprintf(c, "HEAD / HTTP/1.1\r\nHost: %s\r\n\r\nGET /x HTTP/1.1\r\nHost: %s\r\n\r\n", apiHost, apiHost)
	head, err := http.ReadResponse(in, &http.Request{Method: "HEAD"}) //nolint:bodyclose // it has none
	if err != nil || head.ContentLength != 12345 {
		t.Errorf("%+v, %v", head, err)
	}
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusEarlyHints { //nolint:bodyclose // 103 has none
		t.Errorf("behind HEAD: %+v, %v", resp, err)
	}
}

// TestWebSocket switches protocols and echoes frames, one of which tells the value.
func TestWebSocket(t *testing.T) {
	w := newWorld(t)
	v := value(1)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Sec-Websocket-Extensions") != "" || r.Header.Get("Authorization") != "Bearer "+v {
			t.Errorf("the server got %v", r.Header)
		}
		conn, buf, err := rw.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for {
			line, err := buf.ReadString('\n') // not what a client would send: the gateway looks at one direction only
			if err != nil {
				return
			}
			payload := strings.ReplaceAll(strings.TrimSpace(line), "VALUE", v)
			frame := []byte{0x81, byte(len(payload))}
			if len(payload) > 125 {
				frame = []byte{0x81, 126, byte(len(payload) >> 8), byte(len(payload))}
			}
			if _, err := conn.Write(append(frame, payload...)); err != nil {
				return
			}
		}
	})
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	c := w.tlsTo(apiHost)
	fmt.Fprintf(c, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nAuthorization: Bearer %s\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n", apiHost, placeholder(1))
	in := bufio.NewReader(c)
	resp, err := http.ReadResponse(in, nil) //nolint:bodyclose // the connection is another protocol's now
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%+v, %v", resp, err)
	}
	for _, text := range []string{"hello", "it is VALUE!", v[:3], strings.Repeat("long ", 100) + "VALUE"} {
		fmt.Fprintln(c, text)
		want := strings.ReplaceAll(text, "VALUE", strings.Repeat("*", len(v)))
		head := make([]byte, 2)
		if len(want) > 125 {
			head = make([]byte, 4)
		}
		payload := make([]byte, len(want))
		if _, err := io.ReadFull(in, head); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(in, payload); err != nil || string(payload) != want {
			t.Errorf("%q came as %q, %v", text, payload, err)
		}
	}
}

// TestOtherUpgradesAreNotAskedFor: h2c would lead past the parser.
func TestOtherUpgradesAreNotAskedFor(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	resp, _ := send(t, w.client(false), "GET", "https://"+apiHost+"/", "", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "HTTP2-Settings", "AAMAAABk")
	if r := g.last(); resp.StatusCode != 200 || r.header.Get("Upgrade") != "" || r.header.Get("Http2-Settings") != "" {
		t.Errorf("%d; the server got %v", resp.StatusCode, r.header)
	}
}

// TestHopByHop: fields for one hop stay on theirs; a client can't have its credential taken for one.
func TestHopByHop(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Keep-Alive", "timeout=5")
		rw.Header().Set("Alt-Svc", `h3=":443"`)
	}))
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	resp, _ := send(t, w.client(false), "GET", "https://"+apiHost+"/", "", "Connection", "X-Hop, Authorization", "X-Hop", "1", "Authorization", "Bearer "+placeholder(1))
	if r := g.last(); r.header.Get("X-Hop") != "" || r.header.Get("Authorization") != "Bearer "+value(1) {
		t.Errorf("the server got %v", r.header)
	}
	if resp.Header.Get("Alt-Svc") != "" || resp.Header.Get("Keep-Alive") != "" {
		t.Errorf("the client got %v", resp.Header)
	}
}

func TestRemovedSandboxHasNothing(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(apiHost, 443, apiHost, g.handler(nil))
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	w.in.Remove(boxID)
	send(t, w.client(false), "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+placeholder(1))
	if got := g.last().header.Get("Authorization"); got != "Bearer "+placeholder(1) {
		t.Errorf("the server got %q", got)
	}
}

// FuzzHTTP1 feeds arbitrary bytes to the parser. Nothing may panic, and what is passed on must be what
// Go's own reader makes of a request that is written anew.
func FuzzHTTP1(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: y\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		client, server := net.Pipe()
		go func() {
			_, _ = client.Write(b)
			_ = client.Close()
		}()
		go func() { _, _ = io.Copy(io.Discard, client) }()
		_ = serveHTTP1(context.Background(), server, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Content-Length") != "" && len(r.TransferEncoding) > 0 {
				t.Fatal("a length and chunks")
			}
			body, _ := io.ReadAll(r.Body)
			if r.ContentLength >= 0 && int64(len(body)) > r.ContentLength {
				t.Fatal("more than the length")
			}
			var out bytes.Buffer
			if err := r.Header.Write(&out); err != nil {
				t.Fatal(err)
			}
			_, _ = w.Write(body)
		})
		_ = server.Close()
	})
}

// TestFaultEndsOneConnection: a panic, whatever a client did to meet it, ends its connection; others go on.
func TestFaultEndsOneConnection(t *testing.T) {
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "ok") })
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	other := w.client(false)
	if _, body := send(t, other, "GET", "https://"+apiHost+"/", ""); body != "ok" {
		t.Fatal(body)
	}
	w.judge = func(q rules.HTTP) rules.Verdict {
		if q.Path == "/fault" {
			panic("a fault")
		}
		return rules.Verdict{Allow: true, Code: rules.Allowed}
	}
	for _, h2 := range []bool{false, true} {
		if resp, err := w.client(h2).Get("https://" + apiHost + "/fault"); err == nil {
			t.Errorf("h2 %v: status %d", h2, resp.StatusCode)
			_ = resp.Body.Close()
		}
	}
	if _, body := send(t, other, "GET", "https://"+apiHost+"/", ""); body != "ok" {
		t.Errorf("another connection says %q", body)
	}
}
