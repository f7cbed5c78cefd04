package guestwire

import (
	"context"
	"io"
	"net"
	"os"
)

// Client is the server's half: one typed method for each Method. It is safe for concurrent use. A call
// dials, and ends with its connection; but Claim and Run keep theirs for the next Run, and RunCode and what
// concerns forks for the next of these, since dialling and being accepted cost as much as the rest of a short
// call. Close drops what is kept.
//
// When ctx ends, the call's connection is closed and the error is ctx's. A guest may be hostile and
// never answer, so callers bound every call by ctx. Other errors have a kind of package errs: what
// the guest said, Unavailable where the connection was lost, Internal where the guest broke the
// protocol.
type Client struct {
	dial func(ctx context.Context) (net.Conn, error)
	// processes and codes are apart, since the guest serves the connections of processes in a way of its own.
	processes, codes pool
}

// NewClient returns a client that opens its connections with dial.
func NewClient(dial func(ctx context.Context) (net.Conn, error)) *Client {
	return &Client{dial: dial}
}

// Close drops the connections that are kept. Calls under way go on, and later ones dial.
func (c *Client) Close() {
	c.processes.close()
	c.codes.close()
}

func (c *Client) begin(ctx context.Context, m Method, body any, files []*os.File) (*exchange, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, (&exchange{ctx: ctx}).failed(m, err)
	}
	return begin(ctx, conn, m, body, files)
}

// beginKept is begin over a connection that p keeps, where there is one, and keeps it afterwards.
func (c *Client) beginKept(ctx context.Context, p *pool, m Method, body any, files []*os.File) (*exchange, error) {
	return c.beginText(ctx, p, m, body, files, nil)
}

// beginText is beginKept for a call that text follows, unless that is nil.
func (c *Client) beginText(ctx context.Context, p *pool, m Method, body any, files []*os.File, text *string) (*exchange, error) {
	for {
		x := &exchange{ctx: ctx, pool: p, text: text}
		k, ok := p.get()
		if x.conn, x.r, x.buf, x.used = k.conn, k.r, k.buf, ok; !ok {
			var err error
			if x.conn, err = c.dial(ctx); err != nil {
				return nil, x.failed(m, err)
			}
		}
		err := x.send(m, body, files)
		if err != nil && x.stale(err) {
			continue // the guest, or a restore of it, has closed the connection meanwhile
		}
		return x, err
	}
}

func unary[T any](ctx context.Context, c *Client, m Method, body any, files []*os.File) (T, error) {
	var v T
	x, err := c.begin(ctx, m, body, files)
	if err != nil {
		return v, err
	}
	defer x.close()
	if err := x.reply(&v); err != nil {
		var zero T
		return zero, x.failed(m, err)
	}
	return v, nil
}

func (c *Client) ok(ctx context.Context, m Method, body any) error {
	x, err := c.begin(ctx, m, body, nil)
	if err != nil {
		return err
	}
	defer x.close()
	if err := x.reply(nil); err != nil {
		return x.failed(m, err)
	}
	return nil
}

// Env returns the environment that the claim gave.
func (c *Client) Env(ctx context.Context) (map[string]string, error) {
	e, err := unary[Environment](ctx, c, MethodEnv, nil, nil)
	return e.Env, err
}

// Claim gives the instance its identity. A second claim fails with FailedPrecondition.
func (c *Client) Claim(ctx context.Context, r Claim) error {
	for {
		x, err := c.beginKept(ctx, &c.processes, MethodClaim, r, nil)
		if err != nil {
			return err
		}
		if err = x.reply(nil); err == nil {
			x.done()
			return nil
		}
		x.close()
		if err = x.failed(MethodClaim, err); !x.stale(err) {
			return err
		}
		// A kept connection has broken. Asking again is safe: one is kept only after a claim, so this one fails.
	}
}

// Status asks the guest about itself.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return unary[Status](ctx, c, MethodStatus, nil, nil)
}

// Sync returns once dirty data of the sandbox's files is flushed.
func (c *Client) Sync(ctx context.Context) error { return c.ok(ctx, MethodSync, nil) }

// Prepare makes the guest ready for a memory image: when it returns, the guest holds no connection any more. It opens
// up again with the next one that comes. FailedPrecondition: something inside keeps one open.
func (c *Client) Prepare(ctx context.Context) error {
	x, err := c.begin(ctx, MethodPrepare, nil, nil)
	if err != nil {
		return err
	}
	defer x.close()
	if err := x.reply(nil); err != nil {
		return x.failed(MethodPrepare, err)
	}
	// The call's own connection goes last, and that can only be seen.
	_, err = x.frame()
	switch err {
	case io.EOF:
		return nil
	case nil:
		err = broken("a frame after the last one")
	}
	return x.failed(MethodPrepare, err)
}

// Restored tells the guest that the sandbox goes on from a memory image. A call that is repeated does no harm.
func (c *Client) Restored(ctx context.Context, r Restored) error {
	return c.ok(ctx, MethodRestored, r)
}

