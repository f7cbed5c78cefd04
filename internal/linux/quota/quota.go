// Package quota limits directories by project quotas, as ext4 and XFS have them.
//
// What belongs here: project ids and their limits. What does not: which directory gets which limit,
// and other ways to limit one.
package quota

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// Usage is what a project holds.
type Usage struct {
	Bytes  int64
	Inodes int64
}

// Probe reports whether limits really hold below dir: it gives a small one to a directory of its own
// there and exceeds it. Having quotas in the kernel, or counting without enforcing, is not enough.
// The error of a host that has none is errs.Unsupported.
func Probe(dir string) error {
	tmp, err := os.MkdirTemp(dir, ".quota-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	id, err := Assign(tmp)
	if err == nil {
		err = Limit(tmp, id, 64<<10, 16)
	}
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "project quotas are not available")
	}
	defer func() { _ = Limit(tmp, id, 0, 0) }()
	err = os.WriteFile(tmp+"/big", make([]byte, 1<<20), 0o600)
	if !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) {
		return errs.Wrap(err, errs.Unsupported, "project quotas are counted, but not enforced")
	}
	return nil
}

// firstID keeps away from the small numbers that administrators give by hand.
const firstID = 0x43_00_0000

// Assign gives an empty directory a project id that nothing else on the file system uses; what is
// made below inherits it. A directory that has one keeps it.
func Assign(path string) (uint32, error) {
	dir, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	attr, err := getAttr(dir)
	if err != nil {
		return 0, err
	}
	if attr.project != 0 {
		return attr.project, nil
	}
	for try := range uint32(1 << 16) {
		id := firstID + (uint32(os.Getpid())*31+try)%(1<<24)
		q, err := get(dir, id)
		if err != nil {
			return 0, err
		}
		if q != (block{valid: q.valid}) { // in use, or limited by somebody
			continue
		}
		attr.project = id
		attr.flags |= flagInherit
		return id, setAttr(dir, attr)
	}
	return 0, fmt.Errorf("assign project id to %s: all tried ones are in use", path)
}

// Project returns the project id of a directory; 0 is none.
func Project(path string) (uint32, error) {
	dir, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	attr, err := getAttr(dir)
	return attr.project, err
}

// Limit sets a project's hard limits; 0 is none. path is any directory of the file system.
func Limit(path string, id uint32, bytes, inodes int64) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return set(dir, id, block{
		hardBlocks: uint64(bytes+1023) / 1024, softBlocks: uint64(bytes+1023) / 1024,
		hardInodes: uint64(inodes), softInodes: uint64(inodes), valid: validLimits,
	})
}

// Used returns what a project holds now.
func Used(path string, id uint32) (Usage, error) {
	dir, err := os.Open(path)
	if err != nil {
		return Usage{}, err
	}
	defer dir.Close()
	q, err := get(dir, id)
	return Usage{Bytes: int64(q.space), Inodes: int64(q.inodes)}, err
}

// Limits returns a project's hard limits; 0 is none.
func Limits(path string, id uint32) (bytes, inodes int64, err error) {
	dir, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer dir.Close()
	q, err := get(dir, id)
	return int64(q.hardBlocks) * 1024, int64(q.hardInodes), err
}
