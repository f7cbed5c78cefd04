package namespace

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/btrfs"
)

// disk says where an instance's writable layer lies and what bounds it.
type disk struct {
	Mechanism string `json:"mechanism"`
	Upper     string `json:"upper"`
}

// used returns how many bytes the writable layer takes, by the accounting of what bounds it; 0 where
// that keeps none that can be asked for.
func (d disk) used() (int64, error) {
	switch d.Mechanism {
	case "btrfs-quota":
		return d.subvolume()
	case "tmpfs":
		return d.fileSystem()
	}
	return 0, nil
}

// subvolume asks the quota group of the subvolume that the layer lies in.
func (d disk) subvolume() (int64, error) {
	f, err := os.Open(d.Upper)
	if err != nil {
		return 0, fmt.Errorf("measure disk: %w", err)
	}
	defer func() { _ = f.Close() }()
	id, err := btrfs.ID(f)
	if err != nil {
		return 0, fmt.Errorf("measure disk: %w", err)
	}
	return btrfs.Usage(f, id)
}

// fileSystem asks the file system, which holds nothing else. Where an earlier server mounted it, only the sandbox has it
// still: what is not seen is not told, and must not hide what else the sandbox uses.
func (d disk) fileSystem() (int64, error) {
	var st unix.Statfs_t
	switch err := unix.Statfs(d.Upper, &st); {
	case errors.Is(err, unix.ENOENT):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("measure disk: %w", err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}
