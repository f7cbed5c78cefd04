// Package peek reads the beginning of what a client sends, to learn whom it means to talk to: a TLS hello's
// server name, an HTTP request's head.
//
// Everything here is hostile input. Parsers are strict: what two readers could understand differently is an
// error. What belongs here: parsing of bytes. What does not: connections and decisions.
package peek

import (
	"errors"

	"golang.org/x/crypto/cryptobyte"
)

// Hello is what a TLS ClientHello (RFC 8446, section 4.1.2) says that matters here.
type Hello struct {
	ServerName string   // as sent; "" where there is none
	Protocols  []string // of ALPN
	ECH        bool     // an encrypted hello is inside (RFC 9849)
}

// MaxHello bounds a hello, all its records together. Post-quantum key shares take some kilobytes.
const MaxHello = 64 << 10

// The errors of ParseHello. Any other means that the bytes begin as a hello and are none.
var (
	// ErrShort says that more bytes are needed.
	ErrShort = errors.New("more bytes are needed")
	// ErrOther says that the bytes do not begin as a TLS hello.
	ErrOther = errors.New("not a TLS hello")
)

const (
	recordHandshake = 22
	typeClientHello = 1
	maxRecord       = 16 << 10
	extServerName   = 0
	extALPN         = 16
	extECH          = 0xfe0d
)

// ParseHello parses the records at the beginning of b.
func ParseHello(b []byte) (Hello, error) {
	message, err := handshake(b)
	if err != nil {
		return Hello{}, err
	}
	return parseHello(message)
}

// handshake puts the first handshake message together, which may lie in several records.
func handshake(b []byte) ([]byte, error) {
	var message []byte
	for {
		if len(b) == 0 {
			return nil, ErrShort
		}
		if b[0] != recordHandshake || len(b) > 1 && b[1] != 3 {
			if message == nil {
				return nil, ErrOther
			}
			return nil, errors.New("another record interrupts the TLS hello")
		}
		if len(b) < 5 {
			return nil, ErrShort
		}
		n := int(b[3])<<8 | int(b[4])
		if n == 0 || n > maxRecord {
			return nil, errors.New("a TLS record has no valid length")
		}
		if len(b) > 5 && message == nil && b[5] != typeClientHello {
			return nil, errors.New("the first TLS message is no hello")
		}
		message = append(message, b[5:min(len(b), 5+n)]...)
		if len(message) >= 4 {
			size := 4 + (int(message[1])<<16 | int(message[2])<<8 | int(message[3]))
			if size > MaxHello {
				return nil, errors.New("the TLS hello is too long")
			}
			if len(message) > size {
				return nil, errors.New("bytes follow the TLS hello in its record")
			}
			if len(message) == size {
				return message[4:], nil
			}
		}
		if len(b) < 5+n {
			return nil, ErrShort
		}
		b = b[5+n:]
	}
}

func parseHello(b []byte) (Hello, error) {
	bad := errors.New("the TLS hello is malformed")
	s := cryptobyte.String(b)
	var session, suites, compressions, extensions cryptobyte.String
	if !s.Skip(2+32) || !s.ReadUint8LengthPrefixed(&session) || !s.ReadUint16LengthPrefixed(&suites) ||
		!s.ReadUint8LengthPrefixed(&compressions) {
		return Hello{}, bad
	}
	var h Hello
	if s.Empty() {
		return h, nil // no extensions
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return Hello{}, bad
	}
	seen := map[uint16]bool{}
	for !extensions.Empty() {
		var kind uint16
		var body cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&body) {
			return Hello{}, bad
		}
		if seen[kind] {
			return Hello{}, errors.New("the TLS hello holds an extension twice")
		}
		seen[kind] = true
		if !h.extension(kind, body) {
			return Hello{}, bad
		}
	}
	return h, nil
}

func (h *Hello) extension(kind uint16, body cryptobyte.String) bool {
	switch kind {
	case extServerName:
		var list, name cryptobyte.String
		var nameType uint8
		// Exactly one name of the one type that exists (RFC 6066, section 3).
		if !body.ReadUint16LengthPrefixed(&list) || !body.Empty() || !list.ReadUint8(&nameType) || nameType != 0 ||
			!list.ReadUint16LengthPrefixed(&name) || !list.Empty() || name.Empty() {
			return false
		}
		h.ServerName = string(name)
	case extALPN:
		var list cryptobyte.String
		if !body.ReadUint16LengthPrefixed(&list) || !body.Empty() {
			return false
		}
		for !list.Empty() {
			var p cryptobyte.String
			if !list.ReadUint8LengthPrefixed(&p) || p.Empty() {
				return false
			}
			h.Protocols = append(h.Protocols, string(p))
		}
	case extECH:
		// Some clients send a made-up one where they use none ("GREASE"), and nobody outside can tell.
		h.ECH = true
	}
	return true
}
