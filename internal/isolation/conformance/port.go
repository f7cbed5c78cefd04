package conformance

import (
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func portCases() []testCase {
	return []testCase{
		{name: "ports", run: testPorts},
		{name: "ports are each sandbox's own", run: testOwnPorts},
	}
}

const port = 18080

func testPorts(t *testing.T, h Harness) {
	b := startBox(t, h)
	_, err := b.client.DialPort(limited(t), guestwire.DialRequest{Network: "tcp", Port: port})
	wantKind(t, "a port that nothing listens on", err, errs.Unavailable)
	r := b.start(guestwire.StartProcess{Argv: h.EchoServer(port)})
	r.until("\n")
	if ports, err := b.client.Listenings(limited(t)); err != nil || !slices.Contains(ports, port) {
		t.Errorf("listening: %v, %v", ports, err)
	}
	text := strings.Repeat("there and back ", 5000)
	if got := b.echo(text); got != text {
		t.Errorf("got %d bytes back, want %d", len(got), len(text))
	}
}

// echo sends text to the echo server, closes its side, and returns what came back.
func (b *box) echo(text string) string {
	b.t.Helper()
	conn, err := b.client.DialPort(limited(b.t), guestwire.DialRequest{Network: "tcp", Port: port})
	if err != nil {
		b.t.Fatalf("dial: %v", err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		b.t.Fatal(err)
	}
	go func() {
		_, _ = io.WriteString(conn, text)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	back, err := io.ReadAll(io.LimitReader(conn, int64(len(text))))
	if err != nil {
		b.t.Errorf("read back: %v", err)
	}
	return string(back)
}

// testOwnPorts listens on the same port in two sandboxes and on the host.
func testOwnPorts(t *testing.T, h Harness) {
	a, b := startBox(t, h), startBox(t, h)
	a.start(guestwire.StartProcess{Argv: h.EchoServer(port)}).until("\n")
	_, err := b.client.DialPort(limited(t), guestwire.DialRequest{Network: "tcp", Port: port})
	wantKind(t, "a neighbour's port", err, errs.Unavailable)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, err = b.client.DialPort(limited(t), guestwire.DialRequest{Network: "tcp", Port: l.Addr().(*net.TCPAddr).Port})
	wantKind(t, "the host's port", err, errs.Unavailable)
}
