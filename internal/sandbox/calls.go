package sandbox

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// These names let packages above speak of observed system calls without importing what lies below.
type (
	// Calls says which system calls are observed, and what an attempt brings about.
	Calls = isolation.Calls
	// CallEvent is a system call that was seen from outside.
	CallEvent = isolation.CallEvent
	// Reaction is what an attempt brings about.
	Reaction = isolation.Reaction
)

// The reactions.
const (
	ReactRecord = isolation.ReactRecord
	ReactPause  = isolation.ReactPause
	ReactKill   = isolation.ReactKill
)

// severity orders reactions.
func severity(r Reaction) int {
	return slices.Index([]Reaction{"", ReactRecord, ReactPause, ReactKill}, r)
}

// stricter observes what either does, and reacts as the stricter one.
func stricter(a, b Calls) Calls {
	out := Calls{
		Attempts: a.Attempts || b.Attempts, Exec: a.Exec || b.Exec, Connect: a.Connect || b.Connect, Open: a.Open || b.Open,
		OnAttempt: a.OnAttempt,
	}
	if severity(b.OnAttempt) > severity(out.OnAttempt) {
		out.OnAttempt = b.OnAttempt
	}
	return out
}

// callsFor decides what is observed of a new sandbox: what the create says, else the default of what it starts from.
// Whoever is no administrator may ask for more than that, not for less, and a sandbox's child is observed as its parent is
// at least.
func (m *Manager) callsFor(ctx context.Context, p Principal, s Spec, asked string) (*Calls, error) {
	least, err := m.callsByDefault(ctx, s, asked)
	if err != nil {
		return nil, err
	}
	can := isolation.Calls{}
	if o, ok := m.cfg.Backends[s.Isolation].(isolation.Observer); ok {
		can = o.Observes()
	}
	if parent := m.find(p.Sandbox); p.Sandbox != "" && parent != nil {
		if above := parent.snapshot().Spec.Calls; above != nil {
			if possible(*above, can) != *above {
				return nil, errs.New(errs.PermissionDenied, "a child's system calls are observed as its parent's, which isolation %s can't", s.Isolation)
			}
			least = stricter(least, *above)
		}
	}
	if s.Calls == nil {
		c := possible(least, can)
		return &c, nil
	}
	c, err := checkedCalls(*s.Calls)
	if err != nil {
		return nil, err
	}
	if !p.admin() || p.Sandbox != "" {
		c = stricter(c, possible(least, can))
	}
	if possible(c, can) != c {
		return nil, errs.New(errs.Unsupported, "isolation %s can't observe all of the system calls asked for on this server", s.Isolation).
			WithHint("ask for fewer, or for another isolation")
	}
	return &c, nil
}

// possible takes out what a backend can't observe.
func possible(c, can Calls) Calls {
	out := Calls{
		Attempts: c.Attempts && can.Attempts, Exec: c.Exec && can.Exec, Connect: c.Connect && can.Connect, Open: c.Open && can.Open,
	}
	if out.Any() {
		out.OnAttempt = or(c.OnAttempt, ReactRecord)
	}
	return out
}

// observedCalls adds what is observed to an instance's spec.
func observedCalls(s Spec, spec *isolation.Spec) {
	if s.Calls != nil {
		spec.Calls = *s.Calls
	}
}

// settingCalls is the setting that names the last observed call that was recorded.
const settingCalls = "calls.position"

// CallsPosition returns the position that RecordCalls was given last.
func (m *Manager) CallsPosition(ctx context.Context) (string, error) {
	return m.db.Setting(ctx, settingCalls)
}

// RecordCalls records system calls that were seen from outside, in order, together with the position; it returns when
// that is durable. What attempts are to bring about is seen to in the background.
func (m *Manager) RecordCalls(list []CallEvent, position string) error {
	var last journal.Pending
	for i, e := range list {
		if !id.ValidSandbox(e.Sandbox) {
			m.log.Error("a system call of no sandbox was seen", "call", e.String())
			continue
		}
		var with []store.Write
		if i == len(list)-1 {
			with = append(with, store.PutSetting(settingCalls, position))
		}
		last = m.recordCall(e, with...)
	}
	if last.Done == nil {
		return nil
	}
	if _, err := last.Wait(); err != nil {
		return err
	}
	for _, e := range list {
		if e.Reaction == ReactPause || e.Reaction == ReactKill {
			m.background(func() { m.react(e) })
		}
	}
	return nil
}

