package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
)

// Side is one of the two states that a merge joins.
type Side string

// The sides. The zero value is neither.
const (
	Ours   Side = "ours"
	Theirs Side = "theirs"
)

// MergeRequest says what to merge: what Theirs has changed since Base goes into Ours.
type MergeRequest struct {
	Base, Ours, Theirs State
	// Choose says, for a path with a conflict, which side to take; "" or nil: none, so that it stays one. Paths
	// are absolute inside.
	Choose func(path string) Side
	// Text merges text files that both sides changed line by line, where their changes don't touch.
	Text bool
	// Dry makes no layer; then Ours and Theirs may be sandboxes.
	Dry bool
}

// ConflictKind says why two changes of one path can't both be had.
type ConflictKind string

// The kinds.
const (
	// BothChanged: both changed the contents, or made the file, differently.
	BothChanged ConflictKind = "both-changed"
	// ChangedDeleted: ours changed, or made, what theirs deleted; DeletedChanged: the other way round.
	ChangedDeleted ConflictKind = "changed-deleted"
	DeletedChanged ConflictKind = "deleted-changed"
	// TypeChanged: one made another kind of file of it, and the other one changed it, too.
	TypeChanged ConflictKind = "type"
	// DirectoryFile: it is a directory on one side and none on the other.
	DirectoryFile ConflictKind = "directory-file"
	// AttributesChanged: both changed mode, owner or an attribute differently, or the merge would give
	// privileges to contents that never had them.
	AttributesChanged ConflictKind = "attributes"
	// LinksChanged: the sides disagree on which names are one file.
	LinksChanged ConflictKind = "links"
)

// Conflict is a path at which both sides changed something in ways that exclude each other.
type Conflict struct {
	Path string
	Kind ConflictKind
	// What names the parts that conflict: "contents", "mode", "owner", "links", "privileges", or an attribute.
	What []string
	// Base, Ours and Theirs are what is there; nil: nothing.
	Base, Ours, Theirs *FileState
	// Resolved says how it was resolved: "ours", "theirs" or "text"; "": not.
	Resolved string
}

// FileState is what a state has at a path.
type FileState struct {
	Type     string // as in Change
	Mode     uint32
	UID, GID uint32
	Size     int64
}

// Merged is the outcome of a merge.
type Merged struct {
	// Layer is the result, on Ours' layers; its ID is "" where conflicts are left, and in a dry run.
	Layer Layer
	// Conflicts are those that are left, and Resolved those that a choice or a text merge has settled.
	Conflicts, Resolved []Conflict
	// Changes are what the result has other than Ours.
	Changes []Change
}

// Merge makes a layer that has what Ours has and what Theirs changed since Base, on Ours' own layers. It
// guesses nothing: where both changed something in ways that exclude each other, the conflicts are returned
// and no layer is made. Changes that are the same on both sides are no conflict. Owners, modes, attributes,
// links, holes and file times go along as they are; times never conflict.
//
// The same holds for workspaces that all three states have. The environment kept with Ours stays.
// Kinds: NotFound (no such layer), FailedPrecondition (different templates), ResourceExhausted (too much to
// hold, or no room).
func (s *Store) Merge(ctx context.Context, r MergeRequest) (Merged, error) {
	s.kept.change.RLock() // no layer goes meanwhile
	defer s.kept.change.RUnlock()
	m := merger{store: s, ctx: ctx, r: r, roots: map[string]*os.File{}}
	defer m.close()
	if err := m.parts(); err != nil {
		return Merged{}, err
	}
	var out Merged
	for _, p := range m.all {
		if err := p.run(); err != nil {
			return Merged{}, fmt.Errorf("merge: %w", err)
		}
		out.Conflicts = append(out.Conflicts, p.conflicts...)
		out.Resolved = append(out.Resolved, p.resolved...)
		out.Changes = append(out.Changes, p.changes()...)
	}
	if r.Dry || len(out.Conflicts) > 0 {
		return out, nil
	}
	var err error
	out.Layer, err = m.write()
	return out, err
}

