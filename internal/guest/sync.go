package guest

import (
	"bytes"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
)

// maxMountinfo bounds what is read of the mount table, which has a few dozen lines.
const maxMountinfo = 4 << 20

// syncFiles flushes the sandbox's own file systems: never sync(2), which waits for the whole host.
func syncFiles() error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxMountinfo))
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, dir := range diskMounts(b) {
		fd, err := resolve.Open(unix.AT_FDCWD, dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			continue // a single file, or covered by another mount
		}
		err = unix.Syncfs(fd)
		_ = unix.Close(fd)
		if err != nil {
			return errs.Wrap(err, errs.Internal, "cannot flush %s: %v", dir, err)
		}
	}
	return nil
}

// diskMounts returns the mount points of file systems that have something to flush
// (proc_pid_mountinfo(5)): field 5 is the mount point, and the type follows a field "-".
func diskMounts(b []byte) []string {
	var dirs []string
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		before, after, ok := bytes.Cut(line, []byte(" - "))
		f := bytes.Fields(before)
		if !ok || len(f) < 6 {
			continue
		}
		kind, _, _ := bytes.Cut(after, []byte(" "))
		switch string(kind) {
		case "overlay", "btrfs", "ext4", "xfs":
			dirs = append(dirs, unescapeMount(f[4]))
		}
	}
	return dirs
}

// unescapeMount reverses the kernel's octal escapes of blanks and backslashes.
func unescapeMount(b []byte) string {
	var out []byte
	for i := 0; i < len(b); i++ {
		if b[i] == '\\' && i+3 < len(b) {
			if n, err := strconv.ParseUint(string(b[i+1:i+4]), 8, 8); err == nil {
				out = append(out, byte(n))
				i += 3
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}
