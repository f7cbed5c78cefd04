package fake

import (
	"context"
	"fmt"
	"slices"

	"casemate.dev/internal/rootfs"
)

// points are the moments of sandboxes' files, with what changed up to each.
type points struct {
	kept    map[string]rootfs.Point
	pending map[string][]rootfs.FileChange // since the point that was made last, by sandbox
	made    map[string][]rootfs.FileChange // up to a point, by its name
	number  int
	problem error
}

// Changed says that files of a sandbox changed.
func (l *Layers) Changed(sandbox string, changes ...rootfs.FileChange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.points.pending[sandbox] = append(l.points.pending[sandbox], changes...)
}

// FailPoints makes comparisons of points fail from now on; nil: they don't.
func (l *Layers) FailPoints(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.points.problem = err
}

// HasPoints implements sandbox.Roots.
func (l *Layers) HasPoints() error { return nil }

// MakePoint implements sandbox.Roots.
func (l *Layers) MakePoint(_ context.Context, id string) (rootfs.Point, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.points.number++
	p := rootfs.Point{Name: fmt.Sprintf("%s-%d", id, l.points.number)}
	l.points.made[p.Name] = l.points.pending[id]
	delete(l.points.pending, id)
	return p, nil
}

// KeepPoint implements sandbox.Roots.
func (l *Layers) KeepPoint(id string, p rootfs.Point) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.points.kept[id] = p
	return nil
}

// PointOf implements sandbox.Roots.
func (l *Layers) PointOf(id string) (rootfs.Point, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.points.kept[id], nil
}

// DropPoint implements sandbox.Roots.
func (l *Layers) DropPoint(p rootfs.Point) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.points.made, p.Name)
	return nil
}

// AtPoint implements sandbox.Roots.
func (l *Layers) AtPoint(id string, p rootfs.Point) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return p.Name != "" && len(l.points.pending[id]) == 0
}

// Between implements sandbox.Roots.
func (l *Layers) Between(_ context.Context, _ string, _ rootfs.Plan, _, to rootfs.Point, sums rootfs.SumLimits) ([]rootfs.FileChange, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Clone(l.points.made[to.Name])
	if sums == (rootfs.SumLimits{}) {
		for i := range out {
			out[i].Sum, out[i].NotSummed = "", ""
		}
	}
	return out, l.points.problem
}
