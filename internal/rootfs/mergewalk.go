package rootfs

import (
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Bounds of a merge, which holds what it does at once: whoever wrote the files chose their names.
const (
	maxSteps     = 1 << 20
	maxStepPaths = 128 << 20
)

// stepKind is what a merge does at one path of the result.
type stepKind uint8

const (
	stepTake   stepKind = iota // the file of a side, with its attributes or others
	stepDir                    // a directory with attributes
	stepRemove                 // nothing
	stepText                   // a file merged by lines
)

// step is one thing that the result has other than ours.
type step struct {
	path string
	kind stepKind
	from Side // whose contents, for stepTake
	// attr are the attributes; nil: those of the file that is taken.
	attr *fd.Attr
	// linked says that names which are one file on the side that is taken from are one in the result.
	linked bool
	// group are the names that are one file with this one because theirs made them so.
	group []string
	is    fd.Info // of the file that is taken, or of what is removed
	added bool    // ours had nothing there
}

// mergePart is the merge of one file system: the root, or a workspace.
type mergePart struct {
	*merger
	prefix string  // of the paths in answers
	at     string  // the directory in the layer
	source string  // a workspace's directory of the host, at the bottom; "": it is the root
	views  [3]view // base, ours, theirs
	// theirs and ours are what each has changed since the base.
	theirs, ours *comparison

	// gone counts the directories above that ours removed: what theirs makes in one is a conflict.
	gone      int
	steps     []step
	conflicts []Conflict
	resolved  []Conflict
}

// three is what the three states have at one path; nil: nothing.
type three struct{ b, o, t *shownFile }

func isDir(f *shownFile) bool { return f != nil && f.info.IsDir() }

func (p *mergePart) find(path string) (three, error) {
	if path == "" {
		return p.tops()
	}
	var out [3]*shownFile
	for i, v := range p.views {
		f, err := v.find(path)
		if err != nil {
			return three{}, err
		}
		out[i] = f
	}
	return three{out[0], out[1], out[2]}, nil
}

// tops is find for the root directory, which is the topmost layer's.
func (p *mergePart) tops() (three, error) {
	var out [3]*shownFile
	for i, v := range p.views {
		info, err := fd.Stat(v[0])
		if err != nil {
			return three{}, err
		}
		out[i] = &shownFile{info: info, root: v[0]}
	}
	return three{out[0], out[1], out[2]}, nil
}

// run finds the steps and the conflicts.
func (p *mergePart) run() error {
	f, err := p.tops()
	if err != nil {
		return err
	}
	if err := p.bothDirs("", f); err != nil {
		return err
	}
	return p.joinLinks()
}

// node merges one path and what lies below it. Only paths that theirs may have changed are asked for.
func (p *mergePart) node(path string) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if len(p.prefix)+len(path) >= pathMax {
		return errs.New(errs.ResourceExhausted, "%.40s… lies deeper than can be merged (%d bytes)", path, pathMax)
	}
	f, err := p.find(path)
	if err != nil {
		return err
	}
	switch {
	case f.b == nil && f.t == nil:
		return nil
	case f.t == nil:
		return p.removed(path, f)
	case isDir(f.t) && isDir(f.b):
		return p.bothDirs(path, f)
	case isDir(f.t):
		return p.madeDir(path, f)
	}
	return p.file(path, f)
}

// children merges what is in a directory, of the names that theirs may have changed.
func (p *mergePart) children(path string) error {
	names, _, err := p.theirs.candidates(path)
	if err != nil {
		return err
	}
	return p.each(path, names, p.node)
}

// each calls f for the paths of the names in a directory.
func (p *mergePart) each(path string, names map[string]bool, f func(path string) error) error {
	for _, name := range sortedNames(names) {
		if err := f(below(path, name)); err != nil {
			return err
		}
	}
	return nil
}

func below(path, name string) string {
	if path == "" {
		return name
	}
	return path + "/" + name
}

