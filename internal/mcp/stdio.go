package mcp

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// lastAnswers is how long calls may still be answered after the client has closed its end: a script
// that pipes a few messages in wants to read the answers, while a client that is gone leaves nothing
// running for long.
const lastAnswers = time.Second

// RunStdio serves one session over a pair of streams, one JSON-RPC message a line, until the client
// closes its end or ctx ends. It closes in and out.
func (s *Server) RunStdio(ctx context.Context, in io.ReadCloser, out io.WriteCloser) error {
	ss, err := s.mcp.Connect(ctx, patient{&sdk.IOTransport{Reader: in, Writer: out, MaxLineLength: maxMessage}}, nil)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- ss.Wait() }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		s.Close()
		err = <-ended
	}
	s.Close()
	if errors.Is(err, io.EOF) || ctx.Err() != nil {
		return nil
	}
	return err
}

// patient is a transport whose connection tells of its end only when what was read is answered, or
// after lastAnswers: the SDK drops every answer after the end.
type patient struct{ sdk.Transport }

// Connect implements sdk.Transport.
func (p patient) Connect(ctx context.Context) (sdk.Connection, error) {
	c, err := p.Transport.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &patientConn{Connection: c, open: make(map[jsonrpc.ID]bool), answered: make(chan struct{}, 1)}, nil
}

type patientConn struct {
	sdk.Connection

	// mu guards the field below.
	mu   sync.Mutex
	open map[jsonrpc.ID]bool // calls without an answer

	answered chan struct{} // holds a token after an answer
}

// Read implements sdk.Connection.
func (c *patientConn) Read(ctx context.Context) (jsonrpc.Message, error) {
	m, err := c.Connection.Read(ctx)
	if r, ok := m.(*jsonrpc.Request); ok && r.IsCall() {
		c.mu.Lock()
		c.open[r.ID] = true
		c.mu.Unlock()
	}
	if errors.Is(err, io.EOF) {
		c.wait(ctx)
	}
	return m, err
}

// Write implements sdk.Connection.
func (c *patientConn) Write(ctx context.Context, m jsonrpc.Message) error {
	err := c.Connection.Write(ctx, m)
	if r, ok := m.(*jsonrpc.Response); ok {
		c.mu.Lock()
		delete(c.open, r.ID)
		c.mu.Unlock()
		select {
		case c.answered <- struct{}{}:
		default:
		}
	}
	return err
}

func (c *patientConn) wait(ctx context.Context) {
	late := time.NewTimer(lastAnswers)
	defer late.Stop()
	for {
		c.mu.Lock()
		n := len(c.open)
		c.mu.Unlock()
		if n == 0 {
			return
		}
		select {
		case <-c.answered:
		case <-late.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
