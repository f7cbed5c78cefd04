package httpfile

import (
	"errors"
	"io"
)

// Body remembers how reading a request's body failed, so that the client's fault is told from
// the sandbox's.
type Body struct {
	r   io.Reader
	err error
}

// NewBody returns the body of a request.
func NewBody(r io.Reader) *Body { return &Body{r: r} }

// Err returns why reading failed; nil also at the body's end.
func (b *Body) Err() error { return b.err }

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}
