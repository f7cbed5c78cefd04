package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"
	"connectrpc.com/vanguard"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"casemate.dev/internal/errs"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Route is a plain HTTP path beside those of the schema.
type Route struct {
	Method string
	Path   string
	// Twin is the RPC whose work it does and whose access it needs.
	Twin string
}

// twinRoute is a Route with its handler.
type twinRoute struct {
	Route
	handler plainHandler
}

// Routes lists the plain HTTP paths that are not in the schema, since the schema's annotations can't
// say them: streams, bytes, and ports.
func Routes() []Route {
	var out []Route
	for _, t := range (*API)(nil).twins() {
		out = append(out, t.Route)
	}
	return out
}

func (a *API) twins() []twinRoute {
	const box = "/v1/sandboxes/{sandbox}"
	return []twinRoute{
		{Route{"POST", box + "/run", casematev1connect.ProcessServiceRunProcedure}, a.serveRun},
		{Route{"GET", box + "/processes/{process}/output", casematev1connect.ProcessServiceOutputProcedure}, a.serveOutput},
		{Route{"POST", box + "/code/stream", casematev1connect.ContextServiceRunCodeProcedure}, a.serveRunCode},
		{Route{"GET", box + "/contexts/{context}/runs/{run}/items", casematev1connect.ContextServiceFollowRunProcedure}, a.serveRunItems},
		{Route{"GET", box + "/files", casematev1connect.FileServiceReadFileProcedure}, a.serveContent},
		{Route{"PUT", box + "/files", casematev1connect.FileServiceWriteFileProcedure}, a.saveContent},
		{Route{"GET", box + "/files/watch", casematev1connect.FileServiceWatchFilesProcedure}, a.serveWatch},
		{Route{"GET", box + "/bundle", casematev1connect.ProofServiceExportBundleProcedure}, a.serveBundle},
		{Route{"GET", box + "/events/stream", casematev1connect.JournalServiceFollowEventsProcedure}, a.serveEvents},
		{Route{"GET", "/v1/state/{agent}/content", casematev1connect.StateServiceGetDocumentProcedure}, a.serveDocument},
		{Route{"PUT", "/v1/state/{agent}/content", casematev1connect.StateServiceSetDocumentProcedure}, a.saveDocument},
		{Route{"GET", "/v1/state/{agent}/watch", casematev1connect.StateServiceWatchDocumentsProcedure}, a.serveDocuments},
		{Route{"GET", "/v1/builds/{build}/logs/stream", casematev1connect.BuildServiceFollowBuildProcedure}, a.serveBuildLogs},
		{Route{"PUT", "/v1/build-files", casematev1connect.BuildServiceUploadBuildFilesProcedure}, a.saveBuildFiles},
		{Route{"POST", "/v1/templates/{name}/build", casematev1connect.SystemServiceBuildTemplateProcedure}, a.serveBuild},
		{Route{"POST", "/v1/images/pull", casematev1connect.ImageServicePullImageProcedure}, a.servePull},
		{Route{"POST", "/v1/images/push", casematev1connect.ImageServicePushImageProcedure}, a.servePush},
		{Route{"PUT", "/v1/images/archive", casematev1connect.ImageServiceImportImageProcedure}, a.saveArchive},
		{Route{"GET", "/v1/images/archive", casematev1connect.ImageServiceExportImageProcedure}, a.serveArchive},
	}
}

