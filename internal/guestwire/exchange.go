package guestwire

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"casemate.dev/internal/errs"
)

// exchange is the server's half of one call. It owns its connection.
type exchange struct {
	ctx  context.Context
	conn net.Conn
	r    *bufio.Reader // nil until a stream of frames is expected
	buf  []byte
	stop func() bool // detaches conn from ctx
	once sync.Once
	pool *pool // where the connection goes after a call that keeps it, or nil
	used bool  // the connection has carried a call before
	// text follows the call as FrameData and FrameEnd. A guest that refuses answers before it has read all, and
	// closes: then sending fails as sent says, but the reason is there to be read.
	text *string
	sent error
}

// begin sends a call over conn, which it owns from here on, on error too. When ctx ends, the
// connection is closed, which cancels the call.
func begin(ctx context.Context, conn net.Conn, m Method, body any, files []*os.File) (*exchange, error) {
	x := &exchange{ctx: ctx, conn: conn}
	return x, x.send(m, body, files)
}

// send sends the call. On error the exchange is closed.
func (x *exchange) send(m Method, body any, files []*os.File) error {
	conn := x.conn
	x.stop = context.AfterFunc(x.ctx, func() { _ = conn.Close() })
	if err := x.sendCall(m, body, files); err != nil {
		x.close()
		return x.failed(m, err)
	}
	return nil
}

// stale reports whether err says no more than that a kept connection has broken.
func (x *exchange) stale(err error) bool {
	return x.used && x.ctx.Err() == nil && errs.KindOf(err) == errs.Unavailable
}

func (x *exchange) sendCall(m Method, body any, files []*os.File) error {
	b, err := Marshal(body)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	frame := make([]byte, headerLen, headerLen+len(b)+128)
	frame, err = AppendCall(frame, Call{Version: Version, Method: m, Body: b, Keep: x.pool != nil})
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	n := len(frame) - headerLen
	if n > MaxPayload {
		return errs.New(errs.InvalidArgument, "request is too large: %d bytes, limit %d", n, MaxPayload)
	}
	appendHeader(frame[:0], FrameCall, n)
	switch {
	case len(files) > 0:
		return sendWithFiles(x.conn, frame, files)
	case x.text != nil:
		x.sent = sendText(x.conn, frame, *x.text)
		return nil
	}
	_, err = x.conn.Write(frame)
	return err
}

func sendWithFiles(conn net.Conn, frame []byte, files []*os.File) error {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return errs.New(errs.Unsupported, "this backend can't pass files to its guest")
	}
	if len(files) > MaxFiles {
		return fmt.Errorf("pass %d files: limit %d", len(files), MaxFiles)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	// The files ride on the first byte. A stream socket may take less than the whole frame.
	n, _, err := u.WriteMsgUnix(frame, syscall.UnixRights(fds...), nil)
	if err == nil && n < len(frame) {
		_, err = u.Write(frame[n:])
	}
	return err
}

// close ends the call. Idempotent.
func (x *exchange) close() {
	x.once.Do(func() {
		x.stop()
		_ = x.conn.Close()
	})
}

// done ends a call whose last frame was read: its connection may carry another. Idempotent, also with close.
func (x *exchange) done() {
	x.once.Do(func() {
		// What ctx has begun to close, or what holds bytes that nobody asked for, is of no further use.
		if x.stop() && x.pool != nil && (x.r == nil || x.r.Buffered() == 0) {
			x.pool.put(kept{x.conn, x.r, x.buf})
			return
		}
		_ = x.conn.Close()
	})
}

// failed turns what went wrong on the connection into what the caller is told.
func (x *exchange) failed(m Method, err error) error {
	if cause := x.ctx.Err(); cause != nil {
		return fmt.Errorf("%s: %w", m, cause)
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return err
	}
	var p *ProtocolError
	if errors.As(err, &p) {
		return errs.Wrap(err, errs.Internal, "the guest broke its protocol")
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return errs.Wrap(fmt.Errorf("%s: %w", m, err), errs.Unavailable, "the connection to the guest was lost")
}

// frame reads the next frame; a failure that the guest sent becomes an error.
func (x *exchange) frame() (Frame, error) {
	var r io.Reader = x.conn
	if x.r != nil {
		r = x.r
	}
	f, err := ReadFrame(r, &x.buf)
	if err != nil {
		return Frame{}, err
	}
	if f.Kind == FrameFail {
		var fail Failure
		if err := Unmarshal(f.Payload, &fail); err != nil {
			return Frame{}, err
		}
		return Frame{}, fail.Err()
	}
	return f, nil
}

// buffered makes later frames be read through a buffer. The connection's bytes can't be handed to
// anybody else from then on.
func (x *exchange) buffered() {
	if x.r == nil {
		x.r = bufio.NewReaderSize(x.conn, 4<<10)
	}
}

// reply reads the FrameReply into v, which may be nil.
func (x *exchange) reply(v any) error { return x.expect(FrameReply, v) }

func (x *exchange) expect(k Kind, v any) error {
	f, err := x.frame()
	if err != nil {
		return err
	}
	if f.Kind != k {
		return broken("frame of kind %d where %d was due", f.Kind, k)
	}
	if v == nil {
		return nil
	}
	return Unmarshal(f.Payload, v)
}

// CallAndKeep is CallOn with a connection that stays open, unless the call fails.
func CallAndKeep(ctx context.Context, conn net.Conn, m Method, body any, files []*os.File, reply any) error {
	x, err := begin(ctx, conn, m, body, files)
	if err != nil {
		return err
	}
	if err := x.reply(reply); err != nil {
		x.close()
		return x.failed(m, err)
	}
	if !x.stop() { // closed by now, or about to be
		return x.failed(m, context.Cause(ctx))
	}
	return nil
}

// CallOn makes one call over an open connection, which it closes. reply may be nil.
func CallOn(ctx context.Context, conn net.Conn, m Method, body any, files []*os.File, reply any) error {
	x, err := begin(ctx, conn, m, body, files)
	if err != nil {
		return err
	}
	defer x.close()
	if err := x.reply(reply); err != nil {
		return x.failed(m, err)
	}
	return nil
}