// merger is one merge.
type merger struct {
	store *Store
	ctx   context.Context //nolint:containedctx // of the one run
	r     MergeRequest
	roots map[string]*os.File // every layer's directory, opened once
	drops []func()
	links linkFinder
	all   []*mergePart
	size  int // bytes of the paths that are held
}

func (m *merger) close() {
	for _, f := range m.roots {
		_ = f.Close()
	}
	for _, drop := range m.drops {
		drop()
	}
}

// hold bounds the paths that a merge holds at once.
func (m *merger) hold(path string) error {
	if m.size += len(path); m.size > maxStepPaths {
		return tooMuch()
	}
	return nil
}

func tooMuch() error {
	return errs.New(errs.ResourceExhausted, "more files differ than can be merged at once (%d, with %d MiB of paths)",
		maxSteps, maxStepPaths>>20)
}

// parts finds what is to be merged: the root file system, and each workspace.
func (m *merger) parts() error {
	m.links = linkFinder{ctx: m.ctx, hold: m.hold}
	var sides [3]sideDirs
	for i, state := range []State{m.r.Base, m.r.Ours, m.r.Theirs} {
		d, drop, err := m.store.dirsOf(state)
		if err != nil {
			return err
		}
		m.drops = append(m.drops, drop)
		sides[i] = d
	}
	base, ours, theirs := sides[0], sides[1], sides[2]
	if !slices.Equal(base.template, ours.template) || !slices.Equal(base.template, theirs.template) {
		return errs.New(errs.FailedPrecondition, "the states stand on different templates, or on different builds of one").
			WithHint("merge states of one template")
	}
	if err := m.part("/", "/upper", base.root, ours.root, theirs.root); err != nil {
		return err
	}
	for i, w := range ours.spaces {
		b, t := base.space(w.target), theirs.space(w.target)
		if b == nil || t == nil {
			continue // a side never had it
		}
		if err := m.part(w.target+"/", fmt.Sprintf("/ws%d/upper", i), b.dirs, w.dirs, t.dirs); err != nil {
			return err
		}
		m.all[len(m.all)-1].source = w.dirs[len(w.dirs)-1]
	}
	return nil
}

func (m *merger) part(prefix, at string, base, ours, theirs []string) error {
	p := &mergePart{merger: m, prefix: prefix, at: at}
	for i, dirs := range [][]string{base, ours, theirs} {
		var err error
		if p.views[i], err = openView(m.roots, dirs); err != nil {
			return err
		}
	}
	p.theirs = newPair(m.ctx, p.views[0], p.views[2])
	p.ours = newPair(m.ctx, p.views[0], p.views[1])
	m.all = append(m.all, p)
	return nil
}

// newPair returns a comparison that ends at the first difference, of two views whose layers are opened once each.
func newPair(ctx context.Context, from, to view) *comparison {
	c := &comparison{ctx: ctx, from: from, to: to, first: true}
	for c.common < min(len(from), len(to)) && from[len(from)-1-c.common] == to[len(to)-1-c.common] {
		c.common++
	}
	return c
}

// sideDirs are the directories that show a state, the topmost first.
type sideDirs struct {
	root     []string
	template []string // those at the bottom of root
	spaces   []spaceDirs
}

type spaceDirs struct {
	target string
	dirs   []string
}

func (d sideDirs) space(target string) *spaceDirs {
	i := slices.IndexFunc(d.spaces, func(w spaceDirs) bool { return w.target == target })
	if i < 0 {
		return nil
	}
	return &d.spaces[i]
}

// dirsOf is layersOf with the workspaces.
func (s *Store) dirsOf(state State) (d sideDirs, drop func(), err error) {
	if state.Layer == "" {
		return s.liveDirs(state)
	}
	l, err := s.Layer(state.Layer)
	if err != nil {
		return d, nil, err
	}
	stack := l.stack()
	if state.Template {
		stack = nil
	}
	for _, id := range stack {
		d.root = append(d.root, s.keptPath(id)+"/upper")
	}
	for _, dir := range l.Plan.Lowers {
		d.template = append(d.template, s.absolute(dir))
	}
	d.root = append(d.root, d.template...)
	for _, w := range l.Plan.Workspaces {
		d.spaces = append(d.spaces, spaceDirs{w.Target, append(s.workspaceLowers(stack, w.Target), w.Source)})
	}
	return d, func() {}, nil
}