// newREST builds what serves /v1/: the port proxy, the twins, and Vanguard for the rest. Vanguard
// gets no RPC paths: in front of Connect it answers 404 to plain JSON without Connect's own header.
func (a *API) newREST() (http.Handler, error) {
	services := make([]*vanguard.Service, 0, len(a.rpc))
	for prefix, h := range a.rpc {
		services = append(services, vanguard.NewService(prefix, unlessAnswered(h),
			vanguard.WithTargetProtocols(vanguard.ProtocolConnect), // unary calls only arrive here
			vanguard.WithTargetCodecs(vanguard.CodecProto),
			vanguard.WithNoTargetCompression(),
			vanguard.WithMaxMessageBufferBytes(maxMessage),
		))
	}
	schema, err := vanguard.NewTranscoder(services,
		vanguard.WithCodec(newRESTCodec),
		vanguard.WithUnknownHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a.writeError(w, r, errNoRoute(r))
		})))
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for _, t := range a.twins() {
		mux.Handle(t.Method+" "+t.Path, a.gate.twin(t.Twin, t.handler))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p, ok := parsePortPath(r.URL.EscapedPath()); ok {
			a.ports.serve(w, r, p)
			return
		}
		if accepts(r, typeSSE) && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/events") {
			r.URL.Path += "/stream" // the list of events is its own stream for those who accept one
			r.URL.RawPath = ""
		}
		if _, pattern := mux.Handler(r); pattern != "" && !strings.HasPrefix(pattern, "/") {
			mux.ServeHTTP(w, r)
			return
		}
		if err := readable(r.URL); err != nil {
			a.writeError(w, r, err)
			return
		}
		if ct := r.Header.Get("Content-Type"); ct == "" || strings.HasPrefix(ct, "application/x-www-form-urlencoded") {
			r.Header.Set("Content-Type", "application/json") // what curl says of any -d; there are no forms here
		}
		rw := &restWriter{ResponseWriter: w}
		r = r.WithContext(context.WithValue(r.Context(), restKey{}, rw))
		// Vanguard splits Path at slashes and decodes the parts: a tag's own slashes (web%2Fready) must still be encoded.
		u := *r.URL
		u.Path, u.RawPath = r.URL.EscapedPath(), ""
		r.URL = &u
		schema.ServeHTTP(rw, r)
		rw.finish("")
	}), nil
}

// readable refuses what no field of a message can hold, which Vanguard (0.4.0) would take for a fault of the server's.
func readable(u *url.URL) error {
	query, err := url.QueryUnescape(u.RawQuery)
	if err == nil && utf8.ValidString(u.Path) && utf8.ValidString(query) {
		return nil
	}
	return errs.New(errs.InvalidArgument, "the path or the query is no UTF-8, or is malformed")
}

// restJSON is how REST answers are written: every field shows, since a missing "code" for exit code
// 0 surprises people.
func restJSON() protojson.MarshalOptions { return protojson.MarshalOptions{EmitDefaultValues: true} }

// writeMessage answers with a schema message as REST does.
func writeMessage(w http.ResponseWriter, m proto.Message) error {
	body, err := restJSON().Marshal(m)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
	return nil
}

// restCodec is Vanguard's JSON codec, which also writes errors as the other plain paths do, and refuses
// fields that the schema lacks (see jsonCodec).
type restCodec struct{ *vanguard.JSONCodec }

var _ vanguard.RESTCodec = restCodec{}

func newRESTCodec(resolver vanguard.TypeResolver) vanguard.Codec {
	c := vanguard.NewJSONCodec(resolver)
	c.MarshalOptions.EmitDefaultValues = true
	c.MarshalOptions.EmitUnpopulated = false // it would show unset messages as null
	c.UnmarshalOptions.DiscardUnknown = false
	return restCodec{c}
}

// MarshalAppend implements vanguard.Codec.
func (c restCodec) MarshalAppend(base []byte, m proto.Message) ([]byte, error) {
	s, ok := m.(*status.Status)
	if !ok {
		return c.JSONCodec.MarshalAppend(base, m)
	}
	kind := errs.FromGRPC(int(s.GetCode()))
	p := problem{Code: kind.String(), Message: s.GetMessage(), kind: kind}
	for _, d := range s.GetDetails() {
		detail := &v1.ErrorDetail{}
		if d.UnmarshalTo(detail) == nil {
			p.Code, p.Hint, p.ID = detail.GetKind(), detail.GetHint(), detail.GetId()
		}
	}
	body, err := json.Marshal(p)
	return append(append(base, body...), '\n'), err
}

