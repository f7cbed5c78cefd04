package inspect

import (
	"errors"
	"io"
	"sync"
)

// The bounds of what is held in memory of model requests and answers, as they came; what is made of it is three times
// as much at most. One sandbox can't take the gateway from the others so.
const (
	maxHeld    = 48 << 20 // of one sandbox
	maxHeldAll = 256 << 20
)

// The same for what is kept of requests and answers that are under way.
const (
	maxTaken    = 16 << 20
	maxTakenAll = 128 << 20
)

// holds counts what is held. It is safe for concurrent use.
type holds struct {
	most, mostAll int64 // of one sandbox, and of all

	// mu guards the fields below.
	mu  sync.Mutex
	of  map[string]int64 // by sandbox
	all int64
}

// lease is what one request holds.
type lease struct {
	h       *holds
	sandbox string
	n       int64
}

// add reports whether n more bytes may be held.
func (l *lease) add(n int) bool {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	if l.h.of[l.sandbox]+int64(n) > l.h.most || l.h.all+int64(n) > l.h.mostAll {
		return false
	}
	if l.h.of == nil {
		l.h.of = make(map[string]int64)
	}
	l.h.of[l.sandbox] += int64(n)
	l.h.all += int64(n)
	l.n += int64(n)
	return true
}

// end gives all of it back.
func (l *lease) end() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	if l.n == 0 {
		return
	}
	l.h.all -= l.n
	if l.h.of[l.sandbox] -= l.n; l.h.of[l.sandbox] <= 0 {
		delete(l.h.of, l.sandbox)
	}
	l.n = 0
}

// The reasons for which a body is not taken.
var (
	errTooLong = errors.New("the request's body is longer than 32 MiB")
	errHeld    = errors.New("the sandbox has too much of large model requests under way; try again when they are through")
)

// readHeld reads all of a body that is held.
func readHeld(src io.Reader, l *lease) ([]byte, error) {
	var out []byte
	room := make([]byte, 32<<10)
	for {
		n, err := src.Read(room)
		if len(out)+n > maxModelBody {
			return nil, errTooLong
		}
		if !l.add(n) {
			return nil, errHeld
		}
		out = append(out, room[:n]...)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, errors.New("the request's body ended early")
		}
	}
}
