package inspect

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// box is what the Inspector knows of one sandbox, ready for use. It does not change.
type box struct {
	creds  []*credential
	routes map[string]*route // by provider
	// misplaced looks for placeholders in what goes out.
	misplaced *needles
}

// credential is one secret of a sandbox.
type credential struct {
	wireCredential
	bindings []binding
}

// binding is a secret.Binding with its hosts read.
type binding struct {
	secret.Binding
	hosts, except []secret.Host
}

func newBox(p part) *box {
	b := &box{routes: make(map[string]*route)}
	var placeholders [][]byte
	for _, c := range p.Credentials {
		cred := &credential{wireCredential: c}
		for _, bd := range c.Bindings {
			one := binding{Binding: bd, hosts: hostsOf(bd.Hosts), except: hostsOf(bd.Except)}
			if len(one.except) == len(bd.Except) { // else it would be for more than it says
				cred.bindings = append(cred.bindings, one)
			}
		}
		b.creds = append(b.creds, cred)
		placeholders = append(placeholders, []byte(c.Placeholder))
	}
	b.misplaced = &needles{}
	for _, p := range placeholders {
		if len(p) > 0 {
			b.misplaced.forms = append(b.misplaced.forms, p)
			b.misplaced.longest = max(b.misplaced.longest, len(p))
		}
	}
	return b
}

// hostsOf reads hosts, which the server has checked.
func hostsOf(list []string) []secret.Host {
	var out []secret.Host
	for _, text := range list {
		if h, err := secret.ParseHost(text); err == nil {
			out = append(out, h)
		}
	}
	return out
}

// bound reports whether b is for a target.
func (b binding) bound(t egress.Target, tls bool) bool {
	matches := func(h secret.Host) bool { return h.Matches(t.Name, t.Port) }
	return t.Name != "" && (tls || b.Plain) && slices.ContainsFunc(b.hosts, matches) && !slices.ContainsFunc(b.except, matches)
}

// wants reports whether any credential is due for a target.
func (b *box) wants(t egress.Target) bool {
	for _, c := range b.creds {
		for _, bd := range c.bindings {
			// TLS is not known yet: where it decides, a look does no harm.
			if bd.bound(t, true) {
				return true
			}
		}
	}
	return false
}

// needlesFor returns what must not come back from a target.
func (b *box) needlesFor(t egress.Target, tls bool) *needles {
	var values [][]byte
	for _, c := range b.creds {
		if slices.ContainsFunc(c.bindings, func(bd binding) bool { return bd.bound(t, tls) }) {
			values = append(append(values, c.Value, c.Previous), c.Also...)
		}
	}
	if len(values) == 0 {
		return nil
	}
	return newNeedles(values...)
}

// covers reports whether the binding's methods and paths allow the request. A path that servers could
// read in two ways matches no limit.
func (b binding) covers(r *http.Request) bool {
	if len(b.Methods) > 0 && !slices.Contains(b.Methods, r.Method) {
		return false
	}
	if len(b.Paths) == 0 {
		return true
	}
	path := r.URL.EscapedPath()
	if ambiguous(path) {
		return false
	}
	return slices.ContainsFunc(b.Paths, func(p string) bool {
		if head, ok := strings.CutSuffix(p, "*"); ok {
			return strings.HasPrefix(path, head)
		}
		return path == p
	})
}

// ambiguous reports whether a path has parts that servers resolve, each in its own way, before they
// look at it: dot segments, empty ones, and escapes of what separates them.
func ambiguous(path string) bool {
	lower := strings.ToLower(path)
	for _, bad := range []string{"//", "/./", "/../", "%2e", "%2f", "%5c", "%00", "\\", ";"} {
		if strings.Contains(lower, bad) {
			return true
		}
	}
	return strings.HasSuffix(lower, "/.") || strings.HasSuffix(lower, "/..")
}

// unreadableError says that a credential is due and its value could not be read.
type unreadableError struct{ name string }

// Error implements error.
func (e *unreadableError) Error() string {
	return fmt.Sprintf("the secret %s is due on this request and can't be read at the moment", e.name)
}

// place puts the credentials that are due on r, and returns those that it put. On error nothing may be
// sent.
func (b *box) place(r *http.Request, t egress.Target, tls bool) (used []*credential, err error) {
	for _, c := range b.creds {
		put := false
		for _, bd := range c.bindings {
			if !bd.bound(t, tls) || !bd.covers(r) || !bd.due(r, c.Placeholder) {
				continue
			}
			if len(c.Value) == 0 {
				return nil, &unreadableError{c.Name}
			}
			bd.put(r, c.Placeholder, string(c.Value))
			put = true
		}
		if put {
			used = append(used, c)
		}
	}
	return used, nil
}

