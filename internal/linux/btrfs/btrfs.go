// Package btrfs speaks to the btrfs file system by ioctl: subvolumes, snapshots, quota groups.
//
// What belongs here: one function per kernel operation (linux/btrfs.h). What does not: which
// subvolume means what. Starting the btrfs command instead would cost milliseconds per call.
package btrfs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// Numbers of linux/btrfs_tree.h.
const (
	rootTree       = 1
	quotaTree      = 8
	firstFree      = 256 // id of the first subvolume, and inode number of every subvolume's root
	keyRootItem    = 132
	keyRootRef     = 156
	keyQgroupInfo  = 242
	keyQgroupLimit = 244
)

// rootReadOnly is BTRFS_ROOT_SUBVOL_RDONLY (linux/btrfs_tree.h).
const rootReadOnly = 1 << 0

// noCopyOnWrite is FS_NOCOW_FL (linux/fs.h).
const noCopyOnWrite = 0x00800000

// maxName is BTRFS_SUBVOL_NAME_MAX, the smaller one of the two argument forms.
const maxName = 4039

// Is reports whether an open file lies on btrfs.
func Is(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && st.Type == unix.BTRFS_SUPER_MAGIC
}

// IsSubvolume reports whether an open directory is a subvolume's root.
func IsSubvolume(dir *os.File) bool {
	var st unix.Stat_t
	return Is(dir) && unix.Fstat(int(dir.Fd()), &st) == nil && st.Ino == firstFree
}

// CreateSubvolume makes an empty subvolume name in dir. It belongs to root with mode 0755.
func CreateSubvolume(dir *os.File, name string) error {
	return named("BTRFS_IOC_SUBVOL_CREATE", iocSubvolCreate, dir, name)
}

// DeleteSubvolume removes the subvolume name in dir, which may be full and in use; its space comes
// back in the background. One that has subvolumes below fails with ENOTEMPTY: see DeleteTree.
func DeleteSubvolume(dir *os.File, name string) error {
	return named("BTRFS_IOC_SNAP_DESTROY", iocSnapDestroy, dir, name)
}

// Snapshot makes a read-only snapshot name in dir of the subvolume src. It includes what src's files
// hold in memory, which is written out first.
func Snapshot(src, dir *os.File, name string) error {
	return snapshot(src, dir, name, subvolReadOnly)
}

// SnapshotFixed is Snapshot, but calls fixed as soon as it is decided what the snapshot holds: nothing that is
// written to src after that is in it. Most of the time that a snapshot takes lies behind that moment, while the
// file system brings its trees to the disk. fixed is called once, from this goroutine, unless the snapshot fails
// before. root is the root directory of the file system's mount.
func SnapshotFixed(root, src, dir *os.File, name string, fixed func()) error {
	parent, err := ID(dir)
	if err != nil {
		return err
	}
	last, err := lastChild(root, parent)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- Snapshot(src, dir, name) }()
	look := time.NewTicker(fixedEvery)
	defer look.Stop()
	for {
		select {
		case err := <-done:
			if err == nil && fixed != nil {
				fixed()
			}
			return err
		case <-look.C:
		}
		if fixed == nil {
			continue
		}
		// The reference to the snapshot comes into the tree of roots within the critical part of the file system's
		// commit, right after the source's tree was copied (create_pending_snapshot in fs/btrfs/transaction.c).
		if is, err := hasChild(root, parent, last, name); err == nil && is {
			fixed()
			fixed = nil
		}
	}
}

// fixedEvery is how often SnapshotFixed looks.
const fixedEvery = 250 * time.Microsecond

// lastChild returns the highest id of the subvolumes directly below subvolume id. Later ones have higher ids.
func lastChild(root *os.File, id uint64) (uint64, error) {
	children, err := Children(root, id)
	if err != nil || len(children) == 0 {
		return 0, err
	}
	return slices.Max(children), nil
}

// rootRefName is where the name begins in a btrfs_root_ref (linux/btrfs_tree.h).
const rootRefName = 18

// hasChild reports whether subvolume id has a child of that name, with an id above after.
func hasChild(root *os.File, id, after uint64, name string) (bool, error) {
	found := false
	err := search(root, searchKey{
		tree: rootTree, minObject: id, maxObject: id, minType: keyRootRef, maxType: keyRootRef, minOffset: after + 1, maxOffset: ^uint64(0),
	}, func(_ itemHeader, data []byte) {
		found = found || len(data) >= rootRefName && string(data[rootRefName:]) == name
	})
	return found, err
}

