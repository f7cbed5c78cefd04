package btrfs

import (
	"os"
)

// Flags of an extent (linux/fiemap.h).
const (
	extentLast   = 0x1
	extentShared = 0x2000
	// extentOpaque are those whose address does not tell their contents: unknown, delayed, encoded, encrypted,
	// not aligned, inline, tail.
	extentOpaque = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
)

// SameBlocks reports whether two files, which nobody writes to and whose data is on disk, have the same blocks
// in the same places, and so the same contents, without reading them. false means that it can't be told.
func SameBlocks(a, b *os.File) (bool, error) {
	if !Is(a) || !Is(b) {
		return false, nil
	}
	x, err := ioctlFSInfo(a)
	if err != nil {
		return false, err
	}
	y, err := ioctlFSInfo(b)
	if err != nil || x.id != y.id {
		return false, err
	}
	for at := uint64(0); ; {
		left, err := extents(a, at)
		if err != nil {
			return false, err
		}
		right, err := extents(b, at)
		if err != nil || len(left) != len(right) {
			return false, err
		}
		for i, e := range left {
			o := right[i]
			if e.logical != o.logical || e.physical != o.physical || e.length != o.length ||
				(e.flags|o.flags)&extentOpaque != 0 || (e.flags^o.flags)&^extentShared != 0 {
				return false, nil
			}
			if at = e.logical + e.length; e.flags&extentLast != 0 {
				return true, nil
			}
		}
		if len(left) == 0 { // holes only
			return true, nil
		}
	}
}
