package sandbox

import (
	"context"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/errs"
)

// RecordedAnswer is a request of a record with its answer, for a sandbox whose Network is Recorded.
type RecordedAnswer = egress.RecordedAnswer

// SetAnswers gives a sandbox that is answered from a record what it is answered, in place of what it had, or with more behind
// it. The first request of a method, URL and body gets the first answer to such a one, the next the second. When it returns,
// everything is recorded that was asked before. Kinds: FailedPrecondition where it is no such sandbox, InvalidArgument,
// ResourceExhausted where there is more than egress.MaxAnswers.
func (m *Manager) SetAnswers(ctx context.Context, p Principal, ref string, list []RecordedAnswer, more bool) error {
	b, s, err := m.networked(ctx, p, ref)
	if err != nil {
		return err
	}
	if !s.Spec.Network.Recorded {
		return errs.New(errs.FailedPrecondition, "sandbox %s is not answered from a record", b.id).
			WithHint("that is said when it is made: network {recorded: true}")
	}
	if err := m.cfg.Gateway.SetAnswers(ctx, b.id, list, more); err != nil {
		return err
	}
	return m.cfg.Gateway.Settle(ctx, b.id)
}

// Settle returns once everything is recorded that the gateway has seen so far of the sandbox of that id, which may have
// ended. A gateway that does not answer keeps nobody from the record of the rest.
func (m *Manager) Settle(ctx context.Context, id string) {
	b := m.find(id)
	if b == nil || m.cfg.Gateway == nil || b.snapshot().Spec.Network == nil {
		return
	}
	if err := m.cfg.Gateway.Settle(ctx, id); err != nil {
		m.log.Warn("cannot wait for what the gateway saw last", "sandbox", id, "error", err)
	}
}
