package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/peek"
	"casemate.dev/internal/egress/rules"
)

// headerRefused tells programs why a request was refused.
const headerRefused = "Casemate-Refused"

// The patience with servers.
const (
	serverHandshake = 15 * time.Second
	serverContinue  = 10 * time.Second // for 100 Continue; then the body goes without it
	serverIdle      = 90 * time.Second
)

// flow is one connection of a sandbox that is looked into.
type flow struct {
	in   *Inspector
	f    *egress.Flow
	host string // canonical name, or the address where there is none
	tls  bool
	// h1 and h2 are the ways to the server, for requests that came in that version: what is translated in
	// one direction only surprises nobody.
	h1, h2 *http.Transport
	models *http.Transport
	told   tally

	// mu guards the fields below.
	mu      sync.Mutex
	of      *box // that needles are of
	needles *needles
}

func newFlow(in *Inspector, f *egress.Flow, roots *x509.CertPool) *flow {
	x := &flow{in: in, f: f, tls: f.Hello != nil, host: f.Target.Name, told: tally{tell: f.Event}}
	if x.host == "" {
		x.host = f.Target.Addr.String()
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return f.Dial(ctx) }
	x.h1 = newTransport(roots, x.host, dial, false)
	x.h2 = newTransport(roots, x.host, dial, true)
	x.models = newTransport(roots, "", func(ctx context.Context, _, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return nil, err
		}
		return f.DialTo(ctx, host, uint16(n), true)
	}, true)
	return x
}

// newTransport returns a way to servers. It follows no redirect, uses no proxy of the environment, adds
// no header, and verifies every certificate.
func newTransport(roots *x509.CertPool, host string, dial func(context.Context, string, string) (net.Conn, error), h2 bool) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(h2)
	return &http.Transport{
		DialContext:            dial,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: host},
		TLSHandshakeTimeout:    serverHandshake,
		ExpectContinueTimeout:  serverContinue,
		IdleConnTimeout:        serverIdle,
		MaxIdleConnsPerHost:    8,
		MaxConnsPerHost:        64,
		MaxResponseHeaderBytes: maxHeader,
		DisableCompression:     true,
		Protocols:              protocols,
	}
}

func (x *flow) close() {
	x.told.close()
	for _, t := range []*http.Transport{x.h1, x.h2, x.models} {
		t.CloseIdleConnections()
	}
}

// fail answers a request that goes nowhere. code is for programs, reason for people.
func fail(w http.ResponseWriter, status int, code rules.Code, reason string) {
	h := w.Header()
	clear(h)
	body := "casemate: " + reason + "\n"
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if code != "" {
		h.Set(headerRefused, string(code))
	}
	if status == http.StatusBadRequest {
		h.Set("Connection", "close") // what follows on such a connection deserves no trust
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body) // a client that has gone is none to tell
}

// serve answers one request.
func (x *flow) serve(w http.ResponseWriter, r *http.Request) {
	if !x.admit(w, r) {
		return
	}
	b := x.in.box(x.f.Sandbox)
	n := x.secretsOf(b)
	out := x.outgoing(r)
	t := x.take(r.Method, out.URL.String(), out.Header) // before anything is put on it
	if out.Body != nil {
		out.Body = t.reader(egress.BodyRequest, out.Body)
	}
	defer x.tell(r, t)
	used, err := b.place(out, x.f.Target, x.tls)
	if err != nil {
		t.status, t.note = http.StatusBadGateway, err.Error()
		fail(w, http.StatusBadGateway, rules.Unreachable, err.Error())
		return
	}
	x.noteStrays(b, out)
	if n != nil {
		out.Header.Set("Accept-Encoding", "identity") // so that what comes back can be read
		out.Header.Del("Sec-WebSocket-Extensions")    // compression, above all
	}
	if len(used) > 0 {
		// Of an answer in pieces nobody sees the whole value, and the client puts it together.
		out.Header.Del("Range")
		out.Header.Del("If-Range")
	}
	for _, c := range used {
		x.told.event(egress.Event{Type: egress.EventSecret, Secret: c.Secret, Version: c.Version, Note: c.Name, Method: cut(r.Method, 32), Path: shownPath(r)})
	}
	x.exchange(w, r, out, t, n, len(used) > 0)
}

