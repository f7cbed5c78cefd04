package mcp

import (
	"log/slog"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/client"
)

// Config is what New needs.
type Config struct {
	// Version of the program, told to clients.
	Version string
	// Connect returns a client that acts with an API key, which is "" on stdio: there the one who
	// started the program has set how the server is reached, and as whom.
	Connect func(key string) (*client.Client, error)
	// Box is what a session's own sandbox is made from; nil: the server's defaults.
	Box *client.CreateRequest
	// Sandbox names an existing sandbox, which all sessions use instead of one of their own, and which
	// outlives them; "": none.
	Sandbox string
	// Log takes what goes wrong where nobody is told; nil: nowhere.
	Log *slog.Logger
}

// The lives of sessions and of their sandboxes.
const (
	// sessionIdle ends an HTTP session that nobody uses; the protocol has no other sign of a client
	// that is gone.
	sessionIdle = 24 * time.Hour
	// boxIdle deletes a session's own sandbox though the session never ended, because the program that
	// held it was killed.
	boxIdle = 24 * time.Hour
	// endTime bounds how long the end of a session may take to delete its sandbox.
	endTime = 10 * time.Second
)

// Server serves MCP sessions. Its methods are safe for concurrent use.
type Server struct {
	cfg Config
	log *slog.Logger
	mcp *sdk.Server
	// arguments lists, by tool, what it takes; for errors.
	arguments map[string]string

	// mu guards the fields below.
	mu       sync.Mutex
	sessions map[*sdk.ServerSession]*session
	closed   bool

	ending sync.WaitGroup // sessions whose end is still to be awaited
}

// New returns a server without sessions.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg, log: cfg.Log, arguments: make(map[string]string), sessions: make(map[*sdk.ServerSession]*session)}
	s.mcp = sdk.NewServer(
		&sdk.Implementation{Name: "casemate", Title: "Casemate sandboxes", Version: cfg.Version},
		&sdk.ServerOptions{
			Instructions: instructions(cfg.Sandbox),
			Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}}, // the list never changes
		},
	)
	s.mcp.AddReceivingMiddleware(s.explainArguments)
	s.addSandboxTools()
	s.addCommandTools()
	s.addProcessTools()
	s.addCodeTools()
	s.addFileTools()
	return s
}

// Close ends every session, and with it what its tools still run and its own sandbox. Idempotent.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for _, x := range s.sessions {
		x.interrupt()
	}
	s.mu.Unlock()
	for ss := range s.mcp.Sessions() {
		_ = ss.Close() // it waits for its calls, which were interrupted
	}
	s.ending.Wait()
}

// session returns the session that a call belongs to.
func (s *Server) session(req *sdk.CallToolRequest) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.sessions[req.Session]; x != nil {
		return x, nil
	}
	if s.closed {
		return nil, &client.Error{Kind: client.Unavailable, Message: "the server is shutting down", Hint: "connect again in a moment"}
	}
	key := ""
	if req.Extra != nil {
		key, _ = keyOf(req.Extra.Header)
	}
	c, err := s.cfg.Connect(key)
	if err != nil {
		return nil, err
	}
	x := newSession(s.cfg, c, req.Session, key)
	s.sessions[req.Session] = x
	s.ending.Add(1)
	go s.awaitEnd(req.Session, x)
	return x, nil
}

// awaitEnd takes a session's sandbox down when the client has left.
func (s *Server) awaitEnd(ss *sdk.ServerSession, x *session) {
	defer s.ending.Done()
	_ = ss.Wait() // how it ended is no matter
	s.mu.Lock()
	delete(s.sessions, ss)
	s.mu.Unlock()
	if err := x.end(); err != nil {
		s.log.Warn("a session's sandbox could not be deleted; its idle limit will end it", slog.Any("error", err))
	}
}

// interrupt ends what the session with an id runs, where key is the one that it was opened with.
func (s *Server) interrupt(id, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ss, x := range s.sessions {
		if ss.ID() == id && x.key == key {
			x.interrupt()
		}
	}
}
