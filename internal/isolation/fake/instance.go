package fake

import (
	"context"
	"encoding/json"
	"net"
	"os"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// instance is a Backend's handle on a machine of the Host. Several may hold the same one.
type instance struct {
	machine *machine
	backend *Backend
}

var _ isolation.Instance = (*instance)(nil)

type instanceRecord struct {
	ID     string `json:"id"`
	Serial int    `json:"serial"` // tells a second instance of the same id from the first
}

func (i *instance) ID() string { return i.machine.spec.ID }

func (i *instance) Record() json.RawMessage {
	b, _ := json.Marshal(instanceRecord{ID: i.ID(), Serial: i.machine.serial}) // plain data: can't fail
	return b
}

// Device opens a device that takes every frame and sends none.
func (i *instance) Device(context.Context) (*os.File, error) {
	if i.machine.appliedNow().Network == "none" {
		return nil, errs.New(errs.FailedPrecondition, "the sandbox has no network device")
	}
	return os.OpenFile(os.DevNull, os.O_RDWR, 0)
}

func (i *instance) Applied() isolation.Applied { return i.machine.appliedNow() }

func (i *instance) Dial(ctx context.Context) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return i.machine.dial()
}

func (i *instance) NewScope(_ context.Context, processID string) (isolation.Scope, error) {
	if i.machine.dead() {
		return nil, errs.New(errs.Unavailable, "the guest of %s is gone", i.ID())
	}
	return &scope{machine: i.machine, process: processID}, nil
}

func (i *instance) OpenScope(processID string) (isolation.Scope, error) {
	return &scope{machine: i.machine, process: processID}, nil
}

func (i *instance) Freeze(context.Context) error { return i.machine.freeze(true) }

func (i *instance) Thaw(context.Context) error { return i.machine.freeze(false) }

func (i *instance) Usage(context.Context) (isolation.Usage, error) { return i.machine.usage(), nil }

func (i *instance) Update(_ context.Context, l isolation.Limits) error { return i.machine.update(l) }

func (i *instance) Done() <-chan struct{} { return i.machine.gone }

func (i *instance) Exit() isolation.Exit { return i.machine.exitNow() }

func (i *instance) Destroy(ctx context.Context) error {
	i.backend.mu.Lock()
	fail := i.backend.faults.FailDestroy
	i.backend.mu.Unlock()
	if fail != nil {
		return fail
	}
	i.machine.die(isolation.Exit{Reason: "destroyed"})
	select {
	case <-i.machine.gone:
	case <-ctx.Done():
		return ctx.Err()
	}
	i.backend.host.remove(i.ID())
	return nil
}

// scope has no files: the fake's guest knows what belongs to a process.
type scope struct {
	machine *machine
	process string
}

func (s *scope) Files() []*os.File { return nil }
func (s *scope) Layout() []string  { return nil }

func (s *scope) Empty() (bool, error) {
	p := s.machine.process(s.process)
	return p == nil || p.alive() == 0, nil
}

func (s *scope) Kill(context.Context) error {
	if p := s.machine.process(s.process); p != nil {
		p.kill("")
	}
	return nil
}

func (s *scope) Recycle() bool { return false }

func (s *scope) Close() error { return s.Kill(context.Background()) }