// Start starts a process, or attaches to the one of that id. The files of its scope stay the
// caller's. Kinds: InvalidArgument (argv, env), NotFound (program, directory, user),
// PermissionDenied (program), ResourceExhausted (processes).
func (c *Client) Start(ctx context.Context, r StartProcess, files []*os.File) (ProcessInfo, error) {
	return unary[ProcessInfo](ctx, c, MethodStart, r.escaped(), files)
}

// Run is Start and Output on one connection: it returns when the process has started, and the
// stream gives its output and end. Closing the stream does not end the process.
func (c *Client) Run(ctx context.Context, r RunProcess, files []*os.File) (ProcessInfo, *OutputStream, error) {
	r.Start = r.Start.escaped()
	for {
		x, err := c.beginKept(ctx, &c.processes, MethodRun, r, files)
		if err != nil {
			return ProcessInfo{}, nil, err
		}
		x.buffered()
		var info ProcessInfo
		err = x.reply(&info)
		if err == nil {
			return info, &OutputStream{x: x, method: MethodRun, next: r.Output.Offset}, nil
		}
		x.close()
		if err = x.failed(MethodRun, err); !x.stale(err) {
			return ProcessInfo{}, nil, err
		}
		// A kept connection has broken. Asking again is safe: an id that exists is attached to.
	}
}

// Output opens a process's output at an offset, during and after the run.
func (c *Client) Output(ctx context.Context, r OutputRequest) (*OutputStream, error) {
	x, err := c.begin(ctx, MethodOutput, r, nil)
	if err != nil {
		return nil, err
	}
	x.buffered()
	return &OutputStream{x: x, method: MethodOutput, next: r.Offset}, nil
}

// Input writes what in gives to a process's standard input, and returns how many bytes were taken
// in all. It blocks while the process does not read. in may be nil, to close only.
func (c *Client) Input(ctx context.Context, r InputRequest, in io.Reader) (InputReply, error) {
	return upload[InputReply](ctx, c, MethodInput, r, in)
}

// Signal sends a signal to a process or its tree.
func (c *Client) Signal(ctx context.Context, r SignalRequest) error {
	return c.ok(ctx, MethodSignal, r)
}

// Resize sets the size of a process's terminal.
func (c *Client) Resize(ctx context.Context, r ResizeRequest) error {
	return c.ok(ctx, MethodResize, r)
}

// Get returns a process's state.
func (c *Client) Get(ctx context.Context, id string) (ProcessInfo, error) {
	return unary[ProcessInfo](ctx, c, MethodGet, ProcessRef{ID: id}, nil)
}

// Tree tells what lives of a process and its descendants, also after its end.
func (c *Client) Tree(ctx context.Context, id string) (Tree, error) {
	return unary[Tree](ctx, c, MethodTree, ProcessRef{ID: id}, nil)
}

// Bound changes the limits that the guest itself holds the sandbox to. Unsupported where it holds none.
func (c *Client) Bound(ctx context.Context, b Bounds) error { return c.ok(ctx, MethodBound, b) }

// Wait returns a process's state once it has ended and its output is complete.
func (c *Client) Wait(ctx context.Context, id string) (ProcessInfo, error) {
	return unary[ProcessInfo](ctx, c, MethodWait, ProcessRef{ID: id}, nil)
}

// Bounds of the processes that a guest knows.
const (
	// MaxRunning bounds those that run or are not complete.
	MaxRunning = 4096
	// MaxKept is how many are kept beside them of which nothing lives on.
	MaxKept = 1024
)

const (
	// maxWord bounds a process's id and its end's word together.
	maxWord = 256
	// maxListedText bounds what List keeps of the texts that only inform.
	maxListedText = 4 << 20
)

// List returns every process that the guest still knows, oldest first. Where they say more than anybody needs to know, arguments
// and other texts of the later ones are left out.
func (c *Client) List(ctx context.Context) ([]ProcessInfo, error) {
	s, err := events[ProcessInfo](ctx, c, MethodList, nil)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all []ProcessInfo
	text := 0
	for {
		p, err := s.Next()
		if err == io.EOF {
			return all, nil
		}
		if err == nil && (len(all) == MaxRunning+MaxKept || len(p.ID)+len(p.End) > maxWord) {
			err = s.x.failed(MethodList, broken("more processes, or longer words of them, than there can be"))
		}
		if err != nil {
			return nil, err
		}
		if text += p.texts(); text > maxListedText {
			p.Argv, p.Dir, p.User, p.Error = nil, "", "", ""
		}
		all = append(all, p)
	}
}

// texts is about how much memory the texts take that only inform.
func (i *ProcessInfo) texts() int {
	n := len(i.Dir) + len(i.User) + len(i.Error)
	for _, arg := range i.Argv {
		n += len(arg) + 16
	}
	return n
}

// Forget drops an ended process and its output. FailedPrecondition: it still runs.
func (c *Client) Forget(ctx context.Context, id string) error {
	return c.ok(ctx, MethodForget, ProcessRef{ID: id})
}

