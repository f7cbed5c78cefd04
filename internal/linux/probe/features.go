package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/linux/userns"
)

// Kernel is the oldest kernel on which everything else is expected.
func Kernel(major, minor int) Feature {
	version := fmt.Sprintf("%d.%d", major, minor)
	return Feature{
		Name: "linux", MinKernel: version, Remedy: "install Linux " + version + " or newer",
		Probe: func() error {
			var u unix.Utsname
			if err := unix.Uname(&u); err != nil {
				return os.NewSyscallError("uname", err)
			}
			release := unix.ByteSliceToString(u.Release[:])
			if older(release, major, minor) {
				return fmt.Errorf("%w: this is Linux %s", ErrNotSupported, release)
			}
			return nil
		},
	}
}

func older(release string, major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(release, "%d.%d", &a, &b); err != nil {
		return true
	}
	return a < major || a == major && b < minor
}

// UserNamespaces are namespaces in which ids are mapped (user_namespaces(7)).
func UserNamespaces() Feature {
	return Feature{
		Name: "user-namespaces", MinKernel: "3.8",
		Remedy: "set the sysctl user.max_user_namespaces to a few thousand, and use a kernel with CONFIG_USER_NS",
		Probe: func() error {
			ns, err := probeNamespace()
			if err != nil {
				return notSupported(err, unix.ENOSPC, unix.EINVAL, unix.EUSERS, unix.EPERM)
			}
			return ns.Close()
		},
	}
}

// probeNamespace makes a user namespace that maps one id to one that nobody has.
func probeNamespace() (*os.File, error) {
	m := []userns.Range{{Inside: 0, Outside: 0x7fff0000, Count: 1}}
	return userns.New(context.Background(), m, m)
}

// IdmappedMounts are mounts that show stored ids as others (mount_setattr(2)). Whether they work is
// the file system's matter, so dir is tried.
func IdmappedMounts(dir string) Feature {
	return Feature{
		Name: "idmapped-mounts", MinKernel: "5.19",
		Remedy: "keep the data directory on ext4, XFS or btrfs, with Linux 6.1 or newer",
		Probe: func() error {
			ns, err := probeNamespace()
			if err != nil {
				return err
			}
			defer func() { _ = ns.Close() }()
			m, err := mount.Clone(dir, false)
			if err != nil {
				return notSupported(err, unix.ENOSYS)
			}
			defer func() { _ = m.Close() }()
			err = mount.SetAttr(m, mount.Change{UserNS: ns})
			return notSupported(err, unix.ENOSYS, unix.EINVAL, unix.EOPNOTSUPP)
		},
	}
}

// FileSystem is a type of file system that the kernel has built in or can load, which
// probing does.
func FileSystem(name, minKernel string) Feature {
	return Feature{
		Name: name, MinKernel: minKernel, Remedy: "load the kernel module: modprobe " + name,
		Probe: func() error {
			// Opening it is what makes the kernel load the module; the list in /proc/filesystems has only
			// what was loaded before.
			fs, err := unix.Fsopen(name, unix.FSOPEN_CLOEXEC)
			if err != nil {
				return notSupported(fmt.Errorf("open file system %s: %w", name, err), unix.ENODEV, unix.ENOSYS)
			}
			return unix.Close(fs)
		},
	}
}

// SeccompFilters are system call filters that can kill the whole process (seccomp(2)).
func SeccompFilters() Feature {
	return Feature{
		Name: "seccomp", MinKernel: "4.14", Remedy: "use a kernel with CONFIG_SECCOMP_FILTER",
		Probe: func() error {
			b, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("%w: the kernel has no filters", ErrNotSupported)
			}
			if err != nil {
				return err
			}
			for _, action := range []string{"kill_process", "errno", "allow"} {
				if !strings.Contains(" "+string(b), " "+action) {
					return fmt.Errorf("%w: no action %s", ErrNotSupported, action)
				}
			}
			return nil
		},
	}
}

// VisibleProc is a /proc that nothing covers, without which the kernel refuses a new one in a user
// namespace (mount_too_revealing in fs/namespace.c).
func VisibleProc() Feature {
	return Feature{
		Name: "visible-proc", MinKernel: "3.8",
		Remedy: "run the server outside of other containers, or give it an unmasked /proc",
		Probe: func() error {
			b, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				return err
			}
			if covered := coveredProc(b); covered != "" {
				return fmt.Errorf("%w: %s is covered", ErrNotSupported, covered)
			}
			return nil
		},
	}
}

// coveredProc returns a path of /proc that something is mounted on, or "". binfmt_misc's place is an
// empty directory that the kernel keeps for mounts.
func coveredProc(mountinfo []byte) string {
	for line := range bytes.Lines(mountinfo) {
		fields := strings.Fields(string(line))
		if len(fields) < 5 {
			continue
		}
		at := fields[4]
		if strings.HasPrefix(at, "/proc/") && at != "/proc/sys/fs/binfmt_misc" {
			return at
		}
	}
	return ""
}

// notSupported turns the listed errors into ErrNotSupported and leaves others alone.
func notSupported(err error, list ...error) error {
	for _, e := range list {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %w", ErrNotSupported, err)
		}
	}
	return err
}
