// Package api serves the native API: it translates between the wire and sandbox.Manager, and
// nothing else.
//
// One handler serves everything on one port. RPC paths (/casemate.v1.…/) go straight to Connect,
// which speaks its own protocol, gRPC and gRPC-Web. REST paths (/v1/…) go through Vanguard, which
// turns them into the same RPCs by the schema's annotations; what a stream or bytes need has a twin
// in plain HTTP (see Routes). /-/health and /-/metrics are the server's own.
//
// What belongs here: wire formats, status codes, and the enforcement of what the schema says about
// access. What does not: decisions. Whether a principal may see a sandbox, what a default is, when
// something ends: that is package policy's and package sandbox's.
package api

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	"casemate.dev/internal/metrics"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/origin"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/state"
	"casemate.dev/internal/template"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Config is what New needs.
type Config struct {
	Manager *sandbox.Manager
	Keys    *policy.Keys
	// Secrets are what sandboxes may use and never see; nil: unsupported.
	Secrets *secret.Vault
	// Gateway says that there is a gateway that puts secrets on requests; else they can be kept, and
	// neither bound nor routed.
	Gateway bool
	// State holds agents' documents.
	State *state.Documents
	// Proofs proves the record of what happened, and its checkpoint goes with every answer; nil: unsupported.
	Proofs Proofs
	// Log takes the causes of internal errors; nil: nowhere.
	Log *slog.Logger
	// Version, ServerID and Kernel are what GetVersion and GetHost tell.
	Version  string
	ServerID string
	Kernel   string
	// Hosts are names, beyond IP addresses and localhost, under which browsers may reach the server.
	Hosts []string
	// Authority is the server's own certificate authority; nil: it has none.
	Authority *Authority
	// KeepAlive is the silence after which a stream shows that it still stands; 0: 15 s.
	KeepAlive time.Duration
	// Builder builds templates by steps and from Dockerfiles; nil: unsupported.
	Builder *template.Builder
	// BuildTemplate builds a template that comes with the server; nil: unsupported.
	BuildTemplate BuildFunc
	// Images moves templates and commits as images; nil: unsupported.
	Images Images
	// Calls counts calls, and makes spans of them; nil: this API's alone, without spans.
	Calls *observe.Calls
	// Metrics writes what the rest of the server counts; nil: nothing.
	Metrics func(p *metrics.Page)
}

// BuildFunc builds the template name, tells what it does, and returns it.
type BuildFunc func(ctx context.Context, name string, force bool, progress func(step string, fraction float64, line string)) (sandbox.Template, error)

// The limits of one request.
const (
	// maxMessage bounds an RPC message and a REST body: an execute's input, or a list of files.
	maxMessage = 64 << 20
	// maxAnonymous bounds the body of a request that shows no valid key.
	maxAnonymous = 64 << 10
	// anonymousRead is how long such a request may take to arrive.
	anonymousRead = 10 * time.Second
	// compressFrom spares small answers the compressor: latency counts more than bytes.
	compressFrom = 16 << 10
)

// API is the native API as an http.Handler.
type API struct {
	cfg     Config
	log     *slog.Logger
	gate    *gate
	rpc     map[string]http.Handler // by service prefix, "/casemate.v1.SandboxService/"
	rest    http.Handler
	reflect http.Handler
	ports   *portProxy
	hosts   origin.List

	draining context.Context //nolint:containedctx // the server's life, not a request's; done once Drain was called
	drain    context.CancelCauseFunc
}

// New returns the API over cfg.Manager.
func New(cfg Config) (*API, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 15 * time.Second
	}
	if cfg.Calls == nil {
		cfg.Calls = observe.New(nil)
	}
	a := &API{cfg: cfg, log: cfg.Log, hosts: origin.New(cfg.Hosts)}
	a.draining, a.drain = context.WithCancelCause(context.Background())
	a.gate = newGate(a)
	a.ports = newPortProxy(a)
	a.serveRPCs()
	rest, err := a.newREST()
	if err != nil {
		return nil, err
	}
	a.rest = rest
	return a, nil
}

