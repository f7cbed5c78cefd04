package sandbox

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// contextFacts are the server's facts of the events about contexts.
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
type contextSaidFacts struct {
	PID     int    `json:"pid"`
	Version string `json:"version,omitempty"`
	Dir     string `json:"dir,omitempty"`
	User    string `json:"user,omitempty"`
	Starts  int64  `json:"starts"`
}

// contextEndFacts are the guest's facts of context.ended.
type contextEndFacts struct {
	End    End `json:"end"`
	Code   int `json:"code,omitempty"`
	Signal int `json:"signal,omitempty"`
}

// runFacts are the server's facts of run.started. Code may hold secrets, so it is told by a hash that
// can't be guessed from without its salt, which can be taken out of a record.
type runFacts struct {
	Context    string   `json:"context"`
	Run        string   `json:"run"`
	Language   string   `json:"language"`
	CodeBytes  int64    `json:"code_bytes"`
	CodeSHA256 string   `json:"code_sha256"` // of salt and code
	CodeSalt   string   `json:"code_salt"`
	Env        []string `json:"env,omitempty"` // names
	TimeoutMS  int64    `json:"timeout_ms,omitempty"`
	Fresh      bool     `json:"fresh,omitempty"`
}

// runEndFacts are the server's facts of run.ended; End and Driver are set where it was the server, not
// the guest, who knew.
type runEndFacts struct {
	Context string `json:"context"`
	Run     string `json:"run"`
	End     RunEnd `json:"end,omitempty"`
	Driver  End    `json:"driver,omitempty"`
}

// runSaidFacts are the guest's facts of run.ended.
type runSaidFacts struct {
	End        RunEnd `json:"end"`
	Count      int64  `json:"count,omitempty"`
	Items      int64  `json:"items"`
	Dropped    int64  `json:"dropped,omitempty"`
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

// saltedHash returns the hash of a text behind a random salt, and the salt.
func saltedHash(text string) (hash, salt string) {
	var s [16]byte
	_, _ = rand.Read(s[:]) // never fails
	h := sha256.New()
	h.Write(s[:])
	h.Write([]byte(text))
	return hex.EncodeToString(h.Sum(nil)), hex.EncodeToString(s[:])
}
