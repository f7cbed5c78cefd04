package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"casemate.dev/internal/journal/bundle"
)

// Settings are how a sandbox was made, as far as a process in it could notice.
type Settings struct {
	Template     string   `json:"template"`
	Commit       string   `json:"commit"`
	Isolation    string   `json:"isolation"`
	Profile      string   `json:"profile"`
	Limits       Limits   `json:"limits"`
	Env          []string `json:"env"` // names
	User         string   `json:"user"`
	Dir          string   `json:"dir"`
	Workspaces   []string `json:"workspaces"` // targets
	AllowMissing []string `json:"allow_missing"`
	Record       string   `json:"record"`
	FileChanges  string   `json:"file_changes"`
	// Network is set where it had one.
	Network *Network `json:"network"`
	// Placeholders are variables that it was given beyond Env: they held placeholders of secrets.
	Placeholders []string `json:"-"`
	// Labels say of a sandbox that it was made to run the processes of another one again.
	Labels map[string]string `json:"labels"`
}

// Changes says how much was recorded of the files that processes changed.
func (s Settings) Changes() string { return cmp.Or(s.FileChanges, "off") }

// Limits are a sandbox's, as its record has them.
type Limits struct {
	MemoryBytes int64   `json:"memory_bytes"`
	CPUs        float64 `json:"cpus"`
	Pids        int32   `json:"pids"`
	OpenFiles   int32   `json:"open_files"`
	DiskBytes   int64   `json:"disk_bytes"`
	Inodes      int64   `json:"inodes"`
}

// Record is what a sandbox's record tells of how it was made and of what was done in it. Add fills it.
type Record struct {
	Sandbox  string
	Settings Settings
	// Host is the sandbox's host name inside.
	Host string
	// Begun is when it was made; no file that it changed is older.
	Begun time.Time

	steps    []*step
	byID     map[string]*Process
	contexts map[string]*Context
	open     map[string]bool // what has begun and not ended
	group    int             // of what has begun since nothing was open
	left     string          // the last process that left others behind
	rules    uint64          // the event that changed the network's rules
	contacts []*contact
	assigned int // how many of contacts belong to processes already
	last     uint64
	bad      string // why it is no record to go by
}

// step is something that was done in a sandbox, in order. One of process, call and commit is set, or lost alone.
type step struct {
	seq     uint64
	process *Process
	call    *Call
	// commit is one that was made of the files as they were then, or with taken, whose files took their place.
	commit string
	taken  bool
	// lost says why nobody knows from here on what files were.
	lost string
}

// Process is one process of a record, or one run of code.
type Process struct {
	ID string
	// Code is set for a run of code; then Argv, Dir and User are not.
	Code *Code
	// Event is the counter of its start, or of the failure to start.
	Event        uint64
	Began, Ended time.Time
	Argv         []string
	Dir, User    string // as asked for
	Env          []string
	Timeout      time.Duration
	Stdin        []byte
	PID          int

	// End is how it ended, with ExitCode or Signal where that was seen; "failed": it could not be started, for Problem.
	End      string
	ExitCode int
	Signal   int
	Problem  string
	output   map[string]content

	changes *changes // nil: not recorded
	unknown []string // what of the above is not in the record, and why
	tty     bool
	beside  string // another one that was alive at the same time
	group   int    // of those that were
	mixed   string // a process before it that left others behind
	ruled   uint64 // the event before it that changed the network's rules
	// contacts are what it had to do with the network; see Record.assign.
	contacts []*contact
}

// Code is what a run executed, and where.
type Code struct {
	Text, Language string
	// Context is where it ran, as it was then; nil: in a fresh interpreter of its own.
	Context *Context
	// Starts is how often the context's interpreter had been started before, from 0.
	Starts int
}

// Context is an interpreter that kept its variables between runs.
type Context struct {
	ID, Language, Dir, User string
	Env                     []string // names

	starts, pid int
}

// content is a body.
type content struct {
	data  []byte
	bytes int64 // of the whole; where it is more than data, data is its beginning and its last tail bytes
	tail  int64
}

// Call is a change of files through the API.
type Call struct {
	Type           string // the event's
	Path, To, User string
	Mode           uint32
	Data           []byte
}

// event is what is read of one.
type event struct {
	Sandbox string                     `json:"sandbox"`
	Seq     uint64                     `json:"seq"`
	Time    time.Time                  `json:"time"`
	Type    string                     `json:"type"`
	Process string                     `json:"process"`
	Facts   map[string]json.RawMessage `json:"facts"`

	bodies []bundle.Body
}

