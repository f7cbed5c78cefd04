package guestwire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"casemate.dev/internal/errs"
)

// Conn is the guest's half of a connection. It is not safe for concurrent use.
type Conn struct {
	net.Conn
	in      []byte
	oob     []byte
	out     []byte
	head    []byte // of the call before, and
	said    Call   // what it said
	held    []byte // what Hold keeps back
	holding bool
	ended   bool
}

// NewConn returns the guest's half of a connection.
func NewConn(c net.Conn) *Conn { return &Conn{Conn: c} }

// Hold keeps back what is written until Flush, which then writes all of it at once.
func (c *Conn) Hold() { c.holding = true }

// Flush writes what was held back. What is written later goes out at once.
func (c *Conn) Flush() error {
	if !c.holding {
		return nil
	}
	c.holding = false
	_, err := c.Conn.Write(c.held)
	c.held = c.held[:0]
	return err
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	if c.holding {
		c.held = append(c.held, p...)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// ReadCall reads the Call that opens the connection, byte for byte and no further, so that the
// connection can be handed on to another process. The files that came with it belong to the
// caller; on error there are none.
func (c *Conn) ReadCall() (Call, []*os.File, error) {
	c.ended = false
	var h [headerLen]byte
	files, err := c.readHeader(&h)
	if err != nil {
		return Call{}, nil, err
	}
	call, err := c.readCall(h)
	if err != nil {
		closeAll(files)
		return Call{}, nil, err
	}
	return call, files, nil
}

func (c *Conn) readCall(h [headerLen]byte) (Call, error) {
	f, err := readPayload(c.Conn, h, &c.in)
	if err != nil {
		return Call{}, err
	}
	c.in = nil // Call.Body lies in it
	if f.Kind != FrameCall {
		return Call{}, broken("frame of kind %d instead of a call", f.Kind)
	}
	call, err := c.parse(f.Payload)
	if err != nil {
		return Call{}, err
	}
	if call.Version != Version {
		return call, errs.New(errs.Unsupported,
			"the guest speaks version %d of its protocol, not %d: start the sandbox anew", Version, call.Version)
	}
	return call, nil
}

// parse is parseCall. Calls on one connection mostly say the same before their bodies, which is decoded once.
func (c *Conn) parse(p []byte) (Call, error) {
	if end := len(c.head); end > 0 && len(p) >= end && bytes.Equal(p[:end], c.head) {
		call := c.said
		call.Body = p[end:]
		return call, nil
	}
	call, err := parseCall(p)
	if err == nil {
		c.head = append(c.head[:0], p[:len(p)-len(call.Body)]...)
		c.said = call
		c.said.Body = nil
	}
	return call, err
}

// filesReader is a connection that carries files: a *net.UnixConn, or what stands in for one.
type filesReader interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// readHeader takes the files with the first byte: the kernel hands them out with the data that they
// were sent with (unix(7)), and drops them if that is read without recvmsg.
func (c *Conn) readHeader(h *[headerLen]byte) ([]*os.File, error) {
	u, ok := c.Conn.(filesReader)
	if !ok {
		_, err := io.ReadFull(c.Conn, h[:])
		return nil, err
	}
	if c.oob == nil {
		c.oob = make([]byte, syscall.CmsgSpace(4*MaxFiles))
	}
	n, oobn, flags, _, err := u.ReadMsgUnix(h[:], c.oob)
	if err != nil {
		return nil, err
	}
	files, err := parseFiles(c.oob[:oobn])
	if err == nil && flags&syscall.MSG_CTRUNC != 0 {
		err = broken("call with more than %d files", MaxFiles)
	}
	if err == nil && n < len(h) {
		if n == 0 {
			err = io.EOF
		} else {
			_, err = io.ReadFull(c.Conn, h[n:])
		}
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func parseFiles(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, broken("control message: %v", err)
	}
	var files []*os.File
	for i := range msgs {
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // credentials or the like: nothing to own
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// ReadFrame reads the next frame of the server; its payload is valid until the next call.
func (c *Conn) ReadFrame() (Frame, error) { return ReadFrame(c.Conn, &c.in) }

// Reply sends the method's answer.
func (c *Conn) Reply(v any) error { return c.last(c.message(FrameReply, v), v == nil) }

// Event sends one item of a list or a watch.
func (c *Conn) Event(v any) error { return c.message(FrameEvent, v) }

// End sends the last frame of a stream, with v unless it is nil.
func (c *Conn) End(v any) error { return c.last(c.message(FrameEnd, v), true) }

// Ended reports whether the call's last frame was sent: a FrameEnd, or a FrameReply that only says "ok".
func (c *Conn) Ended() bool { return c.ended }

func (c *Conn) last(err error, is bool) error {
	c.ended = err == nil && is
	return err
}

// Fail sends why the call did not work.
func (c *Conn) Fail(err error) error { return c.message(FrameFail, FailureOf(err)) }

// Data sends bytes, in frames of at most ChunkSize.
func (c *Conn) Data(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), ChunkSize)
		if err := c.send(FrameData, p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// Output sends output of a process, at most ChunkSize bytes.
func (c *Conn) Output(s Stream, offset int64, data []byte) error {
	c.out = AppendOutput(c.out[:0], s, offset, data)
	_, err := c.Write(c.out)
	return err
}

// OutputHeader is how many bytes PutOutput puts before the data.
const OutputHeader = headerLen + outputLen

// PutOutput makes a FrameOutput of buf, whose first OutputHeader bytes it fills in; the rest is the
// data, at most ChunkSize. So output goes from a buffer to the socket without another copy.
func PutOutput(buf []byte, s Stream, offset int64) {
	b := appendHeader(buf[:0], FrameOutput, len(buf)-headerLen)
	b = append(b, byte(s))
	binary.BigEndian.AppendUint64(b, uint64(offset))
}

// Gap tells that output between two offsets is gone.
func (c *Conn) Gap(from, to int64) error {
	c.out = AppendGap(c.out[:0], from, to)
	_, err := c.Write(c.out)
	return err
}

func (c *Conn) message(k Kind, v any) error {
	b, err := Marshal(v)
	if err != nil {
		return fmt.Errorf("encode frame of kind %d: %w", k, err)
	}
	return c.send(k, b)
}

func (c *Conn) send(k Kind, payload []byte) error {
	if limit, _ := k.bound(); len(payload) > limit {
		return fmt.Errorf("send frame of kind %d with %d bytes: over its bound", k, len(payload))
	}
	c.out = AppendFrame(c.out[:0], k, payload)
	_, err := c.Write(c.out)
	return err
}
