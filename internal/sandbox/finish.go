package sandbox

import (
	"context"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// watch waits for a process's end in the background. A second call has no effect.
func (m *Manager) watch(pr *proc) {
	pr.box.mu.Lock()
	skip := pr.watched || pr.finishing
	pr.watched = true
	pr.box.mu.Unlock()
	if !skip {
		m.background(func() { m.await(pr) })
	}
}

// await asks the guest for the end until it is told. A connection that breaks is opened again; a
// guest that is gone ends with its sandbox, and that records the end.
func (m *Manager) await(pr *proc) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		info, err := pr.box.guest.Wait(m.ctx, pr.id)
		switch {
		case err == nil && info.End != guestwire.EndNone:
			m.finish(pr, info, nil)
			return
		case errs.Is(err, errs.NotFound):
			m.finish(pr, guestwire.ProcessInfo{ID: pr.id, End: guestwire.EndLost}, nil)
			return
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-pr.ended:
			t.Stop()
			return
		case <-m.ctx.Done():
			t.Stop()
			return
		}
		select {
		case <-pr.box.inst.there(): // while its memory lies on disk, nothing ends
		case <-pr.ended:
			return
		case <-m.ctx.Done():
			return
		}
	}
}

// endedFacts are the facts of process.ended: the guest's.
//
//casemate:facts guest process.ended
type endedFacts struct {
	End      End    `json:"end"`
	Code     *int   `json:"code,omitempty"` // only where it was seen
	Signal   int    `json:"signal,omitempty"`
	Error    string `json:"error,omitempty"`
	Bytes    int64  `json:"bytes"`
	Dropped  int64  `json:"dropped,omitempty"`
	UserMS   int64  `json:"user_ms"`
	SystemMS int64  `json:"system_ms"`
	MaxRSS   int64  `json:"max_rss,omitempty"`
	Leftover int    `json:"leftover,omitempty"`
	// Missed is how many bytes of output had been dropped before the server saw them.
	Missed int64 `json:"missed,omitempty"`
}

// serverEndFacts are the server's facts of process.ended.
//
//casemate:facts server process.ended
type serverEndFacts struct {
	DurationMS int64 `json:"duration_ms"`
	// End is set where it was the server, not the guest, who knew: sandbox_stopped, lost, oom_killed.
	End End `json:"end,omitempty"`
	// Refused is what the gateway refused to the sandbox while the process ran.
	Refused []Refusal `json:"refused,omitempty"`
	// Unread says that there was output of which the server saw nothing.
	Unread bool `json:"output_unread,omitempty"`
	// StdinLost is how many bytes of its input at most are not in stdin, as where a server was killed meanwhile.
	StdinLost int64 `json:"stdin_lost,omitempty"`
}

// kernelEndFacts are the kernel's facts of process.ended.
//
//casemate:facts kernel process.ended context.ended conflict
type kernelEndFacts struct {
	OOMKills int64 `json:"oom_kills"` // in the sandbox since it was last looked
}

