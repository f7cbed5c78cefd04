package secret

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// Scheme is how a secret stands in a request.
type Scheme string

// The schemes.
const (
	Bearer Scheme = "bearer" // Authorization: Bearer VALUE
	Basic  Scheme = "basic"  // Authorization: Basic base64(USER:VALUE), also where the value is the user
	Header Scheme = "header" // a header of any name
	Query  Scheme = "query"  // a parameter of the URL: it ends up in other people's logs, so only if told
)

// The bounds of a binding.
const (
	maxHosts     = 64
	maxSelect    = 256
	maxPaths     = 64
	maxText      = 256
	formatHole   = "{}"
	maxBindings  = 64 // of one secret
	maxNameBytes = 64
)

// Place is where in a request a secret stands.
type Place struct {
	Scheme Scheme `json:"scheme"`
	// Name is the header's or the parameter's; for Bearer and Basic it is Authorization, or
	// Proxy-Authorization where it says so.
	Name string `json:"name,omitempty"`
	// User is the user name that Always sends with Basic; "": x-access-token.
	User string `json:"user,omitempty"`
	// Format is the header's whole value with {} for the secret, for Always with Header; "": {}.
	Format string `json:"format,omitempty"`
}

// Selector says which sandboxes a binding is for. Those in Sandboxes, and those for which everything
// else that is set holds. An empty one stands for none.
type Selector struct {
	All       bool              `json:"all,omitempty"`
	Sandboxes []string          `json:"sandboxes,omitempty"` // ids
	Templates []string          `json:"templates,omitempty"` // one of them
	Labels    map[string]string `json:"labels,omitempty"`    // each of them
}

// Subject is a sandbox, as a Selector sees it. One without an id matches nothing.
type Subject struct {
	ID       string
	Owner    string // principal's id
	Template string
	Labels   map[string]string
	// Parent is the sandbox that asked for it, where one did: it can't get what its parent has not.
	Parent *Subject
}

