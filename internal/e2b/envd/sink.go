package envd

import (
	"sync"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/process"
)

// eventSink sends output as the protocol's events. Connect marshals a message before Send returns, so
// data need not be copied.
type eventSink struct {
	out     func(*process.ProcessEvent) error
	beat    *beat.Beat
	seen    *seen
	id      string
	started bool
}

var _ sandbox.RunSink = (*eventSink)(nil)

func (h *Handler) newSink(c *call, out func(*process.ProcessEvent) error) *eventSink {
	s := &eventSink{out: out, seen: h.seen}
	s.beat = beat.New(c.ping, func() error {
		if !s.started {
			return nil // the start comes first
		}
		return out(&process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}})
	})
	return s
}

func (s *eventSink) send(e *process.ProcessEvent) error {
	return s.beat.Send(func() error { return s.out(e) })
}

// Started implements sandbox.RunSink.
func (s *eventSink) Started(p sandbox.Process) error {
	start := &process.ProcessEvent_StartEvent{Pid: uint32(p.PID)} //nolint:gosec // pids are positive
	s.id = p.ID
	return s.beat.Send(func() error {
		s.started = true
		return s.out(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: start}})
	})
}

// Output implements sandbox.OutputSink.
func (s *eventSink) Output(stream sandbox.Stream, offset int64, data []byte) error {
	d := &process.ProcessEvent_DataEvent{}
	switch stream {
	case sandbox.Stderr:
		d.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: data}
	case sandbox.TTY:
		d.Output = &process.ProcessEvent_DataEvent_Pty{Pty: data}
	default:
		d.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: data}
	}
	err := s.send(&process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: d}})
	if err == nil && stream == sandbox.TTY {
		s.seen.note(s.id, offset+int64(len(data)))
	}
	return err
}

// Gap implements sandbox.OutputSink. The protocol has no word for output that is not kept any more.
func (s *eventSink) Gap(sandbox.Gap) error { return nil }

// seen remembers how far terminals' output has been sent to anybody: whoever connects again continues
// there, since what a terminal shows must not be played to it twice.
type seen struct {
	mu sync.Mutex
	at map[string]int64
}

// maxSeen bounds the terminals that are remembered; one that is forgotten is played from its beginning.
const maxSeen = 4096

func newSeen() *seen { return &seen{at: make(map[string]int64)} }

func (s *seen) note(id string, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.at[id]; !known && len(s.at) >= maxSeen {
		for other := range s.at {
			delete(s.at, other)
			break
		}
	}
	s.at[id] = max(s.at[id], offset)
}

func (s *seen) upTo(id string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at[id]
}

func (s *seen) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.at, id)
}
