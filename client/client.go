// Package client talks to a Casemate server: it makes sandboxes, runs processes in them, moves files
// and reaches their ports.
//
//	c, err := client.New("", "") // CASEMATE_URL and CASEMATE_API_KEY, or the local socket
//	sb, err := c.Sandboxes.Create(ctx, &client.CreateRequest{})
//	defer c.Sandboxes.Delete(ctx, sb.GetId())
//	res, err := c.Processes.Execute(ctx, sb.GetId(), &client.ProcessSpec{Argv: []string{"date"}}, nil)
//
// Requests and answers are the messages of the API's schema (package casematev1); the aliases in this
// package name the common ones. Every error is an *Error with a stable Kind and, where there is one,
// a hint what to do next.
//
// What belongs here: what every program that uses a server needs. What does not: anything that
// prints, asks or decides; that is the program's. The package links the generated code, Connect and
// the standard library, nothing else.
package client

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// DefaultURL is where New connects to when neither it nor the environment names a server.
const DefaultURL = "unix:///run/casemate/casemate.sock"

// The environment variables that New reads.
const (
	EnvURL = "CASEMATE_URL"
	EnvKey = "CASEMATE_API_KEY"
)

// Client talks to one server. It is safe for concurrent use and keeps connections open between
// calls; Close drops them.
type Client struct {
	// Sandboxes makes, shows, changes and ends sandboxes.
	Sandboxes *Sandboxes
	// Processes starts and steers processes in them.
	Processes *Processes
	// Contexts runs code in interpreters that keep their variables.
	Contexts *Contexts
	// Files reads and writes their files.
	Files *Files
	// Ports reaches what listens in them.
	Ports *Ports
	// Commits saves the files of sandboxes, and starts and restores sandboxes from them.
	Commits *Commits
	// History merges, compares and relates saved states.
	History *History
	// State keeps agents' documents, outside every sandbox.
	State *State
	// Images brings OCI images here as templates, and takes templates and commits out.
	Images *Images
	// Builds builds templates by steps and from Dockerfiles.
	Builds *Builds
	// Journal reads what happened to them.
	Journal *Journal
	// Replays helps to run again what a record tells of.
	Replays *Replays
	// Meter tells what they used.
	Meter *Meter
	// System tells about the server, its templates and its keys.
	System *System
	// Network shows and changes what sandboxes may reach.
	Network *Network
	// Calls shows and changes which system calls are observed where a create does not say.
	Calls *CallDefaults
	// Secrets keeps values that sandboxes may use and never see.
	Secrets *Secrets

	conn *conn
}

// conn is what the parts of a Client share: how to reach the server, and as whom.
type conn struct {
	name  string // the URL as given, for error texts
	base  string // http or https URL without a trailing slash
	key   string
	http  *http.Client
	dial  func(ctx context.Context, network, addr string) (net.Conn, error)
	tr    *http.Transport
	unary *direct // nil with TLS
	agent string
	retry time.Duration
}

// Option changes how a Client works.
type Option func(*conn)

// WithUserAgent names the program in requests.
func WithUserAgent(name string) Option { return func(c *conn) { c.agent = name } }

// WithReconnect sets for how long Run, Attach and Output try to reach a server again, counted from
// the last byte that came. The default is 30 s; 0 gives up at the first broken connection.
func WithReconnect(d time.Duration) Option { return func(c *conn) { c.retry = d } }

// WithDialer replaces how connections to the server are made. addr is host:port, or a path for
// unix:// URLs.
func WithDialer(dial func(ctx context.Context, network, addr string) (net.Conn, error)) Option {
	return func(c *conn) { c.dial = dial }
}

// New returns a client for the server at rawURL: http://HOST:PORT, https://HOST[:PORT] or
// unix:///PATH. An empty rawURL means CASEMATE_URL, or DefaultURL where that is unset; an empty key
// means CASEMATE_API_KEY. A key is not sent over a Unix socket, which needs none. New makes no
// connection.
func New(rawURL, key string, opts ...Option) (*Client, error) {
	if rawURL == "" {
		rawURL = os.Getenv(EnvURL)
	}
	if rawURL == "" {
		rawURL = DefaultURL
	}
	if key == "" {
		key = os.Getenv(EnvKey)
	}
	c := &conn{name: rawURL, key: key, dial: (&net.Dialer{Timeout: 5 * time.Second}).DialContext, agent: "casemate-go", retry: 30 * time.Second}
	for _, o := range opts {
		o(c)
	}
	if err := c.open(rawURL); err != nil {
		return nil, err
	}
	return assemble(c), nil
}

