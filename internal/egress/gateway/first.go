package gateway

import (
	"errors"
	"io"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/peek"
	"casemate.dev/internal/egress/rules"
)

// first is what a client's first bytes say.
type first struct {
	bytes []byte
	hello *egress.Hello // TLS
	http  bool          // HTTP/1
	plain bool          // neither
	err   error         // they begin as TLS, and are wrong
}

// classify looks at the first bytes of a client. more says that there are too few.
func classify(b []byte) (f first, more bool) {
	f.bytes = b
	h, err := peek.ParseHello(b)
	switch {
	case err == nil:
		f.hello = &egress.Hello{Protocols: h.Protocols, ECH: h.ECH}
		if h.ServerName != "" {
			name, _, err := rules.Host(h.ServerName)
			if err != nil || name == "" {
				f.err = errors.New("the TLS hello names no valid server")
			}
			f.hello.ServerName = name
		}
		return f, false
	case errors.Is(err, peek.ErrShort):
		return f, len(b) < peek.MaxHello
	case !errors.Is(err, peek.ErrOther):
		f.err = err
		return f, false
	}
	yes, more := peek.LooksLikeHTTP(b)
	f.http, f.plain = yes, !yes && !more
	return f, more
}

// readFirst reads until the first bytes say what is spoken.
func readFirst(r io.Reader) (first, error) {
	var all []byte
	buf := make([]byte, 4<<10)
	for {
		n, err := r.Read(buf)
		all = append(all, buf[:n]...)
		if n > 0 {
			if f, more := classify(all); !more {
				return f, nil
			}
		}
		if err != nil {
			return first{}, err
		}
		if len(all) > peek.MaxHello {
			return first{}, errors.New("the first message is too long")
		}
	}
}

// refineFirst judges a connection by its first bytes.
func (c *conn) refineFirst(f first) rules.Verdict {
	if f.err != nil {
		return rules.Verdict{Code: rules.NoServerName, Reason: f.err.Error()}
	}
	return c.refine(func(q *rules.Query) {
		if f.hello != nil {
			q.TLS = &rules.TLS{ServerName: f.hello.ServerName, ECH: f.hello.ECH}
		}
		q.Plain = f.plain
	})
}
