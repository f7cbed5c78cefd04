package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// A memory image lies in a layer beside its files, as the environment does: it counts on the layer's limit, a commit
// keeps it as well, and it goes with the layer. What is in it is the isolation backend's.
const (
	memoryDir = "memory"
	// memoryNew is one that is being made, which nobody believes.
	memoryNew = "memory.new"
)

// NewMemory returns an empty directory for a memory image of a sandbox. What an earlier call left is removed.
func (s *Store) NewMemory(id string) (string, error) {
	if !validID(id) {
		return "", errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	files := s.disk.files(s.live(id))
	if err := removeBelow(files, memoryNew); err != nil {
		return "", err
	}
	dir := filepath.Join(files, memoryNew)
	if err := os.Mkdir(dir, 0o700); err != nil {
		if notThere(err) {
			err = errs.Wrap(err, errs.NotFound, "the sandbox has no files any more")
		}
		return "", err
	}
	return dir, nil
}

// KeepMemory makes what was put into NewMemory's directory the sandbox's memory image, in place of any other: after a
// crash there is the new one or none.
func (s *Store) KeepMemory(id string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	files := s.disk.files(s.live(id))
	if err := removeBelow(files, memoryDir); err != nil {
		return err
	}
	return durable.Rename(filepath.Join(files, memoryNew), filepath.Join(files, memoryDir))
}

// Memory returns the directory of a sandbox's memory image. NotFound: it has none.
func (s *Store) Memory(id string) (string, error) {
	if !validID(id) {
		return "", errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return imageIn(s.disk.files(s.live(id)))
}

// LayerMemory returns the directory of the memory image that was kept with a committed layer. NotFound: none was.
func (s *Store) LayerMemory(layer string) (string, error) {
	if _, err := s.Layer(layer); err != nil {
		return "", err
	}
	return imageIn(s.keptPath(layer))
}

func imageIn(files string) (string, error) {
	dir := filepath.Join(files, memoryDir)
	_, err := os.Lstat(dir)
	if notThere(err) {
		err = errs.Wrap(err, errs.NotFound, "there is no memory image")
	}
	return dir, err
}

// DropMemory removes a sandbox's memory image, and what is there of one that was not kept. Idempotent.
func (s *Store) DropMemory(id string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	files := s.disk.files(s.live(id))
	return errors.Join(removeBelow(files, memoryDir), removeBelow(files, memoryNew))
}

// removeBelow removes a directory in files, if it is there.
func removeBelow(files, name string) error {
	parent, err := os.Open(files)
	if notThere(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	if _, err := os.Lstat(filepath.Join(files, name)); notThere(err) {
		return nil
	}
	return fd.RemoveAll(parent, name)
}

// staged are memory images that lie in the host's memory for the moment.
type staged struct {
	// mu guards the field below.
	mu    sync.Mutex
	bytes int64 // that they may take together
}

// stageReserve is the part of the host's memory, one in so many, that staging leaves free.
const stageReserve = 8

// StageMemory returns an empty directory in the host's memory for a memory image of up to bytes, so that the sandbox need
// not stand still while a disk writes: AddMemory brings it into a layer afterwards. drop removes it; it goes with the
// server, too. ResourceExhausted: the host has no memory to spare.
func (s *Store) StageMemory(bytes int64) (dir string, drop func() error, err error) {
	total, free, err := hostMemory()
	if err != nil {
		return "", nil, err
	}
	s.staged.mu.Lock()
	defer s.staged.mu.Unlock()
	if s.staged.bytes+bytes > free-total/stageReserve {
		return "", nil, errs.New(errs.ResourceExhausted, "the host has no %d MB of memory to spare", bytes>>20)
	}
	dir = filepath.Join(s.stageDir(), rand.Text())
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, err
	}
	if err := mountStage(dir, bytes); err != nil {
		return "", nil, errors.Join(err, os.Remove(dir))
	}
	s.staged.bytes += bytes
	return dir, func() error {
		err := unmount(dir)
		s.staged.mu.Lock()
		s.staged.bytes -= bytes
		s.staged.mu.Unlock()
		return errors.Join(err, os.Remove(dir))
	}, nil
}

func (s *Store) stageDir() string { return filepath.Join(s.dir, "images") }

// dropStages removes the places of images that an earlier server had in memory.
func (s *Store) dropStages() error {
	all, err := os.ReadDir(s.stageDir())
	if err != nil {
		return ignoreMissing(err)
	}
	for _, e := range all {
		dir := filepath.Join(s.stageDir(), e.Name())
		if err := errors.Join(unmount(dir), os.Remove(dir)); err != nil {
			return err
		}
	}
	return nil
}

// mountStage mounts a file system in memory, with pages as large as the kernel gives.
func mountStage(dir string, bytes int64) error {
	options := fmt.Sprintf("mode=0700,size=%d,nr_inodes=16", max(bytes, 1<<20))
	err := syscall.Mount("image", dir, "tmpfs", layerFlags, options+",huge=always")
	if errors.Is(err, syscall.EINVAL) { // a kernel without large pages
		err = syscall.Mount("image", dir, "tmpfs", layerFlags, options)
	}
	if err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	return nil
}

// hostMemory returns how much memory the host has, and how much of it is to be had (proc_meminfo(5)).
func hostMemory() (total, free int64, err error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(data)) {
		name, rest, _ := strings.Cut(line, ":")
		into := map[string]*int64{"MemTotal": &total, "MemAvailable": &free}[name]
		if into == nil {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("read /proc/meminfo: %w", err)
		}
		*into = kb << 10
	}
	return total, free, nil
}

// AddMemory returns a layer that holds what a committed layer does, with the memory image in dir, whose sandbox has a disk
// limit of that many bytes. The layer that it was made of goes, also on error. Nobody may use that one.
// ResourceExhausted: the image does not fit, into the limit or the store.
func (s *Store) AddMemory(ctx context.Context, layer, dir string, limit int64) (Layer, error) {
	l, err := s.withMemory(ctx, layer, dir, limit)
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	s.warnIf("remove a layer that got a memory image", s.forgetKept(layer))
	if err != nil {
		return Layer{}, fmt.Errorf("add memory image to layer %s: %w", layer, err)
	}
	return l, nil
}

func (s *Store) withMemory(ctx context.Context, layer, dir string, limit int64) (Layer, error) {
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	out, err := s.Layer(layer)
	if err != nil {
		return Layer{}, err
	}
	work := filepath.Join(s.area("snapshots"), rand.Text())
	defer func() { s.warnIf("remove what a memory image was added to", ignoreMissing(s.disk.dropKept(work))) }()
	if err := s.disk.grow(ctx, s.keptPath(layer), work); err != nil {
		return Layer{}, err
	}
	if err := s.copyMemory(ctx, work, dir, limit); err != nil {
		return Layer{}, err
	}
	out.ID = rand.Text()
	return s.keepWork(ctx, work, out)
}

// copyMemory copies a memory image to a layer that is in the making.
func (s *Store) copyMemory(ctx context.Context, work, dir string, limit int64) error {
	size, err := filesSize(dir)
	if err != nil {
		return err
	}
	back, err := s.disk.annex(work, size, limit)
	if err != nil {
		return err
	}
	defer back()
	if err := errors.Join(removeBelow(work, memoryDir), removeBelow(work, memoryNew)); err != nil {
		return err
	}
	into := filepath.Join(work, memoryDir)
	if err := os.Mkdir(into, 0o700); err != nil {
		return noRoom(err)
	}
	from, err := fd.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := fd.OpenRoot(into)
	if err != nil {
		return err
	}
	defer to.Close()
	return noRoom(fd.CopyTree(ctx, from, to))
}

// filesSize sums the sizes of the files in a directory.
func filesSize(dir string) (int64, error) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	var size int64
	for _, e := range all {
		info, err := e.Info()
		if err != nil {
			return 0, err
		}
		size += info.Size()
	}
	return size, nil
}

// noRoom tells a disk limit from the rest.
func noRoom(err error) error {
	if !errors.Is(err, syscall.EDQUOT) && !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	return errs.Wrap(err, errs.ResourceExhausted, "the memory image does not fit into the sandbox's disk limit").
		WithHint("give the sandbox a larger disk limit, or free memory or files in it")
}
