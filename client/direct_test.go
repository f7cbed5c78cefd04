package client

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// echo is a server that gives bodies back, and counts its connections.
func echo(t *testing.T, h http.HandlerFunc) (d *direct, dialled *atomic.Int32, url string, s *httptest.Server) {
	t.Helper()
	s = httptest.NewServer(h)
	t.Cleanup(s.Close)
	dialled = new(atomic.Int32)
	addr := strings.TrimPrefix(s.URL, "http://")
	d = &direct{next: noTransport{}, dial: func(ctx context.Context) (net.Conn, error) {
		dialled.Add(1)
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}}
	t.Cleanup(d.closeIdle)
	return d, dialled, s.URL, s
}

// noTransport fails what should not get here.
type noTransport struct{}

var errNext = errors.New("not a unary call")

func (noTransport) RoundTrip(*http.Request) (*http.Response, error) { return nil, errNext }

func post(ctx context.Context, d *direct, url, body string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	r.Header.Set("Content-Type", "application/proto")
	resp, err := d.RoundTrip(r)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func mirror(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	_, _ = w.Write(b)
}

func TestDirectKeepsItsConnection(t *testing.T) {
	d, dialled, url, _ := echo(t, mirror)
	for _, body := range []string{"", "short", strings.Repeat("long", 15<<10)} {
		for range 3 {
			if got, err := post(t.Context(), d, url, body); err != nil || got != body {
				t.Fatalf("%d bytes came back, %v", len(got), err)
			}
		}
	}
	if n := dialled.Load(); n != 1 {
		t.Errorf("dialled %d times", n)
	}
}

func TestDirectTakesUnaryCallsOnly(t *testing.T) {
	d, _, url, _ := echo(t, mirror)
	r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("x"))
	r.Header.Set("Content-Type", "application/connect+proto")
	if _, err := d.RoundTrip(r); !errors.Is(err, errNext) { //nolint:bodyclose // there is none
		t.Error(err)
	}
	if _, err := post(t.Context(), d, url, strings.Repeat("x", maxDirect+1)); !errors.Is(err, errNext) {
		t.Error(err)
	}
}

// A server that went away between two calls is dialled again, and a call that must not be repeated is not.
func TestDirectSeesAClosedConnection(t *testing.T) {
	d, dialled, url, s := echo(t, mirror)
	if _, err := post(t.Context(), d, url, "a"); err != nil {
		t.Fatal(err)
	}
	s.CloseClientConnections()
	if got, err := post(t.Context(), d, url, "b"); err != nil || got != "b" {
		t.Fatalf("%q, %v", got, err)
	}
	if n := dialled.Load(); n != 2 {
		t.Errorf("dialled %d times", n)
	}
	var calls atomic.Int32
	d, _, url, _ = echo(t, func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 2 {
			panic(http.ErrAbortHandler) // as a server that is killed at work
		}
		mirror(w, r)
	})
	if _, err := post(t.Context(), d, url, "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := post(t.Context(), d, url, "b"); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a call that was cut off: %v", err)
	}
	if n := calls.Load(); n != 2 {
		t.Errorf("%d calls arrived", n)
	}
}

func TestDirectEndsWithItsContext(t *testing.T) {
	reached := make(chan struct{}, 1)
	d, _, url, _ := echo(t, func(w http.ResponseWriter, r *http.Request) {
		if b, _ := io.ReadAll(r.Body); string(b) == "wait" {
			reached <- struct{}{}
			<-r.Context().Done()
			return
		}
		_, _ = w.Write([]byte("fine"))
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-reached; cancel() }()
	if _, err := post(ctx, d, url, "wait"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	go func() { <-reached }()
	if _, err := post(ctx, d, url, "wait"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if got, err := post(t.Context(), d, url, "next"); err != nil || got != "fine" {
		t.Errorf("%q, %v", got, err)
	}
}

// An answer that is not read to its end leaves bytes on the connection, which so carries no other call.
func TestDirectDropsAnUnreadAnswer(t *testing.T) {
	d, dialled, url, _ := echo(t, func(w http.ResponseWriter, r *http.Request) {
		mirror(w, r)
		_, _ = w.Write(make([]byte, 1<<20))
	})
	for range 2 {
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("x"))
		r.Header.Set("Content-Type", "application/proto")
		resp, err := d.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := dialled.Load(); n != 2 {
		t.Errorf("dialled %d times", n)
	}
}
