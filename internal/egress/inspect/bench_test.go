package inspect

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"casemate.dev/internal/secret"
)

// BenchmarkKeptAlive measures what interception and a credential add to a request on a connection that
// stays: direct is the same client and server without the Inspector between them.
func BenchmarkKeptAlive(b *testing.B) {
	body := strings.Repeat(`{"a":"b"}`, 100)
	answer := func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(rw, body)
	}
	run := func(b *testing.B, c *http.Client, url string) {
		for b.Loop() {
			req, _ := http.NewRequestWithContext(b.Context(), "POST", url, strings.NewReader(body))
			req.Header.Set("Authorization", "Bearer "+placeholder(1))
			resp, err := c.Do(req)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				b.Fatal(err)
			}
			_ = resp.Body.Close()
		}
	}
	w := newWorld(b)
	s := w.server(apiHost, 443, apiHost, answer)
	b.Run("direct", func(b *testing.B) {
		c := s.Client()
		c.Transport.(*http.Transport).TLSClientConfig.InsecureSkipVerify = true //nolint:gosec // the client that is compared with
		c.Transport.(*http.Transport).DisableCompression = true
		c.Transport.(*http.Transport).Protocols = new(http.Protocols)
		c.Transport.(*http.Transport).Protocols.SetHTTP1(true)
		run(b, c, s.URL)
	})
	for _, h2 := range []bool{false, true} {
		name := map[bool]string{false: "inspected", true: "inspected HTTP/2"}[h2]
		b.Run(name, func(b *testing.B) {
			w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
			run(b, w.client(h2), "https://"+apiHost+"/")
		})
	}
}

// BenchmarkScrubber measures how fast a body is looked through.
func BenchmarkScrubber(b *testing.B) {
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 1<<15)
	n := newNeedles([]byte(value(1)), []byte(value(2)))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		_, _ = io.Copy(io.Discard, newScrubber(n, io.NopCloser(strings.NewReader(text)), nil))
	}
}