// liveDirs is dirsOf for a sandbox.
func (s *Store) liveDirs(state State) (d sideDirs, drop func(), err error) {
	p := state.Plan
	if state.Template {
		d.template = p.Lowers[len(p.Committed):]
		d.root = d.template
		for _, w := range p.Workspaces {
			d.spaces = append(d.spaces, spaceDirs{w.Target, []string{w.Source}})
		}
		return d, func() {}, nil
	}
	layer, drop, err := s.shownLayer(state.ID)
	if err != nil {
		return d, nil, err
	}
	if d, err = s.planDirs(state.ID, p, layer); err != nil {
		drop()
		return d, nil, err
	}
	return d, drop, nil
}

// planDirs returns the directories of a sandbox whose writable layer is shown at layer.
func (s *Store) planDirs(id string, p Plan, layer string) (d sideDirs, err error) {
	show := func(upper string) (string, error) {
		rel, err := filepath.Rel(s.live(id), upper)
		if err != nil || strings.HasPrefix(rel, "..") {
			return "", errs.New(errs.InvalidArgument, "the plan's upper directory is not sandbox %s's", id)
		}
		return filepath.Join(layer, rel), nil
	}
	upper, err := show(p.Upper)
	if err != nil {
		return d, err
	}
	d.root, d.template = append([]string{upper}, p.Lowers...), p.Lowers[len(p.Committed):]
	for _, w := range p.Workspaces {
		top, err := show(w.Upper)
		if err != nil {
			return d, err
		}
		d.spaces = append(d.spaces, spaceDirs{w.Target, append(append([]string{top}, w.Lowers...), w.Source)})
	}
	return d, nil
}

// write makes the layer.
func (m *merger) write() (Layer, error) {
	s := m.store
	ours, err := s.Layer(m.r.Ours.Layer)
	if err != nil {
		return Layer{}, err
	}
	out := Layer{ID: rand.Text(), Base: ours.Base, Plan: ours.Plan, Below: ours.stack(), Made: time.Now().UTC()}
	work := filepath.Join(s.area("snapshots"), rand.Text())
	defer func() { s.warnIf("remove a merge's leftovers", ignoreMissing(s.disk.dropKept(work))) }()
	if err := s.disk.begin(work); err != nil {
		return Layer{}, err
	}
	if err := m.fill(ours, work); err != nil {
		return Layer{}, fmt.Errorf("write the merge: %w", err)
	}
	if len(out.Below) >= maxStack {
		below, err := s.merged(m.ctx, out)
		if err != nil {
			return Layer{}, fmt.Errorf("squash the layers below: %w", err)
		}
		out.Below = []string{below}
	}
	return s.keepWork(m.ctx, work, out)
}

// fill writes what the merge has found into the layer at work.
func (m *merger) fill(ours Layer, work string) error {
	if err := makeUpper(work); err != nil {
		return err
	}
	for i := range ours.Plan.Workspaces {
		dir := fmt.Sprintf("%s/ws%d", work, i)
		if err := errors.Join(os.Mkdir(dir, 0o700), makeUpper(dir)); err != nil {
			return err
		}
		// Where it is no part of the merge it is an empty layer over what ours has.
		lowers := append(m.store.workspaceLowers(ours.stack(), ours.Plan.Workspaces[i].Target), ours.Plan.Workspaces[i].Source)
		if len(lowers) > 1 {
			if err := sameRoot(dir+"/upper", lowers[0]); err != nil {
				return err
			}
		}
	}
	if err := sameRoot(work+"/upper", m.store.keptPath(ours.ID)+"/upper"); err != nil {
		return err
	}
	env, err := os.ReadFile(filepath.Join(m.store.keptPath(ours.ID), envFile))
	if err == nil {
		err = os.WriteFile(filepath.Join(work, envFile), env, 0o600)
	}
	if ignoreMissing(err) != nil {
		return err
	}
	for _, p := range m.all {
		if err := p.put(work + p.at); err != nil {
			return err
		}
	}
	return nil
}
