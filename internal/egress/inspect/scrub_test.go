package inspect

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// encodings are the ways in which a host may echo a value.
func encodings(v string) map[string]string {
	j, _ := json.Marshal(v)
	return map[string]string{
		"plain": v, "json": string(j), "query": url.QueryEscape(v), "path": url.PathEscape(v), "hex": hex.EncodeToString([]byte(v)),
		"base64":         base64.StdEncoding.EncodeToString([]byte(v)),
		"basic":          base64.StdEncoding.EncodeToString([]byte("x-access-token:" + v)),
		"basic, 1":       base64.StdEncoding.EncodeToString([]byte("me:" + v + ":")),
		"basic, 2":       base64.URLEncoding.EncodeToString([]byte("m:" + v)),
		"in a URL":       "https://x:" + url.QueryEscape(v) + "@" + apiHost,
		"escaped slash":  strings.ReplaceAll(v, "/", `\/`),
		"twice":          v + v,
		"in upper hex":   strings.ToUpper(hex.EncodeToString([]byte(v))),
		"between digits": "0" + v + "1",
		"lower escapes":  string(lowerEscapes(url.QueryEscape(v))),
		"html":           html.EscapeString(v),
		"slow html":      slowHTML(v),
	}
}

// readable reports whether text, decoded in any of those ways, still tells the value.
func readable(text, v string) bool {
	text = html.UnescapeString(text)
	for _, form := range []string{v, url.QueryEscape(v), url.PathEscape(v), strings.ReplaceAll(v, "/", `\/`), hex.EncodeToString([]byte(v))} {
		if strings.Contains(strings.ToLower(text), strings.ToLower(form)) {
			return true
		}
	}
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding, base64.RawStdEncoding} {
		if raw, err := enc.DecodeString(text); err == nil && strings.Contains(string(raw), v) {
			return true
		}
	}
	return false
}

func TestScrubberEveryCut(t *testing.T) {
	v := value(1)
	for name, form := range encodings(v) {
		text := "before " + form + " after"
		if readable(form, v) != true {
			t.Fatalf("%s: the check does not see the value in %q", name, form)
		}
		for _, wrap := range []func(io.Reader) io.Reader{
			func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader,
		} {
			n := newNeedles([]byte(v), []byte("another value"))
			out, err := io.ReadAll(newScrubber(n, io.NopCloser(wrap(strings.NewReader(text))), nil))
			if err != nil || len(out) != len(text) || readable(strings.TrimSuffix(strings.TrimPrefix(string(out), "before "), " after"), v) ||
				!strings.HasPrefix(string(out), "before ") || !strings.HasSuffix(string(out), " after") {
				t.Errorf("%s: %q became %q, %v", name, text, out, err)
			}
		}
	}
}

// TestScrubberAgainstAnOracle cuts random texts, in which the value is or nearly is, at random places.
func TestScrubberAgainstAnOracle(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	v := "abcabcab-abcabcac"
	n := &needles{}
	n.forms, n.longest, n.first['a'] = [][]byte{[]byte(v)}, len(v), true
	for range 2000 {
		var text strings.Builder
		for range rng.IntN(30) {
			switch rng.IntN(4) {
			case 0:
				text.WriteString(v)
			case 1:
				text.WriteString(v[:rng.IntN(len(v))])
			default:
				fmt.Fprint(&text, rng.IntN(1000))
			}
		}
		want := strings.ReplaceAll(text.String(), v, strings.Repeat("*", len(v)))
		cut := &cutReader{[]byte(text.String()), rng}
		got, err := io.ReadAll(newScrubber(n, io.NopCloser(cut), nil))
		if err != nil || string(got) != want {
			t.Fatalf("%q became %q, want %q", text.String(), got, want)
		}
	}
}

type cutReader struct {
	b   []byte
	rng *rand.Rand
}

// Read implements io.Reader.
func (c *cutReader) Read(p []byte) (int, error) {
	if len(c.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.b[:min(len(c.b), 1+c.rng.IntN(7))])
	c.b = c.b[n:]
	return n, nil
}

