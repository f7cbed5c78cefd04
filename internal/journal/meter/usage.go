package meter

import "time"

// Usage is what was used. Every figure is a whole number, so that sums are exact. Times are microseconds.
type Usage struct {
	// Sandboxes is how many it is of: 1 but for sums.
	Sandboxes int64 `json:"sandboxes"`
	// ExecutionUS is for how long at least one process or run of code was executing.
	ExecutionUS int64 `json:"execution_us"`
	// RunningUS is for how long it was running, executing or not; PausedUS for how long it was paused.
	RunningUS int64 `json:"running_us"`
	PausedUS  int64 `json:"paused_us"`
	// CPUUS is the time of processors that the kernel counted for it.
	CPUUS int64 `json:"cpu_us"`
	// MemoryByteSeconds is the memory that counted against its limit, by for how long.
	MemoryByteSeconds int64 `json:"memory_byte_seconds"`
	// SentBytes left it through the gateway, ReceivedBytes came into it.
	SentBytes     int64 `json:"sent_bytes"`
	ReceivedBytes int64 `json:"received_bytes"`
	// Processes and Runs are how many were started.
	Processes int64 `json:"processes"`
	Runs      int64 `json:"runs"`

	// Open is how many processes and runs had not ended, OpenConnections how many connections, whose bytes are not counted
	// yet.
	Open            int64 `json:"open"`
	OpenConnections int64 `json:"open_connections"`
	// MeteredUntil is until when processor time and memory are counted, where there is more to come: of a sum, the earliest
	// such moment.
	MeteredUntil *time.Time `json:"metered_until,omitempty"`
	// Gaps is how many events say that others are missing, and UnmeteredUS for how long nobody read what was used, as
	// while the server was down. Processor time of that is counted later, but for a sandbox that did not survive.
	Gaps        int64 `json:"gaps"`
	UnmeteredUS int64 `json:"unmetered_us"`
}

// Add adds what another one used.
func (u *Usage) Add(o Usage) {
	u.Sandboxes += o.Sandboxes
	u.ExecutionUS += o.ExecutionUS
	u.RunningUS += o.RunningUS
	u.PausedUS += o.PausedUS
	u.CPUUS += o.CPUUS
	u.MemoryByteSeconds += o.MemoryByteSeconds
	u.SentBytes += o.SentBytes
	u.ReceivedBytes += o.ReceivedBytes
	u.Processes += o.Processes
	u.Runs += o.Runs
	u.Open += o.Open
	u.OpenConnections += o.OpenConnections
	u.Gaps += o.Gaps
	u.UnmeteredUS += o.UnmeteredUS
	if o.MeteredUntil != nil && (u.MeteredUntil == nil || o.MeteredUntil.Before(*u.MeteredUntil)) {
		u.MeteredUntil = o.MeteredUntil
	}
}

// Period bounds what counts. A zero bound is none.
type Period struct {
	Since time.Time // the first moment in it
	Until time.Time // the first moment after it
}

// has reports whether a moment lies in the period.
func (p Period) has(t time.Time) bool {
	return !t.Before(p.Since) && (p.Until.IsZero() || t.Before(p.Until))
}

// micros is how much of the time between two moments lies in the period. It cuts at whole microseconds, so that parts
// add up.
func (p Period) micros(from, to time.Time) int64 {
	if from.Before(p.Since) {
		from = p.Since
	}
	if !p.Until.IsZero() && to.After(p.Until) {
		to = p.Until
	}
	return max(to.UnixMicro()-from.UnixMicro(), 0)
}