// Matches reports whether s is for the sandbox.
func (s Selector) Matches(sub Subject) bool {
	if sub.ID == "" || sub.Parent != nil && !s.Matches(*sub.Parent) {
		return false
	}
	if s.All || slices.Contains(s.Sandboxes, sub.ID) {
		return true
	}
	if len(s.Templates) == 0 && len(s.Labels) == 0 {
		return false
	}
	if len(s.Templates) > 0 && !slices.Contains(s.Templates, sub.Template) {
		return false
	}
	for k, v := range s.Labels {
		if have, ok := sub.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

func (s Selector) empty() bool {
	return !s.All && len(s.Sandboxes) == 0 && len(s.Templates) == 0 && len(s.Labels) == 0
}

func (s Selector) check() error {
	switch {
	case s.empty():
		return invalid("the binding names no sandboxes").WithHint("name sandboxes, templates or labels, or say that it is for all")
	case s.All && (len(s.Sandboxes) > 0 || len(s.Templates) > 0 || len(s.Labels) > 0):
		return invalid("the binding is for all sandboxes and names some as well")
	case len(s.Sandboxes)+len(s.Templates)+len(s.Labels) > maxSelect:
		return invalid("the binding names more than %d sandboxes, templates and labels", maxSelect)
	}
	for _, text := range slices.Concat(s.Sandboxes, s.Templates, slices.Collect(maps.Keys(s.Labels)), slices.Collect(maps.Values(s.Labels))) {
		if len(text) > maxText {
			return invalid("the binding holds a name longer than %d bytes", maxText)
		}
	}
	return nil
}

// Binding says where one secret may be used.
type Binding struct {
	ID    string   `json:"id"`
	For   Selector `json:"for"`
	Hosts []string `json:"hosts"` // as ParseHost reads them
	// Except are hosts among them that it is not for.
	Except []string `json:"except,omitempty"`
	Place  Place    `json:"place"`
	// Methods and Paths narrow it; empty: any. A path ends in * for all that begin so.
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
	// Env is the variable that holds the placeholder inside; "": none.
	Env string `json:"env,omitempty"`
	// Always puts the secret on every request that the binding covers, whatever the client sent. Without
	// it the secret takes the place of the placeholder, and only of that.
	Always bool `json:"always,omitempty"`
	// Plain allows requests without TLS, which anybody on the way can read.
	Plain     bool      `json:"plain,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// check says what is wrong with b, and puts names into their canonical form.
func (b *Binding) check() error {
	if err := b.For.check(); err != nil {
		return err
	}
	if len(b.Hosts) == 0 || len(b.Hosts) > maxHosts {
		return invalid("the binding has %d hosts: name 1 to %d", len(b.Hosts), maxHosts)
	}
	var err error
	if b.Hosts, err = canonicalHosts(b.Hosts); err != nil {
		return err
	}
	if b.Except, err = canonicalHosts(b.Except); err != nil {
		return err
	}
	if err := b.Place.check(b.Always); err != nil {
		return err
	}
	if b.Env != "" && !envName(b.Env) {
		return invalid("%.80q is no variable's name", b.Env)
	}
	return b.checkLimits()
}

func canonicalHosts(list []string) ([]string, error) {
	var out []string
	for _, text := range list {
		h, err := ParseHost(text)
		if err != nil {
			return nil, err
		}
		out = append(out, h.String())
	}
	return out, nil
}

func (b *Binding) checkLimits() error {
	if len(b.Methods)+len(b.Paths) > maxPaths {
		return invalid("the binding names more than %d methods and paths", maxPaths)
	}
	for i, m := range b.Methods {
		if !HeaderName(m) || len(m) > 32 {
			return invalid("%.40q is no HTTP method", m)
		}
		b.Methods[i] = strings.ToUpper(m)
	}
	for _, p := range b.Paths {
		if !strings.HasPrefix(p, "/") || len(p) > maxText || strings.Contains(p[:len(p)-1], "*") {
			return invalid("path %.80q: it must begin with /, and may end in *", p)
		}
	}
	return nil
}

func (p *Place) check(always bool) error {
	switch p.Scheme {
	case Bearer, Basic:
		if p.Name == "" {
			p.Name = "Authorization"
		}
		if !strings.EqualFold(p.Name, "Authorization") && !strings.EqualFold(p.Name, "Proxy-Authorization") {
			return invalid("scheme %s belongs in the header Authorization", p.Scheme).WithHint("use the scheme header for %s", p.Name)
		}
	case Header:
		if !HeaderName(p.Name) || len(p.Name) > maxText || framing(p.Name) {
			return invalid("%.80q is no header that a secret can stand in", p.Name)
		}
	case Query:
		if p.Name == "" || len(p.Name) > maxText || strings.ContainsAny(p.Name, "&=#;%+ ") {
			return invalid("%.80q is no name of a parameter", p.Name)
		}
	default:
		return invalid("scheme %.40q is unknown", p.Scheme).WithHint("use bearer, basic, header or query")
	}
	if p.Format != "" && (p.Scheme != Header || !always || strings.Count(p.Format, formatHole) != 1 || !headerText(p.Format)) {
		return invalid("the format %.80q needs the scheme header, --always, and one {}", p.Format)
	}
	if p.User != "" && (p.Scheme != Basic || strings.Contains(p.User, ":") || !headerText(p.User)) {
		return invalid("a user goes with the scheme basic, and holds no colon")
	}
	return nil
}

// framing reports whether a header says how a message is framed or routed: those are the gateway's.
func framing(name string) bool {
	switch strings.ToLower(name) {
	case "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "keep-alive", "expect",
		"proxy-connection", "content-encoding", "accept-encoding":
		return true
	}
	return strings.HasPrefix(name, ":")
}

// HeaderName reports whether s is a token (RFC 9110, 5.6.2), as names of headers and methods are.
func HeaderName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

// HeaderValue reports whether s may stand in a header: no control characters but tab (RFC 9110, 5.5).
func HeaderValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < 0x20 && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// headerText reports whether s may stand in a header's value.
func headerText(s string) bool { return len(s) <= maxText && HeaderValue(s) }

func envName(s string) bool {
	for i := range len(s) {
		c := s[i] | 0x20
		if (c < 'a' || c > 'z') && s[i] != '_' && (i == 0 || s[i] < '0' || s[i] > '9') {
			return false
		}
	}
	return s != "" && len(s) <= maxText
}
