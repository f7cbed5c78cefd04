package quota

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of linux/fs.h and linux/quota.h.
const (
	fsGetXattr  = 0x801c581f
	fsSetXattr  = 0x401c5820
	flagInherit = 0x200 // FS_XFLAG_PROJINHERIT
	getQuota    = 0x800007<<8 | projectQuota
	setQuota    = 0x800008<<8 | projectQuota

	projectQuota = 2
	validLimits  = 1 | 4 // QIF_BLIMITS, QIF_ILIMITS
)

// attr is struct fsxattr.
type attr struct {
	flags, extSize, extents, project, cowExtSize uint32
	pad                                          [8]byte
}

// block is struct if_dqblk; blocks are of 1,024 bytes.
type block struct {
	hardBlocks, softBlocks, space, hardInodes, softInodes, inodes, blockTime, inodeTime uint64
	valid                                                                               uint32
	_                                                                                   uint32
}

func getAttr(dir *os.File) (attr, error) {
	var a attr
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), fsGetXattr, uintptr(unsafe.Pointer(&a)))
	if errno != 0 {
		return a, os.NewSyscallError("FS_IOC_FSGETXATTR", errno)
	}
	return a, nil
}

func setAttr(dir *os.File, a attr) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), fsSetXattr, uintptr(unsafe.Pointer(&a)))
	if errno != 0 {
		return os.NewSyscallError("FS_IOC_FSSETXATTR", errno)
	}
	return nil
}

// get returns a zero block for an id that the file system has never seen.
func get(dir *os.File, id uint32) (block, error) {
	var b block
	err := quotactl(dir, getQuota, id, &b)
	if errors.Is(err, unix.ENOENT) {
		return block{}, nil
	}
	return b, err
}

func set(dir *os.File, id uint32, b block) error { return quotactl(dir, setQuota, id, &b) }

// quotactl is quotactl_fd(2), which needs no block device's name.
func quotactl(dir *os.File, cmd uint32, id uint32, b *block) error {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, dir.Fd(), uintptr(cmd), uintptr(id), uintptr(unsafe.Pointer(b)), 0, 0)
	if errno != 0 {
		return os.NewSyscallError("quotactl_fd", errno)
	}
	return nil
}
