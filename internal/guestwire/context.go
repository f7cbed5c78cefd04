package guestwire

import (
	"context"
	"encoding/binary"
	"io"
	"os"
)

// The methods about code contexts.
const (
	MethodContextCreate    Method = "context.create"    // CreateContext (+ scope files) → ContextInfo once its driver is ready
	MethodContextList      Method = "context.list"      // no body → FrameEvent(ContextInfo)…, FrameEnd
	MethodContextWait      Method = "context.wait"      // WaitContext → ContextInfo once what it waits for is so
	MethodContextRuns      Method = "context.runs"      // ContextRef → FrameEvent(RunInfo)…, FrameEnd
	MethodContextRun       Method = "context.run"       // RunCode, FrameData…, FrameEnd → FrameReply(RunInfo), then as context.items
	MethodContextItems     Method = "context.items"     // ItemsRequest → FrameItem/FrameGap…, then FrameEnd with RunInfo
	MethodContextRunWait   Method = "context.run.wait"  // RunRef → RunInfo once it has ended
	MethodContextInterrupt Method = "context.interrupt" // RunRef → InterruptReply
	MethodContextRestart   Method = "context.restart"   // ContextRef → ContextInfo once the new driver is ready
	MethodContextDelete    Method = "context.delete"    // ContextRef → ok
	MethodContextFork      Method = "context.fork"      // ForkContexts (+ scopes' files) → FrameEvent(Forked)…, FrameEnd
	MethodContextDrop      Method = "context.drop"      // ContextRefs → FrameEnd once nothing is left of them
)

// Bounds of contexts.
const (
	// MaxCode bounds the code of one run, in bytes.
	MaxCode = 4 << 20
	// MaxItem bounds one result or error. It is what a driver may put into one line.
	MaxItem = 8 << 20
	// MaxContexts bounds the contexts of a sandbox.
	MaxContexts = 64
	// MaxForks bounds those beside them that are forked for one run each.
	MaxForks = 64
	// MaxForkBatch bounds the forks of one call.
	MaxForkBatch = 16
	// MaxQueued bounds the runs that wait in one context.
	MaxQueued = 64
	// KeepRuns is how many ended runs a context remembers; what they said goes when memory is short.
	KeepRuns = 64
	// DefaultRunBuffer bounds what is kept of one run's items, in bytes.
	DefaultRunBuffer = 4 << 20
	// MaxDriver bounds a driver's source.
	MaxDriver = 512 << 10
)

// CreateContext starts a driver: a process that keeps an interpreter, and speaks lines of JSON on its
// descriptor 3. Creating an id that exists attaches: the answer has Attached set.
type CreateContext struct {
	ID       string            `json:"id"`
	Language string            `json:"language"`
	Argv     []string          `json:"argv"`
	Env      map[string]string `json:"env,omitempty"`
	Dir      string            `json:"dir,omitempty"`
	User     string            `json:"user,omitempty"`
	// Driver is the source that the process finds on its descriptor 4.
	Driver string `json:"driver"`
	// CodeFile gives the driver a file on descriptor 5, in which it finds long code instead of in the line that
	// says to run it.
	CodeFile bool `json:"code_file,omitempty"`
	// StartMS is how long the driver may take until it is ready; default 30000.
	StartMS int64 `json:"start_ms,omitempty"`
	// Zygote makes the context run nothing itself: it imports Imports, as far as they are there, and is
	// forked from then on.
	Zygote  bool     `json:"zygote,omitempty"`
	Imports []string `json:"imports,omitempty"`
	// Scope names the roles of the files passed with this call, as isolation.Scope.Layout gives them.
	Scope []string `json:"scope,omitempty"`
}

// ContextState is what a context is doing.
type ContextState string

// The states of a context.
const (
	ContextStarting ContextState = "starting"
	ContextIdle     ContextState = "idle"
	ContextBusy     ContextState = "busy"
	ContextEnded    ContextState = "ended" // its driver has ended; a restart gives it a new one
)

