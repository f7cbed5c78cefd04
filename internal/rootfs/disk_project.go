package rootfs

import (
	"os"
	"path/filepath"

	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/linux/quota"
)

// projectDisk limits directories by the project quotas of the data directory's own file system.
type projectDisk struct {
	copies
	dir string
}

func openProject(dir string) (disk, error) {
	if err := quota.Probe(dir); err != nil {
		return nil, err
	}
	d := projectDisk{dir: filepath.Join(dir, "layers")}
	return d, os.MkdirAll(d.dir, 0o700)
}

func (d projectDisk) mechanism() string    { return byProject }
func (d projectDisk) root() string         { return d.dir }
func (d projectDisk) adopt(string) error   { return nil } // the kernel keeps the limits
func (d projectDisk) moved(string, string) {}
func (d projectDisk) close() error         { return nil }

func (d projectDisk) files(path string) string { return path }

func (d projectDisk) create(path string) (*layer, error) {
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	if _, err := quota.Assign(path); err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &layer{path: path, dir: dir}, nil
}

func (d projectDisk) limit(l *layer, bytes, inodes int64) (DiskLimit, error) {
	project, err := quota.Project(l.path)
	if err != nil {
		return DiskLimit{}, err
	}
	return DiskLimit{Mechanism: byProject, Bytes: bytes, Inodes: inodes}, quota.Limit(l.path, project, bytes, inodes)
}

func (d projectDisk) remove(path string) error {
	project, err := quota.Project(path)
	if err != nil {
		return err
	}
	parent, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := fd.RemoveAll(parent, filepath.Base(path)); err != nil || project == 0 {
		return err
	}
	return quota.Limit(d.dir, project, 0, 0)
}

func (d projectDisk) used(path string) (int64, error) {
	project, err := quota.Project(path)
	if err != nil {
		return 0, err
	}
	u, err := quota.Used(d.dir, project)
	return u.Bytes, err
}

func (d projectDisk) lend(path string) (func() error, error) {
	project, err := quota.Project(path)
	if err != nil {
		return nil, err
	}
	bytes, inodes, err := quota.Limits(d.dir, project)
	if err != nil {
		return nil, err
	}
	back := func() error { return quota.Limit(d.dir, project, bytes, inodes) }
	return back, quota.Limit(d.dir, project, raised(bytes, lendBytes), raised(inodes, 4096))
}

// raised adds to a limit; 0 is none and stays.
func raised(limit, by int64) int64 {
	if limit == 0 {
		return 0
	}
	return limit + by
}

func (d projectDisk) snapshot(path string) (string, func() error, error) {
	return path, func() error { return nil }, nil
}
