package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

// front is a server with a direct before net/http, whose answers say which of the two gave them.
type front struct {
	t      *testing.T
	path   string
	direct *direct
	http   *http.Server
	served chan error
}

func newFront(t *testing.T, h http.HandlerFunc) *front {
	t.Helper()
	f := &front{t: t, path: filepath.Join(t.TempDir(), "s"), served: make(chan error, 1)}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", f.path)
	if err != nil {
		t.Fatal(err)
	}
	f.http = &http.Server{ReadHeaderTimeout: time.Minute, ConnContext: connContext, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			by := "http"
			if _, ok := w.(*directWriter); ok {
				by = "direct"
			}
			w.Header().Set("By", by)
			h(w, r)
		})}
	f.direct = newDirect(f.http, slog.New(slog.DiscardHandler))
	go func() { f.served <- f.http.Serve(f.direct.before(l)) }()
	t.Cleanup(func() { _ = f.http.Close(); f.direct.shutdown(t.Context()) })
	return f
}

// talk is a connection to it.
type talk struct {
	t *testing.T
	net.Conn
	r *bufio.Reader
}

func (f *front) talk() *talk {
	f.t.Helper()
	c, err := (&net.Dialer{}).DialContext(f.t.Context(), "unix", f.path)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute)) // nothing here waits that long
	return &talk{f.t, c, bufio.NewReader(c)}
}

func (k *talk) say(text string) {
	k.t.Helper()
	if _, err := io.WriteString(k, text); err != nil {
		k.t.Error(err)
	}
}

// hear returns status, who answered, and the body.
func (k *talk) hear() string {
	k.t.Helper()
	resp, err := http.ReadResponse(k.r, nil)
	if err != nil {
		k.t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		k.t.Fatal(err)
	}
	return strings.TrimSpace(fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("By"), " ", string(b)))
}

// unary is a call with extra header lines.
func unary(body string, extra ...string) string {
	return "POST /casemate.v1.X/Y HTTP/1.1\r\nHost: h\r\nContent-Type: application/proto\r\n" + strings.Join(extra, "") +
		fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
}

func echo(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	_, _ = fmt.Fprintf(w, "%s %s", r.Method, b)
}

func TestDirectAnswersUnaryCalls(t *testing.T) {
	k := newFront(t, echo).talk()
	for _, body := range []string{"one", "", strings.Repeat("x", maxDirect)} {
		go k.say(unary(body))
		if got, want := k.hear(), strings.TrimSpace("200 direct POST "+body); got != want {
			t.Fatalf("%.60s, want %.60s", got, want)
		}
	}
	k.say(unary("a") + unary("b")) // one behind the other
	if a, b := k.hear(), k.hear(); a != "200 direct POST a" || b != "200 direct POST b" {
		t.Errorf("%s, %s", a, b)
	}
	// What is none goes to net/http, on the same connection, and all that follows.
	k.say("GET /-/health HTTP/1.1\r\nHost: h\r\n\r\n")
	if got := k.hear(); got != "200 http GET" {
		t.Errorf("%s", got)
	}
	k.say(unary("c"))
	if got := k.hear(); got != "200 http POST c" {
		t.Errorf("%s", got)
	}
}

