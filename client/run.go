package client

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	v1 "casemate.dev/proto/casemate/v1"
)

// RunOptions say where a process's streams go. The zero value discards output and gives no input.
type RunOptions struct {
	// Stdout and Stderr take the output; nil discards it. A terminal's output goes to Stdout.
	Stdout, Stderr io.Writer
	// Stdin, unless nil, feeds standard input until it returns io.EOF, which closes it inside. A read
	// that blocks outlives Run: close the reader to end it.
	Stdin io.Reader
	// Resize carries the terminal's new sizes, for a process that has one.
	Resize <-chan *Terminal
	// Hold makes the process wait for a slow Stdout rather than drop output.
	Hold bool
	// Started is called once, with the process as it was started.
	Started func(*Process)
	// Gap is called for output that was dropped; nil ignores it.
	Gap func(*Gap)
	// IdempotencyKey goes with the start.
	IdempotencyKey string
}

// Run starts a process, passes its streams through and returns it when it has ended. A broken
// connection, also one broken by a restart of the server, is taken up again at the byte reached, so
// that nothing is lost or seen twice; for that the process gets an id if spec has none. When ctx ends
// the process goes on: use Signal or Kill to end it.
func (p *Processes) Run(ctx context.Context, sandbox string, spec *ProcessSpec, o RunOptions) (*Process, error) {
	spec = proto.CloneOf(spec)
	if spec.GetId() == "" {
		spec.Id = newProcessID()
	}
	spec.Stdin = spec.GetStdin() || (o.Stdin != nil && spec.GetTerminal() == nil)
	spec.Hold = spec.GetHold() || o.Hold
	o.Hold = spec.GetHold()
	f := &follower{p: p, sandbox: sandbox, process: spec.GetId(), spec: spec, o: o}
	return f.run(ctx)
}

// Attach passes through the streams of a process that was started before, from an offset of its
// output on, like Run. With offset -1 it begins at what is printed from now on.
func (p *Processes) Attach(ctx context.Context, sandbox, process string, offset int64, o RunOptions) (*Process, error) {
	proc, err := p.Get(ctx, sandbox, process)
	if err != nil {
		return nil, err
	}
	if offset < 0 {
		offset = proc.GetBytes()
	}
	f := &follower{p: p, sandbox: sandbox, process: process, o: o, offset: offset}
	return f.run(ctx)
}

// Shell is Run for a person at a terminal: both ends are one stream.
func (p *Processes) Shell(ctx context.Context, sandbox string, spec *ProcessSpec, tty io.ReadWriter, resize <-chan *Terminal) (*Process, error) {
	if spec.GetTerminal() == nil {
		spec = proto.CloneOf(spec)
		spec.Terminal = &Terminal{Rows: 24, Cols: 80}
	}
	return p.Run(ctx, sandbox, spec, RunOptions{Stdin: tty, Stdout: tty, Resize: resize})
}

// follower is one Run or Attach under way.
type follower struct {
	p       *Processes
	sandbox string
	process string
	spec    *ProcessSpec // nil: attach only
	o       RunOptions

	offset int64 // of the output that was passed on
	known  bool  // the server has told that the process exists
	feed   sync.Once
	ended  *Process
}

func (f *follower) run(ctx context.Context) (*Process, error) {
	ctx, cancel := context.WithCancel(ctx) // ends the feeding of input with the process
	defer cancel()
	if f.spec == nil {
		f.know(ctx, nil)
	}
	again := newRetry(f.p.conn.retry)
	for {
		err := f.stream(ctx, again)
		if err == nil && f.ended == nil {
			err = &Error{Kind: Unavailable, Message: "the server closed the stream before the process ended", Err: io.ErrUnexpectedEOF}
		}
		if err == nil {
			return f.ended, nil
		}
		if !again.worth(ctx, err) {
			return nil, unmark(err)
		}
	}
}

