package e2b

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
)

// The limits of one control request.
const (
	maxBody = 1 << 20
	// bodyTime is how long a body may take to arrive.
	bodyTime = 30 * time.Second
)

// call is one request to the control plane, by somebody who may make it.
type call struct {
	w http.ResponseWriter
	r *http.Request
	p sandbox.Principal
}

// handler serves a call. It writes nothing before it returns an error.
type handler func(c call) error

// route is one path of the control plane, with the access that it needs.
type route struct {
	pattern string
	access  policy.Access
	handler handler
}

// routes lists the control plane. What is not in it is not served.
func (a *API) routes() []route {
	const box = "/sandboxes/{id}"
	return []route{
		{"GET /health", policy.Open, serveHealth},

		{"POST /v2/sandboxes", policy.SandboxCreate, a.createV2},
		{"POST /sandboxes", policy.SandboxCreate, a.createV1},
		{"GET /v2/sandboxes", policy.SandboxRead, a.listV2},
		{"GET /sandboxes", policy.SandboxRead, a.listV1},
		{"GET /sandboxes/metrics", policy.SandboxRead, a.manyMetrics},
		{"GET " + box, policy.SandboxRead, a.detail},
		{"DELETE " + box, policy.SandboxWrite, a.kill},
		{"POST /v2" + box + "/connect", policy.SandboxWrite, a.connect},
		{"POST " + box + "/connect", policy.SandboxWrite, a.connect},
		{"POST " + box + "/resume", policy.SandboxWrite, a.resume},
		{"POST " + box + "/pause", policy.SandboxWrite, a.pause},
		{"POST " + box + "/timeout", policy.SandboxWrite, a.setTimeout},
		{"POST " + box + "/refreshes", policy.SandboxWrite, a.refresh},
		{"PUT " + box + "/network", policy.SandboxWrite, a.setNetwork},
		{"GET " + box + "/metrics", policy.SandboxRead, a.metrics},
		{"GET " + box + "/logs", policy.SandboxRead, a.logsV1},
		{"GET /v2" + box + "/logs", policy.SandboxRead, a.logsV2},
		{"POST " + box + "/fork", policy.SandboxCreate, a.fork},
		{"POST " + box + "/snapshots", policy.SandboxWrite, a.snapshot},
		{"GET /snapshots", policy.SandboxRead, a.snapshots},

		{"GET /templates", policy.SandboxRead, a.templates},
		{"GET /v2/templates", policy.SandboxRead, a.templatePage},
		{"GET /templates/{id}", policy.SandboxRead, a.template},
		{"GET /templates/{id}/{part}", policy.SandboxRead, a.templatePart},
		{"PATCH /v2/templates/{id}", policy.SandboxWrite, a.updateTemplate},
		{"PATCH /templates/{id}", policy.SandboxWrite, a.updateTemplate},
		{"DELETE /templates/{id}", policy.SandboxWrite, a.deleteTemplate},
		{"POST /templates/tags", policy.SandboxWrite, a.assignTags},
		{"DELETE /templates/tags", policy.SandboxWrite, a.removeTags},

		{"POST /v3/templates", policy.SandboxCreate, a.requestTemplate},
		{"POST /v2/templates", policy.SandboxCreate, a.requestTemplate},
		{"POST /v2/templates/{id}/builds/{build}", policy.SandboxCreate, a.startBuild},
		{"GET /templates/{id}/builds/{build}/status", policy.SandboxRead, a.buildStatus},
		{"GET /templates/{id}/builds/{build}/logs", policy.SandboxRead, a.buildLogs},
		{"GET /templates/{id}/files/{hash}", policy.SandboxCreate, a.fileLink},

		{"GET /teams", policy.SandboxRead, serveTeams},
		{"GET /volumes", policy.SandboxRead, serveNone},

		{"GET /secrets", policy.Secrets, a.secrets},
		{"POST /secrets", policy.Secrets, a.createSecret},
		{"GET /secrets/{id}", policy.Secrets, a.getSecret},
		{"POST /secrets/{id}", policy.Secrets, a.updateSecret},
		{"DELETE /secrets/{id}", policy.Secrets, a.deleteSecret},
	}
}

// serveControl serves the control plane.
func (a *API) serveControl(w http.ResponseWriter, r *http.Request) {
	if _, pattern := a.mux.Handler(r); pattern != "" {
		a.mux.ServeHTTP(w, r)
		return
	}
	// Only with a key: nobody else learns what there is.
	if _, err := a.authenticate(r); err != nil {
		a.answerError(w, r, err)
		return
	}
	a.answerError(w, r, notYet(r.Method+" "+r.URL.Path))
}

