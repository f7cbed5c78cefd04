package sandbox

import (
	"casemate.dev/internal/egress"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/metrics"
)

// Stats is what a Manager counts about itself. Its instruments are live: read them, and write nothing.
type Stats struct {
	// States is how many sandboxes have not stopped, by state.
	States map[State]int
	// Processes and Contexts are how many there are.
	Processes int
	Contexts  int
	*instruments
}

// instruments count since the server began.
type instruments struct {
	// Starts is how long creates took that came to run, by isolation.
	Starts map[string]*metrics.Durations
	// Ended counts sandboxes by why they stopped, and ProcessesEnded processes by how.
	Ended          metrics.Counts[EndReason]
	ProcessesEnded metrics.Counts[End]
	// Network counts what the gateway saw, by type of event and code of the verdict; "other" is what this server does not know.
	Network metrics.Counts[[2]string]
}

func newInstruments(cfg Config) *instruments {
	i := &instruments{Starts: make(map[string]*metrics.Durations)}
	for name := range cfg.Backends {
		i.Starts[name] = &metrics.Durations{}
	}
	return i
}

// Stats counts.
func (m *Manager) Stats() Stats {
	s := Stats{States: map[State]int{Starting: 0, Running: 0, Paused: 0, Stopping: 0}, instruments: m.counted}
	for _, b := range m.boxes() {
		b.mu.Lock()
		if b.sb.State != Stopped { // on its way out
			s.States[b.sb.State]++
		}
		for _, pr := range b.procs {
			if pr.info.End == EndNone && !pr.info.StartedAt.IsZero() {
				s.Processes++
			}
		}
		s.Contexts += len(b.codes)
		b.mu.Unlock()
	}
	return s
}

// countNetwork counts an event of the gateway. That process holds what strangers send, so its word makes no new labels.
func (i *instruments) countNetwork(t journal.Type, e egress.Event) {
	event, code := string(t), ""
	if !e.Type.Known() {
		event = otherLabel
	}
	if e.Verdict != nil {
		if code = string(e.Verdict.Code); !e.Verdict.Code.Known() {
			code = otherLabel
		}
	}
	i.Network.Add([2]string{event, code}, 1)
}

// otherLabel stands for every value that is not known.
const otherLabel = "other"
