package sandbox

import (
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// contextFacts are the server's facts of the events about contexts.
//
//casemate:facts server context.created context.restarted context.ended
type contextFacts struct {
	Context  string   `json:"context"`
	Language string   `json:"language,omitempty"`
	Dir      string   `json:"dir,omitempty"`
	User     string   `json:"user,omitempty"`
	Env      []string `json:"env,omitempty"` // names
	Imports  []string `json:"imports,omitempty"`
	Reason   string   `json:"reason,omitempty"`
	// End is what the server found out of an interpreter's end.
	End End `json:"end,omitempty"`
}

// contextSaidFacts are the guest's facts of context.created and context.restarted.
//
//casemate:facts guest context.created context.restarted
type contextSaidFacts struct {
	PID     int    `json:"pid"`
	Version string `json:"version,omitempty"`
	Dir     string `json:"dir,omitempty"`
	User    string `json:"user,omitempty"`
	Starts  int64  `json:"starts"`
}

// contextEndFacts are the guest's facts of context.ended.
//
//casemate:facts guest context.ended
type contextEndFacts struct {
	End    End `json:"end"`
	Code   int `json:"code,omitempty"`
	Signal int `json:"signal,omitempty"`
}

// runFacts are the server's facts of run.started, beside the code, which is a body: it may hold secrets.
//
//casemate:facts server run.started
type runFacts struct {
	Context   string   `json:"context"`
	Run       string   `json:"run"`
	Language  string   `json:"language"`
	Env       []string `json:"env,omitempty"` // names
	TimeoutMS int64    `json:"timeout_ms,omitempty"`
	Fresh     bool     `json:"fresh,omitempty"`
}

// runEndFacts are the server's facts of run.ended; End and Driver are set where it was the server, not
// the guest, who knew.
//
//casemate:facts server run.ended
type runEndFacts struct {
	Context string `json:"context"`
	Run     string `json:"run"`
	End     RunEnd `json:"end,omitempty"`
	Driver  End    `json:"driver,omitempty"`
	// Unread says that there was output of which the server saw nothing.
	Unread bool `json:"output_unread,omitempty"`
}

// runSaidFacts are the guest's facts of run.ended.
//
//casemate:facts guest run.ended
type runSaidFacts struct {
	End        RunEnd `json:"end"`
	Count      int64  `json:"count,omitempty"`
	Items      int64  `json:"items"`
	Dropped    int64  `json:"dropped,omitempty"`
	Missed     int64  `json:"missed,omitempty"` // items that had been dropped before the server saw them
	Error      string `json:"error,omitempty"`
	DurationMS int64  `json:"duration_ms"`
	Driver     End    `json:"driver,omitempty"`
	Code       int    `json:"code,omitempty"`
	Signal     int    `json:"signal,omitempty"`
}

func (m *Manager) recordContext(c *codeContext, t journal.Type, actor string, facts contextFacts, info guestwire.ContextInfo) {
	e := event(t, actor, facts)
	if info.ID != "" {
		e = e.With(journal.Guest, contextSaidFacts{
			PID: info.PID, Version: info.Version, Dir: info.Dir, User: info.User, Starts: info.Starts,
		})
	}
	e.Sandbox = c.box.id
	m.journal.Post(e)
}
