package namespace

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// A cell that waits may have its runtime started already, as far as to the runtime's gate: what the last start was given is
// what the next one is most likely to be given. It fits that start alone, so that another cell waits beside it as ever. Of
// processors only the number is asked for: a start takes those that the runtime was started on.

// ahead is what a runtime is started with before anybody has asked for it.
type ahead struct {
	runtime isolation.Runtime
	cpus    []int
	limits  []guestwire.Rlimit
}

// aheadOf returns what a start would have a runtime begin with; nil where it can't begin before the start.
func (b *Backend) aheadOf(s isolation.Spec, cpus []int) *ahead {
	if s.Runtime == nil || s.Runtime.Gate == "" || s.Runtime.Image != "" || s.Runtime.Trace != "" {
		return nil
	}
	return &ahead{runtime: *s.Runtime, cpus: cpus, limits: b.guestLimits(s)}
}

// same reports whether a runtime that was started for the one can serve the other. Nil is no runtime.
func (a *ahead) same(other *ahead) bool {
	if a == nil || other == nil {
		return a == other
	}
	x, y := a.runtime, other.runtime
	return x.Program == y.Program && x.Device == y.Device && x.Gate == y.Gate && x.Reach == y.Reach && slices.Equal(x.Args, y.Args) &&
		slices.Equal(x.Capabilities, y.Capabilities) && maps.EqualFunc(x.Files, y.Files, bytes.Equal) &&
		len(a.cpus) == len(other.cpus) && slices.Equal(a.limits, other.limits)
}

// startAhead has a waiting guest start a runtime.
func (b *Backend) startAhead(g *guest, a *ahead) error {
	ctx, cancel := context.WithTimeout(context.Background(), launchTimeout)
	defer cancel()
	build := &builder{spec: isolation.Spec{Runtime: &a.runtime}, first: g.first, userNS: g.userNS}
	defer build.close()
	build.launch = guestwire.Launch{Rlimits: a.limits, Walls: guestwire.Walls{CPUs: a.cpus}, Runtime: said(&a.runtime)}
	if err := build.begin(g); err != nil {
		return err
	}
	if err := guestwire.CallAndKeep(ctx, g.control, guestwire.MethodAhead, build.launch, build.files, nil); err != nil {
		return fmt.Errorf("start a runtime ahead: %w", err)
	}
	g.ahead = a
	return nil
}
