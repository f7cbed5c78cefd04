// Package envd serves what E2B's SDKs ask of a sandbox itself: the plain HTTP routes and the two
// Connect services that, at E2B, a daemon inside the sandbox answers on port 49983.
//
// What belongs here: that wire format, its texts and its codes, as translation to sandbox.Manager. What
// does not: which sandbox a request is for and whether it may ask, which package e2b has found out
// before it calls ServeSandbox (signatures are checked here, by VerifySignature, but asked for there);
// and decisions, which are the Manager's.
//
// # Where it is better than the original
//
// A killed or timed out process takes its whole tree along. A process whose output is still held open
// by a daemon ends for the caller soon after its leader does. A connection that comes late gets the
// output from its beginning, and a terminal's from where nobody has seen it; the header
// Casemate-Output-Offset asks for another place. Files of procfs are read although they say that they
// are empty. A slow reader makes a process wait, as a pipe would, instead of losing its output.
package envd

import (
	"context"
	"encoding/base64"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/filesystem/filesystemconnect"
	"casemate.dev/proto/e2b/process/processconnect"
)

// Version is the version of E2B's daemon whose protocol this is: SDKs turn features on by it.
const Version = "0.6.13"

// Config is what New needs.
type Config struct {
	Manager *sandbox.Manager
	// Log takes the causes of internal errors; nil: nowhere.
	Log *slog.Logger
	// KeepAlive is the silence after which a stream shows that it still stands, where the request does
	// not say; 0: 90 s.
	KeepAlive time.Duration
	// Failed hears of each Connect call that fails, with the call's context; nil: nobody does.
	Failed func(ctx context.Context, kind errs.Kind)
}

// The limits of one request.
const (
	// maxMessage bounds a Connect message.
	maxMessage = 64 << 20
	// compressFrom spares small answers the compressor: latency counts more than bytes.
	compressFrom = 16 << 10
)

// Handler serves all sandboxes. Its methods are safe for concurrent use.
type Handler struct {
	m          *sandbox.Manager
	log        *slog.Logger
	keepAlive  time.Duration
	process    http.Handler
	filesystem http.Handler
	watchers   *watchers
	seen       *seen
}

// New returns a Handler over cfg.Manager. Close ends what it does in the background.
func New(cfg Config) *Handler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 90 * time.Second
	}
	h := &Handler{m: cfg.Manager, log: cfg.Log, keepAlive: cfg.KeepAlive, watchers: newWatchers(), seen: newSeen()}
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(compressFrom),
	}
	if cfg.Failed != nil {
		opts = append(opts, connect.WithInterceptors(teller{cfg.Failed}))
	}
	_, h.process = processconnect.NewProcessHandler(&processes{h}, opts...)
	_, h.filesystem = filesystemconnect.NewFilesystemHandler(&files{h}, opts...)
	return h
}

// Close ends the watches that callers poll.
func (h *Handler) Close() { h.watchers.close() }

// call is one request: who asks, of which sandbox, as which of its users.
type call struct {
	p       sandbox.Principal
	sandbox string
	user    string // "" for the default
	// timeout is how long a process that the request starts may run; 0: no limit.
	timeout time.Duration
	// ping is the silence after which a stream shows that it still stands.
	ping time.Duration
	// offset is where the output begins that the caller wants; -1: it does not say.
	offset int64
}

type callKey struct{}

func callOf(ctx context.Context) *call { return ctx.Value(callKey{}).(*call) }

// headerOffset asks for output from an offset on.
const headerOffset = "Casemate-Output-Offset"

// ServeSandbox answers a request for a sandbox by a caller who may ask. It serves the path of the URL,
// which is the daemon's own.
func (h *Handler) ServeSandbox(w http.ResponseWriter, r *http.Request, p sandbox.Principal, sandboxID string) {
	c := &call{p: p, sandbox: sandboxID, user: userOf(r.Header), ping: h.keepAlive, offset: -1}
	path := r.URL.Path
	rpc := h.filesystem
	switch {
	case strings.HasPrefix(path, "/"+filesystemconnect.FilesystemName+"/"):
	case strings.HasPrefix(path, "/"+processconnect.ProcessName+"/"):
		rpc = h.process
	default:
		h.servePlain(w, r, c)
		return
	}
	if s, err := strconv.Atoi(r.Header.Get("Keepalive-Ping-Interval")); err == nil && s > 0 {
		c.ping = min(time.Duration(s)*time.Second, h.keepAlive)
	}
	if n, err := strconv.ParseInt(r.Header.Get(headerOffset), 10, 64); err == nil && n >= 0 {
		c.offset = n
	}
	c.takeTimeout(r)
	rpc.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callKey{}, c)))
}

// headerTimeout is Connect's limit on a call in milliseconds.
const headerTimeout = "Connect-Timeout-Ms"

// takeTimeout takes the limit on a process off the call that starts it, which then ends when the
// process has: killed, with all that descends from it. 0 is no limit, on every call. What is malformed
// is left for Connect to refuse.
func (c *call) takeTimeout(r *http.Request) {
	ms, err := strconv.ParseInt(r.Header.Get(headerTimeout), 10, 64)
	switch {
	case err != nil || ms < 0:
	case ms == 0:
		r.Header.Del(headerTimeout)
	case r.URL.Path == processconnect.ProcessStartProcedure:
		r.Header.Del(headerTimeout)
		limit := time.Duration(min(ms, longest.Milliseconds()) * int64(time.Millisecond))
		c.timeout = max(limit-min(limit/20, onTheWay), time.Millisecond)
	}
}

const (
	// longest is the Manager's bound of a process's timeout.
	longest = 30 * 24 * time.Hour
	// onTheWay is taken off a process's limit for the time that the request took to get here: SDKs watch
	// the same limit, and when they give up, the process shall be gone.
	onTheWay = 25 * time.Millisecond
)

// userOf returns the user that an Authorization header of type Basic names, without a password.
func userOf(h http.Header) string {
	text, ok := strings.CutPrefix(h.Get("Authorization"), "Basic ")
	if !ok {
		return ""
	}
	plain, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil {
		return ""
	}
	user, _, _ := strings.Cut(string(plain), ":")
	return user
}

// servePlain serves what is not Connect.
func (h *Handler) servePlain(w http.ResponseWriter, r *http.Request, c *call) {
	var f func(http.ResponseWriter, *http.Request, *call) error
	switch r.Method + " " + r.URL.Path {
	case "GET /health", "HEAD /health":
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
		return
	case "GET /metrics":
		f = h.serveMetrics
	case "GET /envs":
		f = h.serveEnvs
	case "GET /files", "HEAD /files":
		f = h.download
	case "POST /files":
		f = h.upload
	case "POST /files/compose":
		f = h.compose
	default:
		WriteError(w, http.StatusNotFound, "no such path: "+r.Method+" "+r.URL.Path)
		return
	}
	if err := f(w, r, c); err != nil {
		h.fail(w, r, err)
	}
}
