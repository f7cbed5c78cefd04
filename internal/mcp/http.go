package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/origin"
)

// The limits of a request.
const (
	// maxMessage bounds one message: a file that is written, in base64.
	maxMessage = 32 << 20
	// maxReplay bounds the answers kept for clients whose connection broke, of all sessions together.
	maxReplay = 32 << 20
)

// sessionHeader is the protocol's header for a session's id.
const sessionHeader = "Mcp-Session-Id"

// HTTPConfig says who may use the HTTP transport.
type HTTPConfig struct {
	// Hosts are names, beside addresses and localhost, under which browsers may reach it.
	Hosts []string
	// Verify says whether a key is valid; its error is shown. It is asked with each request.
	Verify func(ctx context.Context, key string) error
}

// Handler serves the streamable HTTP transport on any path that it is mounted at. Every request needs
// an API key in a header, and a session belongs to the key that opened it.
func (s *Server) Handler(cfg HTTPConfig) http.Handler {
	store := sdk.NewMemoryEventStore(nil)
	store.SetMaxBytes(maxReplay)
	h := &handler{server: s, cfg: cfg, hosts: origin.New(cfg.Hosts)}
	stream := sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return s.mcp }, &sdk.StreamableHTTPOptions{
		EventStore: store, SessionTimeout: sessionIdle, MaxRequestBodyBytes: maxMessage,
		DisableLocalhostProtection: true, // hosts does the same, and knows the names that the operator allowed
	})
	// The user id binds a session to its key: a request with another one is refused.
	bound := auth.RequireBearerToken(func(_ context.Context, key string, _ *http.Request) (*auth.TokenInfo, error) {
		sum := sha256.Sum256([]byte(key))
		return &auth.TokenInfo{UserID: hex.EncodeToString(sum[:])}, nil
	}, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})
	h.next = bound(stream)
	return h
}

// handler guards the transport.
type handler struct {
	server *Server
	cfg    HTTPConfig
	hosts  origin.List
	next   http.Handler
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key, err := h.admit(r)
	if err != nil {
		refuse(w, err)
		return
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+key)
	if r.Method == http.MethodDelete {
		h.server.interrupt(r.Header.Get(sessionHeader), key) // else the end of a session waits for what it runs
	}
	// Streams last as long as they last; the server's own limits on reading hold for requests' headers.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // not every writer has one
	h.next.ServeHTTP(w, r)
}

// admit returns the key that a request shows, if the request may be answered.
func (h *handler) admit(r *http.Request) (string, error) {
	if err := h.hosts.Check(r); err != nil {
		return "", err
	}
	if r.URL.RawQuery != "" {
		return "", errs.New(errs.InvalidArgument, "the address takes no query").
			WithHint("send the API key as a header, `Authorization: Bearer KEY`: addresses end up in logs and histories")
	}
	key, ok := keyOf(r.Header)
	if !ok {
		return "", errs.New(errs.Unauthenticated, "no API key").
			WithHint("send `Authorization: Bearer KEY`; `casemate keys create` makes a key")
	}
	if err := h.cfg.Verify(r.Context(), key); err != nil {
		return "", err
	}
	return key, nil
}

// keyOf returns the API key in a request's header, in one of the two forms that the native API takes.
func keyOf(header http.Header) (string, bool) {
	if key := header.Get("X-API-Key"); key != "" {
		return key, true
	}
	const scheme = "bearer "
	v := header.Get("Authorization")
	if len(v) <= len(scheme) || !strings.EqualFold(v[:len(scheme)], scheme) {
		return "", false
	}
	key := strings.TrimSpace(v[len(scheme):])
	return key, key != "" && !strings.ContainsAny(key, " \t")
}

// refuse answers with an error in the native API's form.
func refuse(w http.ResponseWriter, err error) {
	kind := errs.KindOf(err)
	text, hint := errs.PublicText(err)
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("Connection", "close") // the body of a stranger's request is not read
	if kind == errs.Unauthenticated {
		h.Set("WWW-Authenticate", `Bearer realm="casemate"`)
	}
	w.WriteHeader(kind.Map().HTTP)
	_ = json.NewEncoder(w).Encode(map[string]string{"code": kind.String(), "message": text, "hint": hint})
}
