package guest

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

const (
	// maxAccepted bounds the connections that wait to be taken.
	maxAccepted = 32
	// takeLimit is how long each waits.
	takeLimit = 5 * time.Second
)

// accepted are connections from inside that the server has been told of and has not taken.
type accepted struct {
	// mu guards the fields below.
	mu   sync.Mutex
	last int64
	byID map[int64]net.Conn
}

// put keeps a connection for takeLimit and returns its number; 0 where too many wait.
func (a *accepted) put(c net.Conn) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.byID) >= maxAccepted {
		return 0
	}
	if a.byID == nil {
		a.byID = make(map[int64]net.Conn)
	}
	a.last++
	id := a.last
	a.byID[id] = c
	time.AfterFunc(takeLimit, func() {
		if late := a.take(id); late != nil {
			_ = late.Close()
		}
	})
	return id
}

func (a *accepted) take(id int64) net.Conn {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.byID[id]
	delete(a.byID, id)
	return c
}

// listen opens a port to what is inside, and tells the caller of every connection until it leaves. Only the
// sandbox's own loopback device has the port.
func (g *Guest) listen(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.ListenRequest
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	if r.Port < 1 || r.Port > 65535 {
		return errs.New(errs.InvalidArgument, "no such port: %d", r.Port)
	}
	// Its connections have the queues of the listening socket (tcp(7)).
	config := net.ListenConfig{Control: narrowPort}
	l, err := config.Listen(context.Background(), "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(r.Port)))
	if errors.Is(err, unix.EADDRINUSE) {
		return errs.Wrap(err, errs.AlreadyExists, "something listens on port %d already", r.Port)
	}
	if err != nil {
		return errs.Wrap(err, errs.Unavailable, "port %d can't be listened on: %v", r.Port, err)
	}
	defer l.Close()
	if err := c.Reply(nil); err != nil {
		return nil // nobody is there to tell
	}
	caller := newHangup(c)
	go func() {
		<-caller.gone
		_ = l.Close()
	}()
	for {
		port, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil { // no descriptor or no memory: that passes
			<-time.After(acceptPause)
			continue
		}
		id := g.accepted.put(port)
		if id == 0 {
			_ = port.Close()
			continue
		}
		if err := c.Event(guestwire.Accepted{ID: id}); err != nil {
			return nil
		}
	}
}

// take joins a connection from inside with the call's.
func (g *Guest) take(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.Accepted
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	port := g.accepted.take(r.ID)
	if port == nil {
		return errs.New(errs.NotFound, "no connection %d waits", r.ID)
	}
	return g.joinPort(c, port)
}