// due reports whether the binding has something to do on r.
func (b binding) due(r *http.Request, placeholder string) bool {
	if b.Always {
		return true
	}
	switch b.Place.Scheme {
	case secret.Bearer:
		return slices.ContainsFunc(r.Header.Values(b.Place.Name), func(v string) bool {
			token, ok := cutScheme(v, "bearer")
			return ok && token == placeholder
		})
	case secret.Basic:
		return slices.ContainsFunc(r.Header.Values(b.Place.Name), func(v string) bool {
			user, pass, ok := basicOf(v)
			return ok && (user == placeholder || pass == placeholder)
		})
	case secret.Header:
		return slices.ContainsFunc(r.Header.Values(b.Place.Name), func(v string) bool { return strings.Contains(v, placeholder) })
	case secret.Query:
		_, found := replaceParameter(r.URL.RawQuery, b.Place.Name, placeholder, "")
		return found
	}
	return false
}

// put puts value in the binding's place, and nowhere else.
func (b binding) put(r *http.Request, placeholder, value string) {
	name := http.CanonicalHeaderKey(b.Place.Name)
	if b.Always {
		b.putAlways(r, name, value)
		return
	}
	values := r.Header[name]
	switch b.Place.Scheme {
	case secret.Bearer:
		for i, v := range values {
			if token, ok := cutScheme(v, "bearer"); ok && token == placeholder {
				values[i] = "Bearer " + value
			}
		}
	case secret.Basic:
		for i, v := range values {
			if user, pass, ok := basicOf(v); ok && (user == placeholder || pass == placeholder) {
				values[i] = basicText(swap(user, placeholder, value), swap(pass, placeholder, value))
			}
		}
	case secret.Header:
		for i, v := range values {
			values[i] = strings.ReplaceAll(v, placeholder, value)
		}
	case secret.Query:
		r.URL.RawQuery, _ = replaceParameter(r.URL.RawQuery, b.Place.Name, placeholder, value)
	}
}

// putAlways sets the place to value, whatever the client has there.
func (b binding) putAlways(r *http.Request, name, value string) {
	switch b.Place.Scheme {
	case secret.Bearer:
		r.Header[name] = []string{"Bearer " + value}
	case secret.Basic:
		user := b.Place.User
		if user == "" {
			user = "x-access-token"
		}
		r.Header[name] = []string{basicText(user, value)}
	case secret.Header:
		text := value
		if b.Place.Format != "" {
			text = strings.Replace(b.Place.Format, "{}", value, 1)
		}
		r.Header[name] = []string{text}
	case secret.Query:
		var kept []string
		for p := range strings.SplitSeq(r.URL.RawQuery, "&") {
			if k, _, _ := strings.Cut(p, "="); p != "" && unescaped(k) != b.Place.Name {
				kept = append(kept, p)
			}
		}
		kept = append(kept, url.QueryEscape(b.Place.Name)+"="+url.QueryEscape(value))
		r.URL.RawQuery = strings.Join(kept, "&")
	}
}

func swap(s, old, new string) string {
	if s == old {
		return new
	}
	return s
}

// cutScheme returns what follows an authentication scheme, whose name has no case (RFC 9110, 11.1).
func cutScheme(v, scheme string) (string, bool) {
	if len(v) <= len(scheme) || !strings.EqualFold(v[:len(scheme)], scheme) || v[len(scheme)] != ' ' {
		return "", false
	}
	return strings.Trim(v[len(scheme):], " "), true
}

func basicOf(v string) (user, pass string, ok bool) {
	text, ok := cutScheme(v, "basic")
	if !ok {
		return "", "", false
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return "", "", false
	}
	return strings.Cut(string(raw), ":")
}

func basicText(user, pass string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+pass))
}

func unescaped(s string) string {
	if u, err := url.QueryUnescape(s); err == nil {
		return u
	}
	return s
}

// replaceParameter replaces the value of a parameter that is old, and keeps every other byte.
func replaceParameter(query, name, old, new string) (string, bool) {
	parts, found := strings.Split(query, "&"), false
	for i, p := range parts {
		k, v, _ := strings.Cut(p, "=")
		if unescaped(k) == name && unescaped(v) == old {
			parts[i], found = k+"="+url.QueryEscape(new), true
		}
	}
	return strings.Join(parts, "&"), found
}

// stray is a placeholder where its secret is not bound.
type stray struct {
	of    *credential
	where string
}

// strays returns the placeholders that stand in the request's head: what place has left.
func (b *box) strays(r *http.Request) []stray {
	var out []stray
	note := func(where, text string) {
		for _, c := range b.creds {
			if s := (stray{c, where}); c.Placeholder != "" && strings.Contains(text, c.Placeholder) && !slices.Contains(out, s) {
				out = append(out, s)
			}
		}
	}
	if len(b.creds) == 0 {
		return nil
	}
	note("the URL", r.URL.Path)
	note("the URL", unescaped(r.URL.RawQuery))
	for name, values := range r.Header {
		for _, v := range values {
			note("the header "+name, v)
			if user, pass, ok := basicOf(v); ok {
				note("the header "+name, user+":"+pass)
			}
		}
	}
	return out
}

// inBody returns the credential whose placeholder b holds.
func (b *box) inBody(text []byte) *credential {
	for _, c := range b.creds {
		if c.Placeholder != "" && bytes.Contains(text, []byte(c.Placeholder)) {
			return c
		}
	}
	return nil
}
