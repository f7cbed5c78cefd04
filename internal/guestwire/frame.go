package guestwire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Version is the protocol's version, which every Call carries.
const Version = 1

// Bounds of payloads, in bytes. A frame that says more is refused before it is read.
const (
	// MaxPayload bounds calls, data and output, and replies, which may repeat what a call has brought.
	MaxPayload = 1 << 20
	// MaxControl bounds events and ends.
	MaxControl = 256 << 10
	// MaxFailure bounds failures.
	MaxFailure = 16 << 10
	// MaxFiles bounds the descriptors that travel with one call.
	MaxFiles = 128
	// ChunkSize is what senders put into one FrameData or FrameOutput at most, so that a reader
	// needs no larger buffer in practice.
	ChunkSize = 64 << 10
)

const (
	headerLen = 4
	gapLen    = 16
	outputLen = 9 // stream and offset, before the bytes
)

// Kind tells what a frame carries.
type Kind byte

// The kinds of frames.
const (
	FrameCall Kind = 1 + iota
	FrameReply
	FrameFail
	FrameData
	FrameOutput
	FrameGap
	FrameEvent
	FrameEnd
	FrameItem
)

// bound returns the largest payload of k, and whether k is a kind at all.
func (k Kind) bound() (int, bool) {
	switch k {
	case FrameCall, FrameReply, FrameData, FrameOutput, FrameItem:
		return MaxPayload, true
	case FrameEvent, FrameEnd:
		return MaxControl, true
	case FrameFail:
		return MaxFailure, true
	case FrameGap:
		return gapLen, true
	}
	return 0, false
}

// ProtocolError says that the other side broke the protocol. The connection is of no further use.
type ProtocolError struct {
	Reason string
}

// Error returns what was wrong.
func (e *ProtocolError) Error() string { return "guest protocol: " + e.Reason }

func broken(format string, args ...any) error {
	return &ProtocolError{Reason: fmt.Sprintf(format, args...)}
}

// Frame is one frame as it was read.
type Frame struct {
	Kind    Kind
	Payload []byte
}

// ReadFrame reads one frame. The payload lies in *buf, which grows as needed and is valid until
// the next call with the same buffer. io.EOF means that the other side closed between two frames.
func ReadFrame(r io.Reader, buf *[]byte) (Frame, error) {
	var h [headerLen]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return Frame{}, err
	}
	return readPayload(r, h, buf)
}

func readPayload(r io.Reader, h [headerLen]byte, buf *[]byte) (Frame, error) {
	k, n, err := parseHeader(h)
	if err != nil {
		return Frame{}, err
	}
	if cap(*buf) < n {
		*buf = make([]byte, n, roundUp(n))
	}
	p := (*buf)[:n]
	if _, err := io.ReadFull(r, p); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	return Frame{Kind: k, Payload: p}, nil
}

// parseHeader checks a header before anything is allocated for its payload.
func parseHeader(h [headerLen]byte) (Kind, int, error) {
	k := Kind(h[0])
	n := int(h[1])<<16 | int(h[2])<<8 | int(h[3])
	limit, ok := k.bound()
	switch {
	case !ok:
		return 0, 0, broken("frame of unknown kind %d", k)
	case n > limit:
		return 0, 0, broken("frame of kind %d with %d bytes, limit %d", k, n, limit)
	case k == FrameGap && n != gapLen, k == FrameOutput && n < outputLen, k == FrameItem && n < itemLen:
		return 0, 0, broken("frame of kind %d with %d bytes", k, n)
	}
	return k, n, nil
}

// roundUp spares regrowing a buffer for each slightly larger frame. Most frames are small, and memory that
// is not used is cleared and cached in vain.
func roundUp(n int) int {
	step := 256
	if n > 4<<10 {
		step = 4 << 10
	}
	return (n + step - 1) / step * step
}

// AppendFrame appends a frame to b. The payload must be within the kind's bound.
func AppendFrame(b []byte, k Kind, payload []byte) []byte {
	b = appendHeader(b, k, len(payload))
	return append(b, payload...)
}

func appendHeader(b []byte, k Kind, n int) []byte {
	return append(b, byte(k), byte(n>>16), byte(n>>8), byte(n))
}

// AppendOutput appends a FrameOutput to b. data must be at most ChunkSize long.
func AppendOutput(b []byte, s Stream, offset int64, data []byte) []byte {
	b = appendHeader(b, FrameOutput, outputLen+len(data))
	b = append(b, byte(s))
	b = binary.BigEndian.AppendUint64(b, uint64(offset))
	return append(b, data...)
}

// AppendGap appends a FrameGap to b: the output from one offset to another is gone.
func AppendGap(b []byte, from, to int64) []byte {
	b = appendHeader(b, FrameGap, gapLen)
	b = binary.BigEndian.AppendUint64(b, uint64(from))
	return binary.BigEndian.AppendUint64(b, uint64(to))
}

// WriteFrame writes one frame with a single Write.
func WriteFrame(w io.Writer, k Kind, payload []byte) error {
	if limit, ok := k.bound(); !ok || len(payload) > limit {
		return fmt.Errorf("write frame of kind %d with %d bytes: over its bound", k, len(payload))
	}
	_, err := w.Write(AppendFrame(make([]byte, 0, headerLen+len(payload)), k, payload))
	return err
}

func parseOutput(p []byte) (s Stream, offset int64, data []byte, err error) {
	s = Stream(p[0])
	offset = int64(binary.BigEndian.Uint64(p[1:]))
	if s < Stdout || s > TTY || offset < 0 {
		return 0, 0, nil, broken("output of stream %d at offset %d", s, offset)
	}
	return s, offset, p[outputLen:], nil
}

func parseGap(p []byte) (from, to int64, err error) {
	from = int64(binary.BigEndian.Uint64(p))
	to = int64(binary.BigEndian.Uint64(p[8:]))
	if from < 0 || to <= from {
		return 0, 0, broken("gap from %d to %d", from, to)
	}
	return from, to, nil
}