// ContextInfo is the state of a context.
type ContextInfo struct {
	ID       string       `json:"id"`
	Language string       `json:"language"`
	Version  string       `json:"version,omitempty"` // of the interpreter, by the driver's word
	Dir      string       `json:"dir"`
	User     string       `json:"user"`
	PID      int          `json:"pid"` // inside the sandbox
	State    ContextState `json:"state"`
	Attached bool         `json:"attached,omitempty"`
	Zygote   bool         `json:"zygote,omitempty"`
	Fork     bool         `json:"fork,omitempty"`
	// Created and Started are Unix nanoseconds by the guest's clock; Started is the driver's start.
	Created int64 `json:"created"`
	Started int64 `json:"started"`
	// Starts counts the drivers that it has had.
	Starts int64 `json:"starts"`
	// Runs counts the runs that were taken, Queued those that wait.
	Runs   int64  `json:"runs"`
	Queued int    `json:"queued,omitempty"`
	Run    string `json:"run,omitempty"` // the run that executes
	// End, Code and Signal tell how the last driver ended, where State is ContextEnded.
	End    End `json:"end,omitempty"`
	Code   int `json:"code,omitempty"`
	Signal int `json:"signal,omitempty"`
}

// ContextRef names a context.
type ContextRef struct {
	ID string `json:"id"`
}

// ForkContexts makes contexts of forks of a zygote's interpreter, each for one run: a context that has had its
// run takes no other. An id that exists attaches. Each is told of as soon as it is ready.
type ForkContexts struct {
	Zygote string   `json:"zygote"`
	IDs    []string `json:"ids"`
	// StartMS is how long they may take until they are ready; default 30000.
	StartMS int64 `json:"start_ms,omitempty"`
	// Scopes has the roles of the files of each, which are passed one after the other; none where there
	// are no scopes.
	Scopes [][]string `json:"scopes,omitempty"`
}

// Forked is one of them, or why it did not come to be.
type Forked struct {
	ID     string      `json:"id"`
	Info   ContextInfo `json:"info"`
	Failed *Failure    `json:"failed,omitempty"`
}

// ContextRefs names contexts.
type ContextRefs struct {
	IDs []string `json:"ids"`
}

// WaitContext waits until the driver number Starts of a context has ended.
type WaitContext struct {
	ID     string `json:"id"`
	Starts int64  `json:"starts"`
}

// RunCode executes code in a context, after what was asked for before. The code follows as FrameData.
// A run whose id exists attaches, and its code is read and ignored. Items says from where on to follow.
type RunCode struct {
	ID      string            `json:"id"` // of the run
	Context string            `json:"context"`
	Env     map[string]string `json:"env,omitempty"` // for this run, taken back afterwards
	// TimeoutMS counts from the begin of its execution; 0 means no limit. Then it is interrupted, and
	// after GraceMS (default 3000) its driver is killed.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	GraceMS   int64 `json:"grace_ms,omitempty"`
	// Buffer bounds what is kept of its items, in bytes; 0 means DefaultRunBuffer.
	Buffer int64        `json:"buffer,omitempty"`
	Items  ItemsRequest `json:"items"`
}

// RunEnd says how a run ended.
type RunEnd string

// The ends of a run.
const (
	RunNone        RunEnd = ""            // it waits or executes
	RunCompleted   RunEnd = "completed"   // to its last line
	RunFailed      RunEnd = "failed"      // it raised an error
	RunInterrupted RunEnd = "interrupted" // on request; state is kept
	RunTimedOut    RunEnd = "timed_out"   // at its limit; state is kept unless the driver had to be killed
	RunCanceled    RunEnd = "canceled"    // its context was restarted or deleted
	RunLost        RunEnd = "driver_ended"
	// RunStopped and RunUnknown are the server's: the guest that would know is gone.
	RunStopped RunEnd = "sandbox_stopped"
	RunUnknown RunEnd = "lost"
)

// RunInfo is the state of a run.
type RunInfo struct {
	ID       string `json:"id"`
	Context  string `json:"context"`
	Attached bool   `json:"attached,omitempty"`
	// Queued, Began and Ended are Unix nanoseconds by the guest's clock, 0 while it is not so.
	Queued int64  `json:"queued"`
	Began  int64  `json:"began,omitempty"`
	Ended  int64  `json:"ended,omitempty"`
	End    RunEnd `json:"end,omitempty"`
	// Count is the driver's number of the execution.
	Count int64 `json:"count,omitempty"`
	// Items counts its items in all, Dropped the bytes that are not kept any more.
	Items   int64 `json:"items"`
	Dropped int64 `json:"dropped,omitempty"`
	// Name and Value are those of the error that it raised, cut.
	Name  string `json:"name,omitempty"`
	Value string `json:"value,omitempty"`
	// Driver, Code and Signal tell how its driver ended, where that ended it.
	Driver End `json:"driver,omitempty"`
	Code   int `json:"code,omitempty"`
	Signal int `json:"signal,omitempty"`
}

