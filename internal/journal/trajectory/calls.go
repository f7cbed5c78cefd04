// Package trajectory retells a sandbox's record in the forms that tools for agents read: as a trajectory of Harbor's ATIF,
// and as OpenTelemetry spans of GenAI tool calls.
//
// What belongs here: making these forms of a bundle, and sending spans to a collector. What does not: the record and
// its proofs, which packages journal and bundle keep; nothing here proves anything, each call names its place in the log.
package trajectory

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/journal/bundle"
)

// The names of the tools that calls are of.
const (
	toolProcess = "process"
	toolCode    = "code"
)

// Place is where an event stands.
type Place struct {
	Event uint64 `json:"event"`     // the sandbox's counter
	Index int64  `json:"log_index"` // in the log
	Leaf  string `json:"leaf"`      // its hash there, in base64
}

// Call is something that was asked of a sandbox, and what came of it.
type Call struct {
	ID, Tool, Actor string
	// Arguments are what was asked for, by name.
	Arguments map[string]any
	Begun     time.Time
	// Ended is zero where the end is not on record.
	Ended      time.Time
	Start, End Place
	// Server, Guest and Kernel are the facts of the end, by who observed them.
	Server, Guest, Kernel map[string]any
	// Said is what it said, by name, as far as the bundle holds it.
	Said map[string][]byte
	// Files are which files changed up to its end, as the server compared them, and Compared is where that stands; nil:
	// nobody looked.
	Files    map[string]any
	Compared Place
	// Failed says that it did not begin.
	Failed bool
	// Connections and Refused count what the gateway let out and did not meanwhile.
	Connections, Refused int
}

// Changed are files that changed, as the server compared them.
type Changed struct {
	Files map[string]any `json:"files"`
	Log   Place          `json:"log"`
}

// Story is a sandbox's record as calls.
type Story struct {
	Origin, Sandbox, Key string
	Created              map[string]any // the server's facts of its creation
	Begun, Ended         time.Time      // of the first and the last event
	Over                 bool           // the sandbox has ended
	Calls                []*Call        // in the order in which they began
	Gaps, Events         int
	// Between are changes of files that belong to no call's end: between two, or as the sandbox ended.
	Between []Changed

	open   map[string]*Call
	bodies map[uint64]*Call // whose bodies follow
	starts map[uint64]*Call
}

// event is what of an event is looked at.
type event struct {
	Seq     uint64                    `json:"seq"`
	Time    time.Time                 `json:"time"`
	Type    string                    `json:"type"`
	Actor   string                    `json:"actor"`
	Process string                    `json:"process"`
	Facts   map[string]map[string]any `json:"facts"`
}

