package api

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// upgradeTCP is the protocol that a request to a port without a path upgrades to: the port's bytes.
const upgradeTCP = "casemate-tcp"

// portPath is the form /v1/sandboxes/SANDBOX/ports/PORT[/REST] taken apart.
type portPath struct {
	sandbox string
	port    int
	rest    string // still escaped, with its leading slash; "" where there is none
}

// parsePortPath takes an escaped path apart. It works on the escaped form, so that what is inside a
// segment can't become a separator, and changes nothing of the rest, which is the application's.
func parsePortPath(escaped string) (portPath, bool) {
	s, ok := strings.CutPrefix(escaped, "/v1/sandboxes/")
	if !ok {
		return portPath{}, false
	}
	name, s, ok := strings.Cut(s, "/ports/")
	if !ok || name == "" || strings.Contains(name, "/") {
		return portPath{}, false
	}
	name, err := url.PathUnescape(name)
	if err != nil {
		return portPath{}, false
	}
	digits, rest := s, ""
	if i := strings.IndexByte(s, '/'); i >= 0 {
		digits, rest = s[:i], s[i:]
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 || digits[0] == '0' {
		return portPath{}, false
	}
	return portPath{sandbox: name, port: int(port), rest: rest}, true
}

// portManager is what the proxy needs of the Manager.
type portManager interface {
	Get(ctx context.Context, p sandbox.Principal, id string) (sandbox.Sandbox, error)
	DialPort(ctx context.Context, p sandbox.Principal, id string, port int) (net.Conn, error)
}

// portProxy passes requests on to ports inside sandboxes. What it forwards is written by code that
// nobody trusts, and so is what comes back: no credential goes in, and nothing that could act in the
// name of the server's origin comes out.
type portProxy struct {
	api    *API
	inside portManager
	proxy  *httputil.ReverseProxy
	tr     *http.Transport
}

// portTarget travels with a request from serve to the proxy's hooks.
type portTarget struct {
	principal sandbox.Principal
	id        string // canonical
	portPath
	prefix string // what the proxy's own part of the path is
	header string // of the credential that was used
}

type portTargetKey struct{}

func targetOf(ctx context.Context) *portTarget {
	t, _ := ctx.Value(portTargetKey{}).(*portTarget)
	return t
}

func newPortProxy(a *API) *portProxy {
	p := &portProxy{api: a, inside: a.cfg.Manager}
	p.tr = &http.Transport{
		DialContext:           p.dial,
		MaxIdleConnsPerHost:   16,
		MaxIdleConns:          1024,
		IdleConnTimeout:       15 * time.Second,
		DisableCompression:    true, // pass on what the application sent
		ResponseHeaderTimeout: 0,    // an agent may think for long
	}
	p.proxy = &httputil.ReverseProxy{
		Transport:      p.tr,
		FlushInterval:  -1, // server-sent events must not wait in a buffer
		Rewrite:        p.rewrite,
		ModifyResponse: p.clean,
		ErrorHandler:   p.failed,
		BufferPool:     &bufferPool{pool: sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}},
		ErrorLog:       nil,
	}
	return p
}

func (p *portProxy) close() { p.tr.CloseIdleConnections() }

// serve handles one request to a port. It needs what starting a process needs: both run code inside.
func (p *portProxy) serve(w http.ResponseWriter, r *http.Request, path portPath) {
	a := p.api
	if _, err := a.gate.admit(r.Context(), casematev1connect.ProcessServiceStartProcessProcedure); err != nil {
		a.writeError(w, r, err)
		return
	}
	c := callerOf(r.Context())
	sb, err := p.inside.Get(r.Context(), c.principal, path.sandbox)
	if err != nil {
		a.writeError(w, r, err)
		return
	}
	t := &portTarget{principal: c.principal, id: sb.ID, portPath: path, header: c.header}
	t.prefix = strings.TrimSuffix(r.URL.EscapedPath(), path.rest)
	if path.rest == "" {
		if strings.EqualFold(r.Header.Get("Upgrade"), upgradeTCP) {
			if err := p.tunnel(w, r, t); err != nil {
				a.writeError(w, r, err)
			}
			return
		}
		// Relative links of a page only work below a slash.
		http.Redirect(w, r, t.prefix+"/"+query(r), http.StatusPermanentRedirect)
		return
	}
	ctx, stop := a.whileServing(context.WithValue(r.Context(), portTargetKey{}, t))
	defer stop()
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1: answer while the request still streams
	p.proxy.ServeHTTP(w, r.WithContext(ctx))
}

