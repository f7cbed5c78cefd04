// Package netns enters network namespaces, and sets up new ones.
//
// What belongs here: what a new, empty network namespace needs before programs can use it, and acting in
// another one. What does not: devices that lead out of it (package tap). The guest links this package.
package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// LoopbackUp switches the loopback device on; in a new namespace it is down (network_namespaces(7)).
// The kernel then gives it 127.0.0.1 and ::1 by itself.
func LoopbackUp() error {
	// Any socket of the namespace will do as the door to netdevice(7).
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("name lo: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req); err != nil {
		return os.NewSyscallError("ioctl SIOCSIFFLAGS", err)
	}
	return nil
}
