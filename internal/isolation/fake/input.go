package fake

import (
	"io"
	"sync"

	"casemate.dev/internal/errs"
)

// maxInput bounds what waits unread in a process's standard input, as a pipe does.
const maxInput = 64 << 10

// input is a process's standard input.
type input struct {
	// mu guards the fields below.
	mu      sync.Mutex
	changed *sync.Cond
	data    []byte
	taken   int64
	closed  bool
}

func newInput() *input {
	in := &input{}
	in.changed = sync.NewCond(&in.mu)
	return in
}

func (in *input) Read(p []byte) (int, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for len(in.data) == 0 {
		if in.closed {
			return 0, io.EOF
		}
		in.changed.Wait()
	}
	n := copy(p, in.data)
	in.data = in.data[n:]
	in.changed.Broadcast()
	return n, nil
}

// write takes bytes whose first one has that offset; what was taken before is left out.
func (in *input) write(offset int64, p []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if skip := in.taken - offset; skip > 0 {
		p = p[min(skip, int64(len(p))):]
	}
	for len(p) > 0 {
		for len(in.data) >= maxInput && !in.closed {
			in.changed.Wait()
		}
		if in.closed {
			return errs.New(errs.FailedPrecondition, "standard input is closed")
		}
		n := min(len(p), maxInput-len(in.data))
		in.data = append(in.data, p[:n]...)
		in.taken += int64(n)
		p = p[n:]
		in.changed.Broadcast()
	}
	return nil
}

func (in *input) offset() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.taken
}

func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	in.changed.Broadcast()
}
