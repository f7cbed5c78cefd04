package gateway

import (
	"bytes"
	"slices"
	"testing"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
)

// FuzzDNS sends any question to a sandbox that may reach nothing: no answer holds an address, and the
// resolver, which would panic, is never asked.
func FuzzDNS(f *testing.F) {
	q := new(dns.Msg)
	q.SetQuestion("allowed.test.", dns.TypeA)
	b, _ := q.Pack()
	f.Add(b)
	g := &Gateway{events: newEvents()}
	s := &sandbox{gw: g, names: newNames(), ctx: f.Context(), out: newMeter(), in: newMeter(), quota: newQuota()}
	s.setPolicy(egress.Policy{})
	f.Fuzz(func(t *testing.T, b []byte) {
		q := new(dns.Msg)
		if q.Unpack(b) != nil {
			return
		}
		m := s.answer(q)
		if len(m.Answer) > 0 {
			t.Fatalf("%v got %v", q, m)
		}
		_, _ = m.Pack()
	})
}

// FuzzPacket: whatever passes comes from the sandbox's own address, is whole, and has no options.
func FuzzPacket(f *testing.F) {
	f.Add(uint16(header.IPv4ProtocolNumber), []byte{0x45, 0, 0, 20, 0, 0, 0, 0, 64, 6, 0, 0, 198, 18, 0, 2, 1, 1, 1, 1})
	own := address.Sandbox()
	six := append([]byte{0x60, 0, 0, 0, 0, 8, 17, 64}, slices.Concat(own[1].Addr().AsSlice(), make([]byte, 24))...)
	f.Add(uint16(header.IPv6ProtocolNumber), six)
	f.Add(uint16(header.ARPProtocolNumber), slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, make([]byte, 6), own[0].Addr().AsSlice(), make([]byte, 10)))
	f.Fuzz(func(t *testing.T, protocol uint16, b []byte) {
		if _, ok := inspect(tcpip.NetworkProtocolNumber(protocol), b); !ok {
			return
		}
		// What may pass, by the bytes' own words (RFC 826, 791, 8200).
		var good bool
		switch tcpip.NetworkProtocolNumber(protocol) {
		case header.ARPProtocolNumber:
			good = bytes.Equal(b[14:18], own[0].Addr().AsSlice())
		case header.IPv4ProtocolNumber:
			length, cut := int(b[2])<<8|int(b[3]), b[6]&0x3f != 0 || b[7] != 0
			good = b[0] == 0x45 && !cut && length >= 20 && length <= len(b) && bytes.Equal(b[12:16], own[0].Addr().AsSlice()) &&
				bytes.IndexByte([]byte{1, 6, 17}, b[9]) >= 0
		case header.IPv6ProtocolNumber:
			good = b[0]>>4 == 6 && bytes.Equal(b[8:24], own[1].Addr().AsSlice()) && bytes.IndexByte([]byte{6, 17, 58}, b[6]) >= 0
		}
		if !good {
			t.Fatalf("%#x passed", b)
		}
	})
}

// Addresses that stand for names are stable, distinct, and go back to their names.
func TestNames(t *testing.T) {
	n := newNames()
	seen := map[string]string{}
	for i := range maxNames + 100 {
		name := string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676)) + ".test"
		v4, v6 := n.give(name)
		if a, b := n.give(name); a != v4 || b != v6 {
			t.Fatalf("%s moved", name)
		}
		if other, taken := seen[v4.String()]; taken && other != name && i < maxNames {
			t.Fatalf("%s and %s share %s", name, other, v4)
		}
		seen[v4.String()] = name
		for _, a := range []string{v4.String(), v6.String()} {
			addr, _ := rules.Address(a)
			if got, in := n.of(addr); !in || got != name {
				t.Fatalf("%s stands for %q, not %s", a, got, name)
			}
		}
	}
	if len(n.names) != maxNames || len(n.slots) != maxNames {
		t.Errorf("%d names are kept", len(n.names))
	}
}
