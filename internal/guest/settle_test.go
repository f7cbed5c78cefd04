package guest

import (
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestUnreadOutputIsNotSilent: where the guest gets no processor time, its pumps may come later than the
// time after which output counts as silent. What waits in a pipe is not lost.
func TestUnreadOutputIsNotSilent(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	raw, err := r.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("said"); err != nil {
		t.Fatal(err)
	}
	ended := time.Now().Add(-2 * lateGrace)
	p := &process{open: 1, ended: ended, sources: []syscall.RawConn{raw}}
	if wait, due := p.settleLocked(); due || wait <= 0 {
		t.Errorf("complete although a pipe holds something: %v %v", wait, due)
	}
	// The twin: without the look it would be complete.
	if _, due := (&process{open: 1, ended: ended}).settleLocked(); !due {
		t.Error("silent output does not count as complete")
	}
	// A daemon that goes on printing holds nobody.
	p.last = ended.Add(time.Millisecond)
	if _, due := p.settleLocked(); !due {
		t.Error("who prints on after the end is not cut off")
	}
	p.last = time.Time{}
	if _, err := io.ReadFull(r, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if _, due := p.settleLocked(); !due {
		t.Error("not complete although all is read")
	}
}
