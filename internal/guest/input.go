package guest

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// input is a process's standard input: a pipe's write end, or its terminal.
type input struct {
	file *os.File
	term bool          // file is the terminal and belongs to the process
	turn chan struct{} // holds one token: whoever has it writes

	// mu guards the fields below.
	mu     sync.Mutex
	taken  int64
	closed bool
}

func newInput(f *os.File, term bool) *input {
	in := &input{turn: make(chan struct{}, 1), file: f, term: term}
	in.turn <- struct{}{}
	return in
}

// endOfFile is what a terminal in its usual mode takes for the end of input (VEOF, termios(3)).
const endOfFile = "\x04"

// end closes a pipe. The end of a terminal's input is a character.
func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.closed && !in.term {
		_ = in.file.Close()
	}
	in.closed = true
}

// write writes to the process and returns how much it took, which counts also on error. It blocks
// while the process does not read, until stop is closed.
func (in *input) write(p []byte, stop <-chan struct{}) (int, error) {
	in.mu.Lock()
	closed := in.closed
	in.mu.Unlock()
	if closed {
		return 0, errClosedInput()
	}
	n, err := in.put(p, stop)
	in.mu.Lock()
	in.taken += int64(n)
	in.mu.Unlock()
	return n, err
}

// put writes as write does, also after the end.
func (in *input) put(p []byte, stop <-chan struct{}) (int, error) {
	f := in.file
	_ = f.SetWriteDeadline(time.Time{})
	done := make(chan struct{})
	quit := make(chan struct{})
	go func() {
		defer close(quit)
		select {
		case <-stop:
			_ = f.SetWriteDeadline(time.Unix(1, 0))
		case <-done:
		}
	}()
	n, err := f.Write(p)
	close(done)
	<-quit
	if errors.Is(err, unix.EPIPE) || errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EIO) {
		err = errClosedInput()
	}
	return n, err
}

const (
	// repeatFirst and repeatLast bound the time between two words of the end.
	repeatFirst = 100 * time.Millisecond
	repeatLast  = 5 * time.Second
)

// repeat says again and again that a terminal's input has ended, until over is closed. Each reader takes one
// such word, and it gets lost when a program sets the terminal up anew, as a shell does that has just begun.
func (in *input) repeat(over <-chan struct{}) {
	for wait := repeatFirst; ; wait = min(2*wait, repeatLast) {
		select {
		case <-over:
			return
		case <-time.After(wait):
		}
		if _, err := in.put([]byte(endOfFile), over); err != nil {
			return // the terminal is gone, or over is closed
		}
	}
}

func errClosedInput() error {
	return errs.New(errs.FailedPrecondition, "standard input is closed")
}

func (in *input) offset() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.taken
}

// feed writes what the connection sends, and closes the input if the request says so.
func (g *Guest) feed(c *guestwire.Conn, r guestwire.InputRequest) error {
	p, err := g.processes.get(r.ID)
	if err != nil {
		return err
	}
	in := p.input
	if in == nil {
		return errs.New(errs.FailedPrecondition, "process %s has no standard input", r.ID).
			WithHint("start it with standard input or a terminal")
	}
	frames := readAhead(c)
	defer frames.close()
	select {
	case <-in.turn:
		defer func() { in.turn <- struct{}{} }()
	case <-frames.gone:
		return io.ErrUnexpectedEOF
	}
	skip := int64(0)
	if r.Offset >= 0 {
		if skip = in.offset() - r.Offset; skip < 0 {
			return errs.New(errs.InvalidArgument, "input offset %d is beyond the %d bytes taken so far", r.Offset, in.offset())
		}
	}
	for {
		data, more, err := frames.next()
		if err != nil {
			return err
		}
		if !more {
			break
		}
		known := min(skip, int64(len(data)))
		skip -= known
		if data = data[known:]; len(data) == 0 {
			continue
		}
		if _, err := in.write(data, frames.gone); err != nil {
			return err
		}
	}
	if r.Close {
		if in.term {
			if _, err := in.write([]byte(endOfFile), frames.gone); err != nil {
				return err
			}
			go in.repeat(p.done)
		}
		in.end()
	}
	return c.Reply(guestwire.InputReply{Offset: in.offset()})
}

// ahead reads the frames of an upload in a goroutine of its own, one ahead of who uses them, so that
// the caller's going away is seen also while a process does not read.
type ahead struct {
	frames chan []byte
	stop   chan struct{}
	gone   chan struct{} // closed when the connection has ended before the upload, or after it
	ended  chan struct{} // closed after FrameEnd
}

func readAhead(c *guestwire.Conn) *ahead {
	a := &ahead{
		frames: make(chan []byte), stop: make(chan struct{}),
		gone: make(chan struct{}), ended: make(chan struct{}),
	}
	go a.run(c)
	return a
}

func (a *ahead) run(c *guestwire.Conn) {
	defer close(a.gone)
	var bufs [2][]byte
	for i := 0; ; i++ {
		f, err := guestwire.ReadFrame(c.Conn, &bufs[i%2])
		if err != nil {
			return
		}
		if f.Kind != guestwire.FrameData {
			if f.Kind == guestwire.FrameEnd {
				close(a.ended)
				var one [1]byte
				_, _ = c.Read(one[:]) // returns when the caller closes, or we do
			}
			return
		}
		select {
		case a.frames <- f.Payload:
		case <-a.stop:
			return
		}
	}
}

// next returns the next bytes, valid until the call after. more is false at the upload's end.
func (a *ahead) next() (data []byte, more bool, err error) {
	select {
	case data := <-a.frames:
		return data, true, nil
	case <-a.ended:
		return nil, false, nil
	case <-a.gone:
		select {
		case <-a.ended:
			return nil, false, nil
		default:
			return nil, false, io.ErrUnexpectedEOF
		}
	}
}

func (a *ahead) close() { close(a.stop) }
