// Package fake stands in for a store of layers in the tests of what lies above package rootfs: it keeps
// which layers there are, and no files.
//
// What belongs here: what several packages' tests need of a store. What does not: plans and templates, which
// each of them makes up for itself.
package fake

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// LayerBytes is the size of every layer.
const LayerBytes = 7

// Layers keeps committed layers and environments in memory. Safe for concurrent use.
type Layers struct {
	// Files is a directory that every layer shows; "": they can't be looked at. Compare's answer tells of one
	// file, home/user/new.
	Files string
	// mu guards the fields below.
	mu     sync.Mutex
	made   int
	layers map[string]bool
	envs   map[string]map[string]string
	below  map[string]string
	// unchanged is the layer that a sandbox's files are known to be.
	unchanged map[string]string

	clashing bool
	points   points
	memory   memory
}

// NewLayers returns an empty store.
func NewLayers() *Layers {
	return &Layers{
		layers: map[string]bool{}, envs: map[string]map[string]string{}, below: map[string]string{}, unchanged: map[string]string{},
		points: points{kept: map[string]rootfs.Point{}, pending: map[string][]rootfs.FileChange{}, made: map[string][]rootfs.FileChange{}},
	}
}

// Use notes on which layer a sandbox stands; "" is a template. NotFound: there is no such layer.
func (l *Layers) Use(sandbox, layer string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if layer != "" && !l.layers[layer] {
		return errs.New(errs.NotFound, "there is no layer %s", layer)
	}
	l.below[sandbox] = layer
	return nil
}

// Forget is for a sandbox that is gone.
func (l *Layers) Forget(sandbox string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.below, sandbox)
	delete(l.envs, sandbox)
	delete(l.unchanged, sandbox)
}

// Below returns on which layer a sandbox stands.
func (l *Layers) Below(sandbox string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.below[sandbox]
}

// Layers returns the ids of the layers, in order.
func (l *Layers) Layers() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for id := range l.layers {
		all = append(all, id)
	}
	slices.Sort(all)
	return all
}

// Unchanged implements sandbox.Roots.
func (l *Layers) Unchanged(id, layer string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unchanged[id] == layer && layer != ""
}

// Still says that a sandbox's files are what a layer holds.
func (l *Layers) Still(id, layer string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unchanged[id] = layer
}

// Flush implements sandbox.Roots.
func (l *Layers) Flush(string, bool) error { return nil }

// Durable implements sandbox.Roots.
func (l *Layers) Durable() bool { return true }

// Rest implements sandbox.Roots.
func (l *Layers) Rest(string) error { return nil }

// Rouse implements sandbox.Roots.
func (l *Layers) Rouse(string) error { return nil }

// Lend implements sandbox.Roots.
func (l *Layers) Lend(string) (func() error, error) { return func() error { return nil }, nil }

// Commit implements sandbox.Roots.
func (l *Layers) Commit(_ context.Context, id string, _ rootfs.Plan, hold, release func() error) (rootfs.Layer, error) {
	if err := hold(); err != nil {
		return rootfs.Layer{}, err
	}
	image, _ := l.Memory(id) // "": none
	if err := release(); err != nil {
		return rootfs.Layer{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made++
	layer := rootfs.Layer{ID: fmt.Sprintf("layer%04d", l.made), Bytes: LayerBytes}
	if image != "" {
		l.memory.kept[layer.ID] = image
	}
	l.layers[layer.ID], l.envs[layer.ID] = true, l.envs[id]
	return layer, nil
}

// Collect implements sandbox.Roots.
func (l *Layers) Collect(_ context.Context, keep map[string]bool, dry bool) ([]rootfs.Freed, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	used := map[string]bool{}
	for _, id := range l.below {
		used[id] = true
	}
	var freed []rootfs.Freed
	for id := range l.layers {
		if keep[id] || used[id] {
			continue
		}
		if !dry {
			delete(l.layers, id)
		}
		freed = append(freed, rootfs.Freed{Layer: id, Bytes: LayerBytes})
	}
	return freed, nil
}

// Compare implements sandbox.Roots.
func (l *Layers) Compare(_ context.Context, from, to rootfs.State) ([]rootfs.Change, error) {
	if from.Layer+from.ID == to.Layer+to.ID {
		return nil, nil
	}
	return []rootfs.Change{{Op: "added", Path: "/home/user/new", Type: "file", Size: 3, Mode: 0o644}}, nil
}

// Merge implements sandbox.Roots. It changes one file, and after Clash it conflicts at one path.
func (l *Layers) Merge(_ context.Context, r rootfs.MergeRequest) (rootfs.Merged, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := rootfs.Merged{Changes: []rootfs.Change{{Op: "added", Path: "/home/user/new", Type: "file", Size: 3, Mode: 0o644}}}
	if l.clashing {
		c := rootfs.Conflict{Path: "/home/user/state", Kind: rootfs.BothChanged, What: []string{"contents"}}
		if r.Choose != nil {
			c.Resolved = string(r.Choose(c.Path))
		}
		if c.Resolved == "" {
			out.Conflicts = append(out.Conflicts, c)
			return out, nil
		}
		out.Resolved = append(out.Resolved, c)
	}
	if r.Dry {
		return out, nil
	}
	if !l.layers[r.Ours.Layer] || !l.layers[r.Theirs.Layer] {
		return out, errs.New(errs.NotFound, "there is no layer %s or %s", r.Ours.Layer, r.Theirs.Layer)
	}
	l.made++
	out.Layer = rootfs.Layer{ID: fmt.Sprintf("layer%04d", l.made), Bytes: LayerBytes}
	l.layers[out.Layer.ID], l.envs[out.Layer.ID] = true, l.envs[r.Ours.Layer]
	return out, nil
}

// Diff implements sandbox.Roots.
func (l *Layers) Diff(ctx context.Context, from, to rootfs.State, o rootfs.DiffOptions) ([]rootfs.FileDiff, error) {
	changes, err := l.Compare(ctx, from, to)
	var out []rootfs.FileDiff
	for _, c := range changes {
		d := rootfs.FileDiff{Change: c, After: &rootfs.FileState{Type: c.Type, Mode: c.Mode, Size: c.Size}}
		if o.Patches {
			d.Patch, d.Added = "@@ -0,0 +1,1 @@\n+hi\n", 1
		}
		out = append(out, d)
	}
	return out, err
}

// Digest implements sandbox.Roots.
func (l *Layers) Digest(_ context.Context, layer string) (rootfs.Digest, error) {
	return rootfs.Digest{Text: fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(layer))), Files: 1, Bytes: LayerBytes}, nil
}

// Clash makes merges conflict, or not, from here on.
func (l *Layers) Clash(yes bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clashing = yes
}

// PutEnv implements sandbox.Roots.
func (l *Layers) PutEnv(id string, env map[string]string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.envs[id] = env
	return nil
}

// Env implements sandbox.Roots.
func (l *Layers) Env(id string) (map[string]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.envs[id], nil
}

// LayerEnv implements sandbox.Roots.
func (l *Layers) LayerEnv(layer string) (map[string]string, error) { return l.Env(layer) }

// Tree implements sandbox.Roots.
func (l *Layers) Tree(string) (*rootfs.Tree, error) {
	if l.Files == "" {
		return nil, errs.New(errs.Unsupported, "layers of this test hold no files")
	}
	return rootfs.OpenTree([]string{l.Files})
}

// Settle implements sandbox.Roots.
func (l *Layers) Settle(_ context.Context, layer string, _ time.Time) (rootfs.Layer, error) {
	return rootfs.Layer{ID: layer}, nil
}
