package inspect

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// The bounds of a model request.
const (
	maxModelBody = 32 << 20
	maxAtOnce    = 16 // requests of one sandbox to one provider
	// silence is how long a provider may say nothing. Agents have no limit of their own for that.
	silence = 5 * time.Minute
	// unnamedTokens is what a request that names no limit is taken to use at most, for the budget.
	unnamedTokens = 4096
)

// route is a model route of a sandbox, ready for use.
type route struct {
	wireRoute
	base    *url.URL
	needles *needles
	budget  *budget
	active  atomic.Int32
}

func newRoute(w wireRoute, b *budget) *route {
	r := &route{wireRoute: w, budget: b, needles: newNeedles(w.Key, w.Previous)}
	if u, err := url.Parse(w.BaseURL); err == nil { // the server has checked it
		r.base = u
	}
	return r
}

// modelError answers in the shape that the family's clients understand. The status is never 401, 429 or
// 5xx where trying again can't help: clients would.
func modelError(w http.ResponseWriter, family secret.Family, status int, reason string) {
	kind := "permission_error"
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		kind = "invalid_request_error"
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusServiceUnavailable:
		kind = "api_error"
	case http.StatusTooManyRequests:
		kind = "rate_limit_error"
	}
	inner := map[string]any{"type": kind, "message": "casemate: " + reason}
	body := map[string]any{"error": inner}
	if family == secret.Anthropic {
		body["type"] = "error"
	} else {
		inner["code"], inner["param"] = kind, nil
	}
	text, _ := json.Marshal(body) // strings only: can't fail
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "application/json")
	h.Set(headerRefused, kind)
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n'))
}

// serveModels answers requests to casemate.internal.
func (x *flow) serveModels(w http.ResponseWriter, r *http.Request) {
	name, port, err := hostOf(r)
	if err != nil || name != secret.ModelHost || port != 0 && port != x.f.Target.Port {
		x.refuseModel(w, r, "", http.StatusMisdirectedRequest, "the request names another host")
		return
	}
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), "/models/")
	provider, path, _ := strings.Cut(rest, "/")
	rt := x.in.box(x.f.Sandbox).routes[provider]
	if !ok || rt == nil {
		x.refuseModel(w, r, "", http.StatusNotFound, "this sandbox has no route to a model provider there")
		return
	}
	switch {
	case !rt.opens(r):
		x.refuseModel(w, r, rt.Family, http.StatusForbidden, "the token is not this sandbox's for "+provider+", or has ended")
	case upgrades(r) != "":
		x.refuseModel(w, r, rt.Family, http.StatusUpgradeRequired, "model routes take HTTP requests only")
	case !rt.allowed(r.Method, "/"+path):
		x.refuseModel(w, r, rt.Family, http.StatusNotFound, "model routes pass on requests for answers, embeddings and models only, not "+r.Method+" /"+cut(path, 80))
	case len(rt.Key) == 0:
		x.refuseModel(w, r, rt.Family, http.StatusBadGateway, "the provider's key can't be read at the moment")
	case rt.active.Add(1) > maxAtOnce:
		rt.active.Add(-1)
		x.refuseModel(w, r, rt.Family, http.StatusTooManyRequests, "too many requests at once to this provider")
	default:
		defer rt.active.Add(-1)
		x.ask(w, r, rt, rt.upstreamPath("/"+path))
	}
}

// refuseModel answers a request that goes to no provider, and tells of it.
func (x *flow) refuseModel(w http.ResponseWriter, r *http.Request, family secret.Family, status int, reason string) {
	modelError(w, family, status, reason)
	x.told.event(requestEvent(r, status, reason))
}

// opens reports whether the request shows the route's token. Where a client shows several things, one must be it.
func (r *route) opens(req *http.Request) bool {
	if !r.Expires.IsZero() && time.Now().After(r.Expires) {
		return false
	}
	shown := []string{req.Header.Get("X-Api-Key"), req.Header.Get("Api-Key")}
	if token, ok := cutScheme(req.Header.Get("Authorization"), "bearer"); ok {
		shown = append(shown, token)
	}
	ok := 0
	for _, s := range shown {
		ok |= subtle.ConstantTimeCompare([]byte(s), []byte(r.Token))
	}
	return ok == 1 && r.Token != ""
}

// allowed reports whether a path is one that sandboxes need. Accounts, files and batches are not: they
// are shared by all who use the key.
func (r *route) allowed(method, path string) bool {
	if ambiguous(path) {
		return false
	}
	path = "/" + strings.TrimPrefix(strings.TrimPrefix(path, "/"), "v1/")
	if method == http.MethodGet {
		id, ok := strings.CutPrefix(path, "/models/")
		return path == "/models" || ok && id != ""
	}
	allowed := []string{"/chat/completions", "/completions", "/responses", "/embeddings"}
	if r.Family == secret.Anthropic {
		allowed = []string{"/messages", "/messages/count_tokens"}
	}
	return method == http.MethodPost && slices.Contains(allowed, path)
}