// Stat describes a file.
func (c *Client) Stat(ctx context.Context, r PathRequest) (FileInfo, error) {
	r.Path = Escape(r.Path)
	return unary[FileInfo](ctx, c, MethodStat, r, nil)
}

// ListDir lists a directory. The caller closes the stream.
func (c *Client) ListDir(ctx context.Context, r ListRequest) (*EventStream[FileInfo], error) {
	r.Path = Escape(r.Path)
	return events[FileInfo](ctx, c, MethodListDir, r)
}

// Read opens a file. The reader fails rather than end early where the guest could not send all; it
// must be closed.
func (c *Client) Read(ctx context.Context, r ReadRequest) (FileInfo, io.ReadCloser, error) {
	r.Path = Escape(r.Path)
	x, err := c.begin(ctx, MethodRead, r, nil)
	if err != nil {
		return FileInfo{}, nil, err
	}
	x.buffered()
	var info FileInfo
	if err := x.reply(&info); err != nil {
		x.close()
		return FileInfo{}, nil, x.failed(MethodRead, err)
	}
	return info, &fileReader{x: x}, nil
}

// Write writes what in gives to a file, and describes what came to be.
func (c *Client) Write(ctx context.Context, r WriteRequest, in io.Reader) (FileInfo, error) {
	r.Path = Escape(r.Path)
	return upload[FileInfo](ctx, c, MethodWrite, r, in)
}

// MakeDir makes a directory.
func (c *Client) MakeDir(ctx context.Context, r MakeDirRequest) (FileInfo, error) {
	r.Path = Escape(r.Path)
	return unary[FileInfo](ctx, c, MethodMakeDir, r, nil)
}

// Move renames a file and describes it under its new name.
func (c *Client) Move(ctx context.Context, r MoveRequest) (FileInfo, error) {
	r.Path, r.To = Escape(r.Path), Escape(r.To)
	return unary[FileInfo](ctx, c, MethodMove, r, nil)
}

// Remove removes a file or a tree.
func (c *Client) Remove(ctx context.Context, r RemoveRequest) error {
	r.Path = Escape(r.Path)
	return c.ok(ctx, MethodRemove, r)
}

// Chmod changes a file's mode and owner.
func (c *Client) Chmod(ctx context.Context, r ChmodRequest) (FileInfo, error) {
	r.Path = Escape(r.Path)
	return unary[FileInfo](ctx, c, MethodChmod, r, nil)
}

// Unpack puts a tree of files, which in gives as a sequence of Entry, below a directory.
func (c *Client) Unpack(ctx context.Context, r UnpackRequest, in io.Reader) (UnpackReply, error) {
	r.Path = Escape(r.Path)
	return upload[UnpackReply](ctx, c, MethodUnpack, r, in)
}

// Watch watches a directory. When it returns, the watch is in place; the stream has no end of its
// own, and the caller closes it.
func (c *Client) Watch(ctx context.Context, r WatchRequest) (*EventStream[WatchEvent], error) {
	r.Path = Escape(r.Path)
	s, err := events[WatchEvent](ctx, c, MethodWatch, r)
	if err != nil {
		return nil, err
	}
	if err := s.x.reply(nil); err != nil {
		s.Close()
		return nil, s.x.failed(MethodWatch, err)
	}
	return s, nil
}

// DialPort connects to a TCP port inside. The connection carries the port's bytes and no frames;
// ctx governs only its opening. Unavailable: nothing listens there.
func (c *Client) DialPort(ctx context.Context, r DialRequest) (net.Conn, error) {
	return c.joined(ctx, MethodDial, r)
}

// joined makes a call whose connection carries somebody else's bytes afterwards.
func (c *Client) joined(ctx context.Context, m Method, body any) (net.Conn, error) {
	x, err := c.begin(ctx, m, body, nil)
	if err != nil {
		return nil, err
	}
	if err := x.reply(nil); err != nil {
		x.close()
		return nil, x.failed(m, err)
	}
	if !x.stop() {
		x.close()
		return nil, x.failed(m, ctx.Err())
	}
	return x.conn, nil
}

// ListenPort listens on a TCP port inside. When it returns, the port is open; the stream tells of every
// connection, which TakePort then takes, and has no end of its own. The caller closes it, and the port with it.
// AlreadyExists: something inside listens there.
func (c *Client) ListenPort(ctx context.Context, r ListenRequest) (*EventStream[Accepted], error) {
	s, err := events[Accepted](ctx, c, MethodListen, r)
	if err != nil {
		return nil, err
	}
	if err := s.x.reply(nil); err != nil {
		s.Close()
		return nil, s.x.failed(MethodListen, err)
	}
	return s, nil
}

// TakePort takes a connection that ListenPort told of; it is as one of DialPort. NotFound: it has waited too
// long, or has left.
func (c *Client) TakePort(ctx context.Context, a Accepted) (net.Conn, error) {
	return c.joined(ctx, MethodTake, a)
}

// Listenings returns the TCP ports that something inside listens on, in order.
func (c *Client) Listenings(ctx context.Context) ([]int, error) {
	l, err := unary[PortList](ctx, c, MethodListenings, nil, nil)
	return l.Ports, err
}
