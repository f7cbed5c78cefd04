package rootfs

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Bounds of an answer: the server holds it whole, and whoever wrote the files chose their names.
const (
	maxChanges = 200_000
	// maxChangePaths bounds the paths together.
	maxChangePaths = 32 << 20
)

// Changes tells which files of a sandbox differ from what it started from: the template or the commit, or
// with workspace, the target of one, from that workspace's source. It looks at a snapshot where the store
// has them, so the sandbox may go on; else the caller freezes it. Sorted by path. A directory that was removed
// is one change, whatever was in it. What lies so deep that no path can name it (4,096 bytes) is left out;
// the directory above it is there.
// Kinds: NotFound (no such layer or workspace), ResourceExhausted (too many changes to hold at once).
func (s *Store) Changes(ctx context.Context, id string, p Plan, workspace string) ([]Change, error) {
	c := comparison{prefix: "/", mounts: mountPoints(p)}
	upper, below, base := p.Upper, p.Lowers, p.Lowers
	if workspace != "" {
		i := slices.IndexFunc(p.Workspaces, func(w Workspace) bool { return w.Target == workspace })
		if i < 0 {
			return nil, errs.New(errs.NotFound, "no workspace at %s", workspace)
		}
		w := p.Workspaces[i]
		// Owners differ by the id map alone, which shows the source's owner as the default user.
		c = comparison{anyOwner: true}
		upper, base = w.Upper, []string{w.Source}
		below = append(slices.Clone(w.Lowers), w.Source)
	}
	dir, drop, err := s.shown(id, upper)
	if err != nil {
		return nil, err
	}
	defer drop()
	changes, err := c.run(ctx, base, append([]string{dir}, below...))
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", id, err)
	}
	return changes, nil
}

// State is what Compare takes for the files of a commit or of a sandbox.
type State struct {
	// Layer is a committed layer's id; "": it is a sandbox, ID with Plan.
	Layer string
	// Template says that it is what lies below all committed layers: those that Layer stands on, or those of Plan.
	Template bool
	ID       string
	Plan     Plan
}

// Compare tells which files of the root file system differ between two states, as Changes does.
// Kinds: NotFound (no such layer), ResourceExhausted (too many changes to hold at once).
func (s *Store) Compare(ctx context.Context, from, to State) ([]Change, error) {
	defer s.hold(from, to)()
	var sides [2][]string
	for i, state := range []State{from, to} {
		dirs, drop, err := s.layersOf(state)
		if err != nil {
			return nil, err
		}
		defer drop()
		sides[i] = dirs
	}
	c := comparison{prefix: "/", mounts: mountPoints(Plan{})}
	return c.run(ctx, sides[0], sides[1])
}

// layersOf returns the directories that show a state, the topmost first, and what drops those that were made
// for it.
func (s *Store) layersOf(state State) (dirs []string, drop func(), err error) {
	d, drop, err := s.dirsOf(state)
	return d.root, drop, err
}

// shown returns a directory that shows what upper, a part of a sandbox's writable layer, holds now and that
// does not change, and what drops it.
func (s *Store) shown(id, upper string) (string, func(), error) {
	dir, drop, err := s.shownLayer(id)
	if err != nil {
		return "", nil, err
	}
	rel, err := filepath.Rel(s.live(id), upper)
	if err != nil || strings.HasPrefix(rel, "..") {
		drop()
		return "", nil, errs.New(errs.InvalidArgument, "the plan's upper directory is not sandbox %s's", id)
	}
	return filepath.Join(dir, rel), drop, nil
}

// shownLayer is shown for the whole layer.
func (s *Store) shownLayer(id string) (string, func(), error) {
	if !validID(id) {
		return "", nil, errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	dir, drop, err := s.disk.snapshot(s.live(id))
	if notThere(err) {
		return "", nil, errs.Wrap(err, errs.NotFound, "sandbox %s has no files any more", id)
	}
	if err != nil {
		return "", nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	return dir, func() { s.warnIf("drop snapshot", drop()) }, nil
}

// mountPoints returns the places where a plan, or the backend, mounts something into the root, and the
// directories above them.
func mountPoints(p Plan) map[string]bool {
	all := map[string]bool{}
	targets := []string{"/dev", "/proc", "/sys"}
	for _, b := range p.Binds {
		targets = append(targets, b.Target)
	}
	for _, w := range p.Workspaces {
		targets = append(targets, w.Target)
	}
	for _, t := range targets {
		for ; t != "/" && t != "."; t = filepath.Dir(t) {
			all[strings.TrimPrefix(t, "/")] = true
		}
	}
	return all
}

// pathMax is the longest path that a system call takes (PATH_MAX, limits.h).
const pathMax = 4096

func typeName(i fd.Info) string {
	switch {
	case i.IsDir():
		return "dir"
	case i.IsRegular():
		return "file"
	case i.IsSymlink():
		return "symlink"
	}
	return "other"
}
