// Package portproxy passes HTTP requests on to ports inside sandboxes. What it forwards is read by
// code that nobody trusts, and what comes back was written by it: no credential goes in, and nothing
// that could act in the name of the server's origin comes out.
//
// What belongs here: shaping requests and answers, and the connections into sandboxes. What does not:
// who may reach a port, and how errors look; those are the interface's, which hands a Target over.
package portproxy

import (
	"context"
	"crypto/tls"
	"errors"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/sandbox"
)

// Dialer reaches ports inside sandboxes; sandbox.Manager is one.
type Dialer interface {
	DialPort(ctx context.Context, p sandbox.Principal, ref string, port int) (net.Conn, error)
}

// Target says where one request goes, and how it looks there.
type Target struct {
	Principal sandbox.Principal
	Sandbox   string // whole id
	Port      int
	// Path is what the application is asked for: escaped, with its leading slash.
	Path string
	// Host is the Host that the application sees. Development servers often answer to localhost only.
	Host string
	// Prefix is the path below which the application shows outside, "" where it has a host name of its
	// own. Redirects are turned to it.
	Prefix string
	// Credential names the header that the request was authenticated by, "" where there was none.
	Credential string
	// Shared says that the application answers on the server's own origin: it gets no cookies and sets
	// none, and a browser shows its pages in a sandbox of their own.
	Shared bool
	// TLS says that the application speaks TLS. Its certificate is not checked: the connection never
	// leaves the host.
	TLS bool
	// Failed answers where the port can't be reached. It is not called when the client has left.
	Failed func(w http.ResponseWriter, r *http.Request, err error)
}

// Proxy forwards requests. It keeps connections into sandboxes, which principals share: whoever
// calls has checked that the request may go there.
type Proxy struct {
	dialer Dialer
	proxy  *httputil.ReverseProxy
	tr     *http.Transport
}

type targetKey struct{}

func targetOf(ctx context.Context) *Target {
	t, _ := ctx.Value(targetKey{}).(*Target)
	return t
}

// New returns a Proxy that dials through d.
func New(d Dialer) *Proxy {
	p := &Proxy{dialer: d}
	p.tr = &http.Transport{
		DialContext:           p.dial,
		TLSClientConfig:       &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, //nolint:gosec // see Target.TLS
		MaxIdleConnsPerHost:   16,
		MaxIdleConns:          1024,
		IdleConnTimeout:       15 * time.Second,
		DisableCompression:    true, // pass on what the application sent
		ResponseHeaderTimeout: 0,    // an agent may think for long
	}
	p.proxy = &httputil.ReverseProxy{
		Transport:      p.tr,
		FlushInterval:  -1, // server-sent events must not wait in a buffer
		Rewrite:        rewrite,
		ModifyResponse: clean,
		ErrorHandler:   failed,
		BufferPool:     &bufferPool{pool: sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}},
		ErrorLog:       log.New(discard{}, "", 0), // what applications and clients do wrong
	}
	return p
}

// Close drops the connections that are not in use.
func (p *Proxy) Close() { p.tr.CloseIdleConnections() }

// Serve forwards one request.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, t Target) {
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1: answer while the request still streams
	p.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), targetKey{}, &t)))
}

// dial is the transport's way to an address "PORT.SANDBOX".
func (p *Proxy) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	t := targetOf(ctx)
	if t == nil {
		return nil, errors.New("dial without a target")
	}
	return p.dialer.DialPort(ctx, t.Principal, t.Sandbox, t.Port)
}

// rewrite shapes the request that goes into the sandbox.
func rewrite(pr *httputil.ProxyRequest) {
	t := targetOf(pr.In.Context())
	u := pr.Out.URL
	u.Scheme = "http"
	if t.TLS {
		u.Scheme = "https"
	}
	u.Host = strconv.Itoa(t.Port) + "." + t.Sandbox // names the pool; dial reads the target
	u.RawPath = t.Path
	u.Path, _ = url.PathUnescape(t.Path) // the server has parsed it before
	u.RawQuery = pr.In.URL.RawQuery      // as it came; ReverseProxy drops what it can't parse
	pr.Out.Host = t.Host
	StripCredentials(pr.Out.Header, t.Credential)
	pr.Out.Header.Set("X-Forwarded-Host", pr.In.Host)
	pr.Out.Header.Set("X-Forwarded-Proto", scheme(pr.In))
	pr.Out.Header.Del("X-Forwarded-Prefix")
	if t.Shared {
		pr.Out.Header.Del("Cookie")
	}
	if t.Prefix == "" {
		return
	}
	pr.Out.Header.Set("X-Forwarded-Prefix", t.Prefix)
	if pr.Out.Header.Get("Origin") != "" {
		pr.Out.Header.Set("Origin", "http://"+t.Host) // it was checked at the door; inside it must match Host
	}
}

func scheme(r *http.Request) string {
	if r.TLS != nil {
		return "https"
	}
	return "http"
}

// clean shapes the answer that comes out of the sandbox.
func clean(resp *http.Response) error {
	t := targetOf(resp.Request.Context())
	resp.Header.Del("Casemate-Error") // how the server itself marks an error
	resp.Header.Del("Alt-Svc")        // would lead the client past the proxy
	if to := resp.Header.Get("Location"); to != "" && t.Prefix != "" {
		resp.Header.Set("Location", t.outside(to))
	}
	if !t.Shared {
		keepCookies(resp.Header)
		return nil
	}
	for _, name := range []string{
		"Set-Cookie", "Set-Cookie2", // would be sent to every path of this origin
		"Clear-Site-Data", "Strict-Transport-Security", "Service-Worker-Allowed", // act on the whole origin
	} {
		resp.Header.Del(name)
	}
	// Added, not set: a browser obeys all policies, so the application's own still holds.
	resp.Header.Add("Content-Security-Policy", "sandbox")
	return nil
}

// keepCookies takes the domain off cookies, so that they go back to the host name that set them: with the
// domain that all sandboxes share, one could set another's, and read what that one's visitors carry.
func keepCookies(h http.Header) {
	for i, cookie := range h["Set-Cookie"] {
		parts := strings.Split(cookie, ";")
		kept := slices.DeleteFunc(parts, func(p string) bool {
			name, _, _ := strings.Cut(p, "=")
			return strings.EqualFold(strings.TrimSpace(name), "domain")
		})
		h["Set-Cookie"][i] = strings.Join(kept, ";")
	}
}

// outside turns a redirect to a place of the application into the address where the proxy shows it.
func (t *Target) outside(location string) string {
	for _, scheme := range []string{"http://", "https://"} {
		if rest, ok := strings.CutPrefix(location, scheme+t.Host); ok && (rest == "" || strings.ContainsRune("/?#", rune(rest[0]))) {
			return t.Prefix + "/" + strings.TrimPrefix(rest, "/")
		}
	}
	if strings.HasPrefix(location, "/") && !strings.HasPrefix(location, "//") {
		return t.Prefix + location
	}
	return location // relative, or somewhere else
}

// failed answers where the port can't be reached.
func failed(w http.ResponseWriter, r *http.Request, err error) {
	targetOf(r.Context()).Failed(w, r, err)
}

// bufferPool keeps the proxy's copy buffers.
type bufferPool struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *bufferPool) Get() []byte { return *b.pool.Get().(*[]byte) } //nolint:forcetypeassert // it holds nothing else

// Put implements httputil.BufferPool.
func (b *bufferPool) Put(buf []byte) { b.pool.Put(&buf) }

// discard takes what nobody needs to know.
type discard struct{}

// Write implements io.Writer.
func (discard) Write(p []byte) (int, error) { return len(p), nil }