// callFacts are the kernel's facts of call events: what isolation.CallEvent says beyond the journal's own event. The
// arguments of what is executed lie beside it.
//
//casemate:facts kernel call.exec call.connect call.open = call,pid,command,target,errno,count,note
//casemate:facts kernel call.attempt
//casemate:facts server gap = count,reaction,note
//casemate:fact kernel call.exec argv body
type callFacts struct {
	Call     string   `json:"call,omitempty"`     // the system call's name
	PID      int      `json:"pid,omitempty"`      // of the caller, in the sandbox
	Command  string   `json:"command,omitempty"`  // what the caller calls itself
	Target   string   `json:"target,omitempty"`   // file or address
	Args     []string `json:"args,omitempty"`     // as far as they say something
	Errno    string   `json:"errno,omitempty"`    // what the caller was answered; none: the call went on
	Count    int      `json:"count,omitempty"`    // how many more like it there were, or were not noted
	Reaction Reaction `json:"reaction,omitempty"` // what was done beyond refusing it
	Note     string   `json:"note,omitempty"`
}

func (m *Manager) recordCall(e CallEvent, with ...store.Write) journal.Pending {
	facts := callFacts{
		Call: e.Call, PID: e.PID, Command: e.Command, Target: e.Target, Args: e.Args, Errno: e.Errno,
		Count: e.Count, Reaction: e.Reaction, Note: e.Note,
	}
	je := journal.Event{Type: journal.Type("call." + string(e.Kind)), Actor: "server", Sandbox: e.Sandbox, Time: e.Time, Process: e.Process}
	if e.Kind == isolation.CallGap {
		je.Type = journal.Gap
		je = je.With(journal.Server, facts)
		if b := m.find(e.Sandbox); b != nil {
			return m.saveCoverage(b, je, with...)
		}
		return m.journal.Enqueue(je, with...)
	}
	je = je.With(journal.Kernel, facts)
	if len(e.Argv) > 0 {
		b := m.find(e.Sandbox)
		if b == nil { // it has ended, and nobody says any more how much content is kept
			b = newBox(Sandbox{Spec: Spec{Record: RecordHashes}})
		}
		je = b.withArgv(je, journal.Kernel, e.Argv)
	}
	return m.journal.Enqueue(je, with...)
}

// saveCoverage records that something was not observed, with what is observed from now on.
func (m *Manager) saveCoverage(b *box, e journal.Event, with ...store.Write) journal.Pending {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inst.now() == nil || b.sb.State == Starting {
		return m.journal.Enqueue(e, with...)
	}
	b.sb.Applied = b.inst.Applied()
	return m.saveLocked(b, e, with...)
}

// react does what an attempt, or the loss of whoever would see one, is to bring about. Where the keeper has done it
// already, it is the state that follows.
func (m *Manager) react(e CallEvent) {
	b := m.find(e.Sandbox)
	if b == nil {
		return
	}
	why := e.String()
	if e.Kind == isolation.CallGap {
		why = e.Note
	}
	if e.Reaction == ReactKill {
		m.beginEnd(b, "", EndAttempt, why)
		return
	}
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.Defaults.Stop)
	defer cancel()
	if _, err := m.freezeBox(ctx, "", b, Paused, nil); err != nil && m.ctx.Err() == nil && b.runs() {
		// It must not go on: where it can't be held, it ends.
		m.log.Error("cannot pause a sandbox after an attempt, so it ends", "sandbox", b.id, "error", err)
		m.beginEnd(b, "", EndAttempt, why)
	}
}

// unhold says that a sandbox which an attempt has paused may go on.
func (b *box) unhold(ctx context.Context) error {
	if h, ok := b.inst.now().(isolation.Holder); ok {
		return h.Release(ctx)
	}
	return nil
}

// runs reports whether the sandbox runs.
func (b *box) runs() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sb.State == Running
}
