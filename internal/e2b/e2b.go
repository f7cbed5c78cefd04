// Package e2b serves the wire protocol of E2B's SDKs, so that a program which uses them runs here
// with only its URLs and its key changed. It translates between that protocol and sandbox.Manager,
// and nothing else.
//
// There are two planes on one origin. The control plane is REST (create, list, pause, …) and asks for
// an API key. The data plane is what reaches into one sandbox: its agent (files, processes) on port
// 49983, which package envd serves, the code interpreter on port 49999, which package interpreter
// serves, and every other port, which is forwarded. A request belongs to
// the data plane where it names a sandbox: by a header, by its host name, or by a signature.
//
// What belongs here: routes, JSON shapes, error texts that the SDKs read, tokens. What does not:
// decisions. What is not there yet answers 501 and says so; nothing is accepted and then ignored.
package e2b

import (
	"context"
	"log/slog"
	"net/http"
	"sync"

	"casemate.dev/internal/e2b/interpreter"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/portproxy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/template"
	"casemate.dev/internal/usage"
)

// Envd serves the agent's protocol for one sandbox: /files, /envs, /metrics, and the Connect services.
type Envd interface {
	// ServeSandbox answers a request that may be answered: the token was checked and the sandbox runs.
	// The request's context ends when the sandbox is paused or ends; a stream that is cut by it ends
	// without its last frame, since the caller drops the connection.
	ServeSandbox(w http.ResponseWriter, r *http.Request, p sandbox.Principal, sandboxID string)
}

// Config is what New needs.
type Config struct {
	Manager *sandbox.Manager
	Keys    *policy.Keys
	// Envd serves port 49983 of every sandbox.
	Envd Envd
	// Usage is what sandboxes used earlier.
	Usage *usage.History
	// Transforms keeps headers that are put on sandboxes' requests; nil: there are none.
	Transforms Transforms
	// Proxies are those of single sandboxes; nil: there are none.
	Proxies Proxies
	// Secrets keeps secrets, which headers may name; nil: there are none.
	Secrets Secrets
	// Builder builds templates; nil: unsupported.
	Builder *template.Builder
	// Secret is what tokens are derived from. It must stay the same for tokens to.
	Secret []byte
	// Domain is the name below which <port>-<id>.<domain> leads here, perhaps with a port; "": none.
	Domain string
	// Calls counts calls, and makes spans of them; nil: this API's alone, without spans.
	Calls *observe.Calls
	// Log takes the causes of internal errors; nil: nowhere.
	Log *slog.Logger
}

// API is E2B's protocol as an http.Handler.
type API struct {
	cfg    Config
	log    *slog.Logger
	tokens tokens
	mux    *http.ServeMux
	ports  *portproxy.Proxy
	// interpreter serves port 49999 of every sandbox.
	interpreter *interpreter.Handler
	// search bounds how many signatures are looked for at once.
	search chan struct{}
	// debug makes one debug sandbox at a time.
	debug sync.Mutex
	// toldOf holds the notices about templates that the log has.
	toldOf sync.Map

	// pendingMu guards the field below: builds that wait for their steps, by their ids.
	pendingMu sync.Mutex
	pending   map[string]*pendingBuild

	draining context.Context //nolint:containedctx // the server's life, not a request's; done once Drain was called
	drain    context.CancelCauseFunc
}

// New returns the API over cfg.Manager.
func New(cfg Config) (*API, error) {
	if cfg.Manager == nil || cfg.Keys == nil || cfg.Envd == nil || cfg.Usage == nil || len(cfg.Secret) < 16 {
		return nil, errs.New(errs.Internal, "E2B's protocol needs a manager, keys, an agent, a history and a secret")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Calls == nil {
		cfg.Calls = observe.New(nil)
	}
	a := &API{
		cfg: cfg, log: cfg.Log, tokens: newTokens(cfg.Secret), ports: portproxy.New(cfg.Manager), search: make(chan struct{}, 2), pending: make(map[string]*pendingBuild),
	}
	a.interpreter = interpreter.New(interpreter.Config{Manager: cfg.Manager, Failed: a.answerError})
	a.draining, a.drain = context.WithCancelCause(context.Background())
	a.mux = http.NewServeMux()
	for _, r := range a.routes() {
		a.mux.Handle(r.pattern, a.guard(r))
	}
	const files = "PUT /templates/{id}/files/{hash}"
	a.mux.HandleFunc(files, a.counting(files, a.putFiles)) // its signature stands for a key
	return a, nil
}

// Drain ends every stream; calls that have an end go on. It returns at once.
func (a *API) Drain() { a.drain(errDraining) }

// Close drains and drops connections into sandboxes.
func (a *API) Close() {
	a.Drain()
	a.ports.Close()
}

// ServeHTTP implements http.Handler for the requests that Claims names.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if to, ok, err := a.destination(r); ok || err != nil {
		if err != nil {
			writeError(w, http.StatusBadRequest, publicText(err))
			return
		}
		a.serveData(w, r, to)
		return
	}
	allowAnyOrigin(w, r)
	switch {
	case preflight(w, r):
	case r.URL.Path == "/files":
		a.serveSigned(w, r)
	default:
		a.serveControl(w, r)
	}
}
