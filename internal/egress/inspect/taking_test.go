package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/content"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/testenv"
)

// holding reports whether an event, with all content that goes with it, holds a text.
func holding(t *testing.T, e egress.Event, text string) bool {
	t.Helper()
	b, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	found := bytes.Contains(b, []byte(text))
	for _, k := range e.Bodies {
		found = found || bytes.Contains(k.Data, []byte(text))
	}
	return found
}

func headOf[T any](t *testing.T, k content.Kept) (head T) {
	t.Helper()
	if err := json.Unmarshal(k.Data, &head); err != nil {
		t.Fatalf("%q: %v", k.Data, err)
	}
	return head
}

// A request is taken down as the sandbox made it and its answer as the sandbox got it: a secret that was put on in a
// header and in the query, and that the server sends back in every way, is in neither. The twin is the server, which saw it.
func TestTakenDownWithoutSecrets(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2 ", h2), func(t *testing.T) {
			w := newWorld(t)
			w.keep = true
			seen := make(chan string, 1)
			w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				seen <- r.Header.Get("Authorization") + " " + r.URL.RawQuery
				rw.Header().Set("Set-Cookie", "session=4711")
				rw.Header().Set("X-Echo", r.Header.Get("Authorization"))
				rw.WriteHeader(http.StatusCreated)
				_, _ = fmt.Fprintf(rw, "you sent %s with %s", body, r.Header.Get("Authorization"))
			})
			inQuery := cred(2, secret.Binding{Place: secret.Place{Scheme: secret.Query, Name: "key"}})
			w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization")), inQuery})
			req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://"+apiHost+"/v1/things?a=b&key="+placeholder(2), strings.NewReader("my words"))
			req.Header.Set("Authorization", "Bearer "+placeholder(1))
			req.Header.Set("X-Plain", "shown")
			resp, err := w.client(h2).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			if s := testenv.Receive(t, "the server sees the request", seen); !strings.Contains(s, value(1)) || strings.Contains(s, placeholder(2)) {
				t.Fatalf("the server saw %q", s)
			}
			e := w.await(egress.EventRequest)[0]
			for n := 1; n <= 2; n++ {
				if holding(t, e, value(n)) {
					t.Errorf("secret %d is on record", n)
				}
			}
			if holding(t, e, "4711") {
				t.Error("a cookie is on record")
			}
			head := headOf[egress.RequestHead](t, e.Bodies[egress.BodyRequestHead])
			if head.Method != "POST" || head.URL != "https://"+apiHost+"/v1/things?a=b&key="+placeholder(2) ||
				!slices.Equal(head.Header["X-Plain"], []string{"shown"}) || !slices.Equal(head.Header["Authorization"], []string{egress.Concealed}) {
				t.Errorf("the request: %+v", head)
			}
			answer := headOf[egress.AnswerHead](t, e.Bodies[egress.BodyAnswerHead])
			if answer.Status != http.StatusCreated || !strings.HasPrefix(answer.Header["X-Echo"][0], "Bearer ***") {
				t.Errorf("the answer: %+v", answer)
			}
			if b := string(e.Bodies[egress.BodyRequest].Data); b != "my words" {
				t.Errorf("the request's body: %q", b)
			}
			if b := e.Bodies[egress.BodyAnswer].Data; !bytes.Equal(b, got) || !bytes.Contains(got, []byte("***")) {
				t.Errorf("the answer's body: %q, the client got %q", b, got)
			}
			if e.Status != http.StatusCreated || e.Unfinished != nil || e.NotKept != "" {
				t.Errorf("%+v", e)
			}
		})
	}
}

// Of a header that is a credential by its name nothing but the name is kept; others, whose names have a part of such a name,
// are. What is sent is not touched.
func TestCredentialsInHeadersAreLeftOut(t *testing.T) {
	for name, out := range map[string]bool{
		"Authorization": true, "Proxy-Authorization": true, "Cookie": true, "Set-Cookie": true, "X-Api-Key": true, "X-Goog-Api-Key": true,
		"X-Amz-Security-Token": true, "X-Auth-Key": true, "Ocp-Apim-Subscription-Key": true, "x-session-id": true,
		"Content-Type": false, "Idempotency-Key": false, "Keep-Alive": false, "X-Author": false,
	} {
		h := http.Header{name: {"one", "two"}}
		want := []string{"one", "two"}
		if out {
			want = []string{egress.Concealed, egress.Concealed}
		}
		if got := shownHeader(h)[name]; !slices.Equal(got, want) || !slices.Equal(h[name], []string{"one", "two"}) {
			t.Errorf("%s: %q, of %q", name, got, h[name])
		}
	}
}

// What is not to be kept is hashed as it passes.
func TestTakenDownAsHashes(t *testing.T) {
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "an answer") })
	resp, err := w.client(false).Get("https://" + apiHost + "/")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	e := w.await(egress.EventRequest)[0]
	k := e.Bodies[egress.BodyAnswer]
	if e.Content() > 0 || k.Size != 9 || k.Hash != bundle.HashBody(k.Salt, []byte("an answer")) || !k.Ref().Hashed {
		t.Errorf("%+v", k)
	}
	if _, ok := e.Bodies[egress.BodyRequest]; ok {
		t.Error("a request without body has one on record")
	}
	for name, k := range e.Bodies {
		if err := k.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Of long bodies both ends are kept, and the hash covers all.
func TestLongBodiesAreCut(t *testing.T) {
	w := newWorld(t)
	w.keep = true
	long := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) { _, _ = io.Copy(rw, r.Body) })
	resp, err := w.client(false).Post("https://"+apiHost+"/", "text/plain", bytes.NewReader(long))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !bytes.Equal(got, long) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	e := w.await(egress.EventRequest)[0]
	for _, name := range []string{egress.BodyRequest, egress.BodyAnswer} {
		k := e.Bodies[name]
		if k.Size != int64(len(long)) || len(k.Data) != content.Most || k.Hash != bundle.HashBody(k.Salt, long) || k.Check() != nil {
			t.Errorf("%s: %d of %d bytes, %v", name, len(k.Data), k.Size, k.Check())
		}
	}
	if e.Unfinished != nil {
		t.Errorf("unfinished: %v", e.Unfinished)
	}
}