// TestDirectLeavesTheRest: whatever is not in the usual form is judged by net/http alone, from its first byte on.
func TestDirectLeavesTheRest(t *testing.T) {
	const start = "POST /casemate.v1.X/Y HTTP/1.1\r\n"
	tests := map[string]struct{ say, want string }{
		"chunks":        {start + "Host: h\r\nContent-Type: application/proto\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nc\r\n0\r\n\r\n", "200 http POST c"},
		"json":          {start + "Host: h\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "200 http POST {}"},
		"close":         {unary("x", "Connection: close\r\n"), "200 http POST x"},
		"no host":       {start + "Content-Type: application/proto\r\nContent-Length: 0\r\n\r\n", "400"},
		"two lengths":   {unary("x", "Content-Length: 7\r\n"), "400"},
		"length, chunk": {unary("0\r\n\r\n", "Transfer-Encoding: chunked\r\n"), "200 http POST"},
		"folded":        {unary("x", "A: b\r\n c\r\n"), "200 direct POST x"},
		"no name":       {unary("x", ": b\r\n"), "400"},
		"bare name":     {unary("x", "A\r\n"), "400"},
		"control":       {unary("x", "A: \x01\r\n"), "400"},
		"HTTP/1.0":      {strings.Replace(unary("x"), "HTTP/1.1", "HTTP/1.0", 1), "200 http POST x"},
		"large":         {unary(strings.Repeat("x", maxDirect+1)), "200 http POST " + strings.Repeat("x", maxDirect+1)},
		"long header":   {unary("x", "A: "+strings.Repeat("a", 2*directBuffer)+"\r\n"), "200 http POST x"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, echo)
			for _, before := range []string{"", unary("first")} {
				k := f.talk()
				go k.say(before + tt.say)
				if before != "" {
					_ = k.hear()
				}
				if got := k.hear(); !strings.HasPrefix(got, tt.want) {
					t.Errorf("after %q: %.80s, want %.80s", before, got, tt.want)
				}
			}
		})
	}
	k := newFront(t, echo).talk()
	k.say(unary("x")[:30])
	k.say(unary("x")[30:]) // in pieces, or not: both are right
	if got := k.hear(); !strings.HasSuffix(got, " POST x") {
		t.Errorf("%s", got)
	}
}

// TestDirectCallEndsWithItsCaller, also where it takes long, and one that was looked after so leaves the
// connection as it was.
func TestDirectCallEndsWithItsCaller(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan error, 1)
	release := make(chan struct{})
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		switch string(b) {
		case "wait":
			close(begun)
			<-r.Context().Done()
			ended <- context.Cause(r.Context())
		case "slow":
			<-release
		}
		_, _ = w.Write(b)
	})
	k := f.talk()
	k.say(unary("slow"))
	time.AfterFunc(3*hangupAfter, func() { close(release) })
	if got := k.hear(); got != "200 direct slow" {
		t.Errorf("%s", got)
	}
	k.say(unary("next"))
	if got := k.hear(); got != "200 direct next" {
		t.Errorf("%s", got)
	}
	k.say(unary("wait"))
	testenv.Receive(t, "the call begins", begun)
	_ = k.Close()
	if err := testenv.Receive(t, "the call ends", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// TestDirectShutsDown: connections without a call are dropped, and a call under way gets its answer.
func TestDirectShutsDown(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength > 0 {
			close(begun)
			<-release
		}
		_, _ = w.Write([]byte("done"))
	})
	idle, busy := f.talk(), f.talk()
	idle.say(unary(""))
	if got := idle.hear(); got != "200 direct done" {
		t.Fatal(got)
	}
	busy.say(unary("x"))
	testenv.Receive(t, "the call begins", begun)
	down := make(chan error, 1)
	go func() {
		err := f.http.Shutdown(t.Context())
		f.direct.shutdown(t.Context())
		down <- err
	}()
	if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a connection without a call: %v", err)
	}
	select {
	case err := <-down:
		t.Fatalf("it is down before its call: %v", err)
	default:
	}
	close(release)
	if got := busy.hear(); got != "200 direct done" {
		t.Errorf("%s", got)
	}
	if err := testenv.Receive(t, "it is down", down); err != nil {
		t.Error(err)
	}
	if _, err := busy.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after its call: %v", err)
	}
	if err := testenv.Receive(t, "it serves no more", f.served); !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}

// TestDirectOutlivesAPanic: it ends the connection that it came on, and no other.
func TestDirectOutlivesAPanic(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 0 {
			panic("on purpose")
		}
		echo(w, r)
	})
	bad, good := f.talk(), f.talk()
	bad.say(unary(""))
	if _, err := bad.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	good.say(unary("x"))
	if got := good.hear(); got != "200 direct POST x" {
		t.Errorf("%s", got)
	}
}