// finish records the end of a process and returns the process with it. It happens once; others who
// call it wait for that. No answer tells of the end before it is recorded, and the start is recorded first. h is
// what it said; nil: that is asked for.
func (m *Manager) finish(pr *proc, info guestwire.ProcessInfo, h *transcript) Process {
	<-pr.started
	b := pr.box
	b.mu.Lock()
	if pr.finishing {
		b.mu.Unlock()
		<-pr.ended
		return pr.snapshot()
	}
	pr.finishing = true
	p, stdin := pr.info, pr.stdin
	b.mu.Unlock()

	said := info.End
	info.End = believed(info)
	kills, read := m.oomKills(b, info)
	fill(&p, info)
	p.EndedAt = wall(m.clock.Now())
	p.OOMKills = kills
	p.Refused = m.refusedSince(b, or(pr.asked, p.StartedAt))
	server := serverEndFacts{DurationMS: p.EndedAt.Sub(p.StartedAt).Milliseconds(), Refused: p.Refused}
	if kills > 0 && p.End == EndSignaled && p.Signal == 9 {
		p.End = EndOOMKilled
	}
	if p.End != info.End || p.End == EndSandboxStopped || p.End == EndProcessLost {
		server.End = p.End
	}
	gone := server.End == EndSandboxStopped || server.End == EndProcessLost
	if h == nil && info.Bytes > 0 && !gone {
		h = m.saidBy(pr)
	}
	server.Unread = h == nil && info.Bytes > 0
	server.StdinLost = stdin.lost + stdin.unsure
	e := event(journal.ProcessEnded, pr.actor, server)
	e.Sandbox, e.Process = b.id, pr.id
	//casemate:fact server process.ended stdin body what it was given later
	if stdin.k != nil {
		e = e.WithKept(journal.Server, "stdin", stdin.k)
	}
	if !gone {
		e = e.With(journal.Guest, guestFacts(info, h))
	}
	if h != nil && !gone {
		e = h.onto(e)
	}
	if read {
		e = e.With(journal.Kernel, kernelEndFacts{OOMKills: kills})
	}
	if said != info.End && !(said == EndOOMKilled && kills > 0) {
		m.conflict(pr, said, kills)
	}
	if kills > 0 {
		m.degraded(pr, kills)
	}
	m.recordEnd(e, p)
	left := b.changes.ended(pr, p.Leftover > 0)
	b.mu.Lock()
	pr.info, pr.left = p, left
	pr.input, pr.stdin = nil, given{} // recorded, and no longer to be held while its end is remembered
	m.retireLocked(b, pr)
	b.mu.Unlock()
	close(pr.ended)
	return p
}

// believed returns the end that the guest may tell of. A guest sees no out-of-memory kill, only a
// signal, and words that it does not have are none of its.
func believed(i guestwire.ProcessInfo) End {
	switch i.End {
	case EndExited, EndSignaled, EndTimedOut, EndCanceled, EndFailed, EndSandboxStopped, EndProcessLost:
		return i.End
	case EndOOMKilled:
		return EndSignaled
	}
	return EndProcessLost
}

// conflict records that a guest said of an end what can't be so.
func (m *Manager) conflict(pr *proc, said End, kills int64) {
	//casemate:fact guest conflict end text what it said of an end that can't be so
	e := journal.Event{Sandbox: pr.box.id, Process: pr.id, Type: journal.Conflict, Actor: "server"}.
		With(journal.Guest, map[string]string{"end": cut(string(said))}).
		With(journal.Kernel, kernelEndFacts{OOMKills: kills})
	m.journal.Post(e)
}

// degraded records that the sandbox has reached its memory limit, and lives on.
func (m *Manager) degraded(pr *proc, kills int64) {
	pr.box.mu.Lock()
	limit := pr.box.sb.Spec.Limits.MemoryBytes
	pr.box.mu.Unlock()
	//casemate:fact kernel sandbox.degraded limit text memory
	//casemate:fact kernel sandbox.degraded memory_bytes number
	//casemate:fact kernel sandbox.degraded oom_kills number
	e := journal.Event{Sandbox: pr.box.id, Process: pr.id, Type: journal.SandboxDegraded, Actor: "server"}.
		With(journal.Kernel, map[string]any{"limit": "memory", "memory_bytes": limit, "oom_kills": kills})
	m.journal.Post(e)
}

func (m *Manager) recordEnd(e journal.Event, p Process) {
	m.counted.ProcessesEnded.Add(p.End, 1)
	var with []store.Write
	row, err := processRow(p)
	if err == nil {
		with = append(with, store.PutProcess(row))
	}
	if _, rerr := m.journal.Record(m.ctx, e, with...); err == nil {
		err = rerr
	}
	if err != nil {
		m.log.Error("cannot record the end of a process", "sandbox", p.SandboxID, "process", p.ID, "error", err)
	}
}

