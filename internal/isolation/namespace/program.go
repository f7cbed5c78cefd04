package namespace

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// fExecSeal keeps a sealed file's mode from changing (F_SEAL_EXEC, Linux 6.3).
const fExecSeal = 0x20

// program is the guest's executable as a sealed file in memory, owned by the host's root with mode
// 0111: everybody may execute it, nobody in a sandbox may read it, and nobody at all may change it. Its
// owner may not read it either: the guest is executed with the owner's id and gives it up afterwards.
//
// That it can't be read inside is what puts PID 1 above root inside (HARDENING 2); that it is sealed
// keeps a sandbox from overwriting what the next one runs (CVE-2019-5736). All guests share its pages.
type program struct{ f *os.File }

func newProgram(image []byte) (*program, error) {
	fd, err := unix.MemfdCreate("casemate-guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("casemate-guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if errors.Is(err, unix.EACCES) {
		return nil, errs.Wrap(err, errs.Unsupported, "this host forbids programs in memory files").
			WithHint("set the sysctl vm.memfd_noexec to 0 or 1")
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "casemate-guest")
	if err := sealProgram(f, image); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("seal guest program: %w", err)
	}
	return &program{f: f}, nil
}

func sealProgram(f *os.File, image []byte) error {
	if _, err := f.Write(image); err != nil {
		return err
	}
	// Bits by number: package os would drop none of these, but this says what the kernel checks.
	if err := unix.Fchmod(int(f.Fd()), 0o111); err != nil {
		return os.NewSyscallError("fchmod", err)
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals|fExecSeal)
	if errors.Is(err, unix.EINVAL) {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	return nil
}

// programPath names the program for a child that has it as the descriptor behind those of the launch,
// which the guest closes first of all. The server's own number for it would not do: package syscall
// puts the child's files aside above the highest of them, over whatever is open there.
func programPath() string { return "/proc/self/fd/" + strconv.Itoa(guestwire.LaunchSysFD+1) }

func (p *program) close() error { return p.f.Close() }