// facts are those of all kinds of events that matter.
type facts struct {
	Name         string      `json:"name"`
	Dir          string      `json:"dir"`
	User         string      `json:"user"`
	Env          []string    `json:"env"`
	TTY          bool        `json:"tty"`
	Cut          bool        `json:"cut"`
	TimeoutMS    int64       `json:"timeout_ms"`
	PID          int         `json:"pid"`
	End          string      `json:"end"`
	Signal       int         `json:"signal"`
	Error        string      `json:"error"`
	Missed       int64       `json:"missed"`
	Unread       bool        `json:"output_unread"`
	Run          string      `json:"run"`
	Context      string      `json:"context"`
	Language     string      `json:"language"`
	Fresh        bool        `json:"fresh"`
	Commit       string      `json:"commit"`
	Placeholders []string    `json:"placeholders"`
	Path         string      `json:"path"`
	To           string      `json:"to"`
	Mode         string      `json:"mode"`
	Size         int64       `json:"size"`
	Bytes        int64       `json:"bytes"`
	Offset       int64       `json:"offset"`
	Tree         bool        `json:"tree"`
	Leftover     int         `json:"leftover"`
	Argv         *bundle.Ref `json:"argv"`
	Stdin        *bundle.Ref `json:"stdin"`
	Stdout       *bundle.Ref `json:"stdout"`
	Stderr       *bundle.Ref `json:"stderr"`
	Terminal     *bundle.Ref `json:"terminal"`
	Content      *bundle.Ref `json:"content"`
	Results      *bundle.Ref `json:"results"`
}

// Add takes the next event of a bundle, with the bodies that are there: it fits bundle.Options.
func (r *Record) Add(raw json.RawMessage, bodies []bundle.Body) {
	if r.byID == nil {
		r.byID, r.contexts, r.open = map[string]*Process{}, map[string]*Context{}, map[string]bool{}
	}
	e := event{bodies: bodies}
	if err := json.Unmarshal(raw, &e); err != nil {
		r.fail("an event can't be read: %v", err)
		return
	}
	if e.Seq != r.last+1 {
		r.steps = append(r.steps, &step{seq: e.Seq, lost: fmt.Sprintf("events are missing in the record before event %d", e.Seq)})
	}
	r.last = e.Seq
	if err := r.take(e); err != nil {
		r.fail("event %d (%s): %v", e.Seq, e.Type, err)
	}
}

func (r *Record) fail(format string, args ...any) {
	r.bad = cmp.Or(r.bad, fmt.Sprintf(format, args...))
}

// said reads an observer's facts.
func (e event) said(observer string, into any) error {
	raw := e.Facts[observer]
	if len(raw) == 0 {
		return nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("what the %s says can't be read: %w", observer, err)
	}
	return nil
}

func (r *Record) take(e event) error {
	if e.Type == "sandbox.created" {
		if r.Sandbox != "" {
			return errors.New("it was made before")
		}
		r.Sandbox, r.Host, r.Begun = e.Sandbox, e.Sandbox, e.Time
		return e.said("server", &r.Settings)
	}
	switch kind, _, _ := strings.Cut(e.Type, "."); kind {
	case "network", "model":
		return r.meets(e)
	case "sandbox", "process", "context", "run", "file", "directory", "files", "commit", "gap":
	default:
		return nil
	}
	switch e.Type {
	case "files.changed":
		return r.changed(e)
	case "sandbox.updated":
		return r.updated(e)
	}
	var s, g facts
	if err := e.said("server", &s); err != nil {
		return err
	}
	if err := e.said("guest", &g); err != nil {
		return err
	}
	switch e.Type {
	case "sandbox.claimed":
		r.Host = cmp.Or(s.Name, r.Host)
		r.Settings.Placeholders = s.Placeholders
	case "sandbox.checkout":
		r.steps = append(r.steps, &step{seq: e.Seq, commit: s.Commit, taken: true})
	case "commit.made":
		if len(r.open) == 0 {
			r.steps = append(r.steps, &step{seq: e.Seq, commit: s.Commit})
		}
	case "gap":
		r.steps = append(r.steps, &step{seq: e.Seq, lost: fmt.Sprintf("something may be missing in the record (event %d)", e.Seq)})
	case "process.started", "process.failed":
		r.started(e, s, g)
	case "process.ended":
		return r.ended(e, e.Process, s, g)
	case "context.created":
		r.contexts[s.Context] = &Context{ID: s.Context, Language: s.Language, Dir: s.Dir, User: s.User, Env: s.Env, pid: g.PID}
	case "context.restarted":
		if c := r.contexts[s.Context]; c != nil {
			c.starts, c.pid = c.starts+1, g.PID
		}
	case "run.started":
		return r.ranCode(e, s)
	case "run.ended":
		return r.ended(e, s.Run, s, g)
	case "file.written", "file.removed", "file.moved", "file.mode", "directory.made":
		r.called(e, s, g)
	}
	return nil
}