// An answer that breaks off, on either side, is told of as far as it came.
func TestBrokenOffAnswers(t *testing.T) {
	w := newWorld(t)
	w.keep = true
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, "the beginning")
		_ = http.NewResponseController(rw).Flush()
		if r.URL.Path == "/server" {
			panic(http.ErrAbortHandler)
		}
		for r.Context().Err() == nil { // until somebody sees that the client has gone
			if _, err := io.WriteString(rw, "."); err != nil {
				return
			}
			_ = http.NewResponseController(rw).Flush()
		}
	})
	for _, who := range []string{"server", "client"} {
		resp, err := w.client(false).Get("https://" + apiHost + "/" + who)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 13)); err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		e := w.awaitPath(egress.EventRequest, "/"+who)
		if k := e.Bodies[egress.BodyAnswer]; !bytes.HasPrefix(k.Data, []byte("the beginning")) || !slices.Equal(e.Unfinished, []string{egress.BodyAnswer}) || e.Status != 200 {
			t.Errorf("%s: %+v, %q", who, e, k.Data)
		}
	}
}

// ATTACK: a sandbox has many long requests under way. What is held for the record of them is bounded, they go on, and each
// says what is not kept; another sandbox's are kept. Twin: the same without the bound holds all of it.
func TestTakenContentIsBounded(t *testing.T) {
	for _, bound := range []bool{true, false} {
		in := New()
		if !bound {
			in.taken.most = 1 << 40
		}
		flowOf := func(sandbox string) *flow {
			return &flow{in: in, f: &egress.Flow{Sandbox: sandbox, Keep: true}}
		}
		text := make([]byte, content.Most)
		const many = 2 * maxTaken / content.Most
		var all []*taking
		for range many {
			one := flowOf("box").take("POST", "https://a.test/", nil)
			one.write(egress.BodyRequest, text)
			all = append(all, one)
		}
		if held := in.taken.of["box"]; bound != (held <= maxTaken) {
			t.Errorf("bound %v: %d bytes are held", bound, held)
		}
		other := flowOf("other").take("POST", "https://a.test/", nil)
		other.write(egress.BodyRequest, text)
		lost := 0
		for _, one := range append(all, other) {
			e, _ := one.onto(egress.Event{})
			k := e.Bodies[egress.BodyRequest]
			if k.Hash != bundle.HashBody(k.Salt, text) || k.Check() != nil {
				t.Fatalf("the hash is of something else: %v", k.Check())
			}
			if e.NotKept != "" {
				lost++
				if e.Content() > 0 || one == other {
					t.Errorf("%d bytes are kept of what is not", e.Content())
				}
			}
		}
		if bound != (lost > many/3) {
			t.Errorf("bound %v: %d of %d are not kept", bound, lost, many)
		}
		if in.taken.all != 0 || len(in.taken.of) != 0 {
			t.Errorf("%d bytes are held in the end", in.taken.all)
		}
	}
}

// What a model is asked and answers is taken down as the sandbox sees it, and so is that it may not ask.
func TestModelRequestsAreTakenDown(t *testing.T) {
	w := newWorld(t)
	w.keep = true
	var g got
	w.server(modelHost, 443, modelHost, provider(&g))
	w.configure(nil, grant(secret.OpenAI))
	const asked = `{"model":"m","messages":[{"content":"ECHO"}]}`
	status, text := w.model(t, "openai/v1/chat/completions?q=1", asked, "Authorization", "Bearer token-of-openai")
	if status != http.StatusOK || !strings.Contains(g.last().text(), value(9)) {
		t.Fatalf("%d %s", status, text)
	}
	e := w.await(egress.EventModel)[0]
	head := headOf[egress.RequestHead](t, e.Bodies[egress.BodyRequestHead])
	if head.URL != "http://"+secret.ModelHost+"/models/openai/v1/chat/completions?q=1" {
		t.Errorf("the request: %+v", head)
	}
	if b := string(e.Bodies[egress.BodyRequest].Data); b != asked {
		t.Errorf("asked %q", b)
	}
	if b := string(e.Bodies[egress.BodyAnswer].Data); b != text || !strings.Contains(text, "***") {
		t.Errorf("answered %q, the client got %q", b, text)
	}
	if holding(t, e, value(9)) || holding(t, e, "token-of-openai") {
		t.Error("a key is on record")
	}
	if status, _ = w.model(t, "openai/v1/files", "{}", "Authorization", "Bearer token-of-openai"); status != http.StatusNotFound {
		t.Errorf("status %d", status)
	}
	if e := w.await(egress.EventRequest)[0]; e.Status != http.StatusNotFound || e.Note == "" || !strings.HasSuffix(e.Path, "/files") {
		t.Errorf("refused: %+v", e)
	}
}

// awaitPath returns the first event of a type about a path, once there is one.
func (w *world) awaitPath(typ egress.EventType, path string) (found egress.Event) {
	w.t.Helper()
	testenv.Eventually(w.t, time.Minute, "event "+string(typ)+" of "+path, func() bool {
		for _, e := range w.seen(typ) {
			if e.Path == path {
				found = e
				return true
			}
		}
		return false
	})
	return found
}