func query(r *http.Request) string {
	if r.URL.RawQuery == "" {
		return ""
	}
	return "?" + r.URL.RawQuery
}

// dial is the transport's way to an address "PORT.SANDBOX". Connections are pooled per address and
// shared between principals that serve has let through.
func (p *portProxy) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	t := targetOf(ctx)
	if t == nil {
		return nil, errors.New("dial without a target")
	}
	return p.inside.DialPort(ctx, t.principal, t.id, t.port)
}

// rewrite shapes the request that goes into the sandbox.
func (p *portProxy) rewrite(pr *httputil.ProxyRequest) {
	t := targetOf(pr.In.Context())
	u := pr.Out.URL
	u.Scheme = "http"
	u.Host = strconv.Itoa(t.port) + "." + t.id // names the pool; dial reads the target
	u.RawPath = t.rest
	u.Path, _ = url.PathUnescape(t.rest) // the server has parsed it before
	u.RawQuery = pr.In.URL.RawQuery      // as it came; ReverseProxy drops what it can't parse
	// Development servers answer to localhost only.
	pr.Out.Host = "localhost:" + strconv.Itoa(t.port)
	stripCredentials(pr.Out.Header, t.header)
	pr.Out.Header.Set("X-Forwarded-Host", pr.In.Host)
	pr.Out.Header.Set("X-Forwarded-Proto", scheme(pr.In))
	pr.Out.Header.Set("X-Forwarded-Prefix", t.prefix)
	if pr.Out.Header.Get("Origin") != "" {
		pr.Out.Header.Set("Origin", "http://"+pr.Out.Host) // it was checked at the door; inside it must match Host
	}
}

func scheme(r *http.Request) string {
	if r.TLS != nil {
		return "https"
	}
	return "http"
}

// stripCredentials takes every credential of ours and of E2B's off a request: whatever a sandbox is
// sent, its code can read. used is the header that the request was authenticated by. An Authorization
// that was not used and holds none of our keys belongs to the application.
func stripCredentials(h http.Header, used string) {
	if used != "" {
		h.Del(used)
	}
	for name, values := range h {
		lower := strings.ToLower(name)
		switch {
		case lower == "x-api-key", lower == "x-access-token", lower == "cookie", lower == "proxy-authorization":
		case strings.HasPrefix(lower, "casemate-"), strings.HasPrefix(lower, "e2b-"), strings.HasPrefix(lower, "x-e2b-"):
		case lower == "authorization" && anyKey(values):
		default:
			continue
		}
		delete(h, name)
	}
}

// anyKey reports whether one of an Authorization header's values carries one of our keys, in
// whatever scheme, also inside Basic's encoding.
func anyKey(values []string) bool {
	for _, v := range values {
		words := strings.FieldsFunc(v, func(r rune) bool { return strings.ContainsRune(" ,\"=:", r) })
		for _, word := range words {
			plain, err := base64.RawStdEncoding.DecodeString(word)
			if looksLikeKey(word) || (err == nil && (bytes.Contains(plain, []byte("csm_")) || bytes.Contains(plain, []byte("e2b_")))) {
				return true
			}
		}
	}
	return false
}

