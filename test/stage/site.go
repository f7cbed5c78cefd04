package stage

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Site is a web server that keeps what it gets. Answer answers, "ok" where it is nil; it can read the request's body once
// more.
type Site struct {
	Answer func(w http.ResponseWriter, r *http.Request)

	mu   sync.Mutex // guards the field below
	reqs []Request
}

// Request is one that a Site got.
type Request struct {
	Host, Path, Proto, Body string
	Header                  http.Header
}

// Text is all of the request, to look for something in it.
func (r Request) Text() string { return fmt.Sprint(r.Host, r.Path, r.Header, r.Body) }

// ServeHTTP implements http.Handler.
func (s *Site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(b))
	s.mu.Lock()
	s.reqs = append(s.reqs, Request{r.Host, r.RequestURI, r.Proto, string(b), r.Header.Clone()})
	s.mu.Unlock()
	if s.Answer == nil {
		fmt.Fprint(w, "ok")
		return
	}
	s.Answer(w, r)
}

// All returns the requests so far.
func (s *Site) All() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.reqs...)
}

// Last returns the latest request, and fails the test where there is none.
func (s *Site) Last(t testing.TB) Request {
	t.Helper()
	all := s.All()
	if len(all) == 0 {
		t.Fatal("the site got nothing")
	}
	return all[len(all)-1]
}

// Serve opens a web server on 80, and with TLS on 443 and 8443, of an address of the world, under names.
func (s *Stage) Serve(addr string, h http.Handler, names ...string) {
	s.T.Helper()
	for _, n := range names {
		s.World.Name(n, addr)
	}
	conf := s.World.TLS(names...)
	conf.NextProtos = []string{"h2", "http/1.1"}
	for _, port := range []string{":80", ":443", ":8443"} {
		l := s.World.Listen(addr + port)
		srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
		if port != ":80" {
			l = tls.NewListener(l, conf)
		}
		go func() { _ = srv.Serve(l) }()
		s.T.Cleanup(func() { _ = srv.Close() })
	}
}
