// Package interpreter serves what E2B's code interpreter SDKs ask of port 49999 of a sandbox: contexts,
// and code run in them as a stream of lines of JSON.
//
// What belongs here: that wire format, as translation to sandbox.Manager. What does not: which sandbox a
// request is for and whether it may ask, which package e2b has found out before; and what code shows,
// which is its driver's.
//
// # Where it is better than the original
//
// A context whose interpreter has died says how, and the next run gets a new one. Output that a slow
// reader does not take is not dropped: the code waits, as at a pipe. Every line is ASCII, so that SDKs
// which decode piece by piece get every character whole.
package interpreter

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"casemate.dev/internal/codecontext/drivers"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// Config is what New needs.
type Config struct {
	Manager *sandbox.Manager
	// KeepAlive is the silence after which a stream shows that it still stands; 0: 5 s.
	KeepAlive time.Duration
	// Failed answers a request that failed for reasons which are not the protocol's.
	Failed func(w http.ResponseWriter, r *http.Request, err error)
}

// Handler serves all sandboxes. Its methods are safe for concurrent use.
type Handler struct{ cfg Config }

// New returns a Handler.
func New(cfg Config) *Handler {
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 5 * time.Second
	}
	return &Handler{cfg: cfg}
}

// The limits of one request.
const (
	// maxBody bounds a request: code and variables.
	maxBody = 32 << 20
	// ownPrefix begins the ids of the contexts that exist without being created, one for each language.
	ownPrefix = "e2b-"
)

// call is one request.
type call struct {
	w http.ResponseWriter
	r *http.Request
	p sandbox.Principal
	s sandbox.Sandbox
}

// refusal is an answer that the protocol prescribes: plain text.
type refusal struct {
	status int
	text   string
}

// Error implements error.
func (e *refusal) Error() string { return e.text }

// NeedsToken reports whether a request must carry the sandbox's access token: what runs code must. The
// SDKs send none with what is about contexts.
func NeedsToken(r *http.Request) bool { return r.URL.Path == "/execute" }

// ServeSandbox answers a request for a sandbox by a caller who may ask.
func (h *Handler) ServeSandbox(w http.ResponseWriter, r *http.Request, p sandbox.Principal, s sandbox.Sandbox) {
	c := call{w: w, r: r, p: p, s: s}
	err := h.route(c)
	var refused *refusal
	switch {
	case err == nil:
	case errors.As(err, &refused):
		text(w, refused.status, refused.text)
	case r.Context().Err() != nil: // nobody is there, or the caller of this handler drops the connection
	default:
		h.cfg.Failed(w, r, err)
	}
}

// Route names what a request asks for, as "POST :49999/execute"; "": nothing that is served.
func Route(r *http.Request) string {
	path := r.URL.Path
	if rest, ok := strings.CutPrefix(path, "/contexts/"); ok && rest != "" {
		if path = "/contexts/{id}"; strings.HasSuffix(rest, "/restart") {
			path += "/restart"
		}
	}
	switch r.Method + " " + path {
	case "GET /health", "POST /execute", "GET /contexts", "POST /contexts", "POST /contexts/{id}/restart", "DELETE /contexts/{id}":
		return r.Method + " :49999" + path
	}
	return ""
}

func (h *Handler) route(c call) error {
	id, action, _ := strings.Cut(strings.TrimPrefix(c.r.URL.Path, "/contexts/"), "/")
	named := strings.HasPrefix(c.r.URL.Path, "/contexts/") && id != ""
	switch method, path := c.r.Method, c.r.URL.Path; {
	case method == http.MethodGet && path == "/health":
		return answer(c.w, "OK")
	case method == http.MethodPost && path == "/execute":
		return h.execute(c)
	case method == http.MethodGet && path == "/contexts":
		return h.list(c)
	case method == http.MethodPost && path == "/contexts":
		return h.create(c)
	case method == http.MethodPost && named && action == "restart":
		return h.restart(c, id)
	case method == http.MethodDelete && named && action == "":
		return h.remove(c, id)
	}
	return &refusal{http.StatusNotFound, "Not Found"}
}

// contextAnswer is a context in the protocol's words.
type contextAnswer struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	CWD      string `json:"cwd"`
}

// own returns the contexts that exist without being created, in their order.
func (c call) own() []contextAnswer {
	return []contextAnswer{
		{ownPrefix + "python", "python", c.s.Spec.Dir},
		{ownPrefix + "javascript", "javascript", c.s.Spec.Dir},
	}
}

