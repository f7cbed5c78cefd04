package guest_test

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// freePort returns a port that nothing listens on.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// TestListen: what is inside finds the server on a port of its own loopback device, for as long as that listens.
func TestListen(t *testing.T) {
	r := newRunner(t, setup{})
	port := freePort(t)
	s, err := r.ListenPort(t.Context(), guestwire.ListenRequest{Port: port})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	said := make(chan string, 1)
	go func() {
		res := r.sh(fmt.Sprintf(`python3 -c '
import socket
s = socket.create_connection(("127.0.0.1", %d))
s.sendall(b"from inside")
s.shutdown(socket.SHUT_WR)
print(s.makefile().read())'`, port))
		said <- string(res.out) + string(res.err)
	}()
	a, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.TakePort(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	heard, err := io.ReadAll(c)
	if err != nil || string(heard) != "from inside" {
		t.Fatalf("%q, %v", heard, err)
	}
	_, _ = io.WriteString(c, "from outside")
	_ = c.Close()
	if got := testenv.Receive(t, "the program inside ends", said); got != "from outside\n" {
		t.Errorf("inside: %q", got)
	}
	if _, err := r.TakePort(t.Context(), a); errs.KindOf(err) != errs.NotFound {
		t.Errorf("a second time: %v", err)
	}
	if _, err := r.ListenPort(t.Context(), guestwire.ListenRequest{Port: port}); errs.KindOf(err) != errs.AlreadyExists {
		t.Errorf("a second listener: %v", err)
	}
	if _, err := r.ListenPort(t.Context(), guestwire.ListenRequest{Port: 70_000}); errs.KindOf(err) != errs.InvalidArgument {
		t.Errorf("port 70000: %v", err)
	}
	s.Close()
	testenv.Eventually(t, 30*time.Second, "the port is closed", func() bool {
		_, err := r.ListenPort(t.Context(), guestwire.ListenRequest{Port: port})
		return err == nil
	})
}

// TestListenFlood: connections that nobody takes are bounded, and are closed after a few seconds.
func TestListenFlood(t *testing.T) {
	r := newRunner(t, setup{})
	port := freePort(t)
	s, err := r.ListenPort(t.Context(), guestwire.ListenRequest{Port: port})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	res := r.sh(fmt.Sprintf(`python3 -c '
import socket
all = [socket.create_connection(("127.0.0.1", %d)) for _ in range(50)]
print(sum(s.recv(1) == b"" for s in all))'`, port))
	if string(res.out) != "50\n" {
		t.Errorf("%s%s", res.out, res.err)
	}
	for range 32 {
		if _, err := s.Next(); err != nil {
			t.Fatal(err)
		}
	}
}
