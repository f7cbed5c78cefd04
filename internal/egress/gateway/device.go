package gateway

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"casemate.dev/internal/egress/address"
)

// vnetLen is the length of struct virtio_net_hdr, which stands before every frame (linux/virtio_net.h).
const vnetLen = 10

// vnetNeedsChecksum is VIRTIO_NET_HDR_F_NEEDS_CSUM: the kernel takes the packet as right, since it has not
// left the machine.
const vnetNeedsChecksum = 1

// frameLen is the longest frame.
const frameLen = vnetLen + header.EthernetMinimumSize + address.MTU

// frames lends buffers of one size for reading. Who waits holds none.
type frames struct{ pool sync.Pool }

func newFrames(size int) *frames {
	return &frames{pool: sync.Pool{New: func() any { b := make([]byte, size); return &b }}}
}

func (f *frames) get() *[]byte  { return f.pool.Get().(*[]byte) }
func (f *frames) put(b *[]byte) { f.pool.Put(b) }

// device is the link endpoint of a stack: one end of a sandbox's TAP device, read through the runtime's
// poller, so that a thousand of them need no threads.
type device struct {
	file   *os.File
	raw    syscall.RawConn
	frames *frames
	// refused is told of packets that are neither answered nor carried on.
	refused func(packet)

	mu         sync.RWMutex // guards the field below
	dispatcher stack.NetworkDispatcher

	reading sync.WaitGroup
	closing sync.Once
}

var _ stack.LinkEndpoint = (*device)(nil)

// newDevice takes over the descriptor of a TAP device.
func newDevice(f *os.File, frames *frames, refused func(packet)) (*device, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &device{file: f, raw: raw, frames: frames, refused: refused}, nil
}

// MTU implements stack.LinkEndpoint.
func (*device) MTU() uint32 { return address.MTU }

// SetMTU implements stack.LinkEndpoint; the MTU is the device's.
func (*device) SetMTU(uint32) {}

// MaxHeaderLength implements stack.LinkEndpoint.
func (*device) MaxHeaderLength() uint16 { return header.EthernetMinimumSize }

// LinkAddress implements stack.LinkEndpoint.
func (*device) LinkAddress() tcpip.LinkAddress { return tcpip.LinkAddress(address.GatewayMAC()) }

// SetLinkAddress implements stack.LinkEndpoint; the address is fixed.
func (*device) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.LinkEndpoint. Checksums protect against wires, and there is none.
func (*device) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload | stack.CapabilityTXChecksumOffload | stack.CapabilityResolutionRequired
}

// Attach implements stack.LinkEndpoint and begins to read.
func (d *device) Attach(to stack.NetworkDispatcher) {
	d.mu.Lock()
	first := d.dispatcher == nil && to != nil
	d.dispatcher = to
	d.mu.Unlock()
	if first {
		d.reading.Go(d.read)
	}
}

// IsAttached implements stack.LinkEndpoint.
func (d *device) IsAttached() bool { return d.attached() != nil }

func (d *device) attached() stack.NetworkDispatcher {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.dispatcher
}

// Wait implements stack.LinkEndpoint.
func (d *device) Wait() { d.reading.Wait() }

// ARPHardwareType implements stack.LinkEndpoint.
func (*device) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

// AddHeader implements stack.LinkEndpoint.
func (*device) AddHeader(p *stack.PacketBuffer) {
	header.Ethernet(p.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: tcpip.LinkAddress(address.GatewayMAC()), DstAddr: tcpip.LinkAddress(address.MAC()), Type: p.NetworkProtocolNumber,
	})
}

// ParseHeader implements stack.LinkEndpoint.
func (*device) ParseHeader(p *stack.PacketBuffer) bool {
	_, ok := p.LinkHeader().Consume(header.EthernetMinimumSize)
	return ok
}

// Close implements stack.LinkEndpoint.
func (d *device) Close() { d.closing.Do(func() { _ = d.file.Close() }) }

// SetOnCloseAction implements stack.LinkEndpoint; the device outlives its stack.
func (*device) SetOnCloseAction(func()) {}

// burst is how many frames of one device are read before others get their turn.
const burst = 64

// read carries frames from the device to the stack until the device is closed or gone.
func (d *device) read() {
	for {
		var fail error
		err := d.raw.Read(func(fd uintptr) bool {
			for range burst {
				buf := d.frames.get()
				n, err := unix.Read(int(fd), *buf)
				if err == nil {
					d.deliver((*buf)[:n])
				}
				d.frames.put(buf)
				switch {
				case err == nil, errors.Is(err, unix.EINTR):
				case errors.Is(err, unix.EAGAIN):
					return false
				default:
					fail = err
					return true
				}
			}
			return true
		})
		if err != nil || fail != nil {
			return
		}
	}
}

// deliver hands one frame to the stack, if it is one that a sandbox may send.
func (d *device) deliver(frame []byte) {
	if len(frame) < vnetLen+header.EthernetMinimumSize {
		return
	}
	frame = frame[vnetLen:]
	protocol := tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(frame[12:]))
	p, ok := inspect(protocol, frame[header.EthernetMinimumSize:])
	if !ok {
		if p.proto != "" {
			d.refused(p)
		}
		return
	}
	to := d.attached()
	if to == nil {
		return
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
	defer pkt.DecRef()
	if !d.ParseHeader(pkt) {
		return
	}
	pkt.PktType = tcpip.PacketHost
	to.DeliverNetworkPacket(protocol, pkt)
}

