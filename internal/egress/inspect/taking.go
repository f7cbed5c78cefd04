package inspect

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/journal/content"
)

// whyHeld says why content of a request or an answer is not kept.
const whyHeld = "the gateway held too much of the sandbox's other requests and answers meanwhile"

// taking is what is taken down of one request and its answer: the request as the sandbox made it, before any secret was
// put on it, and the answer as the sandbox gets it, with nothing in it that must not come back. Who reads and writes
// these never waits for it.
type taking struct {
	keep  bool
	began time.Time
	// status and note are what the event says of the answer; of whoever answers the request alone.
	status int
	note   string

	// mu guards the fields below: a request's body may still be read while its answer comes.
	mu    sync.Mutex
	lease lease
	parts map[string]*taken
	lost  bool // content that should be kept is not
	over  bool
}

// taken is one of the things that are taken down.
type taken struct {
	k     *content.Keeper
	held  int  // bytes that the lease has for it
	whole bool // it came to its end
}

// take begins to take down a request.
func (x *flow) take(method, url string, h http.Header) *taking {
	t := &taking{keep: x.f.Keep, began: time.Now(), lease: lease{h: &x.in.taken, sandbox: x.f.Sandbox}, parts: make(map[string]*taken)}
	t.head(egress.BodyRequestHead, egress.RequestHead{Method: method, URL: url, Header: shownHeader(h)})
	return t
}

// answered takes down how an answer begins.
func (t *taking) answered(status int, h http.Header) {
	t.head(egress.BodyAnswerHead, egress.AnswerHead{Status: status, Header: shownHeader(h)})
}

func (t *taking) head(name string, v any) {
	text, err := json.Marshal(v) // of strings and numbers: never fails
	if err == nil {
		t.write(name, text)
		t.end(name)
	}
}

// write takes down more of a part.
func (t *taking) write(name string, p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return
	}
	one := t.partLocked(name)
	if n := min(len(p), content.Most-one.held); t.keep && !t.lost && n > 0 {
		if t.lease.add(2 * n) { // a keeper has up to twice as much at hand as it keeps
			one.held += n
		} else {
			t.lost = true
			for _, other := range t.parts {
				other.k.Forget()
			}
		}
	}
	_, _ = one.k.Write(p) // never fails
}

func (t *taking) partLocked(name string) *taken {
	one := t.parts[name]
	if one == nil {
		one = &taken{k: content.NewKeeper(t.keep && !t.lost)}
		t.parts[name] = one
	}
	return one
}

// begin says that there is such a part, which may be empty, and end that all of it passed.
func (t *taking) begin(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partLocked(name)
}

func (t *taking) end(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partLocked(name).whole = true
}

// reader takes down what is read of src.
func (t *taking) reader(name string, src io.ReadCloser) io.ReadCloser {
	t.begin(name)
	return &takenBody{ReadCloser: src, t: t, name: name}
}

// takenBody is a body that is taken down as it is read.
type takenBody struct {
	io.ReadCloser
	t    *taking
	name string
}

// Read implements io.Reader.
func (b *takenBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.t.write(b.name, p[:n])
	}
	if errors.Is(err, io.EOF) {
		b.t.end(b.name)
	}
	return n, err
}

// onto adds what was taken down to the event that tells of the request, and ends it: what still passes belongs to nothing.
// It reports false where that was done before.
func (t *taking) onto(e egress.Event) (egress.Event, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return e, false
	}
	t.over = true
	defer t.lease.end()
	e.Began = t.began
	e.Bodies = make(map[string]content.Kept, len(t.parts))
	for _, name := range egress.BodyNames() {
		one := t.parts[name]
		if one == nil {
			continue
		}
		if !one.whole {
			e.Unfinished = append(e.Unfinished, name)
		}
		e.Bodies[name] = one.k.Kept()
	}
	if t.lost {
		e.NotKept = whyHeld
	}
	return e, true
}

// shownHeader is a header as it may be kept: without the values of what are credentials by their names, whoever put
// them there. Placeholders go as well: nobody needs them to tell requests apart.
func shownHeader(h http.Header) map[string][]string {
	out := make(map[string][]string, len(h))
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		if values = slices.Clone(values); credentialName(name) {
			for i := range values {
				values[i] = egress.Concealed
			}
		}
		out[name] = values
	}
	return out
}

// credentialName reports whether a header's name says that its value lets somebody in.
func credentialName(name string) bool {
	name = strings.ToLower(name)
	for _, word := range []string{"authorization", "cookie", "token", "secret", "password", "api-key", "apikey", "access-key", "auth-key", "subscription-key", "functions-key", "private-key", "signature", "session", "credential"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