func guestFacts(i guestwire.ProcessInfo, h *transcript) endedFacts {
	f := endedFacts{
		End: i.End, Signal: i.Signal, Error: cut(i.Error), Bytes: i.Bytes, Dropped: i.Dropped,
		UserMS: i.UserMS, SystemMS: i.SystemMS, MaxRSS: i.MaxRSS, Leftover: i.Leftover,
	}
	if i.End == guestwire.EndExited {
		f.Code = &i.Code
	}
	if h != nil {
		f.Missed = h.missed
	}
	return f
}

// fill takes what the guest says of a process into p, whose times are the server's.
func fill(p *Process, i guestwire.ProcessInfo) {
	p.End, p.Signal, p.Error = i.End, i.Signal, cut(i.Error)
	if i.End == guestwire.EndExited {
		p.Code = i.Code
	}
	p.Bytes, p.Dropped = i.Bytes, i.Dropped
	p.UserTime = time.Duration(i.UserMS) * time.Millisecond
	p.SystemTime = time.Duration(i.SystemMS) * time.Millisecond
	p.MaxRSS, p.Leftover = i.MaxRSS, i.Leftover
}

// oomSample is how old the kernel's count may be.
const oomSample = time.Second

// oomKills returns how many out-of-memory kills the kernel has counted since it was last asked, and
// whether it was asked. Asking costs as much as starting a process, so only an end that may be one
// is worth it; others ask afterwards, now and then, so that an old kill is not taken for a new one.
func (m *Manager) oomKills(b *box, info guestwire.ProcessInfo) (int64, bool) {
	suspect := info.Signal == 9 || info.End == guestwire.EndExited && info.Code == 128+9
	if !suspect {
		return 0, false
	}
	return m.readOOM(b)
}

func (m *Manager) readOOM(b *box) (int64, bool) {
	ctx, cancel := m.brief(context.WithoutCancel(m.ctx))
	defer cancel()
	u, err := b.inst.Usage(ctx)
	m.metered(b, u, err, meterTick)
	if err != nil {
		return 0, false // the instance is gone or going
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	kills := max(u.OOMKills-b.oomSeen, 0)
	b.oomSeen, b.oomRead = max(u.OOMKills, b.oomSeen), m.clock.Now()
	return kills, true
}

// retireLocked moves a process to those that have ended, and lets go of its scope: at once where it can
// serve another process, else in the background, since that takes longer than anybody should wait.
func (m *Manager) retireLocked(b *box, pr *proc) {
	b.recent = append(b.recent, pr.id)
	var old []*proc
	for len(b.recent) > keepEnded {
		if o := b.procs[b.recent[0]]; o != nil && o.scope != nil {
			old = append(old, o)
		}
		delete(b.procs, b.recent[0])
		b.recent = b.recent[1:]
	}
	if pr.info.Leftover == 0 && !pr.left && pr.scope != nil && !pr.recycleLocked() {
		old = append(old, pr)
	}
	sample := m.clock.Now().Sub(b.oomRead) > oomSample && (b.sb.State == Running || b.sb.State == Paused)
	if sample {
		b.oomRead = m.clock.Now()
	}
	if len(old) == 0 && !sample {
		return
	}
	m.background(func() {
		for _, o := range old {
			o.letGo()
		}
		if sample {
			m.readOOM(b)
		}
	})
}

// recycleLocked gives the scope of an ended process, in which nothing lives, to the next one. That nothing
// lives there is the guest's word: it puts processes into scopes and could leave one out altogether, so a
// look from here would prove nothing. One that was ended may still be seen to its death by the guest, who
// must not hit another process.
func (pr *proc) recycleLocked() bool {
	if pr.info.End != EndExited || !pr.scope.Recycle() {
		return false
	}
	pr.scope = nil
	return true
}

// letGo closes the scope of an ended process if nothing lives in it. What lives on, say a server
// that a shell left behind, keeps its scope until the sandbox ends.
func (pr *proc) letGo() {
	pr.box.mu.Lock()
	scope := pr.scope
	pr.box.mu.Unlock()
	if scope == nil {
		return
	}
	if empty, err := scope.Empty(); err == nil && empty {
		pr.closeScope()
	}
}
