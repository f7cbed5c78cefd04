package sandbox

import (
	"context"
	"fmt"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
)

// Delete ends a sandbox with all its processes and files, at once: nothing inside is asked to
// finish; signal the processes first where that matters. Idempotent: a stopped sandbox is returned
// as it is. DeadlineExceeded: it is not gone within the stop timeout; the server goes on trying.
func (m *Manager) Delete(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil || b == nil {
		return stopped, err
	}
	m.beginEnd(b, p.ID, EndDeleted, "")
	t := time.NewTimer(m.cfg.Defaults.Stop)
	defer t.Stop()
	select {
	case <-b.ended:
		return b.snapshot(), nil
	case <-ctx.Done():
		return Sandbox{}, ctx.Err()
	case <-t.C:
		return Sandbox{}, errs.New(errs.DeadlineExceeded, "sandbox %s is not gone after %s (stop timeout)", b.id, m.cfg.Defaults.Stop).
			WithHint("the server goes on trying; its log says what is in the way")
	}
}

// beginEnd makes a sandbox end and returns at once; b.ended is closed when nothing is left. The
// first reason stays. actor is the principal that asked, or "" for the server.
func (m *Manager) beginEnd(b *box, actor string, reason EndReason, detail string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m.beginEndLocked(b, actor, reason, detail)
}

func (m *Manager) beginEndLocked(b *box, actor string, reason EndReason, detail string) {
	switch b.sb.State {
	case Starting:
		if b.stop == nil {
			b.stop = &ending{reason: reason, detail: detail}
			b.cancelStart()
		}
	case Running, Paused:
		b.stopTimersLocked()
		b.sb.EndReason, b.sb.EndDetail = reason, detail
		stopping := m.becomeLocked(b, Stopping, event(journal.SandboxStopping, actor, endFacts{Reason: reason, Detail: detail}))
		m.background(func() { m.finishEnd(b, stopping) })
	}
}

// finishEnd takes a stopping sandbox down.
func (m *Manager) finishEnd(b *box, stopping journal.Pending) {
	// The state is written before anything is done about it. A disk that refuses must not keep a
	// sandbox alive.
	if _, err := stopping.Wait(); err != nil {
		m.log.Error("cannot record that a sandbox stops", "sandbox", b.id, "error", err)
	}
	m.detach(m.ctx, b)
	if !m.endChildren(b) || !m.destroy(b) {
		return // it stays stopping, for the next server
	}
	<-b.ready // what asks its guest ends with that
	m.endProcesses(b)
	m.endContexts(b)
	if err := m.endUntold(b); err != nil {
		m.log.Error("cannot record the ends of a sandbox's processes", "sandbox", b.id, "error", err)
	}
	b.changes.look()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
	defer cancel()
	if err := m.cfg.Roots.Release(ctx, b.id); err != nil {
		// The next server's Sweep finds them.
		m.log.Error("cannot remove the files of a sandbox", "sandbox", b.id, "error", err)
	}
	b.mu.Lock()
	b.sb.EndedAt = wall(m.clock.Now())
	ended := m.becomeLocked(b, Stopped, event(journal.SandboxEnded, "", endFacts{
		Reason: b.sb.EndReason, Detail: b.sb.EndDetail, AfterMS: b.sb.EndedAt.Sub(b.sb.StartedAt).Milliseconds(),
	}))
	b.mu.Unlock()
	if _, err := ended.Wait(); err != nil {
		m.log.Error("cannot record that a sandbox ended", "sandbox", b.id, "error", err)
	}
	m.forget(b)
	close(b.ended)
}

// endChildren ends the children first, so that none outlives its parent. It reports false where the
// server went down before.
func (m *Manager) endChildren(b *box) bool {
	b.mu.Lock()
	children := make([]*box, 0, len(b.children))
	for _, c := range b.children {
		children = append(children, c)
	}
	b.mu.Unlock()
	for _, c := range children {
		m.beginEnd(c, "", EndParent, "sandbox "+b.id+" ended")
	}
	for _, c := range children {
		select {
		case <-c.ended:
		case <-m.ctx.Done():
			return false
		}
	}
	return true
}

// destroy takes the instance down, and does not give up: a sandbox that could not be destroyed may
// still run code, so that it must not be called stopped. It reports false where the server went down
// before.
func (m *Manager) destroy(b *box) bool {
	m.meter(context.WithoutCancel(m.ctx), b, meterLast)
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
		err := b.inst.Destroy(ctx)
		cancel()
		if err == nil {
			b.guest.Close()
			return true
		}
		m.log.Error("cannot destroy a sandbox; trying again", "sandbox", b.id, "in", wait, "error", err)
		again := make(chan struct{})
		t := m.clock.AfterFunc(wait, func() { close(again) })
		select {
		case <-again:
		case <-m.ctx.Done():
			t.Stop()
			return false
		}
	}
}

// endProcesses records the end of every process that nobody saw end before its sandbox was gone.
func (m *Manager) endProcesses(b *box) {
	b.mu.Lock()
	var open []*proc
	for _, pr := range b.procs {
		open = append(open, pr)
	}
	b.mu.Unlock()
	for _, pr := range open {
		// One that is being started now has no end. What its start says later counts no more.
		was := pr.snapshot()
		_ = m.refuse(pr, ProcessSpec{Argv: was.Argv, TTY: was.TTY}, &TransitionError{ID: b.id, From: Stopping})
		m.finish(pr, guestwire.ProcessInfo{ID: pr.id, End: guestwire.EndSandboxStopped}, nil)
		pr.closeScope()
	}
}

// endUntold records the end of the processes of an earlier server that the sandbox's guest has not told of.
func (m *Manager) endUntold(b *box) error {
	b.mu.Lock()
	untold, reason := b.untold, b.sb.EndReason
	b.mu.Unlock()
	if !untold {
		return nil
	}
	end := EndSandboxStopped
	if reason == EndLost {
		end = EndProcessLost
	}
	if err := m.db.Flush(); err != nil { // what it did tell of
		return err
	}
	return m.closeProcesses(context.WithoutCancel(m.ctx), b.id, end)
}

// follow waits for the first process of the instance to end by itself.
func (m *Manager) follow(b *box, inst isolation.Instance) {
	select {
	case <-inst.Done():
	case <-b.ended:
		return
	case <-m.ctx.Done():
		return
	}
	exit := inst.Exit()
	detail := exit.Reason
	if exit.Detail != "" {
		detail = fmt.Sprintf("%s: %s", exit.Reason, exit.Detail)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leaving || b.inst.now() != inst {
		return // it was taken down for a pause, and the sandbox stays
	}
	reason := EndGuestDied
	if exit.Reason == "attempt" {
		reason, detail = EndAttempt, exit.Detail
	}
	m.beginEndLocked(b, "", reason, detail) // no effect where it is being ended already
}