// upstreamPath maps a path below the route to the provider's. Clients of OpenAI's family have the
// version in their base URL, and so has the route.
func (r *route) upstreamPath(path string) string {
	if r.Family == secret.OpenAI {
		path = "/" + strings.TrimPrefix(strings.TrimPrefix(path, "/"), "v1/")
	}
	return r.base.Path + path
}

// question is a model request as it was understood.
type question struct {
	asked   []byte // the body as it came, without its encoding
	body    []byte // as it goes on
	model   string
	want    usage // what it may use
	added   bool  // usage in the stream was asked for by us
	problem string
}

// ask sends a request to the provider and passes the answer on.
func (x *flow) ask(w http.ResponseWriter, r *http.Request, rt *route, path string) {
	l := &lease{h: &x.in.held, sandbox: x.f.Sandbox}
	defer l.end()
	q, status := rt.read(r, l)
	if q.problem != "" {
		x.refuseModel(w, r, rt.Family, status, q.problem)
		return
	}
	if reason := rt.budget.take(rt.Budget, q.want); reason != "" {
		x.refuseModel(w, r, rt.Family, http.StatusForbidden, reason)
		return
	}
	m := &meter{lease: l}
	t := x.takeModel(r, q)
	var used usage
	code := 0
	defer func() {
		rt.budget.settle(q.want, used)
		e, _ := t.onto(egress.Event{
			Type: egress.EventModel, Provider: rt.Provider, Model: cut(q.model, 128), Method: cut(r.Method, 32), Path: shownPath(r), Status: code,
			Secret: rt.Secret, Version: rt.Version, TokensIn: used.in, TokensOut: used.out, Estimated: !used.told && used.in+used.out > 0,
		})
		x.f.Event(e)
	}()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	quiet := time.AfterFunc(silence, cancel)
	defer quiet.Stop()
	resp, err := x.models.RoundTrip(rt.outgoing(r, q, path).WithContext(ctx))
	if err != nil {
		used = usage{in: int64(len(q.body)) / bytesPerToken} // it may have been read there
		code = x.modelFailed(w, r, rt, err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	code = resp.StatusCode
	h := w.Header()
	for k, v := range endToEnd(resp.Header) {
		h[k] = v
	}
	h.Del("Alt-Svc")
	h.Del("Set-Cookie")
	rt.needles.maskHeader(h)
	body, err := plainBody(resp, h)
	if err != nil {
		used, code = usage{in: int64(len(q.body)) / bytesPerToken}, http.StatusBadGateway
		modelError(w, rt.Family, code, "the provider's answer has an encoding that can't be read")
		return
	}
	m.src, m.events = noisy{body, quiet}, strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	m.dropUsage = q.added && m.events
	if m.dropUsage {
		h.Del("Content-Length")
	}
	t.answered(code, h)
	w.WriteHeader(code)
	err = pour(w, t.reader(egress.BodyAnswer, newScrubber(rt.needles, m, nil)), lengthOf(w.Header()), func() {})
	if code < 400 && r.Method == http.MethodPost && !counting(path) {
		used = m.used(int64(len(q.body)))
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
}

// noisy puts a deadline off with everything that comes.
type noisy struct {
	io.ReadCloser
	quiet *time.Timer
}

// Read implements io.Reader.
func (n noisy) Read(p []byte) (int, error) {
	got, err := n.ReadCloser.Read(p)
	n.quiet.Reset(silence)
	return got, err
}

// takeModel takes down a model request as the sandbox made it.
func (x *flow) takeModel(r *http.Request, q question) *taking {
	u := url.URL{Scheme: "http", Host: x.host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	if x.tls {
		u.Scheme = "https"
	}
	t := x.take(r.Method, u.String(), endToEnd(r.Header))
	if len(q.asked) > 0 {
		t.write(egress.BodyRequest, q.asked)
		t.end(egress.BodyRequest)
	}
	return t
}

func (x *flow) modelFailed(w http.ResponseWriter, r *http.Request, rt *route, err error) int {
	var refused *egress.RefusedError
	reason := "the provider " + rt.base.Host + " did not answer"
	if errors.As(err, &refused) {
		reason = refused.Verdict.Reason
	} else if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	modelError(w, rt.Family, http.StatusBadGateway, reason)
	return http.StatusBadGateway
}

// outgoing is the request to the provider: the client's, without its credentials and with the key.
func (r *route) outgoing(req *http.Request, q question, path string) *http.Request {
	h := endToEnd(req.Header)
	for _, name := range []string{
		"Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Proxy-Authorization", "Cookie", "Host", "Expect",
		"Content-Encoding", "Content-Length", "Te", "Openai-Organization", "Openai-Project",
	} {
		h.Del(name)
	}
	h.Set("Accept-Encoding", "identity")
	if r.Family == secret.Anthropic {
		h.Set("X-Api-Key", string(r.Key))
	} else {
		h.Set("Authorization", "Bearer "+string(r.Key))
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil // else Go says who it is
	}
	u := *r.base
	u.Path, u.RawPath, u.RawQuery = path, "", req.URL.RawQuery
	out := &http.Request{Method: req.Method, URL: &u, Host: u.Host, Header: h, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}
	if q.body != nil {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(q.body)), int64(len(q.body))
	}
	return out
}

// read reads a request's body, and writes it anew where the model is limited or usage must be asked for,
// so that the provider reads the same as we did.
func (r *route) read(req *http.Request, l *lease) (q question, status int) {
	if req.Method != http.MethodPost {
		return question{}, 0
	}
	text, err := readBody(req, l)
	switch {
	case errors.Is(err, errHeld):
		return question{problem: err.Error()}, http.StatusTooManyRequests
	case err != nil:
		return question{problem: err.Error()}, http.StatusRequestEntityTooLarge
	}
	q.asked = text
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return question{problem: "the request's body is no JSON object"}, http.StatusBadRequest
	}
	for name := range fields {
		if name != "model" && strings.EqualFold(name, "model") { // some providers would take it for the model
			return question{problem: "the request names a model in a field that is not model"}, http.StatusBadRequest
		}
	}
	if raw, ok := fields["model"]; ok && json.Unmarshal(raw, &q.model) != nil {
		return question{problem: "the request's model is no text"}, http.StatusBadRequest
	}
	if len(r.Models) > 0 && !slices.ContainsFunc(r.Models, func(m string) bool { return matchesModel(m, q.model) }) {
		return question{problem: "this sandbox may not ask for the model " + cut(q.model, 80)}, http.StatusForbidden
	}
	if raw, ok := fields["background"]; ok && string(raw) != "false" && string(raw) != "null" { // nobody would see what it used
		return question{problem: "model routes pass on requests whose answer comes with them, and none in the background"}, http.StatusBadRequest
	}
	q.want = wanted(req.URL.Path, text, fields)
	q.added = r.askForUsage(fields, req.URL.Path)
	if q.body, err = json.Marshal(fields); err != nil {
		return question{problem: "the request's body can't be written"}, http.StatusBadRequest
	}
	return q, 0
}

func matchesModel(pattern, model string) bool {
	if head, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(model, head)
	}
	return model == pattern
}

// counting reports whether a path is one that only counts tokens, which uses none.
func counting(path string) bool { return strings.HasSuffix(path, "/count_tokens") }

// wanted returns what a request may use.
func wanted(path string, text []byte, fields map[string]json.RawMessage) usage {
	u := usage{in: int64(len(text)) / bytesPerToken}
	switch {
	case counting(path):
		return usage{}
	case !strings.HasSuffix(path, "/embeddings"): // whose answer has none
		u.out = tokensAsked(fields)
	}
	return u
}

// tokensAsked returns how many tokens an answer may have, with all of the choices that it is to hold.
func tokensAsked(fields map[string]json.RawMessage) int64 {
	number := func(name string) int64 {
		var n float64 // 1e6 and 2.0 are numbers to a provider, too
		if raw, ok := fields[name]; ok && json.Unmarshal(raw, &n) == nil {
			return int64(min(max(n, 0), maxTold))
		}
		return 0
	}
	// Which of them holds is the provider's affair.
	each := max(number("max_tokens"), number("max_completion_tokens"), number("max_output_tokens"))
	if each == 0 {
		each = unnamedTokens
	}
	return each * min(max(number("n"), number("best_of"), 1), maxChoices)
}

// maxChoices bounds what a request is taken to ask for; providers refuse far fewer.
const maxChoices = 1 << 10

// askForUsage makes a stream of chat completions tell what it used, and reports whether that was our wish.
func (r *route) askForUsage(fields map[string]json.RawMessage, path string) bool {
	if r.Family != secret.OpenAI || !strings.HasSuffix(path, "/completions") || string(fields["stream"]) != "true" {
		return false
	}
	options := make(map[string]json.RawMessage)
	if raw, ok := fields["stream_options"]; ok && json.Unmarshal(raw, &options) != nil || options == nil {
		return false // the provider will say what is wrong with it
	}
	if string(options["include_usage"]) == "true" {
		return false
	}
	options["include_usage"] = json.RawMessage("true")
	text, err := json.Marshal(options)
	if err != nil {
		return false
	}
	fields["stream_options"] = text
	return true
}

// readBody reads a body, also one that the client has compressed.
func readBody(r *http.Request, l *lease) ([]byte, error) {
	var src io.Reader = r.Body
	switch strings.ToLower(r.Header.Get("Content-Encoding")) {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, errors.New("the request's body is no gzip")
		}
		src = z
	default:
		return nil, errors.New("the request's body has an encoding other than gzip")
	}
	return readHeld(src, l)
}
