package rootfs

import (
	"errors"
	"os"
	"path/filepath"

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