// For reports whether a template, as the caller named it, is the code interpreter's.
func For(template string) bool { return strings.HasPrefix(template, "code-interpreter") }

// Warm returns the contexts that a new sandbox has from its start: for templates of the code interpreter
// Python's, since that is what their SDK runs.
func Warm(template string, profile sandbox.Profile) []sandbox.CodeContextSpec {
	if !For(template) {
		return nil
	}
	return []sandbox.CodeContextSpec{spec(ownPrefix+"python", "python", "", profile)}
}

// spec is how contexts are made: as root where the sandbox has one, since that is whose kernels are at
// E2B, and code installs packages without a thought. They begin in the sandbox's directory, not in root's.
func spec(id, language, dir string, profile sandbox.Profile) sandbox.CodeContextSpec {
	s := sandbox.CodeContextSpec{ID: id, Language: language, Dir: dir, Env: map[string]string{drivers.ShowSavedImages: "1"}}
	if profile == sandbox.Standard {
		s.User = "root"
	}
	return s
}

func (h *Handler) list(c call) error {
	all, err := h.cfg.Manager.ListContexts(c.r.Context(), c.p, c.s.ID)
	if err != nil {
		return err
	}
	out := c.own()
	for _, x := range all {
		if x.ID != out[0].ID && x.ID != out[1].ID {
			out = append(out, contextAnswer{x.ID, x.Language, x.Dir})
		}
	}
	return answer(c.w, out)
}

func (h *Handler) create(c call) error {
	var req struct {
		Language string `json:"language"`
		CWD      string `json:"cwd"`
	}
	if err := read(c, &req); err != nil {
		return err
	}
	d, err := driverOf(req.Language)
	if err != nil {
		return err
	}
	x, err := h.cfg.Manager.CreateContext(c.r.Context(), c.p, c.s.ID, spec("", d.Language, req.CWD, c.s.Spec.Profile))
	if err != nil {
		return notCreated(err)
	}
	return answer(c.w, contextAnswer{x.ID, x.Language, x.Dir})
}

// driverOf finds the language that a caller means.
func driverOf(language string) (drivers.Driver, error) {
	if language = strings.TrimSpace(language); language == "" {
		language = "python"
	}
	d, err := drivers.Find(language)
	if err != nil {
		return d, &refusal{http.StatusBadRequest, publicText(err)}
	}
	return d, nil
}

// notCreated is what the protocol says of a context that did not come up.
func notCreated(err error) error {
	switch errs.KindOf(err) {
	case errs.NotFound, errs.InvalidArgument, errs.FailedPrecondition, errs.PermissionDenied, errs.DeadlineExceeded:
		return &refusal{http.StatusInternalServerError, "Failed to create context: " + publicText(err)}
	}
	return err
}

func publicText(err error) string {
	text, hint := errs.PublicText(err)
	if hint != "" {
		text += " (" + hint + ")"
	}
	return text
}

func noContext(id string) error {
	return &refusal{http.StatusNotFound, "Context " + id + " not found"}
}

func (h *Handler) restart(c call, id string) error {
	_, err := h.cfg.Manager.RestartContext(c.r.Context(), c.p, c.s.ID, id)
	switch {
	case errs.Is(err, errs.NotFound) && c.isOwn(id):
		// It has not been used yet, so it is as good as new.
	case errs.Is(err, errs.NotFound):
		return noContext(id)
	case err != nil:
		return err
	}
	return answer(c.w, nil)
}

func (h *Handler) remove(c call, id string) error {
	err := h.cfg.Manager.DeleteContext(c.r.Context(), c.p, c.s.ID, id)
	if errs.Is(err, errs.NotFound) {
		return noContext(id)
	}
	if err != nil {
		return err
	}
	return answer(c.w, nil)
}

// isOwn reports whether id names a context that exists without being created.
func (c call) isOwn(id string) bool {
	_, err := drivers.Find(strings.TrimPrefix(id, ownPrefix))
	return strings.HasPrefix(id, ownPrefix) && err == nil
}

// read reads a JSON body into v.
func read(c call, v any) error {
	body, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err != nil {
		return &refusal{http.StatusRequestEntityTooLarge, "the request can't be read, or is too large"}
	}
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, v); err != nil {
		return &refusal{http.StatusUnprocessableEntity, "the request is not the JSON that is wanted: " + err.Error()}
	}
	return nil
}

// answer sends a JSON value.
func answer(w http.ResponseWriter, v any) error {
	b, err := line(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
	return nil
}

// text sends plain text.
func text(w http.ResponseWriter, status int, s string) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, s)
}
