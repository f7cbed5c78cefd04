package fake

import (
	"slices"
	"sync"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// rangeLength is how many host ids an instance is said to own, as with the namespace backend.
const rangeLength = 65536

// Host is what outlives a server: the instances that run, and what failed starts left behind. It is
// safe for concurrent use.
type Host struct {
	// mu guards the fields below.
	mu       sync.Mutex
	machines map[string]*machine
	debris   map[string]bool
	next     uint32
	serial   int
}

// NewHost returns an empty host.
func NewHost() *Host {
	return &Host{machines: map[string]*machine{}, debris: map[string]bool{}, next: 1 << 20}
}

// Instances returns the ids of the instances that are there, dead or alive, sorted.
func (h *Host) Instances() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]string, 0, len(h.machines))
	for id := range h.machines {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// Leftovers returns what failed starts left behind, sorted.
func (h *Host) Leftovers() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]string, 0, len(h.debris))
	for id := range h.debris {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// Kill makes an instance's guest die, as an out-of-memory kill of PID 1 would. It reports whether
// there was such an instance.
func (h *Host) Kill(id string) bool {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	if m == nil {
		return false
	}
	m.die(isolation.Exit{Reason: "guest_killed", Detail: "signal 9"})
	return true
}

// Frozen reports whether an instance that runs is frozen.
func (h *Host) Frozen(id string) bool {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.thawed != nil
}

// Close ends every instance: the machine is switched off.
func (h *Host) Close() {
	for _, id := range h.Instances() {
		h.Kill(id)
		h.remove(id)
	}
}

func (h *Host) start(backend string, s isolation.Spec, missing []string) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machines[s.ID] != nil {
		return nil, errs.New(errs.AlreadyExists, "instance %s exists", s.ID)
	}
	h.serial++
	h.next += rangeLength
	m := newMachine(s, h.serial, isolation.Applied{
		Backend: backend, Profile: s.Profile, HostUID: h.next, UIDCount: rangeLength,
		Limits: s.Limits, Disk: "memory", Network: networkOf(s), NoNewPrivs: s.Profile == isolation.Locked,
		Missing: missing, Observed: map[string]string{"limits": "server"},
	})
	h.machines[s.ID] = m
	return m, nil
}

func networkOf(s isolation.Spec) string {
	if s.Network == nil {
		return "none"
	}
	return s.Network.Device
}

func (h *Host) find(r instanceRecord) *machine {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.ID]
	if m == nil || m.serial != r.Serial || m.dead() {
		return nil
	}
	return m
}

func (h *Host) remove(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.machines, id)
}

func (h *Host) addDebris(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.debris[id] = true
}

func (h *Host) sweep(keep map[string]bool) []string {
	var removed []string
	for _, id := range h.Instances() {
		if keep[id] {
			continue
		}
		h.mu.Lock()
		m := h.machines[id]
		h.mu.Unlock()
		if m == nil {
			continue
		}
		m.die(isolation.Exit{Reason: "destroyed", Detail: "swept"})
		h.remove(id)
		removed = append(removed, "instance "+id)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.debris {
		if !keep[id] {
			delete(h.debris, id)
			removed = append(removed, "leftover of "+id)
		}
	}
	slices.Sort(removed)
	return removed
}
