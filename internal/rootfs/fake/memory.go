package fake

import (
	"context"
	"os"
	"path/filepath"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// memory is where memory images are: those of sandboxes by id, and of layers. Guarded by Layers.mu.
type memory struct {
	dir    string // "": there are none
	staged bool   // there is room to stage one
	kept   map[string]string
	made   map[string]string // by NewMemory, until KeepMemory
	fail   error
}

// KeepImages makes the layers hold memory images, below an empty directory.
func (l *Layers) KeepImages(dir string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.memory = memory{dir: dir, kept: map[string]string{}, made: map[string]string{}}
}

// Stage says whether there is memory for images that are on their way to the disk, and what AddMemory fails with.
func (l *Layers) Stage(yes bool, fail error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.memory.staged, l.memory.fail = yes, fail
}

// Images returns how many memory images there are, of sandboxes and of layers.
func (l *Layers) Images() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.memory.kept)
}

// NewMemory implements sandbox.Roots.
func (l *Layers) NewMemory(id string) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.memory.dir == "" {
		return "", errs.New(errs.Unsupported, "layers of this test hold no memory images")
	}
	dir, err := os.MkdirTemp(l.memory.dir, "image")
	l.memory.made[id] = dir
	return dir, err
}

// KeepMemory implements sandbox.Roots.
func (l *Layers) KeepMemory(id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.memory.kept[id] = l.memory.made[id]
	delete(l.memory.made, id)
	return nil
}

// DropMemory implements sandbox.Roots. The files stay where they are.
func (l *Layers) DropMemory(id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.memory.kept, id)
	delete(l.memory.made, id)
	return nil
}

// StageMemory implements sandbox.Roots.
func (l *Layers) StageMemory(int64) (string, func() error, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.memory.staged {
		return "", nil, errs.New(errs.ResourceExhausted, "there is no memory to spare in this test")
	}
	dir, err := os.MkdirTemp(l.memory.dir, "staged")
	return dir, func() error { return os.RemoveAll(dir) }, err
}

// AddMemory implements sandbox.Roots.
func (l *Layers) AddMemory(_ context.Context, layer, dir string, _ int64) (rootfs.Layer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.memory.fail != nil {
		delete(l.layers, layer)
		return rootfs.Layer{}, l.memory.fail
	}
	to := filepath.Join(l.memory.dir, "of-"+layer)
	l.memory.kept[layer] = to
	return rootfs.Layer{ID: layer, Bytes: LayerBytes}, os.CopyFS(to, os.DirFS(dir))
}

// Memory implements sandbox.Roots.
func (l *Layers) Memory(id string) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	dir, ok := l.memory.kept[id]
	if !ok {
		return "", errs.New(errs.NotFound, "%s has no memory image", id)
	}
	return dir, nil
}

// LayerMemory implements sandbox.Roots.
func (l *Layers) LayerMemory(layer string) (string, error) { return l.Memory(layer) }
