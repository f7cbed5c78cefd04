package inspect

import (
	"encoding/binary"
	"io"
	"maps"
	"net"
	"net/http"
	"sync"

	"casemate.dev/internal/egress/rules"
)

// switchTo passes a connection on that has become one of another protocol, after a head that may go to the client. Only
// WebSocket is asked for.
func (x *flow) switchTo(w http.ResponseWriter, resp *http.Response, head http.Header, protocol string, n *needles) {
	server, ok := resp.Body.(io.ReadWriteCloser)
	if !ok || protocol != "websocket" {
		fail(w, http.StatusBadGateway, rules.Unreachable, "the server switched to a protocol that nobody asked for")
		return
	}
	h := w.Header()
	maps.Copy(h, head)
	h.Set("Connection", "Upgrade")
	h.Set("Upgrade", "websocket")
	w.WriteHeader(http.StatusSwitchingProtocols)
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	var from io.Reader = server
	if n != nil {
		from = &frames{m: masker{n: n}, src: server}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(server, rw) // an end on one side ends the other
		closeWrite(server)
	})
	_, _ = io.Copy(stallGuard{conn}, from)
	_ = conn.Close()
	_ = server.Close()
	wg.Wait()
}

// closeWrite ends one direction where that can be done, else both.
func closeWrite(c io.Closer) {
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		return
	}
	_ = c.Close()
}

var _ net.Conn = stallGuard{}

// frames masks the payload of WebSocket frames that a server sends (RFC 6455, 5.2). A message in several
// frames is looked at frame by frame; of a frame longer than frameHold, piece by piece, with what may be
// the beginning of a form waiting for the next piece.
type frames struct {
	m     masker // of the frame
	src   io.Reader
	raw   []byte // not looked at yet
	out   []byte // to be read
	left  uint64 // of the frame's payload
	err   error
	inner bool // within a payload
	room  []byte
}

// frameHold bounds what is kept of a frame until it is whole.
const frameHold = 64 << 10

// Read implements io.Reader.
func (f *frames) Read(p []byte) (int, error) {
	for len(f.out) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		if f.room == nil {
			f.room = make([]byte, 16<<10)
		}
		n, err := f.src.Read(f.room)
		f.raw, f.err = append(f.raw, f.room[:n]...), err
		for f.step() {
		}
		if f.err != nil { // what is left of a frame that never ends
			rest, _ := f.m.add(f.raw, true)
			f.out, f.raw = append(f.out, rest...), nil
		}
	}
	n := copy(p, f.out)
	f.out = f.out[n:]
	return n, nil
}

// step takes one header or one piece of a payload, and reports whether there was one.
func (f *frames) step() bool {
	if !f.inner {
		size, payload, ok := frameHeader(f.raw)
		if !ok {
			return false
		}
		f.out = append(f.out, f.raw[:size]...)
		f.raw, f.left, f.inner = f.raw[size:], payload, payload > 0
		return true
	}
	have := min(uint64(len(f.raw)), f.left)
	if have < f.left && have < frameHold {
		return false
	}
	piece := f.raw[:have]
	f.raw, f.left = f.raw[have:], f.left-have
	ready, _ := f.m.add(piece, f.left == 0)
	f.out = append(f.out, ready...)
	f.inner = f.left > 0
	return have > 0 || !f.inner
}

// frameHeader returns the size of a frame's header and of its payload.
func frameHeader(b []byte) (size int, payload uint64, ok bool) {
	if len(b) < 2 {
		return 0, 0, false
	}
	size, payload = 2, uint64(b[1]&0x7f)
	switch payload {
	case 126:
		size = 4
	case 127:
		size = 10
	}
	if b[1]&0x80 != 0 {
		size += 4 // a mask, which servers do not use
	}
	if len(b) < size {
		return 0, 0, false
	}
	switch payload {
	case 126:
		payload = uint64(binary.BigEndian.Uint16(b[2:]))
	case 127:
		payload = binary.BigEndian.Uint64(b[2:])
	}
	return size, payload, true
}
