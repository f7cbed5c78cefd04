package sandbox

import (
	"context"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/store"
)

// history is how commits come from each other, with those that were removed.
type history struct {
	commits map[string]store.Ancestry
	order   []string // the newest first
}

func (m *Manager) history(ctx context.Context) (history, error) {
	all, err := m.db.Ancestries(ctx)
	if err != nil {
		return history{}, err
	}
	h := history{commits: make(map[string]store.Ancestry, len(all)), order: make([]string, 0, len(all))}
	for _, a := range all {
		h.commits[a.ID] = a
		h.order = append(h.order, a.ID)
	}
	return h, nil
}

// ancestors returns a commit and all those that it comes from; of "" there are none.
func (h history) ancestors(tips ...string) map[string]bool {
	found := map[string]bool{}
	for len(tips) > 0 {
		id := tips[len(tips)-1]
		tips = tips[:len(tips)-1]
		a, ok := h.commits[id]
		if !ok || found[id] {
			continue
		}
		found[id] = true
		tips = append(tips, a.Parent, a.Merged)
	}
	return found
}

// descendants returns all commits that come from one, without itself.
func (h history) descendants(id string) map[string]bool {
	children := map[string][]string{}
	for _, a := range h.commits {
		children[a.Parent] = append(children[a.Parent], a.ID)
		if a.Merged != "" {
			children[a.Merged] = append(children[a.Merged], a.ID)
		}
	}
	found := map[string]bool{}
	for next := slices.Clone(children[id]); len(next) > 0; {
		c := next[len(next)-1]
		next = next[:len(next)-1]
		if !found[c] {
			found[c] = true
			next = append(next, children[c]...)
		}
	}
	return found
}

// nearest returns the common ancestors of two commits that no other one of them comes from, in order.
func (h history) nearest(a, b string) []string {
	left, right := h.ancestors(a), h.ancestors(b)
	var common, above []string
	for id := range left {
		if right[id] {
			common = append(common, id)
			above = append(above, h.commits[id].Parent, h.commits[id].Merged)
		}
	}
	farther := h.ancestors(above...)
	common = slices.DeleteFunc(common, func(id string) bool { return farther[id] })
	slices.Sort(common)
	return common
}

// commonAncestor returns the one nearest common ancestor of two tips of history; "": they have none, so that
// only the template can be common.
func (h history) commonAncestor(a, b string) (string, error) {
	near := h.nearest(a, b)
	switch {
	case len(near) == 0:
		return "", nil
	case len(near) > 1:
		return "", errs.New(errs.FailedPrecondition, "there are %d nearest common ancestors, and none is nearer than the others: %s",
			len(near), strings.Join(near, ", ")).WithHint("name the base yourself: casemate merge --base")
	case h.commits[near[0]].Gone:
		return "", errs.New(errs.FailedPrecondition, "the nearest common ancestor, %s, was removed", near[0]).
			WithHint("name another base: casemate merge --base")
	}
	return near[0], nil
}

// Relative is a commit in the lineage of another one.
type Relative struct {
	ID, Parent, Merged string
	// Gone says that it was removed; then Commit holds nothing.
	Gone   bool
	Commit Commit
}

// Derived is a sandbox whose files come from a commit.
type Derived struct {
	ID, Name string
	State    State
	// Head is the commit that its files were last at.
	Head string
}

// Lineage is what a commit comes from, and what came of it.
type Lineage struct {
	Commit                 Commit
	Ancestors, Descendants []Relative // the newest first
	Sandboxes              []Derived  // alive, by id
}

// maxLineage bounds each of the lists of a lineage: the newest are told.
const maxLineage = 10_000

// GetLineage tells what a commit comes from, and which commits and living sandboxes come from it, as far as p
// may see them. NotFound: there is no such commit.
func (m *Manager) GetLineage(ctx context.Context, p Principal, ref string) (Lineage, error) {
	c, err := m.GetCommit(ctx, p, ref)
	if err != nil {
		return Lineage{}, err
	}
	h, err := m.history(ctx)
	if err != nil {
		return Lineage{}, err
	}
	tags, err := m.tagsOf(ctx, "")
	if err != nil {
		return Lineage{}, err
	}
	up, down := h.ancestors(c.ID), h.descendants(c.ID)
	delete(up, c.ID)
	out := Lineage{Commit: c}
	for _, id := range h.order {
		list := &out.Ancestors
		if down[id] {
			list = &out.Descendants
		} else if !up[id] {
			continue
		}
		r, ok, err := m.relative(ctx, p, h.commits[id], tags)
		if err != nil {
			return out, err
		}
		if ok && len(*list) < maxLineage {
			*list = append(*list, r)
		}
	}
	down[c.ID] = true
	out.Sandboxes = m.derived(p, down)
	return out, nil
}

// relative returns a commit of a lineage; ok is false where p may not see it.
func (m *Manager) relative(ctx context.Context, p Principal, a store.Ancestry, tags map[string][]string) (r Relative, ok bool, err error) {
	if !m.seesCommit(p, store.Commit{Owner: a.Owner, Sandbox: a.Sandbox}) {
		return r, false, nil
	}
	r = Relative{ID: a.ID, Parent: a.Parent, Merged: a.Merged, Gone: a.Gone}
	if a.Gone {
		return r, true, nil
	}
	row, there, err := m.db.GetCommit(ctx, a.ID)
	if !there || err != nil { // removed meanwhile
		r.Gone = true
		return r, true, err
	}
	r.Commit, err = ofCommitRow(row)
	r.Commit.Tags = tags[a.ID]
	return r, true, err
}

// derived returns the living sandboxes whose files come from one of the commits, as far as p may see them.
func (m *Manager) derived(p Principal, commits map[string]bool) []Derived {
	var out []Derived
	for _, b := range m.boxes() {
		b.mu.Lock()
		s := b.snapshotLocked()
		b.mu.Unlock()
		if m.sees(p, b.owner, b.parent) && (commits[s.Head] || commits[s.Spec.Commit]) {
			out = append(out, Derived{ID: b.id, Name: s.Spec.Name, State: s.State, Head: s.Head})
		}
	}
	slices.SortFunc(out, func(a, b Derived) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// CommonAncestors returns the nearest common ancestors of two commits: mostly one, several after merges in
// both directions, none where only the template is common.
func (m *Manager) CommonAncestors(ctx context.Context, p Principal, a, b string) ([]Relative, error) {
	left, err := m.GetCommit(ctx, p, a)
	if err != nil {
		return nil, err
	}
	right, err := m.GetCommit(ctx, p, b)
	if err != nil {
		return nil, err
	}
	h, err := m.history(ctx)
	if err != nil {
		return nil, err
	}
	tags, err := m.tagsOf(ctx, "")
	if err != nil {
		return nil, err
	}
	var out []Relative
	for _, id := range h.nearest(left.ID, right.ID) {
		r, ok, err := m.relative(ctx, p, h.commits[id], tags)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, r)
		}
	}
	return out, nil
}
