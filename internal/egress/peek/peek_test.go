package peek

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
)

// hello returns what Go's client sends first.
func hello(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer func() { _ = b.Close() }()
	go func() { _ = tls.Client(a, cfg).Handshake(); _ = a.Close() }()
	head := make([]byte, 5)
	if _, err := io.ReadFull(b, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(b, body); err != nil {
		t.Fatal(err)
	}
	return slices.Concat(head, body)
}

func TestParseHello(t *testing.T) {
	b := hello(t, &tls.Config{ServerName: "Allowed.test", NextProtos: []string{"h2", "http/1.1"}})
	h, err := ParseHello(b)
	if err != nil || h.ServerName != "Allowed.test" || strings.Join(h.Protocols, " ") != "h2 http/1.1" || h.ECH {
		t.Errorf("%+v %v", h, err)
	}
	for i := range b {
		if _, err := ParseHello(b[:i]); !errors.Is(err, ErrShort) {
			t.Fatalf("%d bytes: %v", i, err)
		}
	}
	// In many records, as some clients send it to hide the name from readers that look at the first.
	var split []byte
	for rest := b[5:]; len(rest) > 0; {
		n := min(7, len(rest))
		split = append(append(split, 22, 3, 1, 0, byte(n)), rest[:n]...)
		rest = rest[n:]
	}
	if h, err := ParseHello(split); err != nil || h.ServerName != "Allowed.test" {
		t.Errorf("split: %+v %v", h, err)
	}
	if _, err := ParseHello([]byte("GET / HTTP/1.1\r\n")); !errors.Is(err, ErrOther) {
		t.Errorf("HTTP: %v", err)
	}
	for name, bad := range map[string][]byte{
		"another record between": append(append([]byte{}, split[:12]...), 23, 3, 1, 0, 1, 0),
		"an empty record":        {22, 3, 1, 0, 0},
		"another message":        {22, 3, 1, 0, 5, 2, 0, 0, 1, 0},
		"a name twice":           twice(b),
	} {
		if h, err := ParseHello(bad); err == nil || errors.Is(err, ErrShort) || errors.Is(err, ErrOther) {
			t.Errorf("%s: %+v %v", name, h, err)
		}
	}
}

// twice makes a hello with the server name extension in it twice.
func twice(b []byte) []byte {
	name := []byte{0, 0, 0, 17, 0, 15, 0, 0, 12}
	name = append(name, "allowed.test"...)
	at := bytes.Index(b, append([]byte{0, 0, 0, 17, 0, 15, 0, 0, 12}, "Allowed.test"...))
	if at < 0 {
		return []byte{22, 3, 1, 0, 0}
	}
	out := append(append(append([]byte{}, b[:at]...), name...), b[at:]...)
	grow := func(i int, n int) {
		v := int(out[i])<<8 | int(out[i+1])
		v += n
		out[i], out[i+1] = byte(v>>8), byte(v)
	}
	grow(3, len(name))
	grow(7, len(name))
	// The extensions' length stands before the first of them: after version, random, session, suites, methods.
	i := 5 + 4 + 2 + 32
	i += 1 + int(out[i])
	i += 2 + (int(out[i])<<8 | int(out[i+1]))
	i += 1 + int(out[i])
	grow(i, len(name))
	return out
}

func FuzzParseHello(f *testing.F) {
	f.Add(hello(f, &tls.Config{ServerName: "a.test"}))
	f.Add([]byte{22, 3, 1, 0, 5, 1, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHello(b)
		if err == nil && len(h.ServerName) > len(b) {
			t.Fatal("a name from nowhere")
		}
		// What is decided stays decided, whatever follows.
		if !errors.Is(err, ErrShort) && err == nil {
			h2, err2 := ParseHello(append(append([]byte{}, b...), 23, 3, 3, 0, 1, 0))
			if err2 == nil && h2.ServerName != h.ServerName {
				t.Fatalf("%q became %q", h.ServerName, h2.ServerName)
			}
		}
	})
}

// FuzzRequests holds Requests to its promise: what goes on is exactly what came, in order, and every head in it
// was judged.
func FuzzRequests(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\nPOST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"), uint8(3))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: b\r\n\r\n"), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, step uint8) {
		run := func(step int) (out []byte, hosts []string, err error) {
			r := Requests{
				Judge: func(h Head) error {
					hosts = append(hosts, h.Host)
					if h.Host != "a" {
						return errors.New("refused")
					}
					return nil
				},
				Switched: func() bool { return false },
			}
			for rest := b; len(rest) > 0 && err == nil; {
				n := min(step, len(rest))
				var more []byte
				more, err = r.Next(bytes.Clone(rest[:n]))
				for err == nil && r.More() {
					out = append(out, more...)
					more, err = r.Next(nil)
				}
				out, rest = append(out, more...), rest[n:]
			}
			return out, hosts, err
		}
		small, hosts, _ := run(int(step)%16 + 1)
		if !bytes.HasPrefix(b, small) {
			t.Fatalf("%q went on of %q", small, b)
		}
		// However it is cut into pieces, the same heads are judged as long as all are good.
		whole, hosts2, err := run(len(b) + 1)
		if err == nil && (!bytes.Equal(whole, small) || strings.Join(hosts, " ") != strings.Join(hosts2, " ")) {
			t.Fatalf("in pieces %q %v, whole %q %v", small, hosts, whole, hosts2)
		}
	})
}

func FuzzParseHead(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHead(b)
		if err != nil {
			return
		}
		if h.Size > len(b) || h.Host == "" || !strings.HasPrefix(h.Path, "/") && h.Path != "*" || strings.ContainsAny(h.Host, "\r\n") {
			t.Fatalf("%+v", h)
		}
	})
}