// guard lets through to a route whoever may use it.
func (a *API) guard(rt route) http.HandlerFunc {
	return a.counting(rt.pattern, func(w http.ResponseWriter, r *http.Request) {
		c := call{w: w, r: r}
		if rt.access != policy.Open {
			var err error
			if c.p, err = a.authenticate(r); err != nil {
				a.answerError(w, r, err)
				return
			}
		}
		if !policy.Allow(c.p, rt.access, "") {
			a.answerError(w, r, errs.New(errs.PermissionDenied, "this key may not do that"))
			return
		}
		c.r = admitted(r)
		c.r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		if err := guarded(rt.handler, c); err != nil {
			a.answerError(w, r, err)
		}
	})
}

// authenticate finds who asks: by X-API-Key, or as E2B's command line by a bearer token.
func (a *API) authenticate(r *http.Request) (sandbox.Principal, error) {
	key := r.Header.Get("X-API-Key")
	if key == "" {
		const scheme = "bearer "
		if h := r.Header.Get("Authorization"); len(h) > len(scheme) && strings.EqualFold(h[:len(scheme)], scheme) {
			key = strings.TrimSpace(h[len(scheme):])
		}
	}
	if key == "" {
		return sandbox.Principal{}, fail(http.StatusUnauthorized, "no API key: set E2B_API_KEY; `casemate keys create --e2b` makes one")
	}
	p, err := a.cfg.Keys.Authenticate(r.Context(), key)
	if errs.Is(err, errs.Unauthenticated) {
		return p, fail(http.StatusUnauthorized, "Invalid API key: this server does not know it; `casemate keys create --e2b` makes one")
	}
	return p, err
}

// decode reads the body into v. An empty one leaves v as it is.
func (c call) decode(v any) error {
	_ = http.NewResponseController(c.w).SetReadDeadline(time.Now().Add(bodyTime)) // not every writer has one
	b, err := io.ReadAll(c.r.Body)
	_ = http.NewResponseController(c.w).SetReadDeadline(time.Time{})
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		return fail(http.StatusRequestEntityTooLarge, "Error when parsing request: the body is larger than %d bytes", tooBig.Limit)
	case err != nil:
		return fail(http.StatusBadRequest, "Error when parsing request: the body did not arrive")
	case len(strings.TrimSpace(string(b))) == 0:
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fail(http.StatusBadRequest, "Error when parsing request: %s", jsonFault(err))
	}
	return nil
}

// jsonFault says what is wrong with a body in the caller's words.
func jsonFault(err error) string {
	var wrong *json.UnmarshalTypeError
	switch {
	case !errors.As(err, &wrong):
		return err.Error()
	case wrong.Field == "":
		return "the body must be an object, not " + wrong.Value
	}
	return fmt.Sprintf("%s must be of type %s, not %s", wrong.Field, jsonType(wrong.Type.Kind()), wrong.Value)
}

// jsonType is JSON's word for a Go type.
func jsonType(k reflect.Kind) string {
	switch k {
	case reflect.Int, reflect.Int64:
		return "integer"
	case reflect.Bool, reflect.String:
		return k.String()
	case reflect.Slice:
		return "array"
	}
	return "object"
}

// json answers with v.
func (c call) json(status int, v any) error {
	writeJSON(c.w, status, v)
	return nil
}

// done answers without a body.
func (c call) done() error {
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func serveHealth(c call) error {
	c.w.Header().Set("Cache-Control", "no-store")
	return c.json(http.StatusOK, map[string]string{"status": "ok"})
}

// serveNone lists things of a kind that this server has none of.
func serveNone(c call) error { return c.json(http.StatusOK, []struct{}{}) }

// serveTeams answers with the one team that a key belongs to. A key's secret is not known here.
func serveTeams(c call) error {
	return c.json(http.StatusOK, []map[string]any{{"teamID": c.p.ID, "name": "casemate", "apiKey": "", "isDefault": true}})
}

// allowAnyOrigin lets pages of every site call, as E2B does: what they need, a key or a token, is
// nothing that a browser sends by itself.
func allowAnyOrigin(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Origin") == "" {
		return
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*, X-Next-Token, X-Total-Running, Content-Disposition, Content-Length, Content-Range, Retry-After")
}

// preflight answers a browser's question whether it may call.
func preflight(w http.ResponseWriter, r *http.Request) bool {
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		h.Set("Access-Control-Allow-Headers", asked)
	}
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
	return true
}
