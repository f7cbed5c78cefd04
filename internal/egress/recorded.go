package egress

import (
	"net"
	"net/url"
	"strconv"

	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/content"
)

// MaxAnswers bounds what a gateway holds of answers of a record for one sandbox, in bytes as RecordedAnswer.Cost counts them.
const MaxAnswers = 64 << 20

// RecordedAnswer is a request that stands in a record, with the answer that it got then.
type RecordedAnswer struct {
	Method string `json:"method"`
	// URL is the whole one, with its query, as a RequestHead has it.
	URL string `json:"url"`
	// Size is the length of the request's body in bytes, and Hash that of the body behind Salt; none where it is empty.
	Size int64  `json:"size,omitempty"`
	Salt []byte `json:"salt,omitempty"`
	Hash string `json:"hash,omitempty"`

	Status int                 `json:"status"`
	Header map[string][]string `json:"header,omitempty"`
	Data   []byte              `json:"data,omitempty"` // with the encoding that Header tells of
}

// Fits reports whether it is the answer to a request with that body.
func (a *RecordedAnswer) Fits(body []byte) bool {
	return a.Size == int64(len(body)) && (a.Size == 0 || bundle.HashBody(a.Salt, body) == a.Hash)
}

// Cost is what it counts for against MaxAnswers: about the memory that it takes, where it is found by its method and URL.
func (a *RecordedAnswer) Cost() int {
	n := 256 + 2*(len(a.Method)+len(a.URL)) + len(a.Salt) + len(a.Hash) + len(a.Data)
	for k, list := range a.Header {
		n += 64 + len(k)
		for _, v := range list {
			n += 16 + len(v)
		}
	}
	return n
}

// Target is where its request went. Kind: InvalidArgument, where the answer is none that can be given.
func (a *RecordedAnswer) Target() (Target, error) {
	bad := func(format string, args ...any) (Target, error) {
		return Target{}, errs.New(errs.InvalidArgument, "a recorded answer can't be given: "+format, args...)
	}
	u, err := url.Parse(a.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return bad("its URL is none of HTTP")
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return bad("its URL has no port that can be")
	}
	name, addr, err := rules.Host(u.Hostname())
	switch {
	case err != nil:
		return bad("its URL names no host")
	case a.Method == "" || a.Status < 200 || a.Status > 999:
		return bad("it has no method, or a status that none has")
	case a.Size < 0 || a.Size > 0 && (len(a.Salt) != content.SaltSize || a.Hash == ""):
		return bad("of its request's body there is no hash")
	case len(a.Data) > content.Most:
		return bad("it has more than the %d bytes that are kept of one", content.Most)
	}
	return Target{Name: name, Addr: addr, Port: uint16(n)}, nil
}

// String returns it as host:port.
func (t Target) String() string {
	host := t.Name
	if host == "" {
		host = t.Addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(t.Port)))
}