// bothDirs merges what is a directory in the base and in theirs.
func (p *mergePart) bothDirs(path string, f three) error {
	if f.o != nil && !f.o.info.IsDir() {
		changed, err := p.theirs.differs(path)
		if !changed || err != nil {
			return err
		}
		return p.whole(path, f, Conflict{Kind: DirectoryFile})
	}
	if path == "" && f.b.root == f.t.root {
		return nil // one layer: then theirs has changed nothing
	}
	if f.b.root != f.t.root {
		if err := p.dirAttrs(path, f); err != nil {
			return err
		}
	}
	if f.o == nil {
		p.gone++
		defer func() { p.gone-- }()
	}
	return p.children(path)
}

// dirAttrs merges the attributes of a directory of theirs and, if it has one, the base.
func (p *mergePart) dirAttrs(path string, f three) error {
	a, err := p.attrsOf(path, f)
	if err != nil {
		return err
	}
	if f.b != nil && a.b.Equal(a.t) {
		return nil
	}
	if f.o == nil { // ours removed it
		return p.settle(path, f, Conflict{Kind: DeletedChanged}, func() error {
			return p.step(step{path: path, kind: stepDir, attr: &a.t, is: f.t.info, added: true})
		})
	}
	if a.o.Equal(a.t) {
		return nil
	}
	mixed, what := a.merge(f.b != nil)
	if len(what) > 0 {
		return p.settle(path, f, Conflict{Kind: AttributesChanged, What: what}, func() error {
			return p.step(step{path: path, kind: stepDir, attr: &a.t, is: f.t.info})
		})
	}
	if mixed.Equal(a.o) {
		return nil
	}
	return p.step(step{path: path, kind: stepDir, attr: &mixed, is: f.t.info})
}

// madeDir merges a directory that theirs made, where the base has none.
func (p *mergePart) madeDir(path string, f three) error {
	switch {
	case f.o == nil && f.b == nil && p.gone == 0:
		return p.tree(path, f, true)
	case f.o == nil:
		return p.whole(path, f, Conflict{Kind: DeletedChanged})
	case !f.o.info.IsDir():
		if f.b != nil {
			if same, err := p.sameAs(path, f.b, f.o, 0, 1); err != nil {
				return err
			} else if same {
				return p.tree(path, f, false)
			}
		}
		return p.whole(path, f, Conflict{Kind: DirectoryFile})
	}
	// Both made a directory.
	made := f
	made.b = nil
	if err := p.dirAttrs(path, made); err != nil {
		return err
	}
	names, err := p.shownNames(2, path)
	if err != nil {
		return err
	}
	return p.each(path, names, p.node)
}

// shownNames returns the names that one of the views may show in a directory.
func (p *mergePart) shownNames(side int, path string) (map[string]bool, error) {
	v := p.views[side]
	names := map[string]bool{}
	here, err := v.level(nil, path)
	if err != nil {
		return nil, err
	}
	return names, v.names(path, here.which, names, maxNamesHeld)
}

// tree takes what theirs has at a path, whole. added says that ours has nothing there.
func (p *mergePart) tree(path string, f three, added bool) error {
	group, err := p.links.group(2, p.views[2], f.t, path)
	if err != nil {
		return err
	}
	if !f.t.info.IsDir() {
		return p.step(step{path: path, kind: stepTake, from: Theirs, is: f.t.info, added: added, linked: true, group: group})
	}
	a, err := p.attrOf(path, f.t)
	if err != nil {
		return err
	}
	if err := p.step(step{path: path, kind: stepDir, attr: &a, is: f.t.info, added: added}); err != nil {
		return err
	}
	names, err := p.shownNames(2, path)
	if err != nil {
		return err
	}
	return p.each(path, names, func(path string) error {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		t, err := p.views[2].find(path)
		if t == nil || err != nil {
			return err
		}
		return p.tree(path, three{t: t}, true)
	})
}

// whole settles a conflict in which one side's file stands against the other's directory, or against nothing:
// theirs is taken whole, with everything in it.
func (p *mergePart) whole(path string, f three, c Conflict) error {
	return p.settle(path, f, c, func() error { return p.tree(path, f, f.o == nil) })
}

// removed merges a path that theirs removed.
func (p *mergePart) removed(path string, f three) error {
	if f.o == nil {
		return nil
	}
	_, err := p.removedBelow(path, f)
	return err
}

