// Package fake is a scripted isolation backend, for the tests of everything above the backends. It
// isolates nothing and needs no privilege: a sandbox is a few goroutines with files in memory, a
// small shell (see package fake/script) and the guest's protocol in front of it.
//
// What belongs here: what a test of the layers above needs to see, fail or survive. What does not:
// fidelity for its own sake; what needs a kernel is declared missing by Unsupported, and the
// conformance suite reports it.
//
// # Server restarts
//
// A Host holds what would survive the death of the server: running instances. A Backend is what the
// server holds. A test that restarts the server makes a second Backend over the same Host:
//
//	host := fake.NewHost()
//	before := fake.New(fake.Config{Host: host})
//	…
//	after := fake.New(fake.Config{Host: host}) // Adopt finds what before started
package fake

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// Config makes a Backend.
type Config struct {
	// Name is the backend's name; default "fake".
	Name string
	// Host holds the instances; default one of its own.
	Host *Host
	// Capabilities replaces what the host is said to offer, to test layers that are missing.
	Capabilities []isolation.Capability
}

// Step is a place in Start where a fault can strike.
type Step string

// The steps of Start, in their order.
const (
	StepRange Step = "uid range"
	StepRoot  Step = "root file system"
	StepClone Step = "clone"
	StepGuest Step = "guest"
)

// Faults are what goes wrong, from the moment they are set.
type Faults struct {
	// FailAt makes Start fail at that step, with Err or an Internal error.
	FailAt Step
	Err    error
	// Debris makes a failing Start leave a leftover behind, for Sweep to find.
	Debris bool
	// StartDelay is how long Start takes.
	StartDelay time.Duration
	// StartHeld, where it is not nil, holds every Start until it is closed.
	StartHeld <-chan struct{}
	// Runtime is what Applied names as the kernel of its own that runs the sandbox. Its guest stands still while the
	// instance is frozen.
	Runtime string
	// DoneHeld, where it is not nil, holds back that an instance's guest has ended, as a kernel does for a while: its
	// connections are broken by then.
	DoneHeld <-chan struct{}
	// FailDestroy makes Destroy return this and do nothing.
	FailDestroy error
	// FailCheckpoint makes Checkpoint return this and do nothing.
	FailCheckpoint error
}

// Backend is a scripted isolation.Backend.
type Backend struct {
	name         string
	host         *Host
	capabilities []isolation.Capability

	// mu guards the fields below.
	mu     sync.Mutex
	faults Faults
	starts int
}

var _ isolation.Backend = (*Backend)(nil)

// New returns a backend.
func New(c Config) *Backend {
	if c.Name == "" {
		c.Name = "fake"
	}
	if c.Host == nil {
		c.Host = NewHost()
	}
	if c.Capabilities == nil {
		c.Capabilities = []isolation.Capability{
			{Name: "script", OK: true, Required: true, Detail: "nothing is isolated"},
		}
	}
	return &Backend{name: c.Name, host: c.Host, capabilities: c.Capabilities}
}

// Host returns where the backend's instances live.
func (b *Backend) Host() *Host { return b.host }

// SetFaults replaces what goes wrong.
func (b *Backend) SetFaults(f Faults) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = f
}

// Starts returns how often Start was called.
func (b *Backend) Starts() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.starts
}

// Name implements isolation.Backend.
func (b *Backend) Name() string { return b.name }

// Capabilities implements isolation.Backend.
func (b *Backend) Capabilities(context.Context) []isolation.Capability {
	return slices.Clone(b.capabilities)
}

// Start implements isolation.Backend.
func (b *Backend) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	b.mu.Lock()
	b.starts++
	faults := b.faults
	b.mu.Unlock()

	missing, err := b.missing(s)
	if err != nil {
		return nil, err
	}
	if faults.StartDelay > 0 {
		select {
		case <-time.After(faults.StartDelay):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if faults.StartHeld != nil {
		select {
		case <-faults.StartHeld:
		case <-ctx.Done():
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if faults.FailAt != "" {
		return nil, b.fail(s.ID, faults)
	}
	m, err := b.host.start(b.name, s, missing)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.applied.Runtime, m.held = faults.Runtime, faults.DoneHeld
	m.mu.Unlock()
	return &instance{machine: m, backend: b}, nil
}

func (b *Backend) missing(s isolation.Spec) ([]string, error) {
	var missing []string
	for _, c := range b.capabilities {
		switch {
		case c.OK:
		case slices.Contains(s.AllowMissing, c.Name):
			missing = append(missing, c.Name)
		case c.Required:
			return nil, errs.New(errs.Unsupported, "this host lacks %s: %s", c.Name, c.Detail).WithHint("%s", c.Remedy)
		default:
			missing = append(missing, c.Name)
		}
	}
	return missing, nil
}

func (b *Backend) fail(id string, f Faults) error {
	if f.Debris {
		b.host.addDebris(id)
	}
	if f.Err != nil {
		return f.Err
	}
	return errs.New(errs.Internal, "the fake was told to fail at step %q", f.FailAt)
}

// Adopt implements isolation.Backend.
func (b *Backend) Adopt(_ context.Context, record json.RawMessage) (isolation.Instance, error) {
	var r instanceRecord
	if err := json.Unmarshal(record, &r); err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "cannot adopt: not a record of this backend")
	}
	m := b.host.find(r)
	if m == nil {
		return nil, errs.New(errs.NotFound, "instance %s is gone", r.ID)
	}
	return &instance{machine: m, backend: b}, nil
}

// Sweep implements isolation.Backend.
func (b *Backend) Sweep(_ context.Context, keep map[string]bool) ([]string, error) {
	return b.host.sweep(keep), nil
}

// Close implements isolation.Backend. Instances go on: they belong to the Host.
func (b *Backend) Close() error { return nil }