// admit decides whether a request may go on, and answers one that may not.
func (x *flow) admit(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace {
		// The first is for proxies; the second makes servers echo what was put on the request.
		x.deny(w, r, http.StatusMethodNotAllowed, rules.Denied, "the method "+r.Method+" is not passed on")
		return false
	}
	name, port, err := hostOf(r)
	if err != nil {
		x.deny(w, r, http.StatusBadRequest, rules.BadName, err.Error())
		return false
	}
	if r.URL.Host != "" || r.URL.Scheme != "" || r.URL.User != nil || !strings.HasPrefix(r.URL.Path, "/") && r.URL.Path != "*" {
		// HTTP/2 can carry a whole URL in the place of a path, too.
		x.deny(w, r, http.StatusBadRequest, rules.NameMismatch, "the request's target is no path")
		return false
	}
	v := x.f.Judge(rules.HTTP{Host: name, Port: port, Method: r.Method, Path: r.URL.EscapedPath(), Upgrade: upgrades(r) != ""})
	switch {
	case !v.Allow && v.Code == rules.NameMismatch:
		fail(w, http.StatusMisdirectedRequest, v.Code, v.Reason)
		return false
	case !v.Allow:
		fail(w, http.StatusForbidden, v.Code, v.Reason)
		return false
	case name != x.host || port != 0 && port != x.f.Target.Port:
		// The rules say so too; a credential does not depend on that alone.
		x.deny(w, r, http.StatusMisdirectedRequest, rules.NameMismatch, "the request names another host than the one that was connected to")
		return false
	}
	return true
}

// deny answers a request that no rule was asked about, and tells of it.
func (x *flow) deny(w http.ResponseWriter, r *http.Request, status int, code rules.Code, reason string) {
	fail(w, status, code, reason)
	x.told.event(requestEvent(r, status, reason))
}

// requestEvent is the event of a request. Who wrote it chose how long everything in it is.
func requestEvent(r *http.Request, status int, note string) egress.Event {
	return egress.Event{Type: egress.EventRequest, Method: cut(r.Method, 32), Path: shownPath(r), Status: status, Note: cut(note, 256)}
}

// hostOf returns the canonical host of a request and its port, 0 where it names none. A request of
// HTTP/2 may say it twice, and must say the same.
func hostOf(r *http.Request) (string, uint16, error) {
	for _, h := range r.Header["Host"] {
		if h != r.Host {
			return "", 0, errors.New("the request names two hosts")
		}
	}
	host, port, err := peek.HostPort(r.Host)
	if err != nil {
		return "", 0, err
	}
	name, addr, err := rules.Host(host)
	if err != nil {
		return "", 0, err
	}
	if name == "" {
		name = addr.String()
	}
	return name, port, nil
}

// secretsOf returns what must not come back, nil where there is nothing.
func (x *flow) secretsOf(b *box) *needles {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.of != b {
		x.of, x.needles = b, b.needlesFor(x.f.Target, x.tls)
	}
	return x.needles
}

// outgoing writes the request anew, from what was understood of it.
func (x *flow) outgoing(r *http.Request) *http.Request {
	scheme, port := "http", uint16(80)
	if x.tls {
		scheme, port = "https", 443
	}
	host := x.host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if x.f.Target.Port != port {
		host += ":" + strconv.Itoa(int(x.f.Target.Port))
	}
	u := &url.URL{Scheme: scheme, Host: host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery}
	if r.URL.Path == "*" {
		u.Path, u.Opaque = "", "*"
	}
	out := &http.Request{
		Method: r.Method, URL: u, Host: host, Header: endToEnd(r.Header), ContentLength: r.ContentLength, Trailer: r.Trailer,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}
	out.Header.Del("Host")
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = nil // else Go says who it is
	}
	if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
		out.Body = r.Body
	}
	return out
}

