package launch

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/linux/mount"
)

// safe is what no mount of a kernel file system allows.
const safe = mount.NoSuid | mount.NoDev | mount.NoExec

func procFS() (*os.File, error) { return mount.New("proc", safe) }

// maxTerminals bounds the terminals of one sandbox. All sandboxes of a host share kernel.pty.max less
// kernel.pty.reserve, 3,072 by default: one that opened them all left none to the others.
const maxTerminals = "64"

// devPTS makes a file system of terminals. gid 5 is tty wherever terminals have a group; 0666 is for
// the multiplexer.
func devPTS() (*os.File, error) {
	return mount.New("devpts", mount.NoSuid|mount.NoExec,
		mount.Option{Key: "newinstance"}, mount.Option{Key: "ptmxmode", Value: "0666"},
		mount.Option{Key: "mode", Value: "0620"}, mount.Option{Key: "gid", Value: "5"},
		mount.Option{Key: "max", Value: maxTerminals})
}

// shm makes the file system for shared memory, bounded apart from the disk since it is none.
func shm(size int64) (*os.File, error) {
	return mount.New("tmpfs", mount.NoSuid|mount.NoDev, mount.Option{Key: "mode", Value: "1777"},
		mount.Option{Key: "size", Value: strconv.FormatInt(size, 10)})
}

// emptyDir is the place of an empty read-only directory in the staging area, copies of which cover
// what is masked or left out.
const emptyDir = "empty"

func empty() (*os.File, error) {
	return mount.New("tmpfs", safe|mount.ReadOnly, mount.Option{Key: "mode", Value: "0555"},
		mount.Option{Key: "nr_blocks", Value: "1"}, mount.Option{Key: "nr_inodes", Value: "1"})
}

// cloneEmpty returns a copy of the empty directory.
func cloneEmpty() (*os.File, error) { return mount.Clone("/"+emptyDir, false) }

// attachSys mounts /sys: what was prepared, or what came with the launch because it differs.
func (s *setup) attachSys(root int) error {
	if s.launch.Sys == guestwire.Prepared {
		return moveTo(root, "/sys")
	}
	sys, err := s.file(s.launch.Sys)
	if err != nil {
		return err
	}
	return attachTo(root, "/sys", sys)
}

// attachNew makes a file system and mounts it on a directory of the root.
func attachNew(root int, name string, resolve uint64, create func() (*os.File, error)) error {
	m, err := create()
	if err != nil {
		return fmt.Errorf("make %s: %w", name, err)
	}
	defer func() { _ = m.Close() }()
	return attachAt(root, name, resolve, m)
}

// attachTo mounts m on a directory that lies on the root itself.
func attachTo(root int, name string, m *os.File) error {
	return attachAt(root, name, unix.RESOLVE_NO_XDEV, m)
}

// moveTo moves the mount of that name in the staging area, which is "/", to the root.
func moveTo(root int, name string) error {
	fd, err := unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	m := os.NewFile(uintptr(fd), name)
	defer func() { _ = m.Close() }()
	return attachTo(root, name, m)
}

func attachAt(root int, name string, resolve uint64, m *os.File) error {
	at, err := target(root, name, false, resolve)
	if err != nil {
		return fmt.Errorf("mount %s: %w", name, err)
	}
	defer unix.Close(at)
	if err := mount.Attach(m, at); err != nil {
		return fmt.Errorf("mount %s: %w", name, err)
	}
	return nil
}

// watcherSlack is by how many nanoseconds the kernel may delay a timer of the watching thread to join it with
// others; 50,000 is what a thread has by default (prctl(2), PR_SET_TIMERSLACK).
const watcherSlack = "5000000"

// relaxWatcher lets the kernel be late with the timers of the thread by which Go's runtime looks after the
// others: while anything runs, that one sleeps for 20 µs at a time, which took an eighth of the guest's
// processor time. Of that thread alone: a thread that looks for work also sleeps, for 3 µs, and the work waits
// meanwhile. Where it is not permitted nothing is lost but that.
func relaxWatcher(proc *os.File) {
	// The runtime makes it before any other, so it is the second thread of this pid namespace.
	_ = writeAt(proc, "2/timerslack_ns", watcherSlack)
}

func writeAt(dir *os.File, name, value string) error {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return &os.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}

// checkNull makes sure that /dev/null is the null device and nothing that only looks like it: it is
// mounted over the masked paths (CVE-2025-31133).
func checkNull(root int) error {
	fd, err := open(root, "/dev/null", unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 3) {
		return errors.New("/dev/null is not the null device")
	}
	return nil
}

