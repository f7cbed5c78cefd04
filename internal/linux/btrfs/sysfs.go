package btrfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Counters is what the kernel shows of a mounted file system in /sys/fs/btrfs, between its commits.
type Counters struct{ dir string }

// CountersOf returns the counters of the file system that f lies on. Where sysfs is not mounted they
// show nothing.
func CountersOf(f *os.File) (Counters, error) {
	info, err := ioctlFSInfo(f)
	if err != nil {
		return Counters{}, err
	}
	u := info.id
	return Counters{dir: fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])}, nil
}

// Pending returns the bytes that a subvolume's writers have reserved since the last commit. Usage does
// not count them yet, its limit does.
func (c Counters) Pending(id uint64) int64 {
	return c.read(filepath.Join("qgroups", "0_"+strconv.FormatUint(id, 10), "rsv_data"))
}

// Reserved returns the bytes that a subvolume's writers have reserved for data and metadata since the last commit.
// Unlike Pending it fails where that can't be told.
func (c Counters) Reserved(id uint64) (int64, error) {
	var sum int64
	for _, kind := range [...]string{"rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"} {
		n, err := c.value(filepath.Join("qgroups", "0_"+strconv.FormatUint(id, 10), kind))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// Astray reports whether the kernel has stopped counting what quota groups hold: no limit holds then.
func (c Counters) Astray() bool { return c.read(filepath.Join("qgroups", "inconsistent")) != 0 }

// Activity returns a number that changes when anything is written to or freed in the file system.
func (c Counters) Activity() int64 {
	var sum int64
	for i, name := range [...]string{"bytes_used", "bytes_may_use", "bytes_reserved", "bytes_pinned"} {
		for k, kind := range [...]string{"data", "metadata"} {
			sum += c.read(filepath.Join("allocation", kind, name)) * int64(2*i+k+1) // so that a move shows
		}
	}
	return sum
}

// read is value, or 0 where there is none.
func (c Counters) read(name string) int64 {
	n, err := c.value(name)
	if err != nil {
		return 0
	}
	return n
}

func (c Counters) value(name string) (int64, error) {
	b, err := os.ReadFile(filepath.Join(c.dir, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}
