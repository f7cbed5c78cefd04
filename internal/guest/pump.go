package guest

import (
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

// chunkSize is what is read from a pipe at once.
const chunkSize = 32 << 10

// chunks lends buffers, so that a pipe on which nothing comes holds none.
type chunks struct{ pool sync.Pool }

func (c *chunks) get() *[chunkSize]byte {
	if b, ok := c.pool.Get().(*[chunkSize]byte); ok {
		return b
	}
	return new([chunkSize]byte)
}

func (c *chunks) put(b *[chunkSize]byte) { c.pool.Put(b) }

// pump moves what a process prints into its buffer, until every writer has closed the stream. rest was read
// before.
func (p *process) pump(f *os.File, s guestwire.Stream, rest []byte, lend *chunks) {
	defer p.pumped(f)
	if len(rest) > 0 {
		p.taking(true)
		p.print(s, rest)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		buf, n := receive(raw, lend, p.taking)
		if buf == nil {
			return
		}
		if n <= 0 {
			lend.put(buf)
			p.taking(false)
			return
		}
		p.print(s, buf[:n])
		lend.put(buf)
	}
}

// taking notes that a pump is about to read, or that there was nothing: what it has read is on its way into
// the buffer, and the output is not complete before it is there.
func (p *process) taking(begins bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if begins {
		p.busy++
	} else {
		p.busy--
	}
}

// receive waits for bytes and only then takes a buffer for them; taking is told before it looks, and after
// it found nothing. It returns none where the descriptor is of no further use. n is 0 at the end of a pipe;
// a terminal whose last process has gone gives EIO instead (pty(7)).
func receive(raw syscall.RawConn, lend *chunks, taking func(begins bool)) (buf *[chunkSize]byte, n int) {
	err := raw.Read(func(fd uintptr) bool {
		taking(true)
		buf = lend.get()
		for {
			var err error
			n, err = unix.Read(int(fd), buf[:])
			switch err {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				lend.put(buf)
				buf = nil
				taking(false)
				return false // the poller wakes us
			}
			return true
		}
	})
	if err != nil {
		return nil, 0
	}
	return buf, n
}

// drain is the end of a stream that a pump reads.
type drain struct {
	raw  syscall.RawConn
	kind guestwire.Stream
	// owed is how much the process had printed when it ended that no pump had taken: nobody is told of its
	// end before that is in the buffer, however late a slow holder or a busy machine makes it.
	owed int
}

// oweLocked notes at the end of the process what still lies in its streams. What a pump has taken, but not put
// into the buffer, is not there any more, and will be subtracted all the same: a chunk more makes up for it.
func (p *process) oweLocked() {
	for i := range p.sources {
		d := &p.sources[i]
		_ = d.raw.Control(func(fd uintptr) { // closed: it has reached its end
			d.owed, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		})
		if d.owed > 0 && p.busy > 0 {
			d.owed += chunkSize
		}
	}
}

// unreadLocked reports whether a stream, or one that is owed of, has something to tell that no pump has taken
// yet: on a machine with too much to do a pump may come late.
func (p *process) unreadLocked(owed bool) bool {
	for _, d := range p.sources {
		if owed && d.owed == 0 {
			continue
		}
		fds := [1]unix.PollFd{{Events: unix.POLLIN}}
		err := d.raw.Control(func(fd uintptr) {
			fds[0].Fd = int32(fd)
			_, _ = unix.Poll(fds[:], 0) // interrupted: looked at again soon enough
		})
		if err == nil && fds[0].Revents&unix.POLLIN != 0 { // closed: it has reached its end
			return true
		}
	}
	return false
}

// print puts what was taken into the buffer, which may wait for a holder.
func (p *process) print(s guestwire.Stream, b []byte) {
	p.out.Append(s, b)
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy--
	p.last = now
	for i := range p.sources {
		if d := &p.sources[i]; d.kind == s {
			d.owed = max(0, d.owed-len(b))
		}
	}
}

// tryPrint is print that does not wait. It returns how many bytes it has put there.
func (p *process) tryPrint(s guestwire.Stream, b []byte) int {
	n := p.out.TryAppend(s, b)
	now := time.Now()
	p.mu.Lock()
	p.last = now
	p.mu.Unlock()
	return n
}

// pumped notes that a stream has reached its end.
func (p *process) pumped(f *os.File) {
	_ = f.Close()
	p.mu.Lock()
	p.open--
	p.mu.Unlock()
	p.settle()
}
