package namespace

import (
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/mount"
)

// What sandboxes see on /dev and /sys are small file systems that the server fills: root inside can
// make no device node. Each sandbox has its own, made ahead of time with its guest: where two share
// an inode, the one can watch by inotify(7) when the other opens it. They are read-only, so that
// nothing in them can be replaced from inside.

// newDev makes the tree for /dev, with the devices that every program expects and no sandbox can harm
// with.
func newDev() (*os.File, error) {
	// mode 755, not tmpfs's usual 1777: in a sticky directory that everybody may write to,
	// "> /dev/null" fails (fs.protected_regular; HARDENING 8).
	m, err := mount.New("tmpfs", mount.NoSuid|mount.NoExec, mount.Option{Key: "mode", Value: "755"})
	if err != nil {
		return nil, err
	}
	return finishTree(m, fillDev(int(m.Fd())))
}

// newSys makes the tree for /sys, with what programs look up there: which CPUs there are, and
// directories that they list.
func newSys(cpus []int) (*os.File, error) {
	m, err := mount.New("tmpfs", mount.NoSuid|mount.NoExec|mount.NoDev, mount.Option{Key: "mode", Value: "755"})
	if err != nil {
		return nil, err
	}
	return finishTree(m, fillSys(int(m.Fd()), cpus))
}

// finishTree makes a filled tree read-only.
func finishTree(m *os.File, err error) (*os.File, error) {
	if err == nil {
		err = mount.SetAttr(m, mount.Change{Set: mount.ReadOnly})
	}
	if err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

func fillDev(dir int) error {
	devices := []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}
	for _, d := range devices {
		if err := unix.Mknodat(dir, d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return &os.PathError{Op: "mknod", Path: d.name, Err: err}
		}
		if err := chmodAt(dir, d.name, 0o666); err != nil { // the umask took its part
			return err
		}
	}
	links := []struct{ name, to string }{
		{"fd", "/proc/self/fd"},
		{"stdin", "/proc/self/fd/0"},
		{"stdout", "/proc/self/fd/1"},
		{"stderr", "/proc/self/fd/2"},
		{"ptmx", "pts/ptmx"},
	}
	for _, l := range links {
		if err := unix.Symlinkat(l.to, dir, l.name); err != nil {
			return &os.PathError{Op: "symlink", Path: l.name, Err: err}
		}
	}
	return makeDirs(dir, "pts", "shm")
}

// fillSys also makes a directory for each CPU, by which glibc before 2.34 counts them.
func fillSys(dir int, cpus []int) error {
	err := makeDirs(dir, "block", "bus", "class", "class/net", "dev", "devices", "devices/system",
		"devices/system/cpu", "devices/system/node", "fs", "fs/cgroup", "kernel", "kernel/mm",
		"kernel/mm/transparent_hugepage", "module", "power")
	if err != nil {
		return err
	}
	for _, cpu := range cpus {
		if err := makeDirs(dir, "devices/system/cpu/cpu"+strconv.Itoa(cpu)); err != nil {
			return err
		}
	}
	list := cpuList(cpus) + "\n"
	files := []struct{ name, text string }{
		{"devices/system/cpu/online", list},
		{"devices/system/cpu/possible", list},
		{"devices/system/cpu/present", list},
		{"devices/system/node/online", "0\n"},
		// Go's runtime and jemalloc read it.
		{"kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"},
	}
	for _, f := range files {
		if err := writeAt(dir, f.name, f.text); err != nil {
			return err
		}
	}
	return nil
}

// writeAt makes a file. No child may be forked meanwhile: it would hold the file open for writing until
// it executes its program, and the tree couldn't be made read-only (EBUSY).
func writeAt(dir int, name, text string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	defer unix.Close(fd)
	if n, err := unix.Write(fd, []byte(text)); err != nil || n != len(text) {
		return fmt.Errorf("write %s: %d of %d bytes: %w", path.Base(name), n, len(text), err)
	}
	return os.NewSyscallError("fchmod", unix.Fchmod(fd, 0o444))
}

func makeDirs(dir int, names ...string) error {
	for _, name := range names {
		if err := unix.Mkdirat(dir, name, 0o755); err != nil {
			return &os.PathError{Op: "mkdir", Path: name, Err: err}
		}
		if err := chmodAt(dir, name, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func chmodAt(dir int, name string, mode uint32) error {
	if err := unix.Fchmodat(dir, name, mode, 0); err != nil {
		return &os.PathError{Op: "chmod", Path: name, Err: err}
	}
	return nil
}

// cpuList formats CPUs as the kernel does: "0-2,5".
func cpuList(cpus []int) string {
	var b strings.Builder
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(cpus[i]))
		if j > i {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(cpus[j]))
		}
		i = j + 1
	}
	return b.String()
}
