package rootfs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"casemate.dev/internal/errs"
)

// The mechanisms, the best first.
const (
	byProject = "project-quota"
	byBtrfs   = "btrfs-quota"
	byTmpfs   = "tmpfs"
)

// lendBytes is the reserve that Lend adds.
const lendBytes = 16 << 20

// openDisk opens the mechanism that the store has used before, the one that is asked for, or else the
// best one that the host has. A store keeps its mechanism: layers can't move between them.
func openDisk(dir string, cfg Config, log *slog.Logger) (disk, error) {
	mark := filepath.Join(dir, "mechanism")
	names := []string{byProject, byBtrfs, byTmpfs}
	if data, err := os.ReadFile(mark); err == nil {
		names = []string{strings.TrimSpace(string(data))}
		if cfg.Mechanism != "" && cfg.Mechanism != names[0] {
			return nil, errs.New(errs.FailedPrecondition, "this store limits disks by %s, not by %s", names[0], cfg.Mechanism)
		}
	} else if cfg.Mechanism != "" {
		names = []string{cfg.Mechanism}
	}
	var missing []error
	for _, name := range names {
		d, err := openMechanism(name, dir, cfg, log)
		switch {
		case err == nil:
			if name == byTmpfs && len(missing) > 0 {
				log.Warn("what sandboxes write lies in memory: it is lost with this machine, and a server that is restarted does not see it",
					"remedy", "install btrfs-progs and use a new data directory")
			}
			return d, os.WriteFile(mark, []byte(name+"\n"), 0o600)
		case errs.Is(err, errs.InvalidArgument): // what was asked for can't be had, and nothing else is what was asked for
			return nil, err
		}
		log.Info("disk limit not available", "mechanism", name, "reason", err)
		missing = append(missing, fmt.Errorf("%s: %w", name, err))
	}
	return nil, errs.Wrap(errors.Join(missing...), errs.Unsupported, "this host has no way to limit the disk of a sandbox").
		WithHint("install btrfs-progs and kmod, give the data directory some free space, and see that loop devices are there (modprobe loop)")
}

func openMechanism(name, dir string, cfg Config, log *slog.Logger) (disk, error) {
	switch name {
	case byProject:
		return openProject(dir)
	case byBtrfs:
		return openBtrfs(dir, cfg.ImageBytes, log)
	case byTmpfs:
		return openTmpfs(dir)
	}
	return nil, errs.New(errs.InvalidArgument, "disk limits by %q are not known", name)
}
