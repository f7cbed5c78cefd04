package files

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/account"
	"casemate.dev/internal/guestwire"
)

// Arg is the argument that makes the guest's program a worker.
const Arg = "files"

// socketFD is where the worker finds its socket.
const socketFD = 3

const (
	maxCalls   = 64
	maxWatches = 64
)

// Job is the body of a call as the guest hands it to a worker.
type Job struct {
	Home    string          `json:"home"`
	Request json.RawMessage `json:"request"`
	// Owner gets what is made; nil where that is who the worker runs as.
	Owner *Owner `json:"owner,omitempty"`
}

// Owner is to whom a file belongs.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// Main serves file calls until the guest closes the socket and the last call is done.
func Main() error {
	// Little is allocated per call, and the memory is the sandbox's own.
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(32 << 20)
	f := os.NewFile(socketFD, "calls")
	conn, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return fmt.Errorf("calls socket: %w", err)
	}
	return Serve(conn)
}

// server is a worker.
type server struct {
	book account.Book
	// mu guards the fields below.
	mu      sync.Mutex
	watches int
}

// Serve takes calls from the guest, each with its connection, until there are no more.
func Serve(from net.Conn) error {
	s := &server{}
	in := guestwire.NewConn(from)
	slots := make(chan struct{}, maxCalls+maxWatches)
	var calls sync.WaitGroup
	defer calls.Wait()
	for {
		call, passed, err := in.ReadCall()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read call: %w", err)
		}
		slots <- struct{}{}
		calls.Go(func() {
			defer func() { <-slots }()
			s.answer(call, passed)
		})
	}
}

// answer serves one call on the connection that came with it.
func (s *server) answer(call guestwire.Call, passed []*os.File) {
	if len(passed) != 1 {
		for _, f := range passed {
			_ = f.Close()
		}
		return
	}
	nc, err := net.FileConn(passed[0])
	_ = passed[0].Close()
	if err != nil {
		return
	}
	defer nc.Close()
	c := guestwire.NewConn(nc)
	if err := s.serve(c, call); err != nil {
		_ = c.Fail(err) // if the connection is gone, nobody hears it
	}
}

func (s *server) serve(c *guestwire.Conn, call guestwire.Call) error {
	var job Job
	if err := guestwire.Unmarshal(call.Body, &job); err != nil {
		return err
	}
	switch call.Method {
	case guestwire.MethodStat:
		return reply(c, job, s.stat)
	case guestwire.MethodListDir:
		return stream(c, job, s.list)
	case guestwire.MethodRead:
		return stream(c, job, s.read)
	case guestwire.MethodWrite:
		return stream(c, job, s.write)
	case guestwire.MethodMakeDir:
		return reply(c, job, s.makeDir)
	case guestwire.MethodMove:
		return reply(c, job, s.move)
	case guestwire.MethodRemove:
		return reply(c, job, s.remove)
	case guestwire.MethodChmod:
		return reply(c, job, s.chmod)
	case guestwire.MethodUnpack:
		return stream(c, job, s.unpack)
	case guestwire.MethodWatch:
		return stream(c, job, s.watch)
	}
	return errs.New(errs.Unsupported, "the guest knows no method %q", call.Method)
}

// stream decodes the request and lets f speak on the connection.
func stream[R any](c *guestwire.Conn, job Job, f func(*guestwire.Conn, Job, R) error) error {
	var r R
	if err := guestwire.Unmarshal(job.Request, &r); err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "the request's body is malformed: %v", err)
	}
	return f(c, job, r)
}

// reply decodes the request and sends what f returns.
func reply[R, A any](c *guestwire.Conn, job Job, f func(Job, R) (A, error)) error {
	return stream(c, job, func(c *guestwire.Conn, job Job, r R) error {
		answer, err := f(job, r)
		if err != nil {
			return err
		}
		return c.Reply(answer)
	})
}
