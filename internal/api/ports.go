package api

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/portproxy"
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

// portProxy serves the path form of ports.
type portProxy struct {
	api    *API
	inside portManager
	proxy  *portproxy.Proxy
}

// portTarget is one request to a port.
type portTarget struct {
	principal sandbox.Principal
	id        string // canonical
	portPath
}

func newPortProxy(a *API) *portProxy {
	p := &portProxy{api: a, inside: a.cfg.Manager}
	p.proxy = portproxy.New(p)
	return p
}

func (p *portProxy) close() { p.proxy.Close() }

// DialPort implements portproxy.Dialer.
func (p *portProxy) DialPort(ctx context.Context, who sandbox.Principal, id string, port int) (net.Conn, error) {
	return p.inside.DialPort(ctx, who, id, port)
}

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
	t := &portTarget{principal: c.principal, id: sb.ID, portPath: path}
	prefix := strings.TrimSuffix(r.URL.EscapedPath(), path.rest)
	if path.rest == "" {
		if strings.EqualFold(r.Header.Get("Upgrade"), upgradeTCP) {
			if err := p.tunnel(w, r, t); err != nil {
				a.writeError(w, r, err)
			}
			return
		}
		// Relative links of a page only work below a slash.
		http.Redirect(w, r, prefix+"/"+query(r), http.StatusPermanentRedirect)
		return
	}
	ctx, stop := a.whileServing(r.Context())
	defer stop()
	p.proxy.Serve(w, r.WithContext(ctx), portproxy.Target{
		Principal: c.principal, Sandbox: sb.ID, Port: path.port, Path: path.rest,
		Host: "localhost:" + strconv.Itoa(path.port), Prefix: prefix, Credential: c.header, Shared: true,
		Failed: func(w http.ResponseWriter, r *http.Request, err error) { p.failed(w, r, t, err) },
	})
}

func query(r *http.Request) string {
	if r.URL.RawQuery == "" {
		return ""
	}
	return "?" + r.URL.RawQuery
}

// failed answers where the port can't be reached.
func (p *portProxy) failed(w http.ResponseWriter, r *http.Request, t *portTarget, err error) {
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
