package meter

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"
)

// Event is one event of a sandbox's record, as a bundle has it.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"`
	Process string    `json:"process"`
	// Facts is what each observer says: an object of JSON.
	Facts map[string]json.RawMessage `json:"facts"`
}

// Types returns the types of the events that count. Others may be left out.
func Types() []string {
	return []string{
		"sandbox.created", "sandbox.claimed", "sandbox.updated", "sandbox.paused", "sandbox.resumed", "sandbox.adopted", "sandbox.ended",
		"process.started", "process.failed", "process.ended", "run.started", "run.ended",
		"network.opened", "network.closed", "network.cut", "usage.metered", "gap",
	}
}

// hole is how much time may pass between two readings that follow on one another: from the moment that one was made to that
// of the event which tells of it.
const hole = time.Second

// Record is what is known of one sandbox's use from its events, added in order.
type Record struct {
	// Name is the sandbox's, Template what it started from, Principal whose it is.
	Name      string
	Template  string
	Principal string
	// Ended says that nothing more will come.
	Ended bool

	period Period
	u      Usage
	// sure is the time of the last event that shows the server to have been there.
	sure time.Time
	// restarted says that the server is a new one, and has not told yet whether the sandbox goes on.
	restarted bool

	state    state
	changed  time.Time             // since when
	open     map[string]*time.Time // processes and runs; nil: it is paused
	executed time.Time             // until when execution is counted
	conns    int64

	cpu     int64     // what the kernel had counted for the instance when it was last read
	metered time.Time // until when memory is counted
	read    bool      // the instance was read for the last time
	closing *Usage    // what was open at the period's end
}

// state is what a sandbox does.
type state int

// The states.
const (
	none state = iota // it has not come to run, or has ended
	running
	frozen // paused, with its memory
	asleep // paused, and no process is there
)

// NewRecord returns a record without events, of which only what lies in the period is counted.
func NewRecord(p Period) *Record {
	return &Record{period: p, u: Usage{Sandboxes: 1}, open: map[string]*time.Time{}}
}

// facts are those that count, of all types together.
type facts struct {
	Name     string `json:"name"`
	Template string `json:"template"`
	Owner    string `json:"owner"`
	State    string `json:"state"`
	Memory   *bool  `json:"memory"`
	OnDisk   bool   `json:"on_disk"`
	Reason   string `json:"reason"`
	End      string `json:"end"`
	Run      string `json:"run"`
	Count    int64  `json:"count"`
	Sent     int64  `json:"sent"`
	Received int64  `json:"received"`

	CPUUS             int64 `json:"cpu_us"`
	MemoryByteSeconds int64 `json:"memory_byte_seconds"`
	OverMS            int64 `json:"over_ms"`
	Last              bool  `json:"last"`
}

func (e Event) said(observer string) (f facts) {
	// What can't be read says nothing: an event of another version, whose type or facts mean something else.
	_ = json.Unmarshal(e.Facts[observer], &f)
	return f
}

// lost is the end and the reason of what nobody saw end.
const lost = "lost"

// Add adds the next event.
func (r *Record) Add(e Event) {
	if !slices.Contains(Types(), e.Type) {
		return
	}
	f := e.said("server")
	if p := r.period.Until; r.closing == nil && !p.IsZero() && !e.Time.Before(p) {
		r.closing = &Usage{Open: int64(len(r.open)), OpenConnections: r.conns}
	}
	if !r.doubtful(e, f) && e.Time.After(r.sure) {
		r.sure = e.Time
	}
	counts := r.period.has(e.Time)
	switch e.Type {
	case "sandbox.created":
		r.Name, r.Template, r.Principal = f.Name, f.Template, f.Owner
	case "process.started", "run.started":
		r.start(cmp.Or(f.Run, e.Process), e.Time)
		switch {
		case counts && e.Type == "run.started":
			r.u.Runs++
		case counts:
			r.u.Processes++
		}
	case "process.failed", "process.ended", "run.ended":
		r.stop(cmp.Or(f.Run, e.Process))
	case "network.opened":
		r.conns += max(f.Count, 1)
	case "network.closed", "network.cut":
		r.conns = max(r.conns-max(f.Count, 1), 0)
		if counts {
			r.u.SentBytes += f.Sent
			r.u.ReceivedBytes += f.Received
		}
	case "usage.metered":
		r.reading(e, f, counts)
	case "gap":
		r.restarted, r.conns = true, 0
		if counts {
			r.u.Gaps++
		}
	default:
		r.life(e, f)
	}
}

// doubtful reports whether an event was recorded by a server that had not been there to see what it tells of.
func (r *Record) doubtful(e Event, f facts) bool {
	switch e.Type {
	case "gap":
		return true
	case "process.ended", "run.ended":
		_, told := e.Facts["guest"]
		return f.End == lost || r.restarted && !told
	case "sandbox.ended":
		return f.Reason == lost || r.restarted
	}
	return false
}