// Clone is Snapshot, but what it makes can be written to.
func Clone(src, dir *os.File, name string) error { return snapshot(src, dir, name, 0) }

func snapshot(src, dir *os.File, name string, flags uint64) error {
	if err := checkName(name); err != nil {
		return err
	}
	args := volArgsV2{fd: int64(src.Fd()), flags: flags}
	copy(args.name[:], name)
	return ioctlVolV2("BTRFS_IOC_SNAP_CREATE_V2", iocSnapCreateV2, dir, &args)
}

// Shows reports whether it is certain that a read-only snapshot holds what the subvolume src holds, because the
// snapshot was made of it and src was not changed since. c are the file system's counters. What is written after
// Shows was called may or may not count.
//
// Each change of an inode notes in the root of its subvolume, in memory at once, which transaction it belongs to; a
// snapshot inherits that note, and what changes src later belongs to a later transaction (btrfs_update_root_times
// and create_pending_snapshot in fs/btrfs). What is written into pages is noted only when they are written
// out, and until then has room reserved in the subvolume's quota group, at the least for its metadata. So nothing may
// be reserved, and that is looked at first: room is given back after the change was noted.
func Shows(c Counters, snapshot, src *os.File) (bool, error) {
	id, err := ID(src)
	if err != nil {
		return false, err
	}
	if reserved, err := c.Reserved(id); err != nil || reserved != 0 {
		return false, err
	}
	now, err := ioctlSubvolInfo(src)
	if err != nil {
		return false, err
	}
	then, err := ioctlSubvolInfo(snapshot)
	if err != nil {
		return false, err
	}
	return then.flags&rootReadOnly != 0 && then.parentUUID == now.uuid && now.uuid != [16]byte{} &&
		then.changed == now.changed && then.changedAt == now.changedAt, nil
}

// DeleteTree removes the subvolume name in dir together with every subvolume below it, wherever in
// its directories those lie. root is the root directory of the file system's mount.
func DeleteTree(root, dir *os.File, name string) error {
	err := DeleteSubvolume(dir, name)
	if !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open "+name, err)
	}
	sub := os.NewFile(uintptr(fd), name)
	id, err := ID(sub)
	_ = sub.Close()
	if err != nil {
		return err
	}
	below, err := descendants(root, id)
	if err != nil {
		return err
	}
	for i := len(below) - 1; i >= 0; i-- { // the deepest first
		if err := deleteByID(root, below[i]); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return DeleteSubvolume(dir, name)
}

// descendants lists the subvolumes below one, each before those that it contains.
func descendants(root *os.File, id uint64) ([]uint64, error) {
	all := []uint64{id}
	for i := 0; i < len(all); i++ {
		children, err := Children(root, all[i])
		if err != nil {
			return nil, err
		}
		all = append(all, children...)
	}
	return all[1:], nil
}

// Children returns the ids of the subvolumes directly below subvolume id.
func Children(root *os.File, id uint64) ([]uint64, error) {
	var ids []uint64
	err := search(root, searchKey{
		tree: rootTree, minObject: id, maxObject: id, minType: keyRootRef, maxType: keyRootRef, maxOffset: ^uint64(0),
	}, func(h itemHeader, _ []byte) { ids = append(ids, h.offset) })
	return ids, err
}

// Exists reports whether anything of subvolume id is left: one that was deleted takes a while, in the
// background, until its last block has come back.
func Exists(root *os.File, id uint64) (bool, error) {
	found := false
	err := search(root, searchKey{
		tree: rootTree, minObject: id, maxObject: id, minType: keyRootItem, maxType: keyRootItem, maxOffset: ^uint64(0),
	}, func(itemHeader, []byte) { found = true })
	return found, err
}

func deleteByID(root *os.File, id uint64) error {
	args := volArgsV2{flags: subvolByID}
	binary.NativeEndian.PutUint64(args.name[:], id)
	return ioctlVolV2("BTRFS_IOC_SNAP_DESTROY_V2", iocSnapDestroyV2, root, &args)
}

