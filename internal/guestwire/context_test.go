package guestwire

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// FuzzItems reads what a guest might send as a run's items: they join without holes and are bounded.
func FuzzItems(f *testing.F) {
	pair := func(send func(c *Conn)) []byte {
		var b bytes.Buffer
		send(NewConn(writer{&b}))
		return b.Bytes()
	}
	f.Add(pair(func(c *Conn) {
		_ = c.Item(ItemStdout, 0, []byte("hello"))
		_ = c.Item(ItemResult, 1, bytes.Repeat([]byte("x"), ChunkSize+1))
		_ = c.Gap(2, 5)
		_ = c.End(RunInfo{ID: "r", End: RunCompleted})
	}))
	f.Add([]byte{byte(FrameItem), 0, 0, 10, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{byte(FrameItem), 0, 0, 9, 1, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &ItemStream{x: &exchange{ctx: context.Background(), conn: &conn{r: bytes.NewReader(b)}, stop: func() bool { return true }}, method: MethodContextItems}
		next := int64(0)
		for {
			i, err := s.Next()
			if err != nil {
				return
			}
			if i.Number != next || len(i.Data) > MaxItem || i.Next() <= next {
				t.Fatalf("item %+v where %d was due", i, next)
			}
			next = i.Next()
		}
	})
}

// writer is a connection that only takes.
type writer struct{ io.Writer }

func (writer) Read([]byte) (int, error)         { return 0, io.EOF }
func (writer) Close() error                     { return nil }
func (writer) LocalAddr() net.Addr              { return nil }
func (writer) RemoteAddr() net.Addr             { return nil }
func (writer) SetDeadline(time.Time) error      { return nil }
func (writer) SetReadDeadline(time.Time) error  { return nil }
func (writer) SetWriteDeadline(time.Time) error { return nil }

func TestItemsOverFrames(t *testing.T) {
	var b bytes.Buffer
	c := NewConn(writer{&b})
	big := bytes.Repeat([]byte("0123456789"), 50_000)
	for i, data := range [][]byte{[]byte("a"), big, nil, []byte("z")} {
		if err := c.Item(ItemResult, int64(i), data); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.End(RunInfo{ID: "r", End: RunFailed}); err != nil {
		t.Fatal(err)
	}
	s := &ItemStream{x: &exchange{ctx: t.Context(), conn: &conn{r: &b}, stop: func() bool { return true }}, method: MethodContextItems}
	for _, want := range [][]byte{[]byte("a"), big, nil, []byte("z")} {
		if i, err := s.Next(); err != nil || !bytes.Equal(i.Data, want) {
			t.Fatalf("item of %d bytes, %v; want %d", len(i.Data), err, len(want))
		}
	}
	if _, err := s.Next(); !errors.Is(err, io.EOF) || s.Info().End != RunFailed {
		t.Errorf("end %v, %+v", err, s.Info())
	}
}
