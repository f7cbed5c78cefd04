package inspect

import (
	"bufio"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
)

// maxCodings bounds the encodings of one body, each of which costs memory to undo.
const maxCodings = 4

// errUnreadable says that a body has an encoding that can't be undone here.
var errUnreadable = errors.New("the body has an encoding that can't be read")

// plainBody returns a response's body without its encodings, and takes them out of the header h that goes on. The error
// is errUnreadable, with the body as it is.
func plainBody(resp *http.Response, h http.Header) (io.ReadCloser, error) {
	codings := codingsOf(resp.Header)
	if len(codings) == 0 || resp.Request.Method == http.MethodHead || resp.ContentLength == 0 ||
		resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified {
		return resp.Body, nil
	}
	// Of an answer in pieces the decoder would see the middle.
	if len(codings) > maxCodings || resp.StatusCode == http.StatusPartialContent || slices.ContainsFunc(codings, func(c string) bool { return decoderOf(c) == nil }) {
		return resp.Body, errUnreadable
	}
	body := resp.Body
	for _, c := range slices.Backward(codings) {
		body = &decodedBody{src: body, open: decoderOf(c)}
	}
	h.Del("Content-Encoding")
	h.Del("Content-Length")
	return body, nil
}

// codingsOf returns the encodings of a body in the order in which they were put on (RFC 9110, 8.4).
func codingsOf(h http.Header) []string {
	var out []string
	for _, line := range h.Values("Content-Encoding") {
		for c := range strings.SplitSeq(line, ",") {
			if c = strings.ToLower(strings.TrimSpace(c)); c != "" && c != "identity" {
				out = append(out, c)
			}
		}
	}
	return out
}

// decoderOf returns what undoes an encoding, nil where nothing does.
func decoderOf(coding string) func(io.Reader) (io.Reader, error) {
	switch coding {
	case "gzip", "x-gzip":
		return func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }
	case "deflate":
		return inflate
	}
	return nil
}

// inflate reads deflate as servers write it: with zlib's frame, as RFC 9110 wants it, or without.
func inflate(r io.Reader) (io.Reader, error) {
	b := bufio.NewReader(r)
	head, err := b.Peek(2)
	if err != nil {
		return nil, err
	}
	const method = 8 // deflate, in a frame's first byte (RFC 1950, 2.2)
	if head[0]&0x0f == method && (uint(head[0])<<8|uint(head[1]))%31 == 0 {
		return zlib.NewReader(b)
	}
	return flate.NewReader(b), nil
}

// decodedBody undoes one encoding. The decoder is made at the first read, since that reads from the server.
type decodedBody struct {
	src  io.ReadCloser
	open func(io.Reader) (io.Reader, error)
	from io.Reader
}

// Read implements io.Reader.
func (d *decodedBody) Read(p []byte) (int, error) {
	if d.from == nil {
		from, err := d.open(d.src)
		if err != nil {
			return 0, err
		}
		d.from = from
	}
	return d.from.Read(p)
}

// Close implements io.Closer.
func (d *decodedBody) Close() error { return d.src.Close() }