// ID returns the id of the subvolume that an open file or directory lies in. It is also the number of
// its quota group of level 0.
func ID(f *os.File) (uint64, error) {
	var args inoLookup
	args.object = firstFree
	if err := ioctlInoLookup(f, &args); err != nil {
		return 0, err
	}
	return args.tree, nil
}

// EnableQuota switches quota groups on and waits for the first count. Idempotent.
func EnableQuota(root *os.File) error {
	if err := ioctlQuotaCtl(root, quotaEnable); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return awaitCount(root)
}

// Recount has quota groups counted anew and waits for that. Once something went wrong with one group the kernel
// counts for none of the file system, so that no limit holds any more (qgroup_mark_inconsistent in fs/btrfs/qgroup.c;
// see Counters.Astray). Only this brings the limits back.
func Recount(root *os.File) error {
	if err := ioctlQuotaRescan(root); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	return awaitCount(root)
}

func awaitCount(root *os.File) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), iocRescanWait, 0)
	if errno != 0 {
		return os.NewSyscallError("BTRFS_IOC_QUOTA_RESCAN_WAIT", errno)
	}
	return nil
}

// Limit sets how many bytes the subvolume that f lies in may refer to; 0 lifts the limit. Writers
// that reach it get EDQUOT.
func Limit(f *os.File, bytes int64) error {
	args := qgroupLimit{flags: limitReferenced, maxReferenced: uint64(bytes)}
	if bytes <= 0 {
		args.maxReferenced = ^uint64(0) // the kernel's "none"
	}
	return ioctlQgroupLimit(f, &args)
}

// LimitID is Limit for a subvolume by its id; root is any open file of the file system.
func LimitID(root *os.File, id uint64, bytes int64) error {
	args := qgroupLimit{qgroup: id, flags: limitReferenced, maxReferenced: uint64(bytes)}
	if bytes <= 0 {
		args.maxReferenced = ^uint64(0)
	}
	return ioctlQgroupLimit(root, &args)
}

// LimitOf returns a subvolume's limit; 0 is none.
func LimitOf(root *os.File, id uint64) (int64, error) {
	var limit int64
	err := search(root, searchKey{
		tree: quotaTree, minType: keyQgroupLimit, maxType: keyQgroupLimit, minOffset: id, maxOffset: id,
	}, func(_ itemHeader, data []byte) {
		if len(data) >= 16 && binary.LittleEndian.Uint64(data)&limitReferenced != 0 {
			limit = max(0, int64(binary.LittleEndian.Uint64(data[8:]))) // "none" is -1
		}
	})
	return limit, err
}

// Usage returns the bytes that a subvolume refers to, as of the last commit of the file system.
func Usage(root *os.File, id uint64) (int64, error) { return groupInfo(root, id, referencedAt) }

// Exclusive returns the bytes that a subvolume and no other one refers to, as of the last commit of the
// file system: what deleting it would free.
func Exclusive(root *os.File, id uint64) (int64, error) { return groupInfo(root, id, exclusiveAt) }

// Offsets in btrfs_qgroup_info_item.
const (
	referencedAt = 8
	exclusiveAt  = 24
)

func groupInfo(root *os.File, id uint64, at int) (int64, error) {
	used := int64(-1)
	err := search(root, searchKey{
		tree: quotaTree, minType: keyQgroupInfo, maxType: keyQgroupInfo, minOffset: id, maxOffset: id,
	}, func(_ itemHeader, data []byte) {
		if len(data) >= at+8 {
			used = int64(binary.LittleEndian.Uint64(data[at:]))
		}
	})
	if err == nil && used < 0 {
		err = errs.New(errs.NotFound, "no quota group for subvolume %d", id)
	}
	return used, err
}

