package gateway

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"sync"

	"casemate.dev/internal/egress/address"
)

// maxNames bounds the names of one sandbox that have an address. The oldest goes first.
const maxNames = 8192

// poolSize is how many addresses there are for names: the IPv4 range without its first and last one.
const poolSize = 1<<16 - 2

// names gives each name that a sandbox may look up an address of its own, so that a connection tells its
// name. The address follows from the name, so that a gateway that was restarted gives the same one again.
type names struct {
	mu    sync.Mutex // guards the fields below
	slots map[string]uint16
	names map[uint16]string
	order []string // by age
}

func newNames() *names { return &names{slots: map[string]uint16{}, names: map[uint16]string{}} }

// give returns the addresses that stand for a name.
func (n *names) give(name string) (v4, v6 netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	slot, ok := n.slots[name]
	if !ok {
		slot = n.free(name)
		n.slots[name], n.names[slot] = slot, name
		n.order = append(n.order, name)
		if len(n.order) > maxNames {
			old := n.order[0]
			n.order = n.order[1:]
			delete(n.names, n.slots[old])
			delete(n.slots, old)
		}
	}
	return addresses(slot)
}

// free finds a slot for a name, beginning where its hash points. There are always free ones.
func (n *names) free(name string) uint16 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	at := h.Sum32()
	for {
		slot := uint16(at%poolSize) + 1
		if _, taken := n.names[slot]; !taken {
			return slot
		}
		at++
	}
}

func addresses(slot uint16) (v4, v6 netip.Addr) {
	p := address.Names()
	a, b := p[0].Addr().As4(), p[1].Addr().As16()
	binary.BigEndian.PutUint16(a[2:], slot)
	binary.BigEndian.PutUint16(b[14:], slot)
	return netip.AddrFrom4(a), netip.AddrFrom16(b)
}

// of returns the name that an address stands for. known says that the address is in the ranges for names.
func (n *names) of(a netip.Addr) (name string, inRange bool) {
	p := address.Names()
	var slot uint16
	switch {
	case p[0].Contains(a):
		b := a.As4()
		slot = binary.BigEndian.Uint16(b[2:])
	case p[1].Contains(a):
		b := a.As16()
		if binary.BigEndian.Uint32(b[8:12]) != 0 || binary.BigEndian.Uint16(b[12:14]) != 0 {
			return "", true
		}
		slot = binary.BigEndian.Uint16(b[14:])
	default:
		return "", false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[slot], true
}