// RunRef names a run. An interrupt without Run means what executes now.
type RunRef struct {
	Context string `json:"context"`
	Run     string `json:"run"`
}

// InterruptReply names the run that was interrupted, "" for none.
type InterruptReply struct {
	Run string `json:"run"`
}

// ItemsRequest asks for what a run said, from item number Offset on.
type ItemsRequest struct {
	Context string `json:"context"`
	Run     string `json:"run"`
	Offset  int64  `json:"offset"`
	// Follow keeps sending until the run has ended.
	Follow bool `json:"follow,omitempty"`
	// Hold makes the code wait for this reader rather than drop; see OutputRequest.
	Hold bool `json:"hold,omitempty"`
}

// ItemKind tells what an item is.
type ItemKind uint8

// The kinds of items. A result's and an error's bytes are the driver's line of JSON.
const (
	ItemStdout ItemKind = 1
	ItemStderr ItemKind = 2
	ItemResult ItemKind = 3
	ItemError  ItemKind = 4
)

const (
	itemLen  = 10 // kind, flags and number, before the bytes
	itemMore = 1  // the item goes on in the next frame
)

// Item sends one item of a run, in as many frames as it takes.
func (c *Conn) Item(k ItemKind, number int64, data []byte) error {
	for {
		n := min(len(data), ChunkSize)
		flags := byte(0)
		if n < len(data) {
			flags = itemMore
		}
		b := appendHeader(c.out[:0], FrameItem, itemLen+n)
		b = append(b, byte(k), flags)
		b = binary.BigEndian.AppendUint64(b, uint64(number)) //nolint:gosec // not negative
		c.out = append(b, data[:n]...)
		if _, err := c.Write(c.out); err != nil {
			return err
		}
		if data = data[n:]; flags == 0 {
			return nil
		}
	}
}

func parseItem(p []byte) (k ItemKind, more bool, number int64, data []byte, err error) {
	k, flags := ItemKind(p[0]), p[1]
	number = int64(binary.BigEndian.Uint64(p[2:])) //nolint:gosec // checked below
	if k < ItemStdout || k > ItemError || flags > itemMore || number < 0 {
		return 0, false, 0, nil, broken("item of kind %d with flags %d and number %d", k, flags, number)
	}
	return k, flags == itemMore, number, p[itemLen:], nil
}

// RunItem is one thing that a run said, or with Gap set the lack of some.
type RunItem struct {
	Kind   ItemKind // 0 for a gap
	Number int64    // counts the run's items from 0
	// Data is valid until the next call of Next.
	Data []byte
	// Gap is how many items from Number on were dropped.
	Gap int64
}

// Next returns the number of the item after this one.
func (i RunItem) Next() int64 {
	if i.Kind == 0 {
		return i.Number + i.Gap
	}
	return i.Number + 1
}

// ItemStream reads what a run says. It is not safe for concurrent use, but Close may be called at any
// time.
type ItemStream struct {
	x      *exchange
	method Method
	next   int64
	parts  []byte
	info   RunInfo
	err    error
}

// Next returns the next item. Items join without holes. io.EOF means that the guest said all it had
// to say, and Info tells the run's state then; any other error means that this is not known.
func (s *ItemStream) Next() (RunItem, error) {
	if s.err != nil {
		return RunItem{}, s.err
	}
	item, err := s.read()
	if err != nil {
		if err != io.EOF {
			err = s.x.failed(s.method, err)
		}
		s.err = err
	}
	switch {
	case err == io.EOF:
		s.x.done()
	case err != nil:
		s.x.close()
	}
	return item, s.err
}

func (s *ItemStream) read() (RunItem, error) {
	s.parts = s.parts[:0]
	for first := true; ; first = false {
		f, err := s.x.frame()
		if err != nil {
			return RunItem{}, lost(err)
		}
		if f.Kind != FrameItem {
			if !first {
				return RunItem{}, broken("frame of kind %d inside an item", f.Kind)
			}
			return s.other(f)
		}
		k, more, number, data, err := parseItem(f.Payload)
		if err == nil && number != s.next {
			err = broken("item number %d where %d was due", number, s.next)
		}
		if err == nil && len(s.parts)+len(data) > MaxItem {
			err = broken("item with more than %d bytes", MaxItem)
		}
		if err == nil && more && len(data) == 0 {
			err = broken("item that does not go on")
		}
		if err != nil {
			return RunItem{}, err
		}
		if first && !more {
			s.next++
			return RunItem{Kind: k, Number: number, Data: data}, nil
		}
		if s.parts = append(s.parts, data...); !more {
			s.next++
			return RunItem{Kind: k, Number: number, Data: s.parts}, nil
		}
	}
}

