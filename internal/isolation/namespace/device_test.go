package namespace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
)

// TestDeviceThatIsHeldForAMoment: while a guest is being started elsewhere, it has a copy of what the maker of
// a device has closed. Whoever opens the device waits for that; the twin, which may not wait, sees it in use.
func TestDeviceThatIsHeldForAMoment(t *testing.T) {
	b := newHost(t).backend()
	spec := conformance.Spec(t, isolation.Locked)
	spec.Network = &isolation.Network{
		Device: "eth0", MTU: 1500, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, PeerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
		Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}, Gateways: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
	}
	x := start(t, b, spec)
	held, err := x.inst.Device(limited(t))
	if err != nil {
		t.Fatal(err)
	}
	impatient, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := x.inst.Device(impatient); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("twin: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { _ = held.Close() })
	again, err := x.inst.Device(limited(t))
	if err != nil {
		t.Fatalf("after a moment: %v (%s)", err, errs.KindOf(err))
	}
	_ = again.Close()
}
