package contexts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

const (
	// chunkSize is what is read from a pipe at once.
	chunkSize = 32 << 10
	// pipeSize is the most that a pipe can hold when a line arrives, which is what the line must not
	// overtake: 64 KiB, or what an unprivileged process may make of it (fs.pipe-max-size).
	pipeSize = 1 << 20
	// giveLimit bounds how long a driver may take to read a run.
	giveLimit = 10 * time.Second
	// drainLimit bounds how long the output of a driver that has ended is waited for.
	drainLimit = time.Second
)

// running is one driver of a context, from its launch until nothing is left of it.
type running struct {
	c    *interpreter
	up   chan struct{} // closed when it is ready
	over chan struct{} // closed when it has ended and all it said was taken

	d     *Driver
	pumps sync.WaitGroup
	pipes [2]pipe
	gone  chan struct{} // closed when the process has ended
	kills sync.WaitGroup

	// What follows is guarded by c.mu.
	isUp   bool
	hears  bool             // it answers interrupts
	killed bool             // its end is under way
	ending bool             // its process has ended: it is not to be killed any more
	cause  guestwire.RunEnd // why it was killed
	exit   Exit             // set before gone is closed
}

func newRunning(c *interpreter) *running {
	return &running{c: c, up: make(chan struct{}), over: make(chan struct{}), gone: make(chan struct{})}
}

// begin follows a started driver.
func (r *running) begin(d *Driver) {
	r.d = d
	r.pipes[0] = pipe{f: d.Output, kind: guestwire.ItemStdout}
	r.pipes[1] = pipe{f: d.Errors, kind: guestwire.ItemStderr}
	for i := range r.pipes {
		r.pumps.Go(func() { r.pump(&r.pipes[i]) })
	}
	r.pumps.Go(r.listen)
	go r.follow()
}

// ended is called by the reaper: it must not block.
func (r *running) ended(e Exit) {
	r.c.mu.Lock()
	r.exit = e
	r.c.mu.Unlock()
	close(r.gone)
}

// follow waits for the driver's end and clears up: whatever it left behind goes with it.
func (r *running) follow() {
	<-r.gone
	r.c.mu.Lock()
	r.ending = true
	r.c.mu.Unlock()
	// A kill that is still under way would hit the next driver, which gets the same place.
	r.kills.Wait()
	_ = r.c.place.Kill()
	said := make(chan struct{})
	go func() {
		r.pumps.Wait()
		close(said)
	}()
	// All writers are dead, so the ends of the pipes are there, unless something got away from the place
	// or a slow reader is being waited for.
	select {
	case <-said:
	case <-time.After(drainLimit):
		if cur := r.c.executing(r); cur != nil {
			cur.log.release()
		}
	}
	_ = r.d.Output.Close()
	_ = r.d.Errors.Close()
	_ = r.d.Control.Close()
	if r.d.Code != nil {
		_ = r.d.Code.Close()
	}
	<-said
	r.c.driverEnded(r)
	close(r.over)
}

// kill ends the driver and all that descends from it. cause says what that makes of its run. It returns
// at once; over tells when it is done.
func (r *running) kill(cause guestwire.RunEnd) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.cause == guestwire.RunNone {
		r.cause = cause
	}
	if cur := r.c.current; cur != nil {
		cur.log.release()
	}
	if !r.killed && !r.ending {
		r.killed = true
		r.kills.Go(func() {
			_ = r.c.place.Kill()
			if r.c.zygote != nil {
				_ = r.d.Signal(unix.SIGKILL) // one that did not come up may be on its way there
			}
		})
	}
}

// leaveLimit is how long a fork that has had its run may take to leave by itself.
const leaveLimit = 200 * time.Millisecond

// await waits until nothing is left of the driver, but not longer than limit.
func (r *running) await(limit time.Duration) {
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-r.over:
	case <-late.C:
	}
}

const (
	// answerLimit is how long a driver may take to answer an interrupt before it is sent again.
	answerLimit = 500 * time.Millisecond
	// maxRepeats bounds that: code may have put a handler of its own in the place of the driver's.
	maxRepeats = 4
)

// interrupt sends the signal to the driver, whose run n executes. c.mu is held, so that it still does.
//
// An interpreter may lose a signal: CPython looks for one, then calls what blocks, and is not woken by one that
// came between the two. So it goes out again until the driver has answered.
func (r *running) interrupt(n *run) error {
	if r.d == nil {
		return nil
	}
	if r.hears {
		n.unheard, n.repeats = true, 0
		time.AfterFunc(answerLimit, func() { r.repeat(n) })
	}
	return r.d.Signal(interruptSignal)
}

