package btrfs

import (
	"os"
	"unsafe"
)

// assign puts a quota group into another one: BTRFS_IOC_QGROUP_ASSIGN with btrfs_ioctl_qgroup_assign_args.
func assign(root *os.File, group, parent uint64) error {
	args := struct{ assign, source, destination uint64 }{1, group, parent}
	return ioctl("BTRFS_IOC_QGROUP_ASSIGN", 0x40189429, root, unsafe.Pointer(&args))
}
