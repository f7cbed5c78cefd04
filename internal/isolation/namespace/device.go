package namespace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/linux/tap"
)

// device is an instance's network device while it is made: its other end, and its index.
type device struct {
	end   *os.File
	index int
}

func (d device) close() {
	if d.end != nil {
		_ = d.end.Close()
	}
}

// startDevice begins to make a guest's network device and returns a function that waits for it. The
// server makes it, on a thread in the guest's network namespace: the guest needs neither the right to nor
// the host's door to such devices.
func startDevice(g *guest, n *isolation.Network) func() (device, error) {
	if n == nil {
		return func() (device, error) { return device{}, nil }
	}
	type result struct {
		d   device
		err error
	}
	done := make(chan result, 1)
	go func() {
		d, err := makeDevice(g, n)
		done <- result{d, err}
	}()
	return func() (device, error) {
		r := <-done
		return r.d, r.err
	}
}

func makeDevice(g *guest, n *isolation.Network) (device, error) {
	ns, err := netns.Of(g.proc.PID())
	if err != nil {
		return device{}, fmt.Errorf("open network namespace: %w", err)
	}
	defer func() { _ = ns.Close() }()
	f, index, err := tap.Create(ns, tap.Config{
		Name: n.Device, MTU: n.MTU, MAC: n.MAC, PeerMAC: n.PeerMAC, Addrs: n.Addrs, Gateways: n.Gateways,
	})
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return device{}, errs.Wrap(err, errs.Unsupported, "this host has no TAP devices, which sandboxes with network need").
			WithHint("load the kernel module tun (modprobe tun), or create the sandbox without network")
	}
	if err != nil {
		return device{}, fmt.Errorf("make network device: %w", err)
	}
	return device{f, index}, nil
}

// Device implements isolation.Instance.
func (i *Instance) Device(ctx context.Context) (*os.File, error) {
	if i.record.NetIndex == 0 {
		return nil, errs.New(errs.FailedPrecondition, "the sandbox was created without network, and has no device")
	}
	i.mu.Lock()
	f := i.tap // the first time it is open already
	i.tap = nil
	i.mu.Unlock()
	if f != nil {
		return f, nil
	}
	ns, err := netns.Of(i.proc.PID())
	// Looked at afterwards: a namespace that was opened by a pid is the guest's only if it lives still.
	if err != nil || !i.proc.Alive() {
		if ns != nil {
			_ = ns.Close()
		}
		return nil, errs.New(errs.Unavailable, "the sandbox has ended")
	}
	defer func() { _ = ns.Close() }()
	f, err = i.openDevice(ctx, ns)
	switch {
	case errors.Is(err, tap.ErrGone):
		return nil, errs.Wrap(errors.Join(isolation.ErrDeviceGone, err), errs.FailedPrecondition, "the sandbox's network device is not the one that was made")
	case errors.Is(err, unix.EBUSY):
		return nil, errs.Wrap(err, errs.Unavailable, "the sandbox's network device is in use")
	case err != nil:
		return nil, fmt.Errorf("open network device: %w", err)
	}
	return f, nil
}

// deviceBusy is how long a device may be held by one that does not know of it.
const deviceBusy = 30 * time.Second

// openDevice opens the device. Its maker has closed it, but a guest that is being started on another thread
// has a copy of every descriptor of the server until it executes its program, and keeps the device for as
// long: then it is tried again.
func (i *Instance) openDevice(ctx context.Context, ns *os.File) (*os.File, error) {
	end := time.Now().Add(deviceBusy)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		f, err := tap.Open(ns, i.record.NetName, i.record.NetIndex)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return f, err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, ctx.Err()
		}
	}
}

func networkApplied(n *isolation.Network) string {
	if n == nil {
		return "none"
	}
	return n.Device + " to the gateway"
}