// stream opens one stream, from the offset reached, and passes it on until it breaks or ends.
func (f *follower) stream(ctx context.Context, again *retry) error {
	var s *connect.ServerStreamForClient[v1.ProcessEvent]
	var err error
	if f.known {
		s, err = f.p.rpc.Output(ctx, &v1.OutputRequest{
			Sandbox: f.sandbox, Process: f.process, Offset: f.offset, Follow: true, Hold: f.o.Hold,
		})
	} else {
		// Repeating this is safe: starting an id that exists attaches to it.
		s, err = f.p.rpc.Run(keyed(ctx, f.o.IdempotencyKey), &v1.RunRequest{Sandbox: f.sandbox, Process: f.spec})
	}
	if err != nil {
		return f.p.conn.wrap(err)
	}
	defer func() { _ = s.Close() }()
	for s.Receive() {
		again.progress()
		if err := f.event(ctx, s.Msg()); err != nil {
			return err
		}
	}
	if f.ended != nil {
		return nil
	}
	return f.p.conn.wrap(s.Err())
}

func (f *follower) event(ctx context.Context, e *v1.ProcessEvent) error {
	switch {
	case e.GetStarted() != nil:
		f.know(ctx, e.GetStarted())
	case e.GetOutput() != nil:
		return f.output(e.GetOutput())
	case e.GetGap() != nil:
		if g := e.GetGap(); g.GetTo() > f.offset {
			f.offset = g.GetTo()
			if f.o.Gap != nil {
				f.o.Gap(g)
			}
		}
	case e.GetEnded() != nil:
		f.ended = e.GetEnded()
	}
	return nil
}

// output passes bytes on, without those that came before over a connection that broke.
func (f *follower) output(out *v1.Output) error {
	data := out.GetData()
	if seen := f.offset - out.GetOffset(); seen > 0 {
		data = data[min(seen, int64(len(data))):]
	}
	if len(data) == 0 {
		return nil
	}
	w := f.o.Stdout
	if out.GetStream() == v1.Stream_STREAM_STDERR {
		w = f.o.Stderr
	}
	f.offset = out.GetOffset() + int64(len(out.GetData()))
	if w == nil {
		return nil
	}
	if _, err := w.Write(data); err != nil {
		return callerError{err}
	}
	return nil
}

// know notes that the process exists and begins to feed it.
func (f *follower) know(ctx context.Context, proc *Process) {
	f.known = true
	f.feed.Do(func() {
		if f.o.Started != nil && proc != nil {
			f.o.Started(proc)
		}
		if f.o.Stdin != nil {
			go f.pump(ctx)
		}
		if f.o.Resize != nil {
			go f.resize(ctx)
		}
	})
}

// pump copies Stdin to the process, each piece until the server has taken it.
func (f *follower) pump(ctx context.Context) {
	buf := make([]byte, 64<<10)
	offset := int64(-1) // unknown until the first answer, for a process that was fed before
	if f.spec != nil {
		offset = 0
	}
	for {
		n, rerr := f.o.Stdin.Read(buf)
		// A terminal that can't be read any more is no end of what a person has to say.
		eof := rerr != nil && (f.spec == nil || f.spec.GetTerminal() == nil || errors.Is(rerr, io.EOF))
		if n > 0 || eof {
			next, ok := f.write(ctx, offset, buf[:n], eof)
			if !ok {
				return
			}
			offset = next
		}
		if rerr != nil {
			return
		}
	}
}

// write hands one piece of input over, again after a broken connection where its place is known.
func (f *follower) write(ctx context.Context, offset int64, data []byte, eof bool) (int64, bool) {
	again := newRetry(f.p.conn.retry)
	again.progress() // the process is known, so the server was there
	for {
		next, err := f.p.WriteInput(ctx, f.sandbox, f.process, offset, data, eof)
		if err == nil {
			return next, true
		}
		if offset < 0 || !again.worth(ctx, err) {
			return 0, false // the process has ended or reads no more; its own end tells
		}
	}
}

func (f *follower) resize(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case size, ok := <-f.o.Resize:
			if !ok {
				return
			}
			_ = f.p.Resize(ctx, f.sandbox, f.process, size) // the next size will tell as well
		}
	}
}

// newProcessID makes an id of the form that the server gives.
func newProcessID() string { return "prc_" + strings.ToLower(rand.Text())[:20] }
