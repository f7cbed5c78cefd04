package btrfs

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// keyInodeItem is BTRFS_INODE_ITEM_KEY (linux/btrfs_tree.h).
const keyInodeItem = 1

// Offsets in btrfs_inode_item.
const (
	inodeTransidAt = 8
	inodeLinksAt   = 40
	inodeModeAt    = 52
	inodeRdevAt    = 56
	inodeItemSize  = 160
)

// Inode is what Touched tells of one.
type Inode struct {
	Number uint64
	// Links is how many names it has.
	Links uint32
	// Mode is its type and permissions, as in stat(2), and Rdev the device that it stands for.
	Mode uint32
	Rdev uint64
}

// Whiteout reports whether it is overlayfs's mark for a removed file: a character device 0/0.
func (i Inode) Whiteout() bool { return i.Mode&unix.S_IFMT == unix.S_IFCHR && i.Rdev == 0 }

// Top reports whether it is the root of its subvolume.
func (i Inode) Top() bool { return i.Number == firstFree }

// Touched calls each for every inode of a snapshot that was made, or in any way changed, after an earlier snapshot of
// the same subvolume was made. It reads only what changed, however much else there is. An inode that is gone is not
// told of, the directory that it was in is.
//
// An earlier snapshot holds all that belongs to its own transaction and nothing that belongs to a later one, and each
// change of an inode, its contents and attributes included, notes its transaction in the inode's item (fill_inode_item
// in fs/btrfs/inode.c).
func Touched(earlier, later *os.File, each func(Inode) error) error {
	then, err := ioctlSubvolInfo(earlier)
	if err != nil {
		return err
	}
	now, err := ioctlSubvolInfo(later)
	if err != nil {
		return err
	}
	if then.flags&now.flags&rootReadOnly == 0 || then.parentUUID != now.parentUUID || then.parentUUID == [16]byte{} || then.made > now.made {
		return errs.New(errs.Internal, "these are no two snapshots of one subvolume")
	}
	var failed error
	err = search(later, searchKey{
		minObject: firstFree, maxObject: ^uint64(0), minType: keyInodeItem, maxType: keyInodeItem, maxOffset: ^uint64(0),
		minTransid: then.made + 1,
	}, func(h itemHeader, data []byte) {
		if failed != nil || len(data) < inodeItemSize || binary.LittleEndian.Uint64(data[inodeTransidAt:]) <= then.made {
			return
		}
		failed = each(Inode{
			Number: h.object, Links: binary.LittleEndian.Uint32(data[inodeLinksAt:]),
			Mode: binary.LittleEndian.Uint32(data[inodeModeAt:]), Rdev: binary.LittleEndian.Uint64(data[inodeRdevAt:]),
		})
	})
	if failed != nil {
		return failed
	}
	return err
}

// PathOf returns a path of an inode within the subvolume that f lies in, one of them where it has several names; ""
// where it has none, or none that the kernel can tell (more than 4,079 bytes).
func PathOf(f *os.File, ino uint64) (string, error) {
	if ino == firstFree {
		return "", nil
	}
	args := inoLookup{object: ino}
	err := ioctlInoLookup(f, &args)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENAMETOOLONG) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	path, _, _ := strings.Cut(string(args.name[:]), "\x00")
	return strings.TrimSuffix(path, "/"), nil
}
