package check

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Event is one event of a record.
type Event struct {
	Seq     uint64 `json:"seq"`
	Type    string `json:"type"`
	Process string `json:"process"`
	// Facts is what each observer says: an object of JSON.
	Facts map[string]json.RawMessage `json:"facts"`
	// Argv is what was executed, where it is at hand: JSON, as the body of that name has it.
	Argv []byte `json:"-"`
}

// Record is what is known of a sandbox from its events.
type Record struct {
	// Events is how many there are, and Last the counter of the last one.
	Events int
	Last   uint64
	// Ended says that the sandbox has ended.
	Ended bool

	created  bool
	level    string // of file changes
	holes    []evidence
	procs    []*process
	byID     map[string]*process
	runs     map[string]uint64 // open ones: the event that began each
	contexts map[string]uint64 // open ones
	changes  []changeSet
	written  uint64     // the last change by the file API
	replaced []evidence // files as a whole, by those of a commit
	opened   []connection
	refused  []evidence
	attempts []evidence // calls that tell of an attempt to get out
	observed bool       // they are recorded
	bad      []string   // events that could not be read
}

// evidence is an event, with what it tells.
type evidence struct {
	seq  uint64
	what string
	by   string // observer
}

// process is a process of the record.
type process struct {
	id         string
	started    uint64
	by         string // who told of its arguments
	failed     bool   // it could not be started
	command    string // its arguments, with spaces between
	known, cut bool   // the arguments are at hand; they go on
	ended      uint64
	end        string
	code       *int
	left       bool // it left some running
}

// connection is one that was opened.
type connection struct {
	seq                uint64
	host, port, dialed string
}

// changeSet is what one event tells of changed files.
type changeSet struct {
	Seq     uint64 `json:"-"`
	Process string `json:"-"`

	Run      string          `json:"run"`
	Between  bool            `json:"between"`
	Left     []string        `json:"left"`
	Contexts []string        `json:"contexts"`
	Created  int             `json:"created"`
	Modified int             `json:"modified"`
	Deleted  int             `json:"deleted"`
	Renamed  int             `json:"renamed"`
	Files    []fileChange    `json:"files"`
	More     int             `json:"more"`
	MoreIn   []moreDirectory `json:"more_in"`
	Unknown  string          `json:"unknown"`
}

func (c changeSet) count() int { return c.Created + c.Modified + c.Deleted + c.Renamed }

// who tells whose end it belongs to.
func (c changeSet) who() string {
	switch {
	case c.Process != "":
		return "by " + c.Process
	case c.Run != "":
		return "by " + c.Run
	}
	return "between processes"
}

type fileChange struct {
	Op   string   `json:"op"`
	Path string   `json:"path"`
	From string   `json:"from"`
	Type string   `json:"type"`
	What []string `json:"what"`
}

type moreDirectory struct {
	Dir   string `json:"dir"`
	Files int    `json:"files"`
}

// Add takes the next event. They come in the order of their counters.
func (r *Record) Add(e Event) {
	if r.byID == nil {
		r.byID, r.runs, r.contexts = map[string]*process{}, map[string]uint64{}, map[string]uint64{}
	}
	r.Events++
	if e.Seq != r.Last+1 {
		what := fmt.Sprintf("events %d to %d are missing", r.Last+1, e.Seq-1)
		if e.Seq == r.Last+2 {
			what = fmt.Sprintf("event %d is missing", r.Last+1)
		}
		r.holes = append(r.holes, evidence{e.Seq, what, "server"})
	}
	r.Last = e.Seq
	if err := r.take(e); err != nil {
		r.bad = append(r.bad, fmt.Sprintf("event %d (%s): %v", e.Seq, e.Type, err))
	}
}

// serverFacts are those of the server's that matter.
type serverFacts struct {
	FileChanges string `json:"file_changes"`
	Reason      string `json:"reason"`
	Context     string `json:"context"`
	Run         string `json:"run"`
	Cut         bool   `json:"cut"`
	Found       bool   `json:"found"`
	Error       string `json:"error"`
	Commit      string `json:"commit"`
	End         string `json:"end"`
	Target      string `json:"target"`
	Dialed      string `json:"dialed"`
	Proto       string `json:"proto"`
	Verdict     *struct {
		Reason string `json:"reason"`
	} `json:"verdict"`
	Note string `json:"note"`
}

