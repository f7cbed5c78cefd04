package peek

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
)

// Requests follows the requests of one HTTP/1 connection, as the client sends them, without changing a
// byte. Each head is shown to Judge before any of its bytes go on, so that no second request passes behind
// the first.
type Requests struct {
	// Judge is called with each head. An error ends the connection.
	Judge func(Head) error
	// Switched reports whether the server has agreed to another protocol (101). It is asked where a request
	// that wanted one is followed by more bytes, and may wait until the server has answered.
	Switched func() bool

	state  state
	left   int64  // of the body or chunk
	head   []byte // of what is not complete yet
	wanted bool   // the last request asked for another protocol
	rest   []byte // of what can't be read before the server has answered
}

type state int

const (
	inHead state = iota
	inBody
	inChunkLine
	inChunk
	inChunkEnd
	inTrailer
	opaque
)

// maxLine bounds a chunk's line and a trailer's.
const maxLine = 4 << 10

// More reports whether Next has to be called again, without bytes if there are none, once what it returned has gone
// on.
func (r *Requests) More() bool { return len(r.rest) > 0 }

// Next takes bytes from the client and returns those that may go on: what belongs to requests that were
// judged. The result may hold bytes of earlier calls.
func (r *Requests) Next(b []byte) ([]byte, error) {
	var out []byte
	b, r.rest = append(r.rest, b...), nil
	for len(b) > 0 {
		var n int
		var err error
		if r.state == inHead && r.wanted && len(out) > 0 {
			r.rest = b // the server has not seen yet what it is to answer
			return out, nil
		}
		switch r.state {
		case opaque:
			return append(out, b...), nil
		case inBody, inChunk:
			n = int(min(r.left, int64(len(b))))
			out = append(out, b[:n]...)
			b = b[n:]
			if r.left -= int64(n); r.left == 0 {
				r.bodyDone()
			}
			continue
		case inHead:
			out, b, err = r.takeHead(out, b)
		case inChunkLine, inChunkEnd, inTrailer:
			out, b, err = r.takeLine(out, b)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *Requests) bodyDone() {
	if r.state == inChunk {
		r.state = inChunkEnd
	} else {
		r.state = inHead
	}
}

func (r *Requests) takeHead(out, b []byte) ([]byte, []byte, error) {
	if r.wanted {
		r.wanted = false
		if r.Switched() {
			r.state = opaque
			return out, b, nil
		}
	}
	had := len(r.head)
	r.head = append(r.head, b...)
	h, err := ParseHead(r.head)
	if errors.Is(err, ErrShort) {
		return out, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if err := r.Judge(h); err != nil {
		return nil, nil, err
	}
	out = append(out, r.head[:h.Size]...)
	b = b[h.Size-had:]
	r.head, r.wanted = nil, h.Upgrade
	switch {
	case h.Length < 0:
		r.state = inChunkLine
	case h.Length > 0:
		r.state, r.left = inBody, h.Length
	}
	return out, b, nil
}

// takeLine takes the line of a chunk, the one behind it, or a trailer.
func (r *Requests) takeLine(out, b []byte) ([]byte, []byte, error) {
	had := len(r.head)
	r.head = append(r.head, b...)
	end := bytes.IndexByte(r.head, '\n')
	if end < 0 {
		if len(r.head) > maxLine {
			return nil, nil, errors.New("a line of the request's body is too long")
		}
		return out, nil, nil
	}
	line := r.head[:end+1]
	if end == 0 || line[end-1] != '\r' || bytes.IndexByte(line[:end-1], '\r') >= 0 {
		return nil, nil, errors.New("the request has line feeds without carriage returns")
	}
	if err := r.line(string(line[:end-1])); err != nil {
		return nil, nil, err
	}
	out = append(out, line...)
	r.head = nil
	return out, b[end+1-had:], nil
}

func (r *Requests) line(s string) error {
	switch r.state {
	case inChunkEnd:
		if s != "" {
			return errors.New("a chunk of the request is longer than it says")
		}
		r.state = inChunkLine
	case inTrailer:
		if s == "" {
			r.state = inHead
		} else if name, _, ok := strings.Cut(s, ":"); !ok || !token(name) {
			return errors.New("the request has a malformed trailer")
		}
	default: // inChunkLine
		// Extensions of chunks have been used to hide requests, and nobody needs them.
		n, err := strconv.ParseUint(s, 16, 62)
		if err != nil || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
			return errors.New("a chunk of the request has no valid length")
		}
		if n == 0 {
			r.state = inTrailer
		} else {
			r.state, r.left = inChunk, int64(n)
		}
	}
	return nil
}
