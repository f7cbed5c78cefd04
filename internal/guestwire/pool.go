package guestwire

import (
	"bufio"
	"net"
	"sync"
)

// maxKept bounds the connections that a Client keeps: more calls at a time than this are rare, and each
// costs both sides a descriptor.
const maxKept = 8

// kept is a connection on which no call is under way.
type kept struct {
	conn net.Conn
	r    *bufio.Reader // reads conn; nil where nothing was read through one
	buf  []byte        // for its frames
}

// pool holds connections between calls. The last one that came back goes out first: it is the one that the
// guest serves fastest. The zero value is ready.
type pool struct {
	// mu guards the fields below.
	mu     sync.Mutex
	idle   []kept
	closed bool
}

func (p *pool) get() (kept, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle)
	if n == 0 {
		return kept{}, false
	}
	k := p.idle[n-1]
	p.idle[n-1] = kept{}
	p.idle = p.idle[:n-1]
	return k, true
}

func (p *pool) put(k kept) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle) >= maxKept {
		_ = k.conn.Close()
		return
	}
	p.idle = append(p.idle, k)
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, k := range p.idle {
		_ = k.conn.Close()
	}
	p.idle = nil
}
