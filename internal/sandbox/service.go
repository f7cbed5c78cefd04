package sandbox

import (
	"context"
	"strings"
	"time"

	"casemate.dev/internal/errs"
)

// Service is a process that every sandbox of a template runs from its start on. A create returns when the
// service is ready.
type Service struct {
	// Start is its argv; empty: there is none, and Ready alone is waited for.
	Start []string `json:"start,omitempty"`
	// Ready is a command that exits with 0 as soon as the service can be used; empty: nobody waits.
	Ready []string `json:"ready,omitempty"`
	// Within is how long the service may take until it is ready; 0: 30 s. The start timeout holds besides.
	Within time.Duration `json:"within,omitempty"`
	// User and Dir are those of both commands; "": the sandbox's defaults.
	User string `json:"user,omitempty"`
	Dir  string `json:"dir,omitempty"`
}

// ServiceTag is the tag of a service's process.
const ServiceTag = "service"

const (
	readyDefault = 30 * time.Second
	// readyFirst and readyMost are the pauses between two looks: short at first, since most services are up
	// at once, and longer for one that takes its time.
	readyFirst = 50 * time.Millisecond
	readyMost  = time.Second
	// readyTail is how much of what a service said an error carries.
	readyTail = 2 << 10
)

// serve starts a sandbox's service and waits until it is ready. Kinds: FailedPrecondition (it ended, or was
// not ready in time), and those of StartProcess.
func (m *Manager) serve(ctx context.Context, p Principal, b *box) error {
	b.mu.Lock()
	s := b.sb.Spec.Service
	b.mu.Unlock()
	if s == nil {
		return nil
	}
	within := or(s.Within, readyDefault)
	ctx, cancel := context.WithTimeoutCause(ctx, within, errs.New(errs.FailedPrecondition,
		"its service was not ready within %s: %s", within, strings.Join(s.Ready, " ")).
		WithHint("see what it says: casemate exec SANDBOX -- its start command; or raise the time that the template gives it"))
	defer cancel()
	var service *proc
	if len(s.Start) > 0 {
		started, err := m.startProcess(ctx, p, b, ProcessSpec{Argv: s.Start, Tag: ServiceTag, User: s.User, Dir: s.Dir})
		if err != nil {
			return cause(ctx, err)
		}
		service = b.proc(started.ID)
	}
	if len(s.Ready) == 0 {
		return nil
	}
	if err := m.awaitReady(ctx, p, b, s, service); err != nil {
		return cause(ctx, err)
	}
	return nil
}

// awaitReady runs the ready command until it succeeds.
func (m *Manager) awaitReady(ctx context.Context, p Principal, b *box, s *Service, service *proc) error {
	for pause := readyFirst; ; pause = min(2*pause, readyMost) {
		left := time.Minute
		if deadline, ok := ctx.Deadline(); ok {
			left = max(time.Until(deadline), time.Second)
		}
		c := newCollector(readyTail)
		end, err := m.Run(ctx, p, b.id, ProcessSpec{Argv: s.Ready, User: s.User, Dir: s.Dir, Timeout: left}, RunOptions{}, c)
		if err != nil {
			return err
		}
		if end.End == EndExited && end.Code == 0 {
			return nil
		}
		if err := m.serviceEnded(ctx, service); err != nil {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-b.ended:
			t.Stop()
			return b.notUsable(Running)
		}
	}
}

// serviceEnded returns what is wrong with a service that ended before it was ready.
func (m *Manager) serviceEnded(ctx context.Context, pr *proc) error {
	if pr == nil {
		return nil
	}
	select {
	case <-pr.ended:
	default:
		return nil
	}
	p := pr.snapshot()
	if p.End == EndExited && p.Code == 0 {
		return nil // it went into the background
	}
	c := newCollector(readyTail)
	_, _ = m.output(ctx, pr, OutputOptions{}, c) // what it said helps, where it can still be had
	r := c.result()
	said := strings.TrimSpace(string(r.Stdout) + string(r.Stderr))
	return errs.New(errs.FailedPrecondition, "its service ended before it was ready (%s, code %d): %s", p.End, p.Code, said).
		WithHint("the template's start command must stay in the foreground, or end with 0")
}