// masked are the paths of /proc that tell about or act on the host: OCI's list (runtime-spec's
// default in containerd and Docker), and what describes the host's boot, disks and kernel beyond what
// programs look up. The command line names its services and may hold keys.
func masked() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",

		"/proc/cmdline", "/proc/bootconfig", "/proc/config.gz", "/proc/modules", "/proc/kallsyms", "/proc/kmsg",
		"/proc/partitions", "/proc/diskstats", "/proc/swaps", "/proc/mdstat",
		"/proc/iomem", "/proc/ioports", "/proc/dma", "/proc/mtrr", "/proc/consoles",
		"/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo", "/proc/kpagecount", "/proc/kpageflags",
		"/proc/kpagecgroup", "/proc/driver", "/proc/dynamic_debug",
	}
}

// readOnly are the paths of /proc that may be read but would change the host when written: they are
// guarded by ownership alone (CVE-2025-52881, and core_pattern).
func readOnly() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// maskPaths covers the masked paths that exist: files with the null device, directories with an empty
// read-only one. It returns how many.
func maskPaths(root int) (int, error) {
	null, err := open(root, "/dev/null", unix.O_PATH, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(null)
	n := 0
	for _, name := range masked() {
		done, err := maskPath(root, name, null)
		if err != nil {
			return n, fmt.Errorf("mask %s: %w", name, err)
		}
		if done {
			n++
		}
	}
	return n, nil
}

func maskPath(root int, name string, null int) (bool, error) {
	at, err := open(root, name, unix.O_PATH, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil // this kernel has no such file
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	var cover *os.File
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		cover, err = cloneEmpty()
	} else {
		cover, err = mount.CloneAt(null, "/dev/null", false)
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = cover.Close() }()
	return true, mount.Attach(cover, at)
}

// protectPaths makes the read-only paths that exist read-only and returns how many.
func protectPaths(root int) (int, error) {
	n := 0
	for _, name := range readOnly() {
		done, err := protectPath(root, name)
		if err != nil {
			return n, fmt.Errorf("protect %s: %w", name, err)
		}
		if done {
			n++
		}
	}
	return n, nil
}

// protectPath mounts a path on itself and makes that mount read-only: the flag is the mount's, and
// the rest of /proc must stay writable.
func protectPath(root int, name string) (bool, error) {
	at, err := open(root, name, unix.O_PATH, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(at)
	m, err := mount.CloneAt(at, name, true)
	if err != nil {
		return false, err
	}
	defer func() { _ = m.Close() }()
	if err := mount.SetAttr(m, mount.Change{Set: safe | mount.ReadOnly, Recursive: true}); err != nil {
		return false, err
	}
	return true, mount.Attach(m, at)
}

// bootID is where programs learn whether the machine was started anew since they last looked. Here the
// sandbox is what starts: each start has an id of its own, and the host's tells no two sandboxes that they
// are on one machine.
const bootID = "/proc/sys/kernel/random/boot_id"

// ownBootID covers the kernel's file with one that holds a new id. root is the staging area, which keeps
// the file's place until it goes.
func ownBootID(root int) error {
	var id [16]byte
	if _, err := unix.Getrandom(id[:], 0); err != nil {
		return os.NewSyscallError("getrandom", err)
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // version 4 (RFC 9562)
	text := fmt.Sprintf("%x-%x-%x-%x-%x\n", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	at, err := open(root, bootID, unix.O_PATH, 0)
	if err != nil {
		return fmt.Errorf("find boot id: %w", err)
	}
	defer unix.Close(at)
	m, err := mount.New("tmpfs", safe, mount.Option{Key: "mode", Value: "0555"},
		mount.Option{Key: "nr_blocks", Value: "1"}, mount.Option{Key: "nr_inodes", Value: "2"})
	if err != nil {
		return fmt.Errorf("make boot id: %w", err)
	}
	defer func() { _ = m.Close() }()
	fd, err := unix.Openat(int(m.Fd()), "boot_id", unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return &os.PathError{Op: "create", Path: "boot_id", Err: err}
	}
	_, err = unix.Write(fd, []byte(text))
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("write boot id: %w", err)
	}
	if err := mount.SetAttr(m, mount.Change{Set: safe | mount.ReadOnly}); err != nil {
		return err
	}
	// Only of what is mounted somewhere can a copy be made: before Linux 6.15 not of a new file system.
	const stay = "/boot"
	if err := attachAt(root, stay, 0, m); err != nil {
		return err
	}
	if fd, err = open(root, stay+"/boot_id", unix.O_PATH, 0); err != nil {
		return fmt.Errorf("find new boot id: %w", err)
	}
	defer unix.Close(fd)
	file, err := mount.CloneAt(fd, "boot_id", false)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := mount.Attach(file, at); err != nil {
		return fmt.Errorf("cover boot id: %w", err)
	}
	return nil
}
