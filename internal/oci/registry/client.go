package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/net/publicsuffix"

	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
)

// Config says how registries are reached.
type Config struct {
	// Roots are the authorities that registries may be signed by; nil: the host's.
	Roots *x509.CertPool
	// Insecure are hosts, as HOST or HOST:PORT, whose certificate is not verified, and that may speak plain HTTP.
	Insecure []string
	// Proxy chooses a proxy for a request; nil: http.ProxyFromEnvironment.
	Proxy func(*http.Request) (*url.URL, error)
	// Stall is the silence after which a transfer is taken up again; 0: 30 s. Backoff is the first pause before
	// that, which doubles; 0: 500 ms.
	Stall, Backoff time.Duration
}

// Client reaches registries. Safe for concurrent use.
type Client struct {
	cfg          Config
	strict, open *http.Transport
	proxies      sync.Map // addresses of proxies that were used
}

// New returns a client.
func New(cfg Config) *Client {
	if cfg.Proxy == nil {
		cfg.Proxy = http.ProxyFromEnvironment
	}
	if cfg.Stall == 0 {
		cfg.Stall = 30 * time.Second
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = 500 * time.Millisecond
	}
	c := &Client{cfg: cfg}
	c.strict, c.open = c.transport(false), c.transport(true)
	return c
}

// Close drops idle connections.
func (c *Client) Close() {
	c.strict.CloseIdleConnections()
	c.open.CloseIdleConnections()
}

func (c *Client) transport(insecure bool) *http.Transport {
	return &http.Transport{
		Proxy:       c.proxy,
		DialContext: c.dial,
		TLSClientConfig: &tls.Config{
			RootCAs: c.cfg.Roots, MinVersion: tls.VersionTLS12, InsecureSkipVerify: insecure, //nolint:gosec // for hosts that the administrator named
		},
		ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second,
		TLSHandshakeTimeout: 15 * time.Second, ResponseHeaderTimeout: time.Minute, MaxResponseHeaderBytes: 1 << 20,
		DisableCompression: true, // digests are those of the bytes as they are stored
	}
}

// origin is, in a request's context, the registry that the request is made for.
type origin struct {
	address string // with its port
	// private says that the registry has an address of a private network: then it may send the server on
	// within such.
	private atomic.Bool
}

type originKey struct{}

// dial connects to what a request is for, unless a registry has no business sending the server there.
func (c *Client) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{Timeout: 15 * time.Second, ControlContext: func(ctx context.Context, _, resolved string, _ syscall.RawConn) error {
		from, _ := ctx.Value(originKey{}).(*origin)
		_, proxy := c.proxies.Load(address)
		if from == nil || proxy || c.insecure(address) || c.insecure(hostOnly(address)) {
			return nil
		}
		a, err := netip.ParseAddrPort(resolved)
		if err != nil {
			return err
		}
		const private = "a private address"
		what := rules.Special(a.Addr().Unmap())
		switch {
		case address == from.address:
			from.private.Store(what == private)
			return nil
		case what == "", what == private && from.private.Load():
			return nil
		}
		return errs.New(errs.PermissionDenied, "the registry sends this server on to %s, which is %s", address, what)
	}}
	return d.DialContext(ctx, network, address)
}

// proxy chooses a proxy, and notes its address, which may be any.
func (c *Client) proxy(r *http.Request) (*url.URL, error) {
	u, err := c.cfg.Proxy(r)
	if u != nil {
		port := u.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
		}
		c.proxies.Store(net.JoinHostPort(u.Hostname(), port), true)
	}
	return u, err
}

// insecure reports whether a host, with or without a port, was named as insecure.
func (c *Client) insecure(host string) bool { return slices.Contains(c.cfg.Insecure, host) }

// guard is the transport of one conversation with one registry.
type guard struct {
	c    *Client
	host string // of the registry, perhaps with a port
	// secretive says that there are credentials.
	secretive bool
	origin    *origin
}

// RoundTrip implements http.RoundTripper.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	insecure := g.c.insecure(r.URL.Host) || g.c.insecure(r.URL.Hostname())
	if r.URL.Scheme != "https" && !insecure {
		return nil, errs.New(errs.PermissionDenied, "%s is reached over plain HTTP, which anybody on the way can read and change", r.URL.Host).
			WithHint("if that is meant: casemate serve --insecure-registry %s", r.URL.Host)
	}
	if g.secretive && g.carries(r) && !g.trusts(r.URL.Host) {
		return nil, errs.New(errs.PermissionDenied, "the registry %s asks to have its credentials sent to %s", g.host, r.URL.Host).
			WithHint("they are sent to the registry's own domain only")
	}
	over := g.c.strict
	if insecure {
		over = g.c.open
	}
	return over.RoundTrip(r.WithContext(context.WithValue(r.Context(), originKey{}, g.origin)))
}

// carries reports whether a request has credentials in it: in a header, or in the form of a token request
// (distribution-spec, token authentication).
func (g *guard) carries(r *http.Request) bool {
	if r.Header.Get("Authorization") != "" {
		return true
	}
	return r.Method == http.MethodPost && r.Header.Get("Content-Type") == "application/x-www-form-urlencoded"
}

