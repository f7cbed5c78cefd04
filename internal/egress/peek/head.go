package peek

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// MaxHead bounds the head of a request: its line and headers.
const MaxHead = 64 << 10

// Head is the head of an HTTP/1 request.
type Head struct {
	Method  string
	Target  string // as sent
	Host    string // of the Host header, as sent, perhaps with a port
	Path    string // of the target, without query
	Upgrade bool   // asks for another protocol
	Length  int64  // of the body; -1: chunked
	Size    int    // bytes of the head, with the empty line
}

// LooksLikeHTTP reports whether bytes may begin an HTTP/1 request: a method and a space. more says that
// there are too few to tell.
func LooksLikeHTTP(b []byte) (yes, more bool) {
	const longest = 20 // of any method in use
	for i, c := range b {
		switch {
		case c == ' ' && i > 0:
			return true, false
		case i >= longest || (c < 'A' || c > 'Z') && c != '-':
			return false, false
		}
	}
	return false, true
}

// ParseHead parses the head of a request. ErrShort says that more bytes are needed.
func ParseHead(b []byte) (Head, error) {
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		if len(b) > MaxHead {
			return Head{}, fmt.Errorf("the head of the request is longer than %d bytes", MaxHead)
		}
		// Some servers take a bare line feed for the end, and would see a request where we see none.
		if bare(b) {
			return Head{}, errors.New("the request has line feeds without carriage returns")
		}
		return Head{}, ErrShort
	}
	if end > MaxHead {
		return Head{}, fmt.Errorf("the head of the request is longer than %d bytes", MaxHead)
	}
	head := b[:end]
	if bare(head) {
		return Head{}, errors.New("the request has line feeds without carriage returns")
	}
	lines := strings.Split(string(head), "\r\n")
	h := Head{Size: end + 4}
	if err := h.requestLine(lines[0]); err != nil {
		return Head{}, err
	}
	if err := h.headers(lines[1:]); err != nil {
		return Head{}, err
	}
	return h, nil
}

// bare reports whether a line feed stands without its carriage return, or one of these without it.
func bare(b []byte) bool {
	for i, c := range b {
		if c == '\n' && (i == 0 || b[i-1] != '\r') || c == '\r' && i+1 < len(b) && b[i+1] != '\n' {
			return true
		}
	}
	return false
}

func (h *Head) requestLine(line string) error {
	parts := strings.Split(line, " ")
	if len(parts) != 3 || parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0" {
		return errors.New("the request line is not one of HTTP/1")
	}
	h.Method, h.Target = parts[0], parts[1]
	if !token(h.Method) {
		return errors.New("the request has no valid method")
	}
	for _, c := range []byte(h.Target) {
		if c <= ' ' || c >= 0x7f || c == '#' || c == '\\' || c == '"' || c == '<' || c == '>' {
			return fmt.Errorf("the request's target holds the character %q", rune(c))
		}
	}
	switch {
	case strings.HasPrefix(h.Target, "/"):
		h.Path, _, _ = strings.Cut(h.Target, "?")
	case h.Target == "*" && h.Method == "OPTIONS":
		h.Path = "*"
	default:
		// With a host in the target, servers differ in which of the two they take; CONNECT is for proxies.
		return errors.New("the request's target is no path")
	}
	return nil
}

func (h *Head) headers(lines []string) error {
	hosts, lengths, encodings := 0, 0, 0
	for _, line := range lines {
		name, value, ok := strings.Cut(line, ":")
		if !ok || !token(name) {
			return errors.New("the request has a malformed header")
		}
		value = strings.Trim(value, " \t")
		if strings.IndexFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) >= 0 {
			return errors.New("the request has a header with control characters")
		}
		switch strings.ToLower(name) {
		case "host":
			hosts++
			h.Host = value
		case "content-length":
			n, err := strconv.ParseUint(value, 10, 62)
			if err != nil || strings.Trim(value, "0123456789") != "" {
				return errors.New("the request has no valid Content-Length")
			}
			lengths++
			h.Length = int64(n)
		case "transfer-encoding":
			encodings++
			if !strings.EqualFold(value, "chunked") {
				return fmt.Errorf("the request has the transfer encoding %q", value)
			}
		case "upgrade":
			h.Upgrade = true
		}
	}
	switch {
	case hosts != 1 || h.Host == "":
		return errors.New("the request has not exactly one Host header")
	case lengths+encodings > 1:
		return errors.New("the request says its length more than once")
	}
	if encodings == 1 {
		h.Length = -1
	}
	return nil
}

// token reports whether s is a token of RFC 9110, section 5.6.2.
func token(s string) bool {
	if s == "" {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return true
}

// HostPort splits a Host header into host and port, 0 where it names none.
func HostPort(s string) (host string, port uint16, err error) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") {
		return s, 0, nil
	}
	n, err := strconv.ParseUint(s[i+1:], 10, 16)
	if err != nil || n == 0 {
		return "", 0, errors.New("the Host header has no valid port")
	}
	return s[:i], uint16(n), nil
}