// Unmarshal implements vanguard.Codec. A body that can't be read is the caller's fault, which Vanguard
// would take for the server's.
func (c restCodec) Unmarshal(b []byte, m proto.Message) error {
	if err := c.JSONCodec.Unmarshal(b, m); err != nil {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("the request's body is not the JSON that is wanted: "+err.Error()))
	}
	return nil
}

// restKey is where a request's context has the *restWriter of its answer.
type restKey struct{}

// unlessAnswered keeps h from requests that Vanguard (0.4.0) has refused while h reads them: it shows h
// the end of their body, which would be taken for a message without fields and carried out.
func unlessAnswered(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rw, _ := r.Context().Value(restKey{}).(*restWriter)
		r.Body = &restBody{r.Body, rw}
		h.ServeHTTP(w, r)
	})
}

// restBody is a request's body that fails once the request has its answer.
type restBody struct {
	io.ReadCloser
	answer *restWriter
}

// Read implements io.Reader.
func (b *restBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.answer.begun {
		return 0, errors.New("the request has been refused")
	}
	return n, err
}

// restWriter gives errors the status of our own table, and text errors of Vanguard's the JSON shape.
type restWriter struct {
	http.ResponseWriter
	status int  // of a text error that still is to be written; 0: none
	begun  bool // the answer has a status
}

// WriteHeader implements http.ResponseWriter.
func (w *restWriter) WriteHeader(code int) {
	w.begun = true
	h := w.Header()
	switch {
	case code < http.StatusBadRequest:
	case !strings.HasPrefix(h.Get("Content-Type"), "application/json"):
		w.status = code
		return
	default:
		if kind, ok := errs.FromCode(h.Get(headerKind)); ok {
			code = kind.Map().HTTP
			if kind == errs.Unauthenticated {
				h.Set("WWW-Authenticate", `Bearer realm="casemate"`)
			}
		}
	}
	w.ResponseWriter.WriteHeader(code)
}

// Write implements http.ResponseWriter.
func (w *restWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		return w.ResponseWriter.Write(b)
	}
	w.finish(strings.TrimSpace(string(b)))
	return len(b), nil
}

// finish writes a text error as JSON, unless that is done. text may be empty.
func (w *restWriter) finish(text string) {
	if w.status == 0 {
		return
	}
	kind := errs.InvalidArgument
	if asked := askedWrong(text); asked != "" && w.status == http.StatusInternalServerError {
		text, w.status = asked, kind.Map().HTTP
	}
	switch w.status {
	case http.StatusNotFound:
		kind = errs.NotFound
	case http.StatusInternalServerError:
		kind, text = errs.Internal, ""
	}
	if text == "" {
		text = strings.ToLower(http.StatusText(w.status))
	}
	if strings.HasPrefix(text, `{"code":`) { // restCodec's, of a body that Vanguard refused before it had a type
		w.Header().Set("Content-Type", "application/json")
		w.ResponseWriter.WriteHeader(w.status)
		_, _ = io.WriteString(w.ResponseWriter, text+"\n")
		w.status = 0
		return
	}
	text = strings.TrimPrefix(text, connect.CodeInvalidArgument.String()+": ")
	problem{Code: kind.String(), Message: text, Hint: "docs/api.md lists the paths and their methods", kind: kind}.
		write(w.ResponseWriter, w.status)
	w.status = 0
}

// askedWrong words what Vanguard (0.4.0) takes for a fault of its own, and is the caller's; "": it is not.
func askedWrong(text string) string {
	var p problem // as restCodec writes it, of what Vanguard refused before it had a type
	if json.Unmarshal([]byte(text), &p) == nil {
		text = p.Message
	}
	if rest, ok := strings.CutPrefix(text, "unknown field in field path "); ok {
		name, _, _ := strings.Cut(rest, ": element ")
		return "there is no parameter " + name
	}
	if strings.HasPrefix(text, "request should have no body") {
		return "the request takes no body"
	}
	return ""
}

// Unwrap lets http.ResponseController through.
func (w *restWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