// trusts reports whether credentials of the registry may go to a host.
func (g *guard) trusts(host string) bool {
	if host == g.host {
		return true
	}
	a, b := strings.ToLower(hostOnly(host)), strings.ToLower(hostOnly(g.host))
	if _, err := netip.ParseAddr(strings.Trim(a, "[]")); err == nil || a == "localhost" {
		return false // another port of an address is another service
	}
	x, errX := publicsuffix.EffectiveTLDPlusOne(a)
	y, errY := publicsuffix.EffectiveTLDPlusOne(b)
	return errX == nil && errY == nil && x == y
}

// Ref is the name of an image: HOST/PATH with a tag, a digest or both. Names without a host are Docker Hub's.
type Ref struct {
	repo   name.Repository
	tag    string
	digest string
}

// ParseRef reads a name as people write it.
func ParseRef(s string) (Ref, error) {
	bad := func(err error) error {
		return errs.Wrap(err, errs.InvalidArgument, "%.200q is no image's name", s).
			WithHint("write NAME, NAME:TAG, HOST/NAME:TAG or HOST/NAME@sha256:…, in lower case")
	}
	rest, digest, hasDigest := strings.Cut(strings.TrimPrefix(s, "docker://"), "@")
	tag, err := name.NewTag(rest)
	if err != nil || !validHost(tag.RegistryStr()) || !validPath(tag.RepositoryStr()) {
		return Ref{}, bad(err)
	}
	r := Ref{repo: tag.Repository, tag: tag.TagStr()}
	if hasDigest {
		d, err := name.NewDigest(tag.Repository.Name() + "@" + digest)
		if err != nil || !strings.HasPrefix(digest, "sha256:") {
			return Ref{}, bad(err)
		}
		r.digest = d.DigestStr()
	}
	return r, nil
}

// validHost reports whether a registry is a host's name or address, perhaps with a port.
func validHost(s string) bool {
	u, err := url.Parse("https://" + s)
	if err != nil || u.Host != s || u.Port() == "" && strings.HasSuffix(s, ":") {
		return false
	}
	if _, err := netip.ParseAddr(u.Hostname()); err == nil {
		return true
	}
	for label := range strings.SplitSeq(u.Hostname(), ".") {
		if label == "" || label[0] == '-' || strings.Trim(strings.ToLower(label), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

// validPath reports whether a repository is names with slashes between (distribution-spec, Pulling manifests).
func validPath(s string) bool {
	for part := range strings.SplitSeq(s, "/") {
		if part == "" || strings.ContainsAny(part[:1]+part[len(part)-1:], "._-") {
			return false
		}
	}
	return true
}

// String is the whole name.
func (r Ref) String() string {
	s := r.repo.Name()
	if r.tag != "" {
		s += ":" + r.tag
	}
	if r.digest != "" {
		s += "@" + r.digest
	}
	return s
}

// Short is the name as people write it: without Docker Hub's host, or a digest.
func (r Ref) Short() string {
	s := r.repo.Name()
	for _, prefix := range []string{name.DefaultRegistry + "/library/", name.DefaultRegistry + "/"} {
		if rest, ok := strings.CutPrefix(s, prefix); ok {
			s = rest
			break
		}
	}
	return s + ":" + r.tag
}

// Host is the registry's host, perhaps with a port.
func (r Ref) Host() string { return r.repo.RegistryStr() }

// HostPort is the host's name and port.
func (r Ref) HostPort() (host string, port uint16) {
	u := url.URL{Host: r.Host()}
	port = 443
	if p, err := net.LookupPort("tcp", u.Port()); err == nil && p > 0 && p <= 65535 {
		port = uint16(p)
	}
	return strings.ToLower(u.Hostname()), port
}

// Repo is a repository of a registry, with whatever it takes to read from it, or also write to it.
type Repo struct {
	c    *Client
	ref  Ref
	base string
	http *http.Client
	tr   http.RoundTripper
}

// Open starts a conversation with a registry: it finds out how it wants to be asked. auth may be zero.
// Kinds: Unavailable, Unauthenticated, PermissionDenied.
func (c *Client) Open(ctx context.Context, ref Ref, auth authn.AuthConfig, push bool) (*Repo, error) {
	host, port := ref.HostPort()
	g := &guard{
		c: c, host: ref.Host(), secretive: auth != (authn.AuthConfig{}),
		origin: &origin{address: net.JoinHostPort(host, strconv.Itoa(int(port)))},
	}
	scope := ref.repo.Scope(transport.PullScope)
	if push {
		scope = ref.repo.Scope(transport.PushScope)
	}
	repo := ref.repo
	if c.insecure(ref.Host()) || c.insecure(hostOnly(ref.Host())) {
		insecure, err := name.NewRegistry(ref.Host(), name.Insecure)
		if err != nil {
			return nil, err
		}
		repo.Registry = insecure
	}
	var tr http.RoundTripper
	err := c.again(ctx, func() (err error) {
		tr, err = transport.NewWithContext(ctx, repo.Registry, authn.FromConfig(auth), g, []string{scope})
		return err
	})
	if err != nil {
		return nil, told(err, "reach the registry %s", ref.Host())
	}
	ref.repo = repo
	r := &Repo{c: c, ref: ref, tr: tr, base: "https://" + ref.Host() + "/v2/" + repo.RepositoryStr()}
	r.http = &http.Client{Transport: tr, CheckRedirect: func(_ *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return errors.New("the registry sends requests in a circle")
		}
		return nil
	}}
	return r, nil
}

func hostOnly(hostPort string) string {
	if h, _, err := net.SplitHostPort(hostPort); err == nil {
		return h
	}
	return hostPort
}
