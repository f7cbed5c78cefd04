package tap

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/testenv"
)

// namespace makes an empty network namespace.
func namespace(t *testing.T) *os.File {
	t.Helper()
	testenv.Root(t)
	f, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func config() Config {
	return Config{
		Name: "eth0", MTU: 65000, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, PeerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
		Addrs:    []netip.Prefix{netip.MustParsePrefix("198.18.0.2/30"), netip.MustParsePrefix("fdca::2/64")},
		Gateways: []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fdca::1")},
	}
}

// A device is persistent, has what it was given and nothing else, and one end at a time.
func TestCreateAndOpen(t *testing.T) {
	ns := namespace(t)
	f, index, err := Create(ns, config())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	err = netns.In(ns, func() error {
		d, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := d.Addrs()
		if err != nil {
			return err
		}
		if len(addrs) != 2 || d.MTU != 65000 || d.HardwareAddr.String() != "02:00:00:00:00:02" || d.Index != index {
			t.Errorf("%+v %v", d, addrs)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // closed and opened again: it is the same one
		f, err := Open(ns, "eth0", index)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(ns, "eth0", index); !errors.Is(err, unix.EBUSY) {
			t.Errorf("a second end: %v", err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A device that somebody inside removed or renamed, with rights that no sandbox has, is not taken up: the
// kernel would make a new one of that name, which the twin shows.
func TestOpenFindsNoOther(t *testing.T) {
	ns := namespace(t)
	f, index, err := Create(ns, config())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	inside := func(f func(*netlink.Handle, netlink.Link) error) {
		t.Helper()
		err := netns.In(ns, func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer h.Close()
			link, err := h.LinkByName("eth0")
			if err != nil {
				return err
			}
			return f(h, link)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	inside(func(h *netlink.Handle, l netlink.Link) error { return h.LinkDel(l) })
	if _, err := Open(ns, "eth0", index); !errors.Is(err, ErrGone) {
		t.Errorf("removed: %v", err)
	}
	var made *os.File
	if err := netns.In(ns, func() (err error) { made, err = attach("eth0"); return err }); err != nil {
		t.Fatalf("twin: the kernel makes no device for a name: %v", err)
	}
	defer func() { _ = made.Close() }()
	inside(func(_ *netlink.Handle, l netlink.Link) error {
		if l.Attrs().Index == index {
			t.Error("twin: it has the old index")
		}
		return nil
	})
	if _, err := Open(ns, "eth0", index); !errors.Is(err, ErrGone) {
		t.Errorf("another of that name: %v", err)
	}
}

// The thread that entered a namespace is not used again: this one stays where it was.
func TestInLeavesNoTrace(t *testing.T) {
	ns := namespace(t)
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		if err := netns.In(ns, func() error {
			if now, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || now == before {
				t.Errorf("inside it is %s %v", now, err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// A thread takes a moment to end.
	testenv.Eventually(t, 5*time.Second, "every thread is where the process is", func() bool {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if now, err := os.Readlink("/proc/self/task/" + e.Name() + "/ns/net"); err == nil && now != before {
				return false
			}
		}
		return true
	})
}