// life follows the sandbox from its start to its end.
func (r *Record) life(e Event, f facts) {
	switch e.Type {
	case "sandbox.claimed":
		r.become(running, e.Time)
		r.fresh(e.Time)
	case "sandbox.adopted":
		r.restarted = false
	case "sandbox.updated":
		switch {
		case f.State == "running" && r.state != running:
			r.become(running, e.Time)
		case f.State == "paused" && r.state == running:
			r.become(frozen, e.Time)
		}
	case "sandbox.paused":
		if f.OnDisk || f.Memory != nil && !*f.Memory {
			r.become(asleep, e.Time)
		} else {
			r.become(frozen, e.Time)
		}
	case "sandbox.resumed":
		if r.state == asleep || f.OnDisk || f.Memory != nil && !*f.Memory {
			r.fresh(e.Time)
		}
		r.become(running, e.Time)
	case "sandbox.ended":
		for id := range r.open {
			r.stop(id)
		}
		if r.state != none && !r.read {
			r.missed(e.Time)
		}
		until := e.Time
		if r.doubtful(e, f) {
			until = r.sure
		}
		r.become(none, until)
		r.Ended, r.conns = true, 0
	}
}

// fresh begins to count for an instance whose counters are its own.
func (r *Record) fresh(t time.Time) { r.cpu, r.metered, r.read = 0, t, false }

// missed counts the time before t of which nobody read what was used.
func (r *Record) missed(t time.Time) {
	if t.Sub(r.metered) > hole {
		r.u.UnmeteredUS += r.period.micros(r.metered, t)
	}
}

// reading takes up what was read of the kernel.
func (r *Record) reading(e Event, f facts, counts bool) {
	cpu := e.said("kernel").CPUUS
	if counts {
		r.u.MemoryByteSeconds += f.MemoryByteSeconds
		if cpu < r.cpu { // another instance's, of which no event tells
			r.u.CPUUS += cpu
		} else {
			r.u.CPUUS += cpu - r.cpu
		}
	}
	r.cpu = cpu
	if !r.metered.IsZero() {
		r.missed(e.Time.Add(-time.Duration(f.OverMS) * time.Millisecond))
	}
	r.metered, r.read = e.Time, f.Last
}

// become changes the state at t.
func (r *Record) become(to state, t time.Time) {
	switch r.state {
	case running:
		r.u.RunningUS += r.period.micros(r.changed, t)
	case frozen, asleep:
		r.u.PausedUS += r.period.micros(r.changed, t)
	case none:
	}
	if r.state == running && to != running {
		if from := r.earliest(); from != nil {
			r.execute(*from, t)
		}
		for id := range r.open {
			r.open[id] = nil
		}
	}
	if to == running && r.state != running {
		for id := range r.open {
			r.open[id] = &t
		}
	}
	r.state, r.changed = to, t
}

func (r *Record) start(id string, t time.Time) {
	if r.state == running || r.state == none { // or just before that is recorded
		r.open[id] = &t
	} else {
		r.open[id] = nil
	}
}

// stop ends a process or run, as far as anybody knows. What others that are open began after counts as theirs.
func (r *Record) stop(id string) {
	from := r.open[id]
	delete(r.open, id)
	if from == nil {
		return
	}
	to := r.sure
	if next := r.earliest(); next != nil && next.Before(to) {
		to = *next
	}
	r.execute(*from, to)
}

// earliest is when the process or run began that has been open for longest and is not paused; nil: there is none.
func (r *Record) earliest() (first *time.Time) {
	for _, from := range r.open {
		if from != nil && (first == nil || from.Before(*first)) {
			first = from
		}
	}
	return first
}

// execute counts a time in which something was executing; what was counted already counts once.
func (r *Record) execute(from, to time.Time) {
	if from.Before(r.executed) {
		from = r.executed
	}
	if to.After(from) {
		r.u.ExecutionUS += r.period.micros(from, to)
		r.executed = to
	}
}

// Usage returns what was used in the period, as far as the events tell.
func (r *Record) Usage() Usage {
	u := r.u
	if from := r.earliest(); from != nil {
		if from.Before(r.executed) {
			from = &r.executed
		}
		u.ExecutionUS += r.period.micros(*from, r.sure)
	}
	switch r.state {
	case running:
		u.RunningUS += r.period.micros(r.changed, r.sure)
	case frozen, asleep:
		u.PausedUS += r.period.micros(r.changed, r.sure)
	case none:
	}
	u.Open, u.OpenConnections = int64(len(r.open)), r.conns
	if r.closing != nil {
		u.Open, u.OpenConnections = r.closing.Open, r.closing.OpenConnections
	}
	if until := r.period.Until; !r.Ended && r.state != asleep && !r.metered.IsZero() && (until.IsZero() || r.metered.Before(until)) {
		t := r.metered.UTC()
		u.MeteredUntil = &t
	}
	return u
}