// removedBelow takes away what theirs removed and ours did not change, and reports whether anything stays.
func (p *mergePart) removedBelow(path string, f three) (stays bool, err error) {
	if f.o == nil {
		return false, nil
	}
	gone := step{path: path, kind: stepRemove, is: f.o.info}
	if !isDir(f.b) || !f.o.info.IsDir() {
		same := false
		if f.b != nil && !f.b.info.IsDir() && !f.o.info.IsDir() {
			if same, err = p.sameAs(path, f.b, f.o, 0, 1); err != nil {
				return false, err
			}
		}
		if same {
			return false, p.step(gone)
		}
		stays = true
		err = p.settle(path, f, Conflict{Kind: ChangedDeleted}, func() error { stays = false; return p.step(gone) })
		return stays, err
	}
	changed, err := p.ours.differs(path)
	if err != nil {
		return false, err
	}
	if !changed {
		return false, p.step(gone)
	}
	return p.removedDir(path, f, gone)
}

// removedDir is removedBelow for a directory in which ours changed something.
func (p *mergePart) removedDir(path string, f three, gone step) (stays bool, err error) {
	mark := len(p.steps)
	own, err := p.attrsOf(path, f)
	if err != nil {
		return false, err
	}
	if !own.b.Equal(own.o) {
		stays = true
		err := p.settle(path, f, Conflict{Kind: ChangedDeleted, What: differences(own.b, own.o)}, func() error { stays = false; return nil })
		if err != nil {
			return true, err
		}
	}
	names, err := p.shownNames(1, path)
	if err != nil {
		return true, err
	}
	err = p.each(path, names, func(path string) error {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		c, err := p.find(path)
		if err != nil {
			return err
		}
		left, err := p.removedBelow(path, c)
		stays = stays || left
		return err
	})
	if err == nil && !stays {
		p.steps = p.steps[:mark] // the directory's own removal is theirs, too
		err = p.step(gone)
	}
	return stays, err
}

// settle notes a conflict, or resolves it by a choice: theirs calls take.
func (p *mergePart) settle(path string, f three, c Conflict, take func() error) error {
	c.Path = p.prefix + path
	c.Base, c.Ours, c.Theirs = stateAt(f.b), stateAt(f.o), stateAt(f.t)
	if p.r.Choose != nil {
		c.Resolved = string(p.r.Choose(c.Path))
	}
	if err := p.hold(path); err != nil {
		return err
	}
	switch Side(c.Resolved) {
	case Ours:
		p.resolved = append(p.resolved, c)
		return nil
	case Theirs:
		p.resolved = append(p.resolved, c)
		return take()
	}
	p.conflicts = append(p.conflicts, c)
	return nil
}

func stateAt(f *shownFile) *FileState {
	if f == nil {
		return nil
	}
	s := FileState{Type: typeName(f.info), Mode: f.info.Perm(), UID: f.info.UID, GID: f.info.GID}
	if f.info.IsRegular() || f.info.IsSymlink() {
		s.Size = f.info.Size
	}
	return &s
}

// step adds one.
func (p *mergePart) step(s step) error {
	p.steps = append(p.steps, s)
	return p.hold(s.path)
}

func (p *mergePart) hold(path string) error {
	if len(p.steps)+len(p.conflicts)+len(p.resolved) > maxSteps {
		return tooMuch()
	}
	return p.merger.hold(path)
}

// changes tells what the steps change for those who have ours.
func (p *mergePart) changes() []Change {
	out := make([]Change, 0, len(p.steps))
	for _, s := range p.steps {
		c := Change{Op: "modified", Path: p.prefix + s.path, Type: typeName(s.is), Mode: s.is.Perm()}
		switch {
		case s.kind == stepRemove:
			c.Op = "removed"
		case s.added:
			c.Op = "added"
		}
		if s.attr != nil {
			c.Mode = s.attr.Mode
		}
		if s.is.IsRegular() || s.is.IsSymlink() {
			c.Size = s.is.Size
		}
		if c.Path = strings.TrimSuffix(c.Path, "/"); c.Path == "" {
			c.Path = "/"
		}
		out = append(out, c)
	}
	return out
}
