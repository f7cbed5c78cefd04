package control

import (
	"net"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/errs"
)

// TestLateAnswer: the answer of a call that was given up is nobody else's.
func TestLateAnswer(t *testing.T) {
	g := New(Config{RunDir: t.TempDir()})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: g.spec(0).Socket(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	asked, late, given := make(chan struct{}, 100), make(chan struct{}), make(chan struct{}, 100)
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			go answer(c, asked, late, given)
		}
	}()
	if g.conn, err = g.dial(); err != nil {
		t.Fatal(err)
	}
	g.sandboxes["one"] = egress.Member{ID: "one"}
	g.patience = 10 * time.Millisecond
	for len(asked) == 0 { // on a busy machine the question may not be out before
		g.patience *= 2
		if _, err := g.Refused(t.Context(), "one", time.Time{}); !errs.Is(err, errs.Unavailable) {
			t.Fatalf("a call without an answer: %v", err)
		}
	}
	close(late)
	<-given
	g.patience = time.Minute
	if u, err := g.Usage(t.Context(), "one"); err != nil || u.Sent != 7 {
		t.Errorf("the next call: %+v, %v", u, err)
	}
	g.disconnect()
}

// TestTooLongACall: what is too long for a message is the caller's to know, and not sent; the connection stays.
func TestTooLongACall(t *testing.T) {
	g := New(Config{RunDir: t.TempDir()})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: g.spec(0).Socket(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		if c, err := l.AcceptUnix(); err == nil {
			answer(c, nil, nil, nil)
		}
	}()
	if g.conn, err = g.dial(); err != nil {
		t.Fatal(err)
	}
	defer g.disconnect()
	g.sandboxes["one"] = egress.Member{ID: "one"}
	long := []egress.RecordedAnswer{{Data: make([]byte, maxMessage)}}
	if err := g.SetAnswers(t.Context(), "one", long, false); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("answers that are too long: %v", err)
	}
	if u, err := g.Usage(t.Context(), "one"); err != nil || u.Sent != 7 { // nobody takes another connection
		t.Errorf("the next call: %+v, %v", u, err)
	}
}

// answer answers the calls of one connection: what was refused only when late is closed, and then says so.
func answer(c *net.UnixConn, asked chan<- struct{}, late <-chan struct{}, given chan<- struct{}) {
	defer func() { _ = c.Close() }()
	for {
		var r Request
		if _, err := Read(c, &r); err != nil {
			return
		}
		if r.Op == OpRefused {
			asked <- struct{}{}
			<-late
			_ = Write(c, &Reply{Refusals: []egress.Refusal{{Count: 1}}}, nil)
			given <- struct{}{}
			continue
		}
		if err := Write(c, &Reply{Usage: &egress.Usage{Sent: 7}}, nil); err != nil {
			return
		}
	}
}