// repeat sends an interrupt again that was not answered.
func (r *running) repeat(n *run) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.c.current != n || r.c.driver != r || !n.unheard || n.repeats == maxRepeats {
		return
	}
	n.repeats++
	time.AfterFunc(answerLimit, func() { r.repeat(n) })
	_ = r.d.Signal(interruptSignal)
}

// give hands a run over.
func (r *running) give(n *run, code string) {
	o := order{Op: "run", ID: n.id, Code: code, Env: n.env}
	err := r.file(&o)
	var line []byte
	if err == nil {
		line, err = o.line()
	}
	if err == nil {
		_ = r.d.Control.SetWriteDeadline(time.Now().Add(giveLimit))
		_, err = r.d.Control.Write(line)
	}
	if err != nil {
		r.kill("") // it reads no more: its end says so
	}
}

// longCode is how long code is that goes into the driver's file, where it has one: a shell reads a line of a
// socket byte by byte.
const longCode = 4 << 10

// file puts long code into the driver's file, and short code leaves nothing of the last in it.
func (r *running) file(o *order) error {
	if r.d.Code == nil {
		return nil
	}
	if err := r.d.Code.Truncate(0); err != nil || len(o.Code) < longCode {
		return err
	}
	_, err := r.d.Code.WriteAt([]byte(o.Code), 0)
	o.Code, o.File = "", true
	return err
}

// pipe is one output of a driver.
type pipe struct {
	f    *os.File
	kind guestwire.ItemKind

	// mu is held while bytes are on their way from the pipe into a log, so that they stay in order.
	mu    sync.Mutex
	carry []byte // the first bytes of a character whose others have not come yet
}

// pump takes what comes until every writer has closed the pipe.
func (r *running) pump(p *pipe) {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return
	}
	for {
		n, state := 0, error(nil)
		err := raw.Read(func(fd uintptr) bool {
			n, state = r.take(p, fd)
			return !errors.Is(state, unix.EAGAIN) // the poller wakes us
		})
		if err != nil || state != nil || n <= 0 {
			return
		}
	}
}

// take moves one piece from a pipe into the log.
func (r *running) take(p *pipe, fd uintptr) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	buf := r.c.set.chunks.Get().(*[chunkSize]byte)
	defer r.c.set.chunks.Put(buf)
	had := copy(buf[:], p.carry)
	for {
		n, err := unix.Read(int(fd), buf[had:])
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return 0, err
		case err != nil || n <= 0:
			r.flushLocked(p)
			return 0, err
		}
		text := buf[:had+n]
		whole := len(text) - unfinished(text)
		p.carry = append(p.carry[:0], text[whole:]...)
		r.c.said(r, p.kind, text[:whole])
		return n, nil
	}
}

// flushLocked gives up waiting for the rest of a character.
func (r *running) flushLocked(p *pipe) {
	r.c.said(r, p.kind, p.carry)
	p.carry = p.carry[:0]
}

// unfinished returns how many bytes at the end of b begin a character of UTF-8 that is not complete, so
// that no item ends within one.
func unfinished(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

// drain takes what is in a pipe now, and not what comes meanwhile without end.
func (r *running) drain(p *pipe) {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return
	}
	// Control, not Read: the pump waits inside Read.
	_ = raw.Control(func(fd uintptr) {
		for taken := 0; taken < pipeSize; {
			n, err := r.take(p, fd)
			if err != nil || n <= 0 {
				return
			}
			taken += n
		}
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	r.flushLocked(p)
}

// listen takes the driver's lines.
func (r *running) listen() {
	in := bufio.NewReaderSize(r.d.Control, 16<<10)
	var buf []byte
	for {
		known, _ := in.Peek(in.Buffered())
		taken := bytes.IndexByte(known, '\n') >= 0 // what was printed before it is taken already
		line, err := readLine(in, &buf, guestwire.MaxItem)
		if err != nil && !errors.Is(err, errLong) {
			return
		}
		for i := range r.pipes {
			if !taken {
				r.drain(&r.pipes[i])
			}
		}
		if err != nil {
			r.tooLong()
			continue
		}
		m, err := parse(line)
		if err != nil {
			continue
		}
		r.c.told(r, m, slices.Clone(line))
		if cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

// tooLong tells of a line that was dropped.
func (r *running) tooLong() {
	if n := r.c.executing(r); n != nil {
		n.log.append(guestwire.ItemError, errorLine(n.id, "ResultTooLarge",
			fmt.Sprintf("a result of more than %d MiB was dropped; write it to a file", guestwire.MaxItem>>20)))
	}
}

// describe tells how a driver ended.
func describe(e Exit) string {
	switch e.End {
	case guestwire.EndExited:
		return fmt.Sprintf("exited with code %d", e.Code)
	case guestwire.EndSignaled:
		return "killed by " + unix.SignalName(syscall.Signal(e.Signal))
	}
	return string(e.End)
}