// open sets the base URL and the transport.
func (c *conn) open(rawURL string) error {
	u, err := url.Parse(rawURL)
	if err != nil {
		return badURL(rawURL, err)
	}
	dial := c.dial
	switch {
	case u.Scheme == "unix" && u.Path != "":
		c.base, c.key = "http://casemate", ""
		path := u.Path
		dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx, "unix", path) }
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		c.base = strings.TrimRight(u.Scheme+"://"+u.Host+u.Path, "/")
	default:
		return badURL(rawURL, nil)
	}
	c.tr = &http.Transport{
		DialContext:         dial,
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 256, // many calls at once to one server are the rule here
		IdleConnTimeout:     90 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
		DisableCompression:  true, // local or fast networks: latency counts, not bytes
	}
	var over http.RoundTripper = c.tr
	if u.Scheme != "https" {
		addr := hostPort(u)
		c.unary = &direct{next: c.tr, dial: func(ctx context.Context) (net.Conn, error) { return dial(ctx, "tcp", addr) }}
		over = c.unary
	}
	c.http = &http.Client{Transport: authTransport{c, over}}
	return nil
}

func badURL(rawURL string, err error) error {
	return &Error{
		Kind:    InvalidArgument,
		Message: fmt.Sprintf("server URL %q has no known form", rawURL),
		Hint:    "use http://HOST:PORT, https://HOST or unix:///PATH",
		Err:     err,
	}
}

// hostPort returns where to dial for an http or https URL.
func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	return net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
}

func assemble(c *conn) *Client {
	opts := []connect.ClientOption{
		connect.WithAcceptCompression("gzip", nil, nil), // spare both sides the work
		connect.WithReadMaxBytes(256 << 20),
	}
	processes := casematev1connect.NewProcessServiceClient(c.http, c.base, opts...)
	return &Client{
		Sandboxes: &Sandboxes{c, casematev1connect.NewSandboxServiceClient(c.http, c.base, opts...)},
		Processes: &Processes{c, processes},
		Contexts:  &Contexts{c, casematev1connect.NewContextServiceClient(c.http, c.base, opts...)},
		Files:     &Files{c, casematev1connect.NewFileServiceClient(c.http, c.base, opts...)},
		Ports:     &Ports{c},
		Commits:   &Commits{c, casematev1connect.NewCommitServiceClient(c.http, c.base, opts...)},
		History:   &History{c, casematev1connect.NewHistoryServiceClient(c.http, c.base, opts...)},
		State:     &State{c, casematev1connect.NewStateServiceClient(c.http, c.base, opts...)},
		Images:    &Images{c, casematev1connect.NewImageServiceClient(c.http, c.base, opts...)},
		Builds:    &Builds{c, casematev1connect.NewBuildServiceClient(c.http, c.base, opts...)},
		Journal: &Journal{
			c, casematev1connect.NewJournalServiceClient(c.http, c.base, opts...),
			casematev1connect.NewProofServiceClient(c.http, c.base, opts...), casematev1connect.NewRecordServiceClient(c.http, c.base, opts...),
		},
		Replays: &Replays{c, casematev1connect.NewReplayServiceClient(c.http, c.base, opts...)},
		Meter:   &Meter{c, casematev1connect.NewMeterServiceClient(c.http, c.base, opts...)},
		System: &System{
			c, casematev1connect.NewSystemServiceClient(c.http, c.base, opts...), casematev1connect.NewTrustServiceClient(c.http, c.base, opts...),
		},
		Network: &Network{c, casematev1connect.NewNetworkServiceClient(c.http, c.base, opts...)},
		Calls:   &CallDefaults{c, casematev1connect.NewCallServiceClient(c.http, c.base, opts...)},
		Secrets: &Secrets{c, casematev1connect.NewSecretServiceClient(c.http, c.base, opts...)},
		conn:    c,
	}
}

// URL returns the server's URL as it was given or found.
func (c *Client) URL() string { return c.conn.name }

// Close drops idle connections. Calls under way go on.
func (c *Client) Close() {
	c.conn.tr.CloseIdleConnections()
	if c.conn.unary != nil {
		c.conn.unary.closeIdle()
	}
}

// authTransport puts the key on each request, so that it stands in one place.
type authTransport struct {
	c    *conn
	over http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t authTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.c.key != "" || r.Header.Get("User-Agent") == "" {
		r = r.Clone(r.Context()) // a RoundTripper must not change the caller's request
	}
	if t.c.key != "" {
		r.Header.Set("Authorization", "Bearer "+t.c.key)
	}
	if r.Header.Get("User-Agent") == "" {
		r.Header.Set("User-Agent", t.c.agent)
	}
	return t.over.RoundTrip(r)
}

// keyed adds an idempotency key to calls made with the returned context.
func keyed(ctx context.Context, idempotencyKey string) context.Context {
	if idempotencyKey == "" {
		return ctx
	}
	ctx, info := connect.NewClientContext(ctx)
	info.RequestHeader().Set("Idempotency-Key", idempotencyKey)
	return ctx
}
