package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"casemate.dev/internal/egress/address"
)

// nic is the one interface of every stack.
const nic tcpip.NICID = 1

// The sizes of a connection's buffers towards the sandbox. They start small, and grow where the
// connection fills them, each within its share of the sandbox's budget.
const (
	bufferBudget = 8 << 20 // for all connections of one sandbox
	bufferMin    = 4 << 10
	bufferStart  = 64 << 10
	bufferMax    = 1 << 20
)

// newStack makes the network that a sandbox sees: every address there is answers.
func newStack(d *device) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	if err := configure(s, d); err != nil {
		s.Destroy()
		return nil, err
	}
	return s, nil
}

func configure(s *stack.Stack, d *device) error {
	if err := setOptions(s); err != nil {
		return err
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	if err := s.CreateNICWithOptions(nic, d, stack.NICOptions{Disabled: true}); err != nil {
		return tcpipError("create interface", err)
	}
	for i, a := range address.Gateway() {
		full := tcpip.ProtocolAddress{
			Protocol:          protocolOf(a),
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: addressOf(a), PrefixLen: address.Sandbox()[i].Bits()},
		}
		if err := s.AddProtocolAddress(nic, full, stack.AddressProperties{}); err != nil {
			return tcpipError("add address", err)
		}
		// Nobody is asked who has the sandbox's address: the device leads to nobody else.
		if err := s.AddStaticNeighbor(nic, protocolOf(a), addressOf(address.Sandbox()[i].Addr()), tcpip.LinkAddress(address.MAC())); err != nil {
			return tcpipError("add neighbour", err)
		}
	}
	// Whatever address a packet goes to is ours, and answers come from it.
	if err := s.SetPromiscuousMode(nic, true); err != nil {
		return tcpipError("take all addresses", err)
	}
	if err := s.SetSpoofing(nic, true); err != nil {
		return tcpipError("answer from all addresses", err)
	}
	if err := s.EnableNIC(nic); err != nil {
		return tcpipError("enable interface", err)
	}
	return nil
}

func setOptions(s *stack.Stack) error {
	sack := tcpip.TCPSACKEnabled(true)
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: bufferMin, Default: bufferStart, Max: bufferMax}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: bufferMin, Default: bufferStart, Max: bufferMax}
	// The handshake is with the machine's own kernel: what is not answered soon is not going to be.
	retries := tcpip.TCPSynRetriesOption(3)
	wait := tcpip.TCPTimeWaitTimeoutOption(time.Second)
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &receive, &send, &retries, &wait} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return tcpipError("set option of TCP", err)
		}
	}
	return nil
}

func tcpipError(what string, err tcpip.Error) error {
	return fmt.Errorf("%s: %w", what, errors.New(err.String()))
}

func addressOf(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

func addrOf(a tcpip.Address) netip.Addr {
	out, _ := netip.AddrFromSlice(a.AsSlice())
	return out.Unmap()
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}