// endToEnd returns a copy of a header without the fields that are for one hop (RFC 9110, 7.6.1).
func endToEnd(h http.Header) http.Header {
	out := h.Clone()
	for _, v := range h.Values("Connection") {
		for name := range strings.SplitSeq(v, ",") {
			// A client may not have its own credentials, or what frames the message, taken for one hop's.
			if name = textproto.TrimString(name); !slices.Contains([]string{"authorization", "content-length", "host"}, strings.ToLower(name)) {
				out.Del(name)
			}
		}
	}
	te := h.Get("Te")
	for _, name := range []string{
		"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings",
	} {
		out.Del(name)
	}
	if strings.EqualFold(te, "trailers") {
		out.Set("Te", "trailers")
	}
	return out
}

// upgrades returns the protocol that a request asks for, in lower case; "" for none.
func upgrades(r *http.Request) string {
	if r.ProtoMajor != 1 || !slices.ContainsFunc(r.Header.Values("Connection"), func(v string) bool {
		return strings.Contains(strings.ToLower(v), "upgrade")
	}) {
		return ""
	}
	return strings.ToLower(r.Header.Get("Upgrade"))
}

// noteStrays records placeholders that stand where their secret is not bound, and watches the body for
// more. Nothing of the request is changed.
func (x *flow) noteStrays(b *box, out *http.Request) {
	for _, s := range b.strays(out) {
		x.misplaced(s.of, s.where)
	}
	if out.Body == nil || len(b.misplaced.forms) == 0 {
		return
	}
	w := &watcher{ReadCloser: out.Body, n: b.misplaced}
	w.found = func(text []byte) { x.misplaced(b.inBody(text), "the body") }
	out.Body = w
}

func (x *flow) misplaced(c *credential, where string) {
	e := egress.Event{Type: egress.EventMisplaced, Note: where}
	if c != nil {
		e.Secret = c.Secret
	}
	x.told.event(e)
}

// shownPath is a request's path as it may be recorded: without query, and not without bounds.
func shownPath(r *http.Request) string { return cut(r.URL.EscapedPath(), 256) }

// tell tells of a request, once, with what was taken down of it so far.
func (x *flow) tell(r *http.Request, t *taking) {
	if e, first := t.onto(requestEvent(r, t.status, t.note)); first {
		x.told.event(e)
	}
}

