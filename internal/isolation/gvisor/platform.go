package gvisor

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// How the Sentry gets at the system calls of a sandbox's processes. Systrap works on every host; KVM has the processor do it, and
// takes a device of the host's. Auto is KVM where the host has it, else Systrap.
const (
	Auto    = "auto"
	Systrap = "systrap"
	KVM     = "kvm"
)

// platform is what was chosen, and of what device; the zero value was not.
type platform struct {
	name   string
	device string // path on the host, "" for none
	why    string // why it is not KVM
}

// kvmMajor and kvmMinor are the device's numbers (Documentation/admin-guide/devices.txt in Linux' source).
const (
	kvmMajor = 10
	kvmMinor = 232
)

// choosePlatform finds the platform that is wanted on a host whose devices lie in dev. "" is Auto. Unsupported: the host lacks
// what was named.
func choosePlatform(want, dev string) (platform, error) {
	if want == Systrap {
		return platform{name: Systrap}, nil
	}
	if err := CheckPlatform(want); err != nil {
		return platform{}, err
	}
	device := filepath.Join(dev, "kvm")
	err := usableKVM(device)
	switch {
	case err == nil:
		return platform{name: KVM, device: device}, nil
	case want == KVM:
		return platform{}, errs.Wrap(err, errs.Unsupported, "gVisor's platform kvm was asked for, and can't be had: %v", err).
			WithHint("load the kernel's module kvm, and give everybody access to %s; or take --runsc-platform %s", device, Systrap)
	}
	return platform{name: Systrap, why: err.Error()}, nil
}

// usableKVM says why a sandbox's runsc could not use a device. It runs with ids of the sandbox's own, which are in no group of the
// host's, so that only what everybody may open is open to it.
func usableKVM(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("the host has no %s", path)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || info.Mode()&os.ModeCharDevice == 0 || st.Rdev != unix.Mkdev(kvmMajor, kvmMinor):
		return fmt.Errorf("%s is not the device of KVM", path)
	case info.Mode().Perm()&0o006 != 0o006:
		return fmt.Errorf("%s is not open to everybody, and so not to a sandbox's own ids", path)
	}
	return nil
}

// CheckPlatform refuses what is no platform's name.
func CheckPlatform(name string) error {
	switch name {
	case "", Auto, Systrap, KVM:
		return nil
	}
	return errs.New(errs.InvalidArgument, "gVisor has no platform %q", name).WithHint("name %s, %s or %s", Auto, Systrap, KVM)
}

// args are runsc's.
func (p platform) args() []string {
	if p.device == "" {
		return []string{"--platform=" + p.name}
	}
	return []string{"--platform=" + p.name, "--platform_device_path=" + guestwire.RuntimeDevice}
}

// explain adds to a start that failed what may be to blame.
func (p platform) explain(err error) error {
	if p.name != KVM || !errs.Is(err, errs.Internal) {
		return err
	}
	return errs.Wrap(err, errs.Internal, "the sandbox did not start with gVisor's platform %s", p.name).
		WithHint("start the server with --runsc-platform %s", Systrap)
}