func (s *ItemStream) other(f Frame) (RunItem, error) {
	switch f.Kind {
	case FrameGap:
		from, to, err := parseGap(f.Payload)
		if err == nil && from != s.next {
			err = broken("gap from item %d where %d was due", from, s.next)
		}
		if err != nil {
			return RunItem{}, err
		}
		s.next = to
		return RunItem{Number: from, Gap: to - from}, nil
	case FrameEnd:
		if err := Unmarshal(f.Payload, &s.info); err != nil {
			return RunItem{}, err
		}
		return RunItem{}, io.EOF
	}
	return RunItem{}, broken("frame of kind %d among items", f.Kind)
}

// Info returns the run's state as the stream's end told it. It is only meaningful after Next has
// returned io.EOF.
func (s *ItemStream) Info() RunInfo { return s.info }

// Close stops the following. Idempotent.
func (s *ItemStream) Close() { s.x.close() }

// CreateContext starts a context and returns when its driver is ready. The files of its scope stay
// the caller's. Kinds: those of Start, AlreadyExists never (it attaches), ResourceExhausted (contexts),
// FailedPrecondition (the driver did not come up; the text says what it printed).
func (c *Client) CreateContext(ctx context.Context, r CreateContext, files []*os.File) (ContextInfo, error) {
	start := StartProcess{Argv: r.Argv, Env: r.Env, Dir: r.Dir}.escaped()
	r.Argv, r.Env, r.Dir = start.Argv, start.Env, start.Dir
	return unary[ContextInfo](ctx, c, MethodContextCreate, r, files)
}

// Fork makes forks of a zygote's interpreter, and calls each with every one that is ready, or with why it did not
// come to be. It returns once all were told of; an error means that nothing is known of those that were not.
// The files of the scopes stay the caller's.
func (c *Client) Fork(ctx context.Context, r ForkContexts, files []*os.File, each func(id string, info ContextInfo, err error)) error {
	asked := make(map[string]bool, len(r.IDs))
	for _, id := range r.IDs {
		asked[id] = true
	}
	for {
		x, err := c.beginKept(ctx, &c.codes, MethodContextFork, r, files)
		if err != nil {
			return err
		}
		x.buffered()
		s := &EventStream[Forked]{x: x, method: MethodContextFork}
		err = hearForks(s, asked, each)
		s.Close()
		if err == nil || !x.stale(err) || len(asked) < len(r.IDs) {
			return err
		}
		// A kept connection has broken. Asking again is safe: an id that exists is attached to.
	}
}

// hearForks reads until the end, and takes those that were told of out of asked.
func hearForks(s *EventStream[Forked], asked map[string]bool, each func(id string, info ContextInfo, err error)) error {
	for {
		f, err := s.Next()
		if err == io.EOF && len(asked) == 0 {
			return nil
		}
		if err == io.EOF {
			return s.x.failed(s.method, broken("no word of %d forks", len(asked)))
		}
		if err != nil {
			return err
		}
		if !asked[f.ID] {
			return s.x.failed(s.method, broken("word of a fork that was not asked for, or told of before"))
		}
		delete(asked, f.ID)
		if f.Failed != nil {
			each(f.ID, ContextInfo{}, f.Failed.Err())
		} else {
			each(f.ID, f.Info, nil)
		}
	}
}

// Drop ends contexts as DeleteContext does; ids that are not known are passed over.
func (c *Client) Drop(ctx context.Context, ids []string) error {
	for {
		x, err := c.beginKept(ctx, &c.codes, MethodContextDrop, ContextRefs{IDs: ids}, nil)
		if err != nil {
			return err
		}
		if err = x.expect(FrameEnd, nil); err == nil {
			x.done()
			return nil
		}
		x.close()
		if err = x.failed(MethodContextDrop, lost(err)); !x.stale(err) {
			return err
		}
	}
}

// Contexts returns the contexts that the guest knows, oldest first.
func (c *Client) Contexts(ctx context.Context) ([]ContextInfo, error) {
	return drained[ContextInfo](ctx, c, MethodContextList, nil, MaxContexts+MaxForks)
}

// maxRuns bounds how many runs ContextRuns takes from a guest: those that ended, those that wait, and the one that executes.
const maxRuns = KeepRuns + MaxQueued + 1

