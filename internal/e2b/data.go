package e2b

import (
	"context"
	"html"
	"net/http"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/e2b/interpreter"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/portproxy"
	"casemate.dev/internal/sandbox"
)

// headerTraffic carries the token of a sandbox whose ports are not public.
const headerTraffic = "E2b-Traffic-Access-Token"

// outage is the body of an answer where a sandbox or its port can't be reached.
type outage struct {
	SandboxID string `json:"sandboxId"`
	Message   string `json:"message"`
	Port      int    `json:"port,omitempty"`
	Code      int    `json:"code"`
}

// write answers with o; a browser gets a page.
func (o outage) write(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if r.Method == http.MethodGet && strings.Contains(r.Header.Get("Accept"), "text/html") {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
		w.WriteHeader(o.Code)
		_, _ = w.Write([]byte("<!doctype html><title>" + strconv.Itoa(o.Code) + "</title><h1>" + html.EscapeString(o.Message) +
			"</h1><p>Sandbox " + html.EscapeString(o.SandboxID) + "</p>\n"))
		return
	}
	writeJSON(w, o.Code, o)
}

// the data plane acts in the name of a sandbox's owner; to find the sandbox, it looks as the server.
func server() sandbox.Principal { return sandbox.Principal{ID: "e2b", Admin: true} }

// serveData serves a request to a port of a sandbox. Who calls is known by a token, which is checked
// before a paused sandbox is woken.
func (a *API) serveData(w http.ResponseWriter, r *http.Request, to destination) {
	if to.port == envdPort || to.port == interpreterPort {
		allowAnyOrigin(w, r)
		if preflight(w, r) {
			return
		}
	}
	counts(a.dataMethod(r, to.port), w, r, func(w http.ResponseWriter, r *http.Request) { a.serveTo(w, r, to) })
}

// serveTo is serveData for what is counted.
func (a *API) serveTo(w http.ResponseWriter, r *http.Request, to destination) {
	s, err := a.cfg.Manager.Get(r.Context(), server(), to.sandbox)
	if err != nil || s.ID != to.sandbox || s.State != sandbox.Running && s.State != sandbox.Paused {
		if err != nil && !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.InvalidArgument) {
			a.answerError(w, r, err)
			return
		}
		notThere(to.sandbox).write(w, r)
		return
	}
	if a.admits(w, r, to, keptOf(s)) {
		a.serveAdmitted(w, r, to, s)
	}
}

// serveAdmitted serves a request by somebody who may make it, and wakes a paused sandbox for it.
func (a *API) serveAdmitted(w http.ResponseWriter, r *http.Request, to destination, s sandbox.Sandbox) {
	k := keptOf(s)
	r = admitted(r)
	owner := sandbox.Principal{ID: s.Owner}
	if s.State == sandbox.Paused && (isHealth(r, to) || !a.wake(r, owner, s, k)) {
		notThere(s.ID).write(w, r)
		return
	}
	ctx, stop, err := a.cfg.Manager.WhileRunning(r.Context(), owner, s.ID)
	if err != nil {
		notThere(s.ID).write(w, r)
		return
	}
	defer stop()
	undrain := context.AfterFunc(a.draining, stop)
	defer undrain()
	a.forward(w, r.WithContext(ctx), to, owner, s)
	if ctx.Err() != nil && r.Context().Err() == nil {
		// The sandbox was paused or ended under the request. Whatever is half said must not look whole:
		// the SDKs then ask for its health and tell what happened.
		panic(http.ErrAbortHandler)
	}
}

func notThere(sandboxID string) outage {
	return outage{SandboxID: sandboxID, Message: "The sandbox was not found", Code: http.StatusBadGateway}
}