func (r *Record) take(e Event) error {
	var s serverFacts
	if raw := e.Facts["server"]; len(raw) > 0 {
		if err := json.Unmarshal(raw, &s); err != nil {
			return fmt.Errorf("its facts can't be read: %w", err)
		}
	}
	switch e.Type {
	case "sandbox.created":
		r.created, r.level = true, s.FileChanges
	case "sandbox.ended":
		r.Ended = true
		r.runs, r.contexts = map[string]uint64{}, map[string]uint64{}
	case "gap":
		why := s.Reason
		if why == "" {
			why = s.Note
		}
		r.holes = append(r.holes, evidence{e.Seq, strings.TrimSuffix("something was not recorded: "+why, ": "), "server"})
	case "process.started", "process.failed":
		r.started(e, s)
	case "process.ended":
		return r.endedProcess(e, s)
	case "run.started":
		r.runs[s.Run] = e.Seq
	case "run.ended":
		delete(r.runs, s.Run)
	case "context.created", "context.restarted":
		r.contexts[s.Context] = e.Seq
	case "context.ended":
		delete(r.contexts, s.Context)
	case "file.written", "file.removed", "file.moved", "file.mode", "directory.made":
		r.written = e.Seq
	case "files.changed":
		c := changeSet{Seq: e.Seq, Process: e.Process}
		if err := json.Unmarshal(e.Facts["server"], &c); err != nil {
			return fmt.Errorf("its facts can't be read: %w", err)
		}
		r.changes = append(r.changes, c)
	case "sandbox.checkout":
		r.replaced = append(r.replaced, evidence{e.Seq, "its files are those of " + s.Commit + " from here on", "server"})
	case "network.opened":
		host, port := splitHost(s.Target)
		dialed, _ := splitHost(s.Dialed)
		r.opened = append(r.opened, connection{e.Seq, strings.ToLower(strings.TrimSuffix(host, ".")), port, dialed})
	case "sandbox.started":
		return r.coverage(e)
	case "call.attempt":
		return r.attempted(e)
	case "network.refused":
		what := strings.Join(strings.Fields("refused: "+s.Proto+" "+s.Target), " ")
		if s.Verdict != nil && s.Verdict.Reason != "" {
			what += ": " + s.Verdict.Reason
		}
		r.refused = append(r.refused, evidence{e.Seq, what, "server"})
	}
	return nil
}

// coverage takes what a start says of the calls that are observed.
func (r *Record) coverage(e Event) error {
	var s struct {
		Calls map[string]string `json:"calls"`
	}
	if raw := e.Facts["server"]; len(raw) > 0 {
		if err := json.Unmarshal(raw, &s); err != nil {
			return fmt.Errorf("its facts can't be read: %w", err)
		}
	}
	r.observed = strings.HasPrefix(s.Calls["attempts"], "recorded")
	return nil
}

// attempted takes a call that tells of an attempt to get out.
func (r *Record) attempted(e Event) error {
	var k struct {
		Call    string   `json:"call"`
		Target  string   `json:"target"`
		Args    []string `json:"args"`
		Command string   `json:"command"`
	}
	if raw := e.Facts["kernel"]; len(raw) > 0 {
		if err := json.Unmarshal(raw, &k); err != nil {
			return fmt.Errorf("its facts can't be read: %w", err)
		}
	}
	what := strings.Join(strings.Fields("attempted: "+k.Call+" "+k.Target+" "+strings.Join(k.Args, " ")), " ")
	if k.Command != "" {
		what += " by " + k.Command
	}
	r.attempts = append(r.attempts, evidence{e.Seq, what, "kernel"})
	return nil
}

// maxArgv is where the server cuts arguments, in bytes with one more for each. It does not say so of those that it found
// out later.
const maxArgv = 16 << 10

func (r *Record) started(e Event, s serverFacts) {
	p := &process{id: e.Process, started: e.Seq, by: "server", cut: s.Cut}
	var argv []string
	if len(e.Argv) > 0 && json.Unmarshal(e.Argv, &argv) == nil {
		p.command, p.known = strings.Join(argv, " "), true
	}
	if s.Found {
		p.by, p.cut = "guest", len(p.command) >= maxArgv-1
	}
	if e.Type == "process.failed" {
		p.failed, p.ended, p.end = true, e.Seq, strings.TrimSuffix("could not be started: "+s.Error, ": ")
	}
	r.procs = append(r.procs, p)
	r.byID[p.id] = p
}

func (r *Record) endedProcess(e Event, s serverFacts) error {
	p := r.byID[e.Process]
	if p == nil {
		return fmt.Errorf("process %s ends and has no start", e.Process)
	}
	p.ended, p.end = e.Seq, s.End
	var g struct {
		End      string `json:"end"`
		Code     *int   `json:"code"`
		Leftover int    `json:"leftover"`
	}
	if raw := e.Facts["guest"]; len(raw) > 0 {
		if err := json.Unmarshal(raw, &g); err != nil {
			return fmt.Errorf("its facts can't be read: %w", err)
		}
	}
	if p.end == "" {
		p.end = g.End
	}
	if p.end == "exited" {
		p.code = g.Code
	}
	p.left = g.Leftover > 0
	return nil
}

// Incomplete says that something is missing, or may be.
func (r *Record) Incomplete(why string) {
	r.holes = append(r.holes, evidence{r.Last, why, "server"})
}

// incomplete tells why something may be missing; "" where nothing is known to be.
func (r *Record) incomplete() (string, []evidence) {
	switch {
	case len(r.holes) > 0:
		return "something is missing in the record", r.holes
	case len(r.bad) > 0:
		return r.bad[0], nil
	case !r.created:
		return "the record does not begin with the sandbox's creation", nil
	}
	return "", nil
}

// raw reads a path of a record: a byte that is no text stands there as NUL and two hexadecimal digits.
func raw(text string) string {
	if !strings.Contains(text, "\x00") {
		return text
	}
	var b []byte
	for {
		before, rest, more := strings.Cut(text, "\x00")
		b = append(b, before...)
		if !more {
			return string(b)
		}
		if one, err := hex.DecodeString(rest[:min(2, len(rest))]); err == nil && len(one) == 1 {
			b, text = append(b, one[0]), rest[2:]
			continue
		}
		b, text = append(b, 0), rest
	}
}

// open returns the processes that have not ended.
func (r *Record) open() []*process {
	if r.Ended {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(r.procs), func(p *process) bool { return p.ended > 0 })
}
