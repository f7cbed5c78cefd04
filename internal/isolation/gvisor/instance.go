package gvisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// Instance is one running sandbox.
type Instance struct {
	isolation.Cell
	record record
	raw    json.RawMessage // record as text; never changes
	guest  *guestwire.Client

	// gate is held for reading while a connection to the guest is opened, and for writing while the guest must have none.
	gate sync.RWMutex

	mu     sync.Mutex // guards the fields below
	limits isolation.Limits
	frozen bool
	told   guestwire.Status // what the guest last said
}

var (
	_ isolation.Instance = (*Instance)(nil)
	_ isolation.Holder   = (*Instance)(nil)
)

// record is what Adopt needs.
type record struct {
	Version string `json:"runsc"` // that it runs with
	// Platform is "" in what servers wrote that knew Systrap alone.
	Platform string           `json:"platform,omitempty"`
	Limits   isolation.Limits `json:"limits"`
	Network  bool             `json:"network,omitempty"`
	// Bundle is the specification that runsc was given. A memory image needs the same one again.
	Bundle json.RawMessage `json:"bundle"`
	// Mark is what the guest inside marks executions with that the server asked for: for its life, which a memory image
	// carries on. 0: it marks none.
	Mark uint64          `json:"mark,omitempty"`
	Cell json.RawMessage `json:"cell"`
}

func decodeRecord(raw json.RawMessage) (record, error) {
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, fmt.Errorf("decode record: %w", err)
	}
	if len(r.Cell) == 0 {
		return r, errs.New(errs.InvalidArgument, "the record names no cell")
	}
	return r, nil
}

func newInstance(inst isolation.Instance, kept record, s isolation.Spec) (*Instance, error) {
	kept.Limits, kept.Network, kept.Cell = s.Limits, s.Network != nil, inst.Record()
	return adopted(inst, kept)
}