// TestScrubberOfNestedForms: a value that begins with the one before it, wherever the stream is cut.
func TestScrubberOfNestedForms(t *testing.T) {
	before, now := value(1), value(1)+"-and-more-of-it"
	text := "a " + now + " b " + before + " c " + now + now + " d"
	for cut := range len(text) {
		n := newNeedles([]byte(now), []byte(before))
		out, err := io.ReadAll(newScrubber(n, io.NopCloser(io.MultiReader(strings.NewReader(text[:cut]), strings.NewReader(text[cut:]))), nil))
		if err != nil || len(out) != len(text) || strings.Trim(string(out), "*abcd ") != "" {
			t.Fatalf("cut at %d it is %q, %v", cut, out, err)
		}
	}
}

// TestEncodedEchoes: an answer in an encoding is read where it can be, and refused where a value was put on the request
// and it can't.
func TestEncodedEchoes(t *testing.T) {
	v := value(1)
	write := map[string]func(io.Writer) io.WriteCloser{
		"gzip":        func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
		"X-GZIP":      func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
		"deflate":     func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
		"raw deflate": func(w io.Writer) io.WriteCloser { z, _ := flate.NewWriter(w, 5); return z },
		"twice":       func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
		"br":          nil, "zstd": nil, "in two headers": nil, "many": nil,
	}
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
		how, _ := url.PathUnescape(strings.TrimPrefix(r.URL.EscapedPath(), "/"))
		coding := map[string][]string{
			"raw deflate": {"deflate"}, "twice": {"deflate, gzip"}, "in two headers": {"identity", "br"}, "many": {"gzip,gzip,gzip,gzip,gzip"},
		}[how]
		if coding == nil {
			coding = []string{how}
		}
		rw.Header()["Content-Encoding"] = coding
		if write[how] == nil {
			_, _ = io.WriteString(rw, "pretend: "+r.Header.Get("Authorization"))
			return
		}
		z := write[how](rw)
		if how == "twice" {
			inner := zlib.NewWriter(z)
			_, _ = io.WriteString(inner, "echo "+r.Header.Get("Authorization"))
			_ = inner.Close()
		} else {
			_, _ = io.WriteString(z, "echo "+r.Header.Get("Authorization"))
		}
		_ = z.Close()
	})
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
	for how, plain := range write {
		for _, h2 := range []bool{false, true} {
			resp, body := send(t, w.client(h2), "GET", "https://"+apiHost+"/"+url.PathEscape(how), "", "Authorization", "Bearer "+placeholder(1), "Accept-Encoding", "x")
			switch {
			case readable(body, v):
				t.Errorf("%s tells %q", how, body)
			case plain != nil && (resp.StatusCode != 200 || !strings.HasPrefix(body, "echo Bearer ***") || resp.Header.Get("Content-Encoding") != ""):
				t.Errorf("%s: %d %q %v", how, resp.StatusCode, body, resp.Header)
			case plain == nil && resp.StatusCode != 502:
				t.Errorf("%s: %d %q", how, resp.StatusCode, body)
			}
			// The twin: without a value on the request, what can't be read passes.
			if resp, _ := send(t, w.client(h2), "GET", "https://"+apiHost+"/"+url.PathEscape(how), "", "Accept-Encoding", "x"); resp.StatusCode != 200 {
				t.Errorf("%s without a value: %d", how, resp.StatusCode)
			}
		}
	}
}

// TestScrubberHoldsNothingBack: what can't be the beginning of a value is there at once.
func TestScrubberHoldsNothingBack(t *testing.T) {
	r, w := io.Pipe()
	s := newScrubber(newNeedles([]byte(value(1))), r, nil)
	buf := make([]byte, 100)
	for _, event := range []string{"data: one\n\n", "data: v\n\n", "data: " + value(1) + "\n\n"} {
		go func() { _, _ = io.WriteString(w, event) }()
		n, err := s.Read(buf)
		if err != nil || n != len(event) {
			t.Errorf("of %q came %q, %v", event, buf[:n], err)
		}
	}
}