// admits checks the token that a request needs, and answers where it is missing.
func (a *API) admits(w http.ResponseWriter, r *http.Request, to destination, k kept) bool {
	if to.port == envdPort {
		if text := a.tokens.refuses(r, to.sandbox, time.Now()); text != "" {
			writeError(w, http.StatusUnauthorized, text)
			return false
		}
		return true
	}
	if to.port == interpreterPort && interpreter.NeedsToken(r) {
		if text := a.tokens.refuses(r, to.sandbox, time.Now()); text != "" {
			writeError(w, http.StatusUnauthorized, text)
			return false
		}
	}
	if k.public() {
		return true
	}
	text := ""
	switch given := r.Header.Get(headerTraffic); {
	case given == "":
		text = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
	case !same(given, a.tokens.traffic(to.sandbox)):
		text = "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
	default:
		return true
	}
	outage{SandboxID: to.sandbox, Message: text, Code: http.StatusForbidden}.write(w, r)
	return false
}

// wake resumes a paused sandbox that asked for it, and reports whether it runs.
func (a *API) wake(r *http.Request, owner sandbox.Principal, s sandbox.Sandbox, k kept) bool {
	if !k.AutoResume || s.FilesOnly { // a boot is not for passers-by to cause
		return false
	}
	_, err := a.cfg.Manager.Resume(r.Context(), owner, s.ID)
	return err == nil
}

// isHealth reports whether a request only asks whether the sandbox runs. It needs no token and wakes
// nobody: the SDKs ask of their own accord when a pause cuts a stream.
func isHealth(r *http.Request, to destination) bool {
	return to.port == envdPort && r.URL.Path == "/health"
}

// internalRoute reports whether a path is the agent's own, between it and what runs it.
func internalRoute(path string) bool {
	switch path {
	case "/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade":
		return true
	}
	return false
}

// forward answers a request to a sandbox that runs.
func (a *API) forward(w http.ResponseWriter, r *http.Request, to destination, owner sandbox.Principal, s sandbox.Sandbox) {
	switch {
	case to.port == envdPort && internalRoute(r.URL.Path):
		writeError(w, http.StatusNotFound, "no such path")
		return
	case to.port == envdPort:
		a.cfg.Envd.ServeSandbox(w, r, owner, to.sandbox)
		return
	case to.port == interpreterPort:
		a.interpreter.ServeSandbox(w, r, owner, s)
		return
	}
	if c := countedOf(r.Context()); c != nil {
		c.forwarded = true
	}
	k := keptOf(s)
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	a.ports.Serve(w, r, portproxy.Target{
		Principal: owner, Sandbox: to.sandbox, Port: to.port, Path: path, Host: k.Network.host(r.Host, to.port),
		Shared: !to.byHost, TLS: k.Network.speaksTLS(to.port),
		Failed: func(w http.ResponseWriter, r *http.Request, err error) { a.unreachable(w, r, to, err) },
	})
}

// unreachable answers where a port can't be reached.
func (a *API) unreachable(w http.ResponseWriter, r *http.Request, to destination, err error) {
	switch {
	case r.Context().Err() != nil:
		return // the client has left, or the sandbox has
	case errs.Is(err, errs.ResourceExhausted), errs.Is(err, errs.DeadlineExceeded):
		CallFailed(r.Context(), errs.KindOf(err))
		a.answerError(w, r, err)
		return
	}
	CallFailed(r.Context(), errs.FailedPrecondition) // nothing listens there
	outage{
		SandboxID: to.sandbox, Message: "The sandbox is running but port is not open", Port: to.port, Code: http.StatusBadGateway,
	}.write(w, r)
}

// serveSigned serves /files where nothing but a signature names the sandbox: links that the SDKs make
// for people who have no header to send.
func (a *API) serveSigned(w http.ResponseWriter, r *http.Request) {
	if !envd.HasSignature(r) || r.Method != http.MethodGet && r.Method != http.MethodHead && r.Method != http.MethodPost {
		writeError(w, http.StatusUnauthorized, "missing signature query parameter")
		return
	}
	select {
	case a.search <- struct{}{}: // strangers can make us look: at most so many at once
	case <-r.Context().Done():
		return
	}
	found := ""
	for _, sandboxID := range a.cfg.Manager.Alive() {
		if a.tokens.signs(r, sandboxID, time.Now()) {
			found = sandboxID
			break
		}
	}
	<-a.search
	if found == "" {
		writeError(w, http.StatusUnauthorized, "invalid signature")
		return
	}
	a.serveData(w, r, destination{sandbox: found, port: envdPort})
}