func adopted(inst isolation.Instance, r record) (*Instance, error) {
	cell, ok := inst.(isolation.Cell)
	if !ok {
		return nil, errs.New(errs.Internal, "the cells' backend makes a %T, which is no cell", inst)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	i := &Instance{Cell: cell, record: r, raw: raw, limits: r.Limits}
	i.guest = guestwire.NewClient(i.Dial)
	return i, nil
}

// Dial implements isolation.Instance.
func (i *Instance) Dial(ctx context.Context) (net.Conn, error) {
	i.gate.RLock()
	defer i.gate.RUnlock()
	return i.Cell.Dial(ctx)
}

// Record implements isolation.Instance.
func (i *Instance) Record() json.RawMessage { return i.raw }

// Applied implements isolation.Instance.
func (i *Instance) Applied() isolation.Applied {
	a := i.Cell.Applied()
	a.Backend = Name
	a.Runtime = "gVisor " + i.record.Version + ", " + cmp.Or(i.record.Platform, Systrap)
	a.Calls = coverage(a.Calls)
	i.mu.Lock()
	defer i.mu.Unlock()
	if a.Limits.MemoryBytes != 0 { // else the host has nothing to hold the sandbox to
		a.Limits.MemoryBytes = i.limits.MemoryBytes
	}
	if a.Limits.Pids != 0 {
		a.Limits.Pids = i.limits.Pids
	}
	return a
}

// Update implements isolation.Instance. The cell's limits give way first and take hold last, so that a sandbox
// within its limits never meets them.
func (i *Instance) Update(ctx context.Context, l isolation.Limits) error {
	i.mu.Lock()
	was := i.limits
	i.mu.Unlock()
	room := CellLimits(l)
	outer := CellLimits(was)
	outer.MemoryBytes, outer.Pids, outer.CPUs = max(outer.MemoryBytes, room.MemoryBytes), max(outer.Pids, room.Pids), l.CPUs
	if err := i.Cell.Update(ctx, outer); err != nil {
		return err
	}
	if err := i.guest.Bound(ctx, guestwire.Bounds{MemoryBytes: l.MemoryBytes, Pids: l.Pids}); err != nil {
		return err
	}
	i.mu.Lock()
	i.limits.MemoryBytes, i.limits.Pids, i.limits.CPUs = l.MemoryBytes, l.Pids, l.CPUs
	i.mu.Unlock()
	err := i.Cell.Update(ctx, room)
	if errs.Is(err, errs.FailedPrecondition) || errs.Is(err, errs.ResourceExhausted) {
		return nil // more is in use: the guest ends what is too much, and the outer wall stays wider meanwhile
	}
	return err
}

// Usage implements isolation.Instance. Memory, CPU time and disk are what the host's kernel counted for the cell, runsc
// included; the number of processes, and of those that were ended for want of memory, is the guest's word, since the
// host sees none of them. (The Sentry counts threads, those of the guest too.)
func (i *Instance) Usage(ctx context.Context) (isolation.Usage, error) {
	u, err := i.Cell.Usage(ctx)
	if err != nil {
		return u, err
	}
	st, err := i.status(ctx)
	u.Pids = st.Alive
	u.OOMKills += st.OOMKills
	return u, err
}

// status asks the guest. One that is frozen can't answer, and nothing has changed since it last did.
func (i *Instance) status(ctx context.Context) (guestwire.Status, error) {
	i.mu.Lock()
	frozen, told := i.frozen, i.told
	i.mu.Unlock()
	if frozen {
		return told, nil
	}
	st, err := i.guest.Status(ctx)
	if err != nil {
		return told, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.told = st
	return st, nil
}

// NewScope implements isolation.Instance. The host's control groups hold the sandbox as a whole; within it the
// guest knows which process is whose.
func (i *Instance) NewScope(_ context.Context, processID string) (isolation.Scope, error) {
	return &scope{guest: i.guest, process: processID}, nil
}

// OpenScope implements isolation.Instance.
func (i *Instance) OpenScope(processID string) (isolation.Scope, error) {
	return &scope{guest: i.guest, process: processID}, nil
}

// scope is a process and its descendants, as the guest knows them.
type scope struct {
	guest   *guestwire.Client
	process string
}

func (*scope) Files() []*os.File { return nil }
func (*scope) Layout() []string  { return nil }
func (*scope) Recycle() bool     { return true }
func (*scope) Close() error      { return nil }

// lookTimeout bounds how long a guest, which may be hostile, has to tell what lives of a process.
const lookTimeout = 10 * time.Second

// Empty implements isolation.Scope.
func (s *scope) Empty() (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	t, err := s.guest.Tree(ctx, s.process)
	if errs.Is(err, errs.NotFound) {
		return true, nil
	}
	return t.Alive == 0, err
}

// Kill implements isolation.Scope.
func (s *scope) Kill(ctx context.Context) error {
	err := s.guest.Signal(ctx, guestwire.SignalRequest{ID: s.process, Signal: int(syscall.SIGKILL), Tree: true})
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.FailedPrecondition) {
		return nil // nothing is left
	}
	if err != nil {
		return errors.Join(fmt.Errorf("kill %s", s.process), err)
	}
	return nil
}

// Freeze implements isolation.Instance: the Sentry lets no process go on, the guest neither.
func (i *Instance) Freeze(ctx context.Context) error {
	if _, err := i.status(ctx); err != nil { // what Usage tells meanwhile
		return err
	}
	return i.hold(ctx, true, methodPause)
}

// Thaw implements isolation.Instance.
func (i *Instance) Thaw(ctx context.Context) error { return i.hold(ctx, false, methodResume) }

// hold freezes or thaws, and notes that in the cell for a server that comes after this one: the Sentry counts, so that one
// that was paused twice would have to be resumed twice, and does not tell how it stands. One that is frozen is noted so
// before and after: a server that is killed in between finds it noted as frozen.
func (i *Instance) hold(ctx context.Context, frozen bool, method string) error {
	i.mu.Lock()
	was := i.frozen
	i.mu.Unlock()
	if was == frozen {
		return nil
	}
	if frozen {
		if err := i.note(true); err != nil {
			return err
		}
	}
	if err := i.call(ctx, method, nil); err != nil {
		return err
	}
	i.mu.Lock()
	i.frozen = frozen
	i.mu.Unlock()
	if frozen {
		return nil
	}
	return i.note(false)
}

// What frozenFile holds.
const (
	thawedByte = '0'
	frozenByte = '1'
)

func (i *Instance) note(frozen bool) error {
	f, err := i.Cell.OpenCell(frozenFile)
	if err != nil {
		return err
	}
	b := []byte{thawedByte}
	if frozen {
		b[0] = frozenByte
	}
	_, err = f.WriteAt(b, 0)
	return errors.Join(err, f.Close())
}

// noted reads what an earlier server noted.
func (i *Instance) noted() error {
	f, err := i.Cell.OpenCell(frozenFile)
	if err != nil {
		return err
	}
	var b [1]byte
	_, err = f.ReadAt(b[:], 0)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.frozen = b[0] == frozenByte
	return errors.Join(err, f.Close())
}
