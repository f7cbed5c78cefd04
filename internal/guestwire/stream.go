package guestwire

import (
	"context"
	"errors"
	"io"
	"net"
)

// Item is one piece of a process's output: bytes, or with Gap set the lack of them.
type Item struct {
	Stream Stream // 0 for a gap
	Offset int64  // of the first byte
	// Data is valid until the next call of Next.
	Data []byte
	// Gap is how many bytes from Offset on were dropped; 0 where the item carries data.
	Gap int64
}

// End returns the offset behind the item.
func (i Item) End() int64 { return i.Offset + int64(len(i.Data)) + i.Gap }

// OutputStream reads a process's output. It is not safe for concurrent use, but Close may be called
// at any time.
type OutputStream struct {
	x      *exchange
	method Method
	next   int64
	info   ProcessInfo
	err    error
}

// Next returns the next item. Items join without holes: each begins where the last one ended.
// io.EOF means that the guest said all it had to say, and Info tells the process's state then; any
// other error means that this is not known.
func (s *OutputStream) Next() (Item, error) {
	if s.err != nil {
		return Item{}, s.err
	}
	item, err := s.read()
	if err == io.EOF {
		s.err = err
		s.x.done()
	} else if err != nil {
		s.err = s.x.failed(s.method, err)
		s.x.close()
	}
	return item, s.err
}

func (s *OutputStream) read() (Item, error) {
	f, err := s.x.frame()
	if err != nil {
		return Item{}, lost(err)
	}
	var item Item
	switch f.Kind {
	case FrameOutput:
		item.Stream, item.Offset, item.Data, err = parseOutput(f.Payload)
	case FrameGap:
		var to int64
		item.Offset, to, err = parseGap(f.Payload)
		item.Gap = to - item.Offset
	case FrameEnd:
		if err := Unmarshal(f.Payload, &s.info); err != nil {
			return Item{}, err
		}
		return Item{}, io.EOF
	default:
		err = broken("frame of kind %d in output", f.Kind)
	}
	if err == nil && item.Offset != s.next {
		err = broken("output at offset %d where %d was due", item.Offset, s.next)
	}
	if err != nil {
		return Item{}, err
	}
	s.next = item.End()
	return item, nil
}

// Offset returns where the next item begins: what to resume from after an error.
func (s *OutputStream) Offset() int64 { return s.next }

// Info returns the process's state as the stream's end told it. It is only meaningful after Next
// has returned io.EOF.
func (s *OutputStream) Info() ProcessInfo { return s.info }

// Close stops the following. Idempotent.
func (s *OutputStream) Close() { s.x.close() }

// lost keeps a connection that ended between two frames from looking like the stream's own end.
func lost(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// EventStream reads the items of a list or a watch. It is not safe for concurrent use, but Close
// may be called at any time.
type EventStream[T any] struct {
	x      *exchange
	method Method
	err    error
}

func events[T any](ctx context.Context, c *Client, m Method, body any) (*EventStream[T], error) {
	x, err := c.begin(ctx, m, body, nil)
	if err != nil {
		return nil, err
	}
	x.buffered()
	return &EventStream[T]{x: x, method: m}, nil
}

// Next returns the next item, and io.EOF once the guest has sent all of them.
func (s *EventStream[T]) Next() (T, error) {
	var v T
	if s.err != nil {
		return v, s.err
	}
	f, err := s.x.frame()
	switch {
	case err != nil:
		err = lost(err)
	case f.Kind == FrameEvent:
		err = Unmarshal(f.Payload, &v)
	case f.Kind == FrameEnd:
		s.err = io.EOF
		s.x.done()
		return v, s.err
	default:
		err = broken("frame of kind %d in a list", f.Kind)
	}
	if err != nil {
		s.err = s.x.failed(s.method, err)
		s.x.close()
		var zero T
		return zero, s.err
	}
	return v, nil
}

// Close ends the call. Idempotent.
func (s *EventStream[T]) Close() { s.x.close() }

// fileReader reads the FrameData of a file.
type fileReader struct {
	x    *exchange
	rest []byte
	err  error
}

func (r *fileReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 && r.err == nil {
		f, err := r.x.frame()
		switch {
		case err != nil:
			r.err = r.x.failed(MethodRead, lost(err))
		case f.Kind == FrameData:
			r.rest = f.Payload
		case f.Kind == FrameEnd:
			r.err = io.EOF
		default:
			r.err = r.x.failed(MethodRead, broken("frame of kind %d in a file", f.Kind))
		}
	}
	if len(r.rest) == 0 {
		return 0, r.err
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *fileReader) Close() error {
	r.x.close()
	return nil
}

// upload makes a call whose body is followed by what in gives.
func upload[T any](ctx context.Context, c *Client, m Method, body any, in io.Reader) (T, error) {
	var v T
	x, err := c.begin(ctx, m, body, nil)
	if err != nil {
		return v, err
	}
	defer x.close()
	readErr, sendErr := sendData(x.conn, in)
	if readErr != nil {
		// Without FrameEnd the guest drops what it got.
		return v, readErr
	}
	// A guest that refuses answers before it has read everything, and closes: then the send fails,
	// but the reason is there to be read.
	if err := x.reply(&v); err != nil {
		if sendErr != nil && !hasKind(err) {
			err = sendErr
		}
		var zero T
		return zero, x.failed(m, err)
	}
	return v, nil
}

// sendData sends frames until in ends, then FrameEnd.
func sendData(conn net.Conn, in io.Reader) (readErr, sendErr error) {
	var frame []byte
	if in != nil {
		frame = make([]byte, headerLen+ChunkSize)
	}
	for in != nil {
		n, err := in.Read(frame[headerLen:])
		if n > 0 {
			appendHeader(frame[:0], FrameData, n)
			if _, err := conn.Write(frame[:headerLen+n]); err != nil {
				return nil, err
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err, nil
		}
	}
	return nil, WriteFrame(conn, FrameEnd, nil)
}