// DropQuotaGroup removes the quota group of a subvolume that no longer Exists, once it counts nothing any more: before
// the file system's next commit it may still, and is then errs.Unavailable. The kernel would remove it all the same:
// an older one with the limit of a subvolume in use, a newer one at the price of all limits (see Recount).
func DropQuotaGroup(root *os.File, id uint64) error {
	for _, count := range [...]func(*os.File, uint64) (int64, error){Usage, Exclusive} {
		switch n, err := count(root, id); {
		case errs.Is(err, errs.NotFound): // newer kernels drop it themselves
			return nil
		case err != nil:
			return err
		case n != 0:
			return errs.New(errs.Unavailable, "the quota group of subvolume %d still counts %d bytes", id, n)
		}
	}
	err := ioctlQgroupCreate(root, &qgroupCreate{create: 0, qgroup: id})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// QuotaGroups returns the subvolume ids that have a quota group of level 0.
func QuotaGroups(root *os.File) ([]uint64, error) {
	var ids []uint64
	err := search(root, searchKey{
		tree: quotaTree, minType: keyQgroupInfo, maxType: keyQgroupInfo, maxOffset: 1<<48 - 1,
	}, func(h itemHeader, _ []byte) { ids = append(ids, h.offset) })
	return ids, err
}

// NoCopyOnWrite makes an empty file on btrfs overwrite its blocks in place. Elsewhere it does nothing.
func NoCopyOnWrite(f *os.File) error {
	if !Is(f) {
		return nil
	}
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return os.NewSyscallError("FS_IOC_GETFLAGS", err)
	}
	return os.NewSyscallError("FS_IOC_SETFLAGS",
		unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|noCopyOnWrite))
}

// StartCommit begins a commit of the file system and does not wait for it. Deleted subvolumes are freed
// after the next commit, which else comes every 30 s.
func StartCommit(f *os.File) error { return ioctlStartSync(f) }

// Sync commits the file system.
func Sync(f *os.File) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), iocSync, 0)
	if errno != 0 {
		return os.NewSyscallError("BTRFS_IOC_SYNC", errno)
	}
	return nil
}

func named(what string, request uintptr, dir *os.File, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	var args volArgs
	copy(args.name[:], name)
	return ioctlVol(what, request, dir, &args)
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > maxName {
		return errs.New(errs.InvalidArgument, "name %q can't be a subvolume's", name)
	}
	for i := range len(name) {
		if name[i] == '/' || name[i] == 0 {
			return errs.New(errs.InvalidArgument, "name %q can't be a subvolume's", name)
		}
	}
	return nil
}

// searchKey selects items of a tree. Between its bounds keys are ordered as (object, type, offset)
// triples, so the callback sees only those whose three parts are each within bounds.
type searchKey struct {
	tree                 uint64
	minObject, maxObject uint64
	minType, maxType     uint32
	minOffset, maxOffset uint64
	// minTransid leaves out blocks of the tree that no transaction since has written.
	minTransid uint64
}

func (k searchKey) holds(h itemHeader) bool {
	return h.object >= k.minObject && h.object <= k.maxObject && h.kind >= k.minType && h.kind <= k.maxType &&
		h.offset >= k.minOffset && h.offset <= k.maxOffset
}

// itemHeader is btrfs_ioctl_search_header without what nobody needs.
type itemHeader struct {
	object, offset uint64
	kind, length   uint32
}

const headerSize = 32

// search calls f for each item within the key's bounds.
func search(root *os.File, k searchKey, f func(itemHeader, []byte)) error {
	var args searchArgs
	next := k
	for {
		args.key = rawKey{
			tree: k.tree, minObject: next.minObject, maxObject: k.maxObject, minOffset: next.minOffset,
			maxOffset: k.maxOffset, minTransid: k.minTransid, maxTransid: ^uint64(0), minType: next.minType, maxType: k.maxType, count: 4096,
		}
		if err := ioctlSearch(root, &args); err != nil {
			return err
		}
		if args.key.count == 0 {
			return nil
		}
		var last itemHeader
		buf := args.buf[:]
		for range args.key.count {
			if len(buf) < headerSize {
				return fmt.Errorf("tree search: %d items do not fit into the answer", args.key.count)
			}
			last = itemHeader{
				object: binary.NativeEndian.Uint64(buf[8:]), offset: binary.NativeEndian.Uint64(buf[16:]),
				kind: binary.NativeEndian.Uint32(buf[24:]), length: binary.NativeEndian.Uint32(buf[28:]),
			}
			buf = buf[headerSize:]
			if uint64(last.length) > uint64(len(buf)) {
				return fmt.Errorf("tree search: item of %d bytes does not fit into the answer", last.length)
			}
			if k.holds(last) {
				f(last, buf[:last.length])
			}
			buf = buf[last.length:]
		}
		if last.offset == ^uint64(0) {
			return nil
		}
		next.minObject, next.minType, next.minOffset = last.object, last.kind, last.offset+1
	}
}
