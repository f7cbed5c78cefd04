package rootfs

import (
	"context"
	"maps"
	"os"
	"slices"

	"casemate.dev/internal/linux/fd"
)

// linkFinder finds names that are one file. It walks a layer when it is first asked about a file of it that has
// several names.
type linkFinder struct {
	ctx    context.Context                  //nolint:containedctx // of the one run
	hold   func(path string) error          // bounds what is held
	layers map[*os.File]map[uint64][]string // paths by inode, of those with several
	groups map[linkKey][]string
}

type linkKey struct {
	side int
	root *os.File
	ino  uint64
}

// group returns the names, in order, that a view shows of the file that it shows at path; nil: there is only
// this one.
func (l *linkFinder) group(side int, v view, f *shownFile, path string) ([]string, error) {
	if f.info.Links < 2 || f.info.IsDir() {
		return nil, nil
	}
	key := linkKey{side, f.root, f.info.Ino}
	if g, ok := l.groups[key]; ok {
		return g, nil
	}
	all, err := l.paths(f.root)
	if err != nil {
		return nil, err
	}
	var g []string
	for _, other := range all[f.info.Ino] {
		shown, err := v.find(other)
		if err != nil {
			return nil, err
		}
		if shown != nil && shown.root == f.root && shown.info.Ino == f.info.Ino {
			g = append(g, other)
		}
	}
	if len(g) < 2 {
		g = nil
	}
	slices.Sort(g)
	if l.groups == nil {
		l.groups = map[linkKey][]string{}
	}
	l.groups[key] = g
	return g, nil
}

// paths returns the names of a layer's files that have several.
func (l *linkFinder) paths(root *os.File) (map[uint64][]string, error) {
	if all, ok := l.layers[root]; ok {
		return all, nil
	}
	all := map[uint64][]string{}
	err := fd.Walk(l.ctx, root, func(e fd.Entry) error {
		if e.Info.Links > 1 && !e.Info.IsDir() {
			all[e.Info.Ino] = append(all[e.Info.Ino], e.Path)
			return l.hold(e.Path)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if l.layers == nil {
		l.layers = map[*os.File]map[uint64][]string{}
	}
	l.layers[root] = all
	return all, nil
}

// joinLinks takes, with each file that theirs gave further names, those of its names that theirs did not change
// otherwise: in the result they are one file, too. Where ours changed one of them, that is a conflict.
func (p *mergePart) joinLinks() error {
	steps := make(map[string]int, len(p.steps))
	for i, s := range p.steps {
		steps[s.path] = i
	}
	settled := map[string]bool{}
	for _, list := range [][]Conflict{p.conflicts, p.resolved} {
		for _, c := range list {
			settled[c.Path] = true
		}
	}
	for i := 0; i < len(p.steps); i++ { // steps that are added have the same names
		for _, path := range p.steps[i].group {
			if at, ok := steps[path]; ok {
				if s := p.steps[at]; s.kind == stepTake && s.from == Theirs && s.attr == nil && s.linked {
					continue
				}
			}
			if settled[p.prefix+path] {
				continue
			}
			settled[p.prefix+path] = true
			if err := p.joinLink(path, steps, p.steps[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// joinLink makes path one file with what s takes.
func (p *mergePart) joinLink(path string, steps map[string]int, s step) error {
	f, err := p.find(path)
	if err != nil {
		return err
	}
	take := func() error {
		j := step{path: path, kind: stepTake, from: Theirs, is: f.t.info, linked: true}
		if at, ok := steps[path]; ok {
			p.steps[at] = j
			return nil
		}
		steps[path] = len(p.steps)
		return p.step(j)
	}
	if _, ok := steps[path]; !ok && f.o != nil && f.t != nil && !f.o.info.IsDir() {
		equal, err := same(p.ctx, *f.o, *f.t, path, p.foreign(f.o, f.t))
		if err != nil {
			return err
		}
		if equal {
			return take()
		}
	}
	return p.settle(path, f, Conflict{Kind: LinksChanged, What: []string{"links"}}, take)
}

func sortedNames(names map[string]bool) []string { return slices.Sorted(maps.Keys(names)) }
