package btrfs

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of linux/btrfs.h: magic 0x94.
const (
	iocFiemap        = 0xc020660b // FS_IOC_FIEMAP, linux/fs.h
	iocFSInfo        = 0x8400941f
	iocSync          = 0x9408
	iocSubvolCreate  = 0x5000940e
	iocSnapDestroy   = 0x5000940f
	iocTreeSearch    = 0xd0009411
	iocInoLookup     = 0xd0009412
	iocSnapCreateV2  = 0x50009417
	iocStartSync     = 0x80089418
	iocQuotaCtl      = 0xc0109428
	iocQgroupCreate  = 0x4010942a
	iocQgroupLimit   = 0x8030942b
	iocQuotaRescan   = 0x4040942c
	iocRescanWait    = 0x942e
	iocSubvolInfo    = 0x81f8943c
	iocSnapDestroyV2 = 0x5000943f
)

const (
	subvolReadOnly  = 1 << 1
	subvolByID      = 1 << 4
	quotaEnable     = 1
	limitReferenced = 1 << 0
)

// volArgs is btrfs_ioctl_vol_args.
type volArgs struct {
	fd   int64
	name [4088]byte
}

// volArgsV2 is btrfs_ioctl_vol_args_v2; name also holds a subvolume id.
type volArgsV2 struct {
	fd      int64
	transid uint64
	flags   uint64
	inherit [4]uint64
	name    [4040]byte
}

// inoLookup is btrfs_ioctl_ino_lookup_args.
type inoLookup struct {
	tree, object uint64
	name         [4080]byte
}

// quotaCtl is btrfs_ioctl_quota_ctl_args.
type quotaCtl struct{ cmd, status uint64 }

// quotaRescan is btrfs_ioctl_quota_rescan_args.
type quotaRescan struct{ flags, progress, reserved0, reserved1, reserved2, reserved3, reserved4, reserved5 uint64 }

// qgroupCreate is btrfs_ioctl_qgroup_create_args.
type qgroupCreate struct{ create, qgroup uint64 }

// qgroupLimit is btrfs_ioctl_qgroup_limit_args; qgroup 0 means the subvolume of the descriptor.
type qgroupLimit struct {
	qgroup, flags, maxReferenced, maxExclusive, rsvReferenced, rsvExclusive uint64
}

// rawKey is btrfs_ioctl_search_key.
type rawKey struct {
	tree, minObject, maxObject, minOffset, maxOffset, minTransid, maxTransid uint64
	minType, maxType, count, unused                                          uint32
	unused2                                                                  [4]uint64
}

// searchArgs is btrfs_ioctl_search_args.
type searchArgs struct {
	key rawKey
	buf [4096 - 104]byte
}

func ioctl(what string, request uintptr, f *os.File, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return os.NewSyscallError(what, errno)
		}
	}
}

func ioctlVol(what string, request uintptr, dir *os.File, args *volArgs) error {
	return ioctl(what, request, dir, unsafe.Pointer(args))
}

func ioctlVolV2(what string, request uintptr, dir *os.File, args *volArgsV2) error {
	return ioctl(what, request, dir, unsafe.Pointer(args))
}

func ioctlInoLookup(f *os.File, args *inoLookup) error {
	return ioctl("BTRFS_IOC_INO_LOOKUP", iocInoLookup, f, unsafe.Pointer(args))
}

func ioctlQuotaCtl(f *os.File, cmd uint64) error {
	args := quotaCtl{cmd: cmd}
	return ioctl("BTRFS_IOC_QUOTA_CTL", iocQuotaCtl, f, unsafe.Pointer(&args))
}

func ioctlQuotaRescan(f *os.File) error {
	var args quotaRescan
	return ioctl("BTRFS_IOC_QUOTA_RESCAN", iocQuotaRescan, f, unsafe.Pointer(&args))
}

func ioctlQgroupCreate(f *os.File, args *qgroupCreate) error {
	return ioctl("BTRFS_IOC_QGROUP_CREATE", iocQgroupCreate, f, unsafe.Pointer(args))
}

func ioctlQgroupLimit(f *os.File, args *qgroupLimit) error {
	return ioctl("BTRFS_IOC_QGROUP_LIMIT", iocQgroupLimit, f, unsafe.Pointer(args))
}

func ioctlSearch(f *os.File, args *searchArgs) error {
	return ioctl("BTRFS_IOC_TREE_SEARCH", iocTreeSearch, f, unsafe.Pointer(args))
}

func ioctlStartSync(f *os.File) error {
	var transaction uint64
	return ioctl("BTRFS_IOC_START_SYNC", iocStartSync, f, unsafe.Pointer(&transaction))
}

// fsInfo is btrfs_ioctl_fs_info_args.
type fsInfo struct {
	maxID, devices uint64
	id             [16]byte
	rest           [1024 - 32]byte
}

func ioctlFSInfo(f *os.File) (fsInfo, error) {
	var args fsInfo
	err := ioctl("BTRFS_IOC_FS_INFO", iocFSInfo, f, unsafe.Pointer(&args))
	return args, err
}

// subvolInfo is btrfs_ioctl_get_subvol_info_args.
type subvolInfo struct {
	tree                                 uint64
	name                                 [256]byte
	parent, dir, generation, flags       uint64
	uuid, parentUUID, receivedUUID       [16]byte
	changed, made, sent, received        uint64
	changedAt, madeAt, sentAt, receiveAt struct {
		sec  uint64
		nsec uint32
		_    uint32
	}
	_ [8]uint64
}

func ioctlSubvolInfo(dir *os.File) (subvolInfo, error) {
	var args subvolInfo
	err := ioctl("BTRFS_IOC_GET_SUBVOL_INFO", iocSubvolInfo, dir, unsafe.Pointer(&args))
	return args, err
}

// extent is fiemap_extent (linux/fiemap.h).
type extent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

// fiemapArgs is fiemap with room for some extents.
type fiemapArgs struct {
	start, length                uint64
	flags, mapped, count, unused uint32
	extents                      [128]extent
}

// extents returns the next extents of a file from an offset on.
func extents(f *os.File, from uint64) ([]extent, error) {
	args := fiemapArgs{start: from, length: ^uint64(0) - from}
	args.count = uint32(len(args.extents))
	if err := ioctl("FS_IOC_FIEMAP", iocFiemap, f, unsafe.Pointer(&args)); err != nil {
		return nil, err
	}
	return args.extents[:min(args.mapped, args.count)], nil
}
