package sandbox

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// seat holds the instance of a sandbox, which may change: one that is paused without memory has none. To
// those that use it, it is the instance. Safe for concurrent use.
type seat struct {
	// mu guards the fields below.
	mu    sync.Mutex
	inst  isolation.Instance
	taken chan struct{} // closed while there is one
}

var _ isolation.Instance = (*seat)(nil)

func seatOf(inst isolation.Instance) *seat {
	s := &seat{taken: make(chan struct{})}
	s.put(inst)
	return s
}

// now returns the instance, nil where there is none, as while the sandbox starts.
func (s *seat) now() isolation.Instance {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inst
}

// put changes the instance; nil: none.
func (s *seat) put(inst isolation.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.inst == nil && inst != nil:
		close(s.taken)
	case s.inst != nil && inst == nil:
		s.taken = make(chan struct{})
	}
	s.inst = inst
}

// there returns a channel that is closed while there is an instance.
func (s *seat) there() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}

// errAsleep is what the absence of an instance looks like from above.
func errAsleep() error {
	return errs.New(errs.FailedPrecondition, "the sandbox is paused, and no process of it is on the host").
		WithHint("resume it first")
}

// orAsleep calls f with the instance, or returns errAsleep.
func orAsleep[T any](s *seat, f func(isolation.Instance) (T, error)) (T, error) {
	if inst := s.now(); inst != nil {
		return f(inst)
	}
	var none T
	return none, errAsleep()
}

// ID implements isolation.Instance.
func (s *seat) ID() string {
	if inst := s.now(); inst != nil {
		return inst.ID()
	}
	return ""
}

// Record implements isolation.Instance.
func (s *seat) Record() json.RawMessage {
	if inst := s.now(); inst != nil {
		return inst.Record()
	}
	return nil
}

// Applied implements isolation.Instance.
func (s *seat) Applied() isolation.Applied {
	if inst := s.now(); inst != nil {
		return inst.Applied()
	}
	return isolation.Applied{}
}

// Dial implements isolation.Instance.
func (s *seat) Dial(ctx context.Context) (net.Conn, error) {
	return orAsleep(s, func(i isolation.Instance) (net.Conn, error) { return i.Dial(ctx) })
}

// Device implements isolation.Instance.
func (s *seat) Device(ctx context.Context) (*os.File, error) {
	return orAsleep(s, func(i isolation.Instance) (*os.File, error) { return i.Device(ctx) })
}

// NewScope implements isolation.Instance.
func (s *seat) NewScope(ctx context.Context, processID string) (isolation.Scope, error) {
	return orAsleep(s, func(i isolation.Instance) (isolation.Scope, error) { return i.NewScope(ctx, processID) })
}

// OpenScope implements isolation.Instance.
func (s *seat) OpenScope(processID string) (isolation.Scope, error) {
	return orAsleep(s, func(i isolation.Instance) (isolation.Scope, error) { return i.OpenScope(processID) })
}

// Freeze implements isolation.Instance.
func (s *seat) Freeze(ctx context.Context) error {
	if inst := s.now(); inst != nil {
		return inst.Freeze(ctx)
	}
	return nil
}

// Thaw implements isolation.Instance.
func (s *seat) Thaw(ctx context.Context) error {
	if inst := s.now(); inst != nil {
		return inst.Thaw(ctx)
	}
	return errAsleep()
}

// Checkpoint implements isolation.Instance.
func (s *seat) Checkpoint(ctx context.Context, dir string) (time.Duration, error) {
	return orAsleep(s, func(i isolation.Instance) (time.Duration, error) { return i.Checkpoint(ctx, dir) })
}

// Usage implements isolation.Instance.
func (s *seat) Usage(ctx context.Context) (isolation.Usage, error) {
	return orAsleep(s, func(i isolation.Instance) (isolation.Usage, error) { return i.Usage(ctx) })
}

// Update implements isolation.Instance.
func (s *seat) Update(ctx context.Context, l isolation.Limits) error {
	if inst := s.now(); inst != nil {
		return inst.Update(ctx, l)
	}
	return errAsleep()
}

// Done implements isolation.Instance.
func (s *seat) Done() <-chan struct{} {
	if inst := s.now(); inst != nil {
		return inst.Done()
	}
	return nil
}

// Exit implements isolation.Instance.
func (s *seat) Exit() isolation.Exit {
	if inst := s.now(); inst != nil {
		return inst.Exit()
	}
	return isolation.Exit{}
}

// Destroy implements isolation.Instance.
func (s *seat) Destroy(ctx context.Context) error {
	if inst := s.now(); inst != nil {
		return inst.Destroy(ctx)
	}
	return nil
}