// Read makes the story of a bundle. It verifies nothing.
func Read(in io.Reader) (*Story, error) {
	s := &Story{open: make(map[string]*Call), bodies: make(map[uint64]*Call), starts: make(map[uint64]*Call)}
	err := bundle.Read(in, func(l bundle.Line) error {
		switch {
		case l.Bundle != nil:
			s.Origin, s.Sandbox, s.Key = l.Bundle.Origin, l.Bundle.Sandbox, l.Bundle.Key
		case l.Event != nil:
			var e event
			if err := json.Unmarshal(l.Event, &e); err != nil {
				return fmt.Errorf("read an event: %w", err)
			}
			hash := tlog.RecordHash(l.Event)
			s.add(e, Place{Event: e.Seq, Index: *l.Leaf, Leaf: hash.String()})
		case l.Body != nil:
			s.body(*l.Body)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if s.Sandbox == "" {
		return nil, fmt.Errorf("it is no bundle")
	}
	return s, nil
}

func (s *Story) add(e event, at Place) {
	s.Events++
	if s.Begun.IsZero() {
		s.Begun = e.Time
	}
	s.Ended = e.Time
	server := e.Facts["server"]
	switch e.Type {
	case "sandbox.created":
		s.Created = server
	case "sandbox.ended":
		s.Over = true
	case "gap":
		s.Gaps++
	case "process.started", "process.failed":
		c := s.begin(toolProcess, e.Process, e, at, "dir", "user", "tty", "timeout_ms")
		c.Failed = e.Type == "process.failed"
		if c.Failed {
			s.end(c, e, at)
		}
	case "process.ended":
		if c := s.open[toolProcess+e.Process]; c != nil {
			s.end(c, e, at)
		}
	case "run.started":
		s.begin(toolCode, text(server["run"]), e, at, "language", "context", "timeout_ms", "fresh")
	case "run.ended":
		if c := s.open[toolCode+text(server["run"])]; c != nil {
			s.end(c, e, at)
		}
	case "file.written", "file.read", "file.removed", "file.moved", "file.mode", "directory.made":
		c := s.begin(e.Type, fmt.Sprintf("event-%d", e.Seq), e, at, "path", "to", "user", "mode", "offset", "tree")
		s.end(c, e, at)
	case "files.changed":
		s.changed(e.Process, server, at)
	case "network.opened", "network.refused":
		for _, c := range s.open {
			if e.Type == "network.opened" {
				c.Connections++
			} else {
				c.Refused++
			}
		}
	}
}

// changed gives changes of files to the call that they end with.
func (s *Story) changed(process string, facts map[string]any, at Place) {
	tool, id := toolProcess, process
	if run := text(facts["run"]); run != "" {
		tool, id = toolCode, run
	}
	for _, c := range slices.Backward(s.Calls) {
		if between, _ := facts["between"].(bool); !between && c.Tool == tool && c.ID == id && !c.Ended.IsZero() {
			c.Files, c.Compared = facts, at
			return
		}
	}
	s.Between = append(s.Between, Changed{facts, at})
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

// begin adds a call, whose arguments are among the facts of its beginning.
func (s *Story) begin(tool, id string, e event, at Place, names ...string) *Call {
	c := &Call{ID: id, Tool: tool, Actor: e.Actor, Begun: e.Time, Start: at, Arguments: make(map[string]any), Said: make(map[string][]byte)}
	for _, observer := range []string{"guest", "server"} { // the server's word counts
		for _, n := range names {
			if v, ok := e.Facts[observer][n]; ok {
				c.Arguments[n] = v
			}
		}
	}
	s.Calls = append(s.Calls, c)
	s.open[tool+id] = c
	s.starts[e.Seq] = c
	return c
}

func (s *Story) end(c *Call, e event, at Place) {
	c.Ended, c.End = e.Time, at
	c.Server, c.Guest, c.Kernel = e.Facts["server"], e.Facts["guest"], e.Facts["kernel"]
	delete(s.open, c.Tool+c.ID)
	s.bodies[e.Seq] = c
}

// body gives content to the call that it is of.
func (s *Story) body(b bundle.Body) {
	_, name, _ := strings.Cut(b.Name, ".")
	if c := s.starts[b.Seq]; c != nil {
		switch name {
		case "argv":
			var argv []string
			if json.Unmarshal(b.Data, &argv) == nil {
				c.Arguments["argv"] = argv
			}
		case "code", "stdin":
			c.Arguments[name] = strings.ToValidUTF8(string(b.Data), "\uFFFD")
		}
	}
	if c := s.bodies[b.Seq]; c != nil && (name == "stdout" || name == "stderr" || name == "terminal" || name == "results") {
		c.Said[name] = b.Data
	}
}

// fact is a fact of the end: the most trusted observer's.
func (c *Call) fact(name string) any {
	for _, facts := range []map[string]any{c.Kernel, c.Server, c.Guest} {
		if v, ok := facts[name]; ok {
			return v
		}
	}
	return nil
}

// outcome is how it ended, in one word; "" while it has not.
func (c *Call) outcome() string {
	switch end := text(c.fact("end")); {
	case c.Failed:
		return "failed"
	case c.Ended.IsZero():
		return ""
	case end != "":
		return end
	}
	return "done"
}

// wrong says what went wrong, in a few words that are always the same for the same; "" where nothing did.
func (c *Call) wrong() string {
	switch o := c.outcome(); o {
	case "", "done", "completed":
		return ""
	case "exited":
		if code, _ := c.fact("code").(float64); code != 0 {
			return fmt.Sprintf("exit_%v", code)
		}
		return ""
	default:
		return o
	}
}

// said is all that it said, as text.
func (c *Call) said() string {
	var b strings.Builder
	for _, name := range []string{"stdout", "terminal", "results", "stderr"} {
		if data := c.Said[name]; len(data) > 0 {
			if b.Len() > 0 && name == "stderr" {
				b.WriteString("\n[stderr]\n")
			}
			b.WriteString(strings.ToValidUTF8(string(data), "\uFFFD"))
		}
	}
	return b.String()
}