// begin notes that a process or a run is alive, beside whatever else is.
func (r *Record) begin(id string) {
	if len(r.open) == 0 {
		r.group++
	}
	if p := r.byID[id]; p != nil {
		p.group, p.mixed, p.ruled = r.group, r.left, r.rules
	}
	for other := range r.open {
		if a, b := r.byID[id], r.byID[other]; a != nil && b != nil && a.follows(b) {
			continue
		}
		for _, pair := range [][2]string{{id, other}, {other, id}} {
			if p := r.byID[pair[0]]; p != nil {
				p.beside = cmp.Or(p.beside, pair[1])
			}
		}
	}
	r.open[id] = true
}

// follows reports whether two runs are in one context, where each waits for the one before.
func (p *Process) follows(q *Process) bool {
	return p.Code != nil && q.Code != nil && p.Code.Context != nil && p.Code.Context == q.Code.Context
}

// ranCode takes the start of a run.
func (r *Record) ranCode(e event, s facts) error {
	p := &Process{
		ID: s.Run, Event: e.Seq, Began: e.Time, Env: s.Env, Timeout: time.Duration(s.TimeoutMS) * time.Millisecond,
		Code: &Code{Language: s.Language},
	}
	if !s.Fresh {
		c := r.contexts[s.Context]
		if c == nil {
			p.unknown = append(p.unknown, "its context is not in the record")
			c = &Context{ID: s.Context}
		}
		p.Code.Context, p.Code.Starts, p.PID = c, c.starts, c.pid
	}
	var body struct {
		Code *bundle.Ref `json:"code"`
	}
	if err := e.said("server", &body); err != nil {
		return err
	}
	switch code, why := e.body("server.code", body.Code); {
	case why != "":
		p.unknown = append(p.unknown, "its code is not in the record: "+why)
	case code.bytes > int64(len(code.data)):
		p.unknown = append(p.unknown, "its code is longer than what is kept of it")
	default:
		p.Code.Text = string(code.data)
	}
	r.byID[p.ID] = p
	r.steps = append(r.steps, &step{seq: e.Seq, process: p})
	r.begin(p.ID)
	return nil
}

func (r *Record) started(e event, s, g facts) {
	p := &Process{
		ID: e.Process, Event: e.Seq, Began: e.Time, Dir: s.Dir, User: s.User, Env: s.Env, tty: s.TTY, PID: g.PID,
		Timeout: time.Duration(s.TimeoutMS) * time.Millisecond,
	}
	name, ref := "server.argv", s.Argv
	if ref == nil {
		name, ref = "guest.argv", g.Argv
	}
	text, why := e.body(name, ref)
	switch {
	case why != "":
		p.unknown = append(p.unknown, "its arguments are not in the record: "+why)
	case s.Cut || json.Unmarshal(text.data, &p.Argv) != nil || len(p.Argv) == 0:
		p.unknown = append(p.unknown, "its arguments are longer than what is recorded")
	}
	p.given(e, s.Stdin)
	r.byID[p.ID] = p
	r.steps = append(r.steps, &step{seq: e.Seq, process: p})
	if e.Type == "process.failed" {
		p.Ended, p.End, p.Problem = e.Time, "failed", s.Error
		return
	}
	r.begin(p.ID)
}

// given takes what went to its standard input.
func (p *Process) given(e event, ref *bundle.Ref) {
	in, why := e.body("server.stdin", ref)
	switch {
	case why != "":
		p.unknown = append(p.unknown, "its input is not in the record: "+why)
	case in.bytes > int64(len(in.data)):
		p.unknown = append(p.unknown, "its input is longer than what is kept of it")
	default:
		p.Stdin = append(p.Stdin, in.data...)
	}
}

