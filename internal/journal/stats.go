package journal

// Stats is what a Log counts about itself.
type Stats struct {
	// Events and Gaps are how many were recorded since it was opened; gaps are among the events.
	Events, Gaps uint64
	// Pending is how many events have their place and don't survive the death of this process yet.
	Pending int
	// Backlog is how many of them the disk has refused, and Dropped how many found no room to wait.
	Backlog, Dropped int
	// Entries is how many the signed log has; 0 without one.
	Entries int64
}

// Stats counts.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Events: l.recorded, Gaps: l.gaps, Backlog: len(l.backlog) + l.retrying}
	for _, n := range l.dropped {
		s.Dropped += n
	}
	for _, h := range l.heads {
		s.Pending += len(h.line)
	}
	if l.tree != nil {
		s.Entries = l.tree.Size()
	}
	return s
}
