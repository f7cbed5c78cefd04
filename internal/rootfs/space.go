package rootfs

import (
	"os"
	"syscall"
)

// Space tells how many bytes the file system that holds the layers has in all, and how many of them are free to use.
func (s *Store) Space() (total, free int64, err error) { return space(s.disk.root()) }

func space(dir string) (total, free int64, err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, 0, os.NewSyscallError("statfs", err)
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}