// exchange sends out, which is keyed where a secret was put on, and passes the answer on.
func (x *flow) exchange(w http.ResponseWriter, r, out *http.Request, t *taking, n *needles, keyed bool) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		if code != http.StatusEarlyHints {
			return nil
		}
		early := endToEnd(http.Header(h))
		n.maskHeaderOf(early)
		for k, v := range early {
			w.Header()[k] = v
		}
		w.WriteHeader(code)
		clear(w.Header())
		return nil
	}})
	protocol := upgrades(r)
	if r.ProtoMajor != 2 && protocol == "websocket" {
		out.Header.Set("Connection", "Upgrade")
		out.Header.Set("Upgrade", "websocket")
	}
	resp, err := x.way(r).RoundTrip(out.WithContext(ctx))
	if err != nil {
		x.failed(w, r, t, err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	t.status = resp.StatusCode
	if resp.StatusCode == http.StatusSwitchingProtocols {
		h := endToEnd(resp.Header)
		n.maskHeaderOf(h)
		t.answered(resp.StatusCode, h)
		x.tell(r, t) // what follows may take days, and is nobody's answer
		x.switchTo(w, resp, h, protocol, n)
		return
	}
	x.answer(w, r, resp, t, n, keyed)
}

// way is where a request is answered.
func (x *flow) way(r *http.Request) http.RoundTripper {
	switch {
	case x.f.Recorded != nil:
		return recordedWay{x}
	case r.ProtoMajor == 2:
		return x.h2
	}
	return x.h1
}

// failed tells why the server gave no answer. What a dial says may name addresses of the host's network,
// so it is sorted and not quoted.
func (x *flow) failed(w http.ResponseWriter, r *http.Request, t *taking, err error) {
	var refused *egress.RefusedError
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	status, code, reason := http.StatusBadGateway, rules.Unreachable, "the server "+x.host+" did not answer"
	switch {
	case errors.As(err, &refused):
		status, code, reason = http.StatusForbidden, refused.Verdict.Code, refused.Verdict.Reason
	case errors.As(err, &unknown):
		reason = "the certificate of " + x.host + " is signed by an authority that this host does not trust"
	case errors.As(err, &name):
		reason = "the certificate that the server shows is not for " + x.host
	case errors.As(err, &invalid):
		reason = "the certificate of " + x.host + " is not valid"
	case r.Context().Err() != nil:
		t.note = "the client left before there was an answer"
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	t.status, t.note = status, reason
	fail(w, status, code, reason)
}

// answer passes a response on as it comes, without what must not come back.
func (x *flow) answer(w http.ResponseWriter, r *http.Request, resp *http.Response, t *taking, n *needles, keyed bool) {
	h := w.Header()
	for k, v := range endToEnd(resp.Header) {
		h[k] = v
	}
	h.Del("Alt-Svc") // it leads to places that are not looked into
	masked := n.maskHeaderOf(h)
	body := resp.Body
	if n != nil {
		var err error
		if body, err = plainBody(resp, h); err != nil {
			x.told.event(egress.Event{Type: egress.EventMasked, Note: err.Error()})
			if keyed { // it was told to answer without, and what it says could hold the key
				t.status, t.note = http.StatusBadGateway, "the server's answer has an encoding that can't be read"
				fail(w, http.StatusBadGateway, rules.NotInspectable, "a secret was put on the request, and the server's answer has an encoding that can't be read")
				return
			}
		}
		body = newScrubber(n, body, func() { masked = true })
	}
	t.answered(resp.StatusCode, h)
	body = t.reader(egress.BodyAnswer, body)
	if r.ProtoMajor == 1 {
		announceTrailer(h, resp)
	}
	w.WriteHeader(resp.StatusCode)
	// Before the sandbox has all of it: whoever sees that a process has ended finds what it was answered in the record.
	err := pour(w, body, lengthOf(h), func() {
		t.end(egress.BodyAnswer)
		x.tell(r, t)
	})
	if masked {
		x.told.event(egress.Event{Type: egress.EventMasked, Note: "a secret was taken out of the response"})
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	for k, v := range resp.Trailer {
		for i := range v {
			v[i], _ = n.maskText(v[i])
		}
		if len(v) > 0 { // one that was announced and did not come would keep net/http from ending the stream
			h[http.TrailerPrefix+k] = v
		}
	}
}

// announceTrailer says which trailers may follow: not in HTTP/2, where net/http waits for each.
func announceTrailer(h http.Header, resp *http.Response) {
	var names []string
	for k := range resp.Trailer {
		names = append(names, k)
	}
	if len(names) > 0 {
		slices.Sort(names)
		h.Set("Trailer", strings.Join(names, ", "))
	}
}

// maskHeaderOf is maskHeader for needles that may be nil.
func (n *needles) maskHeaderOf(h http.Header) bool {
	return n != nil && n.maskHeader(h)
}

// pour copies what there is as soon as it is there. The last of a body whose length is known, -1 where it is not, goes
// with the end of the response; whole is called before it.
func pour(w http.ResponseWriter, body io.Reader, length int64, whole func()) error {
	rc := http.NewResponseController(w)
	buf := make([]byte, 32<<10)
	for {
		n, err := body.Read(buf)
		if length -= int64(n); n > 0 && length == 0 {
			whole()
		}
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return werr
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if length == 0 {
			continue
		}
		if err := rc.Flush(); err != nil {
			return err
		}
	}
}
