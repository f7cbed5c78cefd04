package launch

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// checkFiles looks at every descriptor that PID 1 holds and returns their number. A directory among
// them would be a door out: with one, a symbolic link to /proc/1/fd/N/../.. led to the host
// (CVE-2024-21626). So anything that is not known to be harmless stops the start.
func checkFiles() (int, error) {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return 0, err
	}
	open := 0
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil {
			return 0, fmt.Errorf("descriptor %q is no number", name)
		}
		if fd == int(dir.Fd()) {
			continue
		}
		if err := checkFile(fd); err != nil {
			return 0, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		open++
	}
	return open, nil
}

func checkFile(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK, unix.S_IFIFO:
		return nil
	case unix.S_IFCHR:
		if st.Rdev == unix.Mkdev(1, 3) { // null
			return nil
		}
	}
	// The link's text says what kind of file without a path it is.
	link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, 0:
		// Files without a directory: the guest's own sealed program and log, the runtime's poller.
		// Older kernels give anonymous inodes no type.
		// The one that must not be is the listener of the system call filter, which answers for the sandbox's walls.
		if strings.HasPrefix(link, "/memfd:") || strings.HasPrefix(link, "anon_inode:") && !strings.HasPrefix(link, "anon_inode:seccomp") {
			return nil
		}
	}
	return fmt.Errorf("%s (mode %o) must not be open in a sandbox", link, st.Mode)
}
