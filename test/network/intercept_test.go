package network

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// live is a server whose answers go on: events of which the second waits until the first has been seen, and a
// connection that becomes another protocol's.
type live struct {
	seen chan struct{}
	*http.ServeMux
}

func newLive() *live {
	l := &live{make(chan struct{}), http.NewServeMux()}
	l.HandleFunc("/ok/proto", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) })
	l.HandleFunc("/ok/seen", func(http.ResponseWriter, *http.Request) { close(l.seen) })
	l.HandleFunc("/ok/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: first\n\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-l.seen:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "data: second\n\n")
	})
	l.HandleFunc("/ok/socket", func(w http.ResponseWriter, r *http.Request) {
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
		_, _ = io.Copy(c, buf) // frames are bytes to whoever passes them on
	})
	return l
}

// liveScript reads events and speaks over a socket that was switched, each as it comes.
const liveScript = `python3 - <<'E'
import http.client, socket, ssl
ctx = ssl.create_default_context()
def get(path):
    c = http.client.HTTPSConnection('opened.test', context=ctx, timeout=60)
    c.request('GET', path)
    return c.getresponse()
r = get('/ok/events')
print(r.readline().strip().decode())
get('/ok/seen').read()
print(r.read().decode().strip())
s = ctx.wrap_socket(socket.create_connection(('opened.test', 443), 60), server_hostname='opened.test')
s.sendall(b'GET /ok/socket HTTP/1.1\r\nHost: opened.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n')
head = b''
while b'\r\n\r\n' not in head: head += s.recv(1)
print(head.split(b'\r\n')[0].decode())
for text in (b'one', b'two'):
    s.sendall(text)
    got = b''
    while len(got) < len(text): got += s.recv(9)
    print(got.decode())
E`

// What is looked into still streams: HTTP/2, events one by one, and connections that become WebSockets. Requests that no
// rule allows are answered 403.
func TestIntercepted(t *testing.T) {
	p := newPlace(t)
	w := p.w
	srv := &http.Server{
		Handler: newLive(), TLSConfig: w.TLS("opened.test", "passed.test"), ReadHeaderTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	l := w.Listen(world.Web + ":443")
	go func() { _ = srv.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = srv.Close() })
	w.Name("opened.test", world.Web)
	w.Name("passed.test", world.Web)
	s := p.create("allow https://opened.test/ok/*", "allow passed.test")
	const curl = `curl -sS --max-time 60 -o /dev/null -w '%{http_version} %{http_code}' `
	p.expect(s, curl+`--http2 https://opened.test/ok/proto`, "2 200")
	p.expect(s, curl+`--http1.1 https://opened.test/ok/proto`, "1.1 200")
	p.expect(s, curl+`--http2 https://opened.test/no`, "2 403")
	p.expect(s, `curl -sS --max-time 60 --http2 https://opened.test/ok/proto`, "HTTP/2.0")
	const issuer = `curl -sSv --max-time 60 https://%s/ok/proto 2>&1 | grep -c 'issuer:.*test CA'`
	p.expect(s, fmt.Sprintf(issuer, "opened.test"), "0")
	p.expect(s, fmt.Sprintf(issuer, "passed.test"), "1") // the twin: passed through, it is the server's own
	if out, _ := p.sh(s, liveScript); strings.TrimSpace(out) != "data: first\ndata: second\nHTTP/1.1 101 Switching Protocols\none\ntwo" {
		t.Errorf("streams:\n%s", out)
	}
	p.answered(s, "/ok/proto", "HTTP/2.0")
	p.answered(s, "/ok/events", "data: first\n\ndata: second\n\n")
	p.answered(s, "/ok/socket", "")
}

// answered waits until the record has a request of a path with this answer, "" for one without a body.
func (p *place) answered(s *client.Sandbox, path, want string) {
	p.t.Helper()
	got := ""
	testenv.Eventually(p.t, time.Minute, "the record of "+path, func() bool {
		events, err := p.Journal.Events(p.t.Context(), s.GetId(), 0, 0)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, e := range events {
			f := e.GetFacts()["server"].GetFields()
			if e.GetType() != "network.request" || f["path"].GetStringValue() != path {
				continue
			}
			b, err := p.Journal.Body(p.t.Context(), s.GetId(), e.GetSeq(), "server.answer_body")
			if err != nil && client.KindOf(err) != client.NotFound {
				p.t.Fatal(err)
			}
			if got = string(b.GetData()); got == want && f["answer"].GetStructValue() != nil {
				return true
			}
		}
		return false
	})
	if got != want {
		p.t.Errorf("%s was answered %q", path, got)
	}
}
