package gvisor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// How the Sentry gets at the system calls of a sandbox's processes. Systrap works on every host; KVM has the processor do it, and
// takes a device of the host's. Auto is KVM where the host has one that works, else Systrap.
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

// choosePlatform finds the platform that is wanted on a host whose devices lie in dev; ask says whether a device answers as KVM
// does. "" is Auto. Unsupported: the host lacks what was named.
func choosePlatform(want, dev string, ask func(path string) error) (platform, error) {
	if want == Systrap {
		return platform{name: Systrap}, nil
	}
	if err := CheckPlatform(want); err != nil {
		return platform{}, err
	}
	device := filepath.Join(dev, "kvm")
	err := usableKVM(device)
	if err == nil {
		err = ask(device)
	}
	switch {
	case err == nil:
		return platform{name: KVM, device: device}, nil
	case want == KVM:
		return platform{}, errs.Wrap(err, errs.Unsupported, "gVisor's platform kvm was asked for, and can't be had: %v", err).
			WithHint("load the kernel's module kvm where the processor has what it needs, and give everybody access to %s; or take --runsc-platform %s", device, Systrap)
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

// KVM's calls and the one version of them that programs should go on with (linux/kvm.h and Documentation/virt/kvm/api.rst in Linux'
// source).
const (
	kvmGetAPIVersion = 0xae00
	kvmCreateVM      = 0xae01
	kvmAPIVersion    = 12
)

// askKVM says why a device is none that machines can be made with. A kernel may have the device and no processor to go with it,
// as inside of a virtual machine.
func askKVM(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s can't be opened: %w", path, err)
	}
	defer unix.Close(fd)
	version, err := uninterrupted(func() (int, error) { return unix.IoctlRetInt(fd, kvmGetAPIVersion) })
	if err != nil {
		return fmt.Errorf("%s does not answer as KVM: %w", path, err)
	}
	if version != kvmAPIVersion {
		return fmt.Errorf("%s has version %d of KVM's calls, not %d", path, version, kvmAPIVersion)
	}
	machine, err := uninterrupted(func() (int, error) { return unix.IoctlRetInt(fd, kvmCreateVM) })
	if err != nil {
		return fmt.Errorf("%s makes no virtual machine: %w", path, err)
	}
	return unix.Close(machine)
}

// uninterrupted makes a call until no signal gets in between.
func uninterrupted(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
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

// chosen returns the platform that sandboxes start on, and whether that is settled.
func (b *Backend) chosen() (platform, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.platform, b.proven
}

// settle has sandboxes start on a platform that one has started on. The first one stays.
func (b *Backend) settle(p platform) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.proven {
		b.platform, b.proven = p, true
	}
}

// onPlatform calls start with the platform. KVM that was found rather than asked for may make machines, and still not do all that
// the Sentry needs: only a sandbox that runs shows it. Until one does, what does not start on it is started on Systrap, and where
// that goes well, so is everything later.
func (b *Backend) onPlatform(ctx context.Context, start func(platform) (isolation.Instance, error)) (isolation.Instance, error) {
	p, proven := b.chosen()
	inst, err := start(p)
	switch {
	case err == nil:
		b.settle(p)
		return inst, nil
	case proven || p.name != KVM || ctx.Err() != nil || !errs.Is(err, errs.Internal):
		return nil, p.explain(err)
	}
	other := platform{name: Systrap, why: "no sandbox starts with " + p.device}
	if inst, err = start(other); err != nil {
		return nil, err
	}
	b.settle(other)
	return inst, nil
}