func (r *Record) ended(e event, id string, s, g facts) error {
	p := r.byID[id]
	if p == nil {
		return fmt.Errorf("%s ends and has no start", id)
	}
	delete(r.open, p.ID)
	if p.Ended = e.Time; g.Leftover > 0 {
		r.left = p.ID
	}
	p.End, p.Signal, p.Problem = cmp.Or(s.End, g.End), g.Signal, g.Error
	if err := p.exited(e); err != nil {
		return err
	}
	p.given(e, s.Stdin)
	p.output = map[string]content{}
	for name, ref := range map[string]*bundle.Ref{"stdout": g.Stdout, "stderr": g.Stderr, "terminal": g.Terminal, "results": g.Results} {
		out, why := e.body("guest."+name, ref)
		if why != "" {
			p.unknown = append(p.unknown, "its output is not in the record: "+why)
			break
		}
		p.output[name] = out
	}
	if s.Unread || g.Missed > 0 {
		p.unknown = append(p.unknown, "not all of its output was seen when it was recorded")
	}
	return nil
}

// exited reads its exit code; of a run, that is its interpreter's.
func (p *Process) exited(e event) error {
	var g struct {
		Code int `json:"code"`
	}
	err := e.said("guest", &g)
	p.ExitCode = g.Code
	return err
}

// body returns content that an event speaks of, or why it is not there.
func (e event) body(name string, ref *bundle.Ref) (c content, why string) {
	if ref == nil || ref.Bytes == 0 {
		return content{}, ""
	}
	for _, b := range e.bodies {
		if b.Name == name {
			return content{data: b.Data, bytes: ref.Bytes, tail: ref.Tail}, ""
		}
	}
	if ref.Hashed {
		return content{}, "only hashes were kept (make sandboxes with --record content)"
	}
	return content{}, "it was erased, has expired, or was left out of the bundle"
}

// called takes a change through the API.
func (r *Record) called(e event, s, g facts) {
	c := &Call{Type: e.Type, Path: s.Path, To: s.To, User: s.User}
	st := &step{seq: e.Seq, call: c}
	r.steps = append(r.steps, st)
	what := fmt.Sprintf("through the API %s was changed (event %d), ", s.Path, e.Seq)
	switch {
	case e.Type == "file.mode" && s.Mode == "":
		st.lost = what + "its owner, and that is not done again"
	case e.Type == "file.written" && s.Tree:
		st.lost = what + "as a tree, and that is not done again"
	case e.Type == "file.written" && (s.Offset > 0 || g.Size != s.Bytes):
		st.lost = what + "in part, and that is not done again"
	case e.Type == "file.written":
		body, why := e.body("server.content", s.Content)
		if why == "" && body.bytes > int64(len(body.data)) {
			why = "it is longer than what is kept"
		}
		if why != "" {
			st.lost = what + "and the content is not in the record: " + strings.Replace(why, "--record content", "--record all", 1)
		}
		c.Data = body.data
	}
	if _, err := fmt.Sscanf(cmp.Or(s.Mode, g.Mode, "0"), "%o", &c.Mode); err != nil {
		st.lost = what + "and the mode can't be read"
	}
}

// updated notes that the network's rules were changed.
func (r *Record) updated(e event) error {
	var s struct {
		Network *Network `json:"network"`
	}
	if err := e.said("server", &s); err != nil {
		return err
	}
	if s.Network != nil {
		r.rules = e.Seq
	}
	return nil
}

// changed takes what an end changed.
func (r *Record) changed(e event) error {
	c := &changes{}
	if err := e.said("server", c); err != nil {
		return err
	}
	if err := c.hashed(e); err != nil {
		return err
	}
	if p := r.byID[cmp.Or(e.Process, c.Run)]; p != nil && !c.Between {
		p.changes = c
	}
	return nil
}

// Processes returns the processes and the runs of code in the order in which they began.
func (r *Record) Processes() []*Process {
	var out []*Process
	for _, s := range r.steps {
		if s.process != nil {
			out = append(out, s.process)
		}
	}
	return out
}

// Process returns a process or a run by its id; nil: there is none.
func (r *Record) Process(id string) *Process { return r.byID[id] }

// Problem says why it is no record to go by; "" where it is one.
func (r *Record) Problem() string {
	if r.bad == "" && r.Sandbox == "" {
		return "the record does not begin with the sandbox's creation"
	}
	return r.bad
}