// WritePackets implements stack.LinkEndpoint. A device that takes no more loses packets, as any does.
func (d *device) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	sent := 0
	var failed tcpip.Error
	err := d.raw.Write(func(fd uintptr) bool {
		var parts [16][]byte
		for _, pkt := range list.AsSlice() {
			vnet := vnetHeader(pkt)
			iov := append(parts[:0], vnet[:])
			iov = append(iov, pkt.AsSlices()...)
			_, err := unix.Writev(int(fd), iov)
			for errors.Is(err, unix.EINTR) {
				_, err = unix.Writev(int(fd), iov)
			}
			if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ENOBUFS) {
				failed = &tcpip.ErrClosedForSend{}
				return true
			}
			sent++
		}
		return true
	})
	if err != nil {
		failed = &tcpip.ErrClosedForSend{}
	}
	return sent, failed
}

// vnetHeader says where the checksum of TCP or UDP stands, which is not made.
func vnetHeader(pkt *stack.PacketBuffer) (h [vnetLen]byte) {
	offset := 0
	switch pkt.TransportProtocolNumber {
	case header.TCPProtocolNumber:
		offset = header.TCPChecksumOffset
	case header.UDPProtocolNumber:
		offset = 6 // of the checksum in a UDP header, RFC 768
	default:
		return h
	}
	h[0] = vnetNeedsChecksum
	start := header.EthernetMinimumSize + len(pkt.NetworkHeader().Slice())
	binary.NativeEndian.PutUint16(h[6:], uint16(start))
	binary.NativeEndian.PutUint16(h[8:], uint16(offset))
	return h
}

// packet is what is read of a packet before the stack sees it.
type packet struct {
	proto    string // "icmp", "ip"; "" for what is not worth a word
	src, dst netip.Addr
	what     string
}

// inspect lets a packet through that comes from the sandbox's own address and that the stack has a use
// for. Options, extension headers and fragments have none here: nothing needs them at this MTU, and much
// code would read them.
func inspect(protocol tcpip.NetworkProtocolNumber, b []byte) (packet, bool) {
	switch protocol {
	case header.ARPProtocolNumber:
		h := header.ARP(b)
		return packet{}, h.IsValid() && netip.AddrFrom4([4]byte(h.ProtocolAddressSender())) == address.Sandbox()[0].Addr()
	case header.IPv4ProtocolNumber:
		return inspect4(b)
	case header.IPv6ProtocolNumber:
		return inspect6(b)
	}
	return packet{}, false
}

func inspect4(b []byte) (packet, bool) {
	h := header.IPv4(b)
	if len(b) < header.IPv4MinimumSize || !h.IsValid(len(b)) {
		return packet{}, false
	}
	p := packet{src: netip.AddrFrom4([4]byte(b[12:16])), dst: netip.AddrFrom4([4]byte(b[16:20]))}
	switch {
	case p.src != address.Sandbox()[0].Addr():
		p.proto, p.what = "ip", "the source address is not the sandbox's"
		return p, false
	case h.HeaderLength() != header.IPv4MinimumSize, h.More(), h.FragmentOffset() != 0:
		p.proto, p.what = "ip", "fragments and options are not carried"
		return p, false
	}
	body := b[header.IPv4MinimumSize:]
	switch h.TransportProtocol() {
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		return p, true
	case header.ICMPv4ProtocolNumber:
		if p.dst == address.Gateway()[0] && len(body) >= header.ICMPv4MinimumSize && header.ICMPv4(body).Type() == header.ICMPv4Echo {
			return p, true
		}
		p.proto, p.what = "icmp", "only the gateway answers ICMP echo"
		return p, false
	}
	p.proto, p.what = "ip", "only TCP, UDP and ICMP echo are carried"
	return p, false
}

func inspect6(b []byte) (packet, bool) {
	if len(b) < header.IPv6MinimumSize || b[0]>>4 != 6 {
		return packet{}, false
	}
	h := header.IPv6(b)
	p := packet{src: netip.AddrFrom16([16]byte(b[8:24])), dst: netip.AddrFrom16([16]byte(b[24:40]))}
	if p.dst.IsMulticast() && p.src.IsUnspecified() || p.dst.IsMulticast() && b[6] != uint8(header.ICMPv6ProtocolNumber) {
		return packet{}, false // listeners' reports and the like: every kernel sends them
	}
	if p.src != address.Sandbox()[1].Addr() {
		p.proto, p.what = "ip", "the source address is not the sandbox's"
		return p, false
	}
	body := b[header.IPv6MinimumSize:]
	switch tcpip.TransportProtocolNumber(h.NextHeader()) { // extension headers are not carried
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		return p, true
	case header.ICMPv6ProtocolNumber:
		if len(body) < header.ICMPv6MinimumSize {
			return packet{}, false
		}
		switch t := header.ICMPv6(body).Type(); {
		case t == header.ICMPv6NeighborSolicit, t == header.ICMPv6NeighborAdvert:
			return p, true
		case t == header.ICMPv6RouterSolicit || p.dst.IsMulticast():
			return packet{}, false
		case t == header.ICMPv6EchoRequest && p.dst == address.Gateway()[1]:
			return p, true
		}
		p.proto, p.what = "icmp", "only the gateway answers ICMP echo"
		return p, false
	}
	p.proto, p.what = "ip", "only TCP, UDP and ICMP echo are carried"
	return p, false
}