// clean shapes the answer that comes out of the sandbox.
func (p *portProxy) clean(resp *http.Response) error {
	for _, name := range []string{
		"Set-Cookie", "Set-Cookie2", // would be sent to every path of this origin
		"Clear-Site-Data", "Strict-Transport-Security", "Service-Worker-Allowed", "Alt-Svc", // act on the whole origin
		headerKind,
	} {
		resp.Header.Del(name)
	}
	if to := resp.Header.Get("Location"); to != "" {
		resp.Header.Set("Location", targetOf(resp.Request.Context()).outside(to))
	}
	// Added, not set: a browser obeys all policies, so the application's own still holds.
	resp.Header.Add("Content-Security-Policy", "sandbox")
	return nil
}

// outside turns a redirect to a place of the application into the address where the proxy shows it.
func (t *portTarget) outside(location string) string {
	host := "localhost:" + strconv.Itoa(t.port)
	for _, scheme := range []string{"http://", "https://"} {
		if rest, ok := strings.CutPrefix(location, scheme+host); ok && (rest == "" || strings.ContainsRune("/?#", rune(rest[0]))) {
			return t.prefix + "/" + strings.TrimPrefix(rest, "/")
		}
	}
	if strings.HasPrefix(location, "/") && !strings.HasPrefix(location, "//") {
		return t.prefix + location
	}
	return location // relative, or somewhere else
}

// failed answers where the port can't be reached.
func (p *portProxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	t := targetOf(r.Context())
	var own *errs.Error
	switch {
	case errors.Is(context.Cause(r.Context()), errDraining):
		err = errDraining
	case r.Context().Err() != nil:
		return // the client has left
	case errors.As(err, &own) && own.Kind != errs.Internal && !refused(own):
	default:
		prob := problem{
			Code:    errs.Unavailable.String(),
			Message: "nothing answers on port " + strconv.Itoa(t.port) + " of sandbox " + t.id,
			Hint:    "start a server there that listens on 127.0.0.1 or 0.0.0.0, then ask again",
			kind:    errs.Unavailable,
		}
		prob.write(w, http.StatusBadGateway)
		return
	}
	p.api.writeError(w, r, err)
}

// refused reports whether a dial reached the sandbox and nothing listened there.
func refused(e *errs.Error) bool {
	return e.Kind == errs.Unavailable || e.Kind == errs.FailedPrecondition
}

// tunnel turns the connection into the port's bytes.
func (p *portProxy) tunnel(w http.ResponseWriter, r *http.Request, t *portTarget) error {
	inside, err := p.inside.DialPort(r.Context(), t.principal, t.id, t.port)
	if err != nil {
		return err
	}
	defer func() { _ = inside.Close() }()
	outside, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "this connection can't be upgraded").WithHint("use HTTP/1.1")
	}
	defer func() { _ = outside.Close() }()
	_ = outside.SetDeadline(time.Time{})
	const head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + upgradeTCP + "\r\n\r\n"
	if _, err := io.WriteString(outside, head); err != nil {
		return nil // the client has left; there is nobody to tell
	}
	// What the client sent ahead lies in the server's buffer.
	early := make([]byte, buf.Reader.Buffered())
	if _, err := io.ReadFull(buf, early); err != nil {
		return nil // as above
	}
	if _, err := inside.Write(early); err != nil {
		return nil // the port has closed; so does the tunnel
	}
	unhook := context.AfterFunc(p.api.draining, func() { _ = outside.Close(); _ = inside.Close() })
	defer unhook()
	splice(inside, outside)
	return nil
}

// splice copies both ways and hands each end of stream on, until both ways have ended.
func splice(a, b net.Conn) {
	var wg sync.WaitGroup
	way := func(dst, src net.Conn) {
		defer wg.Done()
		_, err := io.Copy(dst, src)
		if half, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
			_ = half.CloseWrite()
			return
		}
		_ = dst.Close()
		_ = src.Close()
	}
	wg.Add(2)
	go way(a, b)
	go way(b, a)
	wg.Wait()
}

// bufferPool keeps the proxy's copy buffers.
type bufferPool struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *bufferPool) Get() []byte { return *b.pool.Get().(*[]byte) } //nolint:forcetypeassert // it holds nothing else

// Put implements httputil.BufferPool.
func (b *bufferPool) Put(buf []byte) { b.pool.Put(&buf) }
