package gateway

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/control"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// A gateway that serves nobody goes once its server has gone for good; one that serves a sandbox stays.
func TestLeavesWhenAlone(t *testing.T) {
	world.New(t)
	g := newGateway(t, nil)
	path := filepath.Join(testenv.RunDir(t), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	newBox(t, g, "one", egress.Policy{}) // before it looks for the first time whether anybody needs it
	gone := make(chan error, 1)
	const limit = 200 * time.Millisecond
	go func() { gone <- g.serve(l, limit) }()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(op control.Op) *control.Reply {
		t.Helper()
		var r control.Reply
		if err := control.Write(c, control.Request{Op: op, Sandbox: "two"}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := control.Read(c, &r); err != nil {
			t.Fatal(err)
		}
		return &r
	}
	if r := ask(control.OpHello); r.Protocol != control.Protocol || r.Err() != nil {
		t.Errorf("%+v", r)
	}
	if r := ask(control.OpUsage); r.Err() == nil {
		t.Error("a sandbox that is not there has usage")
	}
	_ = c.Close()
	select {
	case err := <-gone:
		t.Fatalf("it left a sandbox alone: %v", err)
	case <-time.After(3 * limit):
	}
	g.Detach("one")
	select {
	case err := <-gone:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it stays, and nobody needs it")
	}
}