// serveRPCs makes the Connect handlers.
func (a *API) serveRPCs() {
	opts := []connect.HandlerOption{
		connect.WithInterceptors(a.gate),
		connect.WithRecover(a.recovered),
		connect.WithCodec(jsonCodec("json")),
		connect.WithCodec(jsonCodec("json; charset=utf-8")),
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(compressFrom),
	}
	a.rpc = make(map[string]http.Handler, 7)
	add := func(path string, h http.Handler) { a.rpc[path] = h }
	add(casematev1connect.NewSandboxServiceHandler(&sandboxes{a}, opts...))
	add(casematev1connect.NewProcessServiceHandler(&processes{a}, opts...))
	add(casematev1connect.NewContextServiceHandler(&contexts{a}, opts...))
	add(casematev1connect.NewFileServiceHandler(&files{a}, opts...))
	add(casematev1connect.NewJournalServiceHandler(&journals{a}, opts...))
	add(casematev1connect.NewSystemServiceHandler(&system{a}, opts...))
	add(casematev1connect.NewTrustServiceHandler(&trust{a}, opts...))
	add(casematev1connect.NewSecretServiceHandler(&secrets{a}, opts...))
	add(casematev1connect.NewNetworkServiceHandler(&networks{a}, opts...))
	add(casematev1connect.NewCallServiceHandler(&callDefaults{a}, opts...))
	add(casematev1connect.NewCommitServiceHandler(&commits{a}, opts...))
	add(casematev1connect.NewImageServiceHandler(&images{a}, opts...))
	add(casematev1connect.NewHistoryServiceHandler(&history{a}, opts...))
	add(casematev1connect.NewStateServiceHandler(&states{a}, opts...))
	add(casematev1connect.NewBuildServiceHandler(&builds{a}, opts...))
	add(casematev1connect.NewProofServiceHandler(&proofs{a}, opts...))
	add(casematev1connect.NewRecordServiceHandler(&records{a}, opts...))
	add(casematev1connect.NewMeterServiceHandler(&meters{a}, opts...))
	add(casematev1connect.NewReplayServiceHandler(&replays{a}, opts...))

	names := make([]string, 0, len(a.rpc))
	for path := range a.rpc {
		names = append(names, strings.Trim(path, "/"))
	}
	_, a.reflect = grpcreflect.NewHandlerV1(grpcreflect.NewStaticReflector(names...))
}

// ServeHTTP implements http.Handler. It is the hot path of every call: no logging, no middleware.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !isLocalPeer(r.Context()) { // no browser reaches the server's own socket
		if err := a.hosts.Check(r); err != nil {
			a.writeError(w, r, err)
			return
		}
	}
	path := r.URL.Path
	switch {
	case strings.HasPrefix(path, "/casemate.v1."):
		cut := strings.IndexByte(path[1:], '/') + 2
		h, ok := a.rpc[path[:cut]]
		if !ok {
			http.NotFound(w, r) // RPC clients read the bare status
			return
		}
		h.ServeHTTP(w, a.identify(w, r))
	case strings.HasPrefix(path, "/v1/"):
		a.rest.ServeHTTP(w, a.identify(w, r))
	case strings.HasPrefix(path, "/-/"):
		a.serveOwn(w, r)
	case strings.HasPrefix(path, "/"+grpcreflect.ReflectV1ServiceName+"/"):
		a.serveReflection(w, a.identify(w, r))
	default:
		a.writeError(w, r, errNoRoute(r))
	}
}

// Drain ends every stream, so that clients take them up again at the next server; calls that have an
// end go on. It returns at once.
func (a *API) Drain() { a.drain(errDraining) }

// Close drains and drops connections into sandboxes.
func (a *API) Close() {
	a.Drain()
	a.ports.close()
}

// whileServing returns ctx cut short by Drain. The caller calls stop when it is through.
func (a *API) whileServing(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(a.draining, func() { cancel(errDraining) })
	return ctx, func() { unhook(); cancel(nil) }
}