// TestEchoes: a host that tells what it was sent, in every place and encoding.
func TestEchoes(t *testing.T) {
	v := value(1)
	for name, form := range encodings(v) {
		for _, h2 := range []bool{false, true} {
			w := newWorld(t)
			w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
				if !strings.Contains(r.Header.Get("Authorization"), v) {
					t.Error("the host has no value to echo")
				}
				rw.Header().Set("X-Echo", form)
				rw.Header().Add("Set-Cookie", "a="+form)
				rw.Header().Set("Trailer", "X-End")
				if r.URL.Path == "/length" {
					rw.Header().Del("Trailer")
					rw.Header().Set("Content-Length", fmt.Sprint(len(form)+2))
				}
				if r.URL.Path == "/gzip" {
					rw.Header().Set("Content-Encoding", "gzip")
					z := gzip.NewWriter(rw)
					_, _ = io.WriteString(z, "<"+form+">")
					_ = z.Close()
					return
				}
				rw.WriteHeader(http.StatusForbidden) // error pages too
				_, _ = io.WriteString(rw, "<"+form[:len(form)/2])
				rw.(http.Flusher).Flush()
				_, _ = io.WriteString(rw, form[len(form)/2:]+">")
				rw.Header().Set("X-End", form)
			})
			w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))})
			for _, path := range []string{"/", "/length", "/gzip"} {
				resp, body := send(t, w.client(h2), "GET", "https://"+apiHost+path, "", "Authorization", "Bearer "+placeholder(1))
				if readable(strings.Trim(body, "<>"), v) || len(body) != len(form)+2 {
					t.Errorf("%s %s: the body is %q", name, path, body)
				}
				for _, text := range []string{resp.Header.Get("X-Echo"), strings.TrimPrefix(resp.Header.Get("Set-Cookie"), "a="), resp.Trailer.Get("X-End")} {
					if readable(text, v) {
						t.Errorf("%s %s: a header or trailer tells %q", name, path, text)
					}
				}
			}
			if m := w.await(egress.EventMasked); len(m) == 0 {
				t.Errorf("%s: events %+v", name, m)
			}
		}
	}
}

// TestEchoWithoutCredential is the twin: where no credential is bound the same host's echo comes through,
// so that the test above would see a value.
func TestEchoWithoutCredential(t *testing.T) {
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, r.Header.Get("Authorization"))
	})
	if _, body := send(t, w.client(false), "GET", "https://"+apiHost+"/", "", "Authorization", "Bearer "+value(1)); !readable(strings.TrimPrefix(body, "Bearer "), value(1)) {
		t.Errorf("the echo is %q", body)
	}
}

func TestPreviousValueIsTakenOut(t *testing.T) {
	w := newWorld(t)
	w.server(apiHost, 443, apiHost, func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, value(0)) })
	c := cred(1, bindTo(secret.Bearer, "Authorization"))
	c.Previous = secret.NewValue([]byte(value(0)))
	w.configure([]secret.Credential{c})
	if _, body := send(t, w.client(false), "GET", "https://"+apiHost+"/", ""); readable(body, value(0)) {
		t.Errorf("the body is %q", body)
	}
}

func FuzzScrubber(f *testing.F) {
	f.Add([]byte("text "+value(1)+" more"), 3)
	f.Add([]byte(base64.StdEncoding.EncodeToString([]byte(value(1)))), 1)
	f.Fuzz(func(t *testing.T, text []byte, size int) {
		n := newNeedles([]byte(value(1)))
		out, err := io.ReadAll(newScrubber(n, io.NopCloser(&inPieces{text, 1 + size&63}), nil))
		if err != nil || len(out) != len(text) {
			t.Fatalf("%d bytes became %d, %v", len(text), len(out), err)
		}
		whole := bytes.Clone(text)
		n.mask(text, whole)
		if !bytes.Equal(whole, out) && bytes.Contains(out, []byte(value(1))) {
			t.Fatalf("cut, it tells %q", out)
		}
	})
}

// inPieces gives its text in pieces of a size.
type inPieces struct {
	text []byte
	size int
}

func (r *inPieces) Read(p []byte) (int, error) {
	if len(r.text) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.text[:min(r.size, len(r.text))])
	r.text = r.text[n:]
	return n, nil
}