// ContextRuns returns the runs of a context that the guest still knows, oldest first.
func (c *Client) ContextRuns(ctx context.Context, id string) ([]RunInfo, error) {
	return drained[RunInfo](ctx, c, MethodContextRuns, ContextRef{ID: id}, maxRuns)
}

func drained[T any](ctx context.Context, c *Client, m Method, body any, most int) ([]T, error) {
	s, err := events[T](ctx, c, m, body)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all []T
	for {
		v, err := s.Next()
		if err == io.EOF {
			return all, nil
		}
		if err == nil && len(all) == most {
			err = s.x.failed(m, broken("more than %d answers", most))
		}
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
}

// WaitContext returns a context once the driver that it names has ended.
func (c *Client) WaitContext(ctx context.Context, r WaitContext) (ContextInfo, error) {
	return unary[ContextInfo](ctx, c, MethodContextWait, r, nil)
}

// RunCode executes code and follows it: it returns when the run has its place, and the stream gives
// what it says. Closing the stream does not end the run.
func (c *Client) RunCode(ctx context.Context, r RunCode, code string) (RunInfo, *ItemStream, error) {
	env := StartProcess{Env: r.Env}.escaped()
	r.Env = env.Env
	for {
		x, err := c.beginText(ctx, &c.codes, MethodContextRun, r, nil, &code)
		if err != nil {
			return RunInfo{}, nil, err
		}
		x.buffered()
		var info RunInfo
		if err = x.reply(&info); err == nil {
			return info, &ItemStream{x: x, method: MethodContextRun, next: r.Items.Offset}, nil
		}
		x.close()
		if x.sent != nil && !hasKind(err) {
			err = x.sent
		}
		if err = x.failed(MethodContextRun, err); !x.stale(err) {
			return RunInfo{}, nil, err
		}
		// A kept connection has broken. Asking again is safe: an id that exists is attached to.
	}
}

// sendText sends a text as FrameData and FrameEnd behind a frame, a short one by a single write.
func sendText(w io.Writer, b []byte, text string) error {
	for len(text) > 0 {
		n := min(len(text), ChunkSize)
		b = appendHeader(b, FrameData, n)
		b = append(b, text[:n]...)
		if text = text[n:]; len(text) > 0 {
			if _, err := w.Write(b); err != nil {
				return err
			}
			b = b[:0]
		}
	}
	_, err := w.Write(appendHeader(b, FrameEnd, 0))
	return err
}

// ReadText reads what sendText sends, at most limit bytes: the guest's half.
func (c *Conn) ReadText(limit int) (string, error) {
	var text []byte
	for {
		f, err := c.ReadFrame()
		if err != nil {
			return "", lost(err)
		}
		switch f.Kind {
		case FrameEnd:
			return string(text), nil
		case FrameData:
			if len(text)+len(f.Payload) > limit {
				return "", broken("text with more than %d bytes", limit)
			}
			text = append(text, f.Payload...)
		default:
			return "", broken("frame of kind %d in a text", f.Kind)
		}
	}
}

// Items opens what a run said at an item's number, during and after the run.
func (c *Client) Items(ctx context.Context, r ItemsRequest) (*ItemStream, error) {
	x, err := c.begin(ctx, MethodContextItems, r, nil)
	if err != nil {
		return nil, err
	}
	x.buffered()
	return &ItemStream{x: x, method: MethodContextItems, next: r.Offset}, nil
}

// WaitRun returns a run's state once it has ended.
func (c *Client) WaitRun(ctx context.Context, r RunRef) (RunInfo, error) {
	return unary[RunInfo](ctx, c, MethodContextRunWait, r, nil)
}

// Interrupt interrupts what a context executes, or one run of it, and tells which it was.
func (c *Client) Interrupt(ctx context.Context, r RunRef) (InterruptReply, error) {
	return unary[InterruptReply](ctx, c, MethodContextInterrupt, r, nil)
}

// RestartContext gives a context a new driver, and returns when that is ready. What ran is canceled.
func (c *Client) RestartContext(ctx context.Context, id string) (ContextInfo, error) {
	return unary[ContextInfo](ctx, c, MethodContextRestart, ContextRef{ID: id}, nil)
}

// DeleteContext ends a context and everything that descends from its driver.
func (c *Client) DeleteContext(ctx context.Context, id string) error {
	return c.ok(ctx, MethodContextDelete, ContextRef{ID: id})
}
