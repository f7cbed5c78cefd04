package e2b

import (
	"net"
	"net/http"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
)

// The ports that mean something.
const (
	envdPort        = 49983
	interpreterPort = 49999
)

// The headers by which the SDKs name a sandbox on a shared origin.
const (
	headerSandbox = "E2b-Sandbox-Id"
	headerPort    = "E2b-Sandbox-Port"
)

// destination is what of which sandbox a request is for.
type destination struct {
	sandbox string
	port    int
	// byHost says that the sandbox's port has a host name, and so an origin, of its own.
	byHost bool
}

// Claims reports whether a request is E2B's: it names a sandbox in E2B's way, or its path is one of
// E2B's API. What is left belongs to the native API.
func (a *API) Claims(r *http.Request) bool {
	if r.Header.Get(headerSandbox) != "" {
		return true
	}
	if _, ok, err := a.byHost(r.Host); ok || err != nil {
		return true
	}
	path := r.URL.Path
	for _, p := range [...]string{
		"/sandboxes", "/v2/sandboxes", "/templates", "/v2/templates", "/v3/templates", "/snapshots", "/volumes", "/volumecontent",
		"/secrets", "/teams", "/events", "/files", "/health", "/envs", "/process.Process", "/filesystem.Filesystem",
	} {
		if rest, ok := strings.CutPrefix(path, p); ok && (rest == "" || rest[0] == '/') {
			return true
		}
	}
	return false
}

// destination finds what a request names; ok is false where it names no sandbox. A host name wins
// over headers: a page inside a sandbox can't send its visitors' requests elsewhere.
func (a *API) destination(r *http.Request) (to destination, ok bool, err error) {
	if to, ok, err = a.byHost(r.Host); ok || err != nil {
		return to, ok, err
	}
	name := r.Header.Get(headerSandbox)
	if name == "" {
		return destination{}, false, nil
	}
	to.sandbox = sandboxID(name)
	if !wellFormed(to.sandbox) {
		return to, true, errs.New(errs.InvalidArgument, "Invalid sandbox ID")
	}
	port, err := strconv.ParseUint(r.Header.Get(headerPort), 10, 16)
	if err != nil || port == 0 {
		return to, true, errs.New(errs.InvalidArgument, "Invalid sandbox port: the header %s must name it", headerPort)
	}
	to.port = int(port)
	return to, true, nil
}

// byHost reads <port>-<id>.<domain>. Names below localhost are always taken, since they lead to the
// machine itself wherever they are asked for (RFC 6761). Besides sandboxes' ports, the names api and
// sandbox below the domain stand for the server: SDKs that are given nothing but a domain make them.
// Others that are no sandbox's are an error.
func (a *API) byHost(host string) (to destination, ok bool, err error) {
	label, rest, ok := strings.Cut(strings.ToLower(hostname(host)), ".")
	own := a.cfg.Domain != "" && rest == strings.ToLower(hostname(a.cfg.Domain))
	if !ok || !own && rest != "localhost" {
		return destination{}, false, nil
	}
	digits, name, ok := strings.Cut(label, "-")
	port, perr := strconv.ParseUint(digits, 10, 16)
	switch {
	case ok && perr == nil && port > 0 && wellFormed(sandboxID(name)):
		return destination{sandbox: sandboxID(name), port: int(port), byHost: true}, true, nil
	case own && label != "api" && label != "sandbox":
		return destination{}, false, errs.New(errs.InvalidArgument, "Invalid host: it must be <port>-<sandbox id>.%s", a.cfg.Domain)
	}
	return destination{}, false, nil
}

func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return host
}

// sandboxID drops the client's id that old SDKs append.
func sandboxID(name string) string {
	name, _, _ = strings.Cut(name, "-")
	return name
}

// wellFormed reports whether s could be a sandbox's id, ours or E2B's.
func wellFormed(s string) bool {
	if id.ValidSandbox(s) {
		return true
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return s != "" && len(s) <= 63
}
