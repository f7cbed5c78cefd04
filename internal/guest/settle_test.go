package guest

import (
	"io"
	"os"
	"testing"
	"time"

	"casemate.dev/internal/guest/output"
	"casemate.dev/internal/guestwire"
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
	p := &process{open: 1, ended: ended, sources: []drain{{raw: raw, kind: guestwire.Stdout}}}
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

// TestOutputFromBeforeTheEndIsOwed: a holder that is slow may make a pump late after it has put a first piece into
// the buffer. What the process had printed before it ended is not lost, even so.
func TestOutputFromBeforeTheEndIsOwed(t *testing.T) {
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
	p := &process{open: 1, sources: []drain{{raw: raw, kind: guestwire.Stdout}}, out: output.NewPool(1<<20).NewBuffer(0, false)}
	p.oweLocked()
	p.ended = time.Now().Add(-2 * lateGrace)
	p.last = p.ended.Add(time.Millisecond)
	if wait, due := p.settleLocked(); due || wait <= 0 {
		t.Errorf("complete although what came before the end is unread: %v %v", wait, due)
	}
	// The twin: what comes after the end is not owed.
	p.sources[0].owed = 0
	if _, due := p.settleLocked(); !due {
		t.Error("what came after the end holds the caller")
	}
	p.oweLocked()
	piece := make([]byte, 4)
	if _, err := io.ReadFull(r, piece); err != nil {
		t.Fatal(err)
	}
	p.taking(true)
	p.print(guestwire.Stdout, piece)
	if _, err := w.WriteString("a daemon's"); err != nil {
		t.Fatal(err)
	}
	p.last = p.ended.Add(time.Millisecond)
	if _, due := p.settleLocked(); !due {
		t.Error("all that was owed is there, and the caller is held")
	}
	// A chunk on its way when the process ends is not taken for what lies in the pipe.
	p.taking(true)
	p.oweLocked()
	p.print(guestwire.Stdout, piece)
	p.last = p.ended.Add(time.Millisecond)
	if _, due := p.settleLocked(); due {
		t.Error("a chunk from before the end was taken for what is unread")
	}
}
