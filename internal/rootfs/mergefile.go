package rootfs

import (
	"bytes"
	"maps"
	"slices"

	"casemate.dev/internal/linux/fd"
)

// setid are the mode bits that give privileges: setuid and setgid.
const setid = 0o6000

// capability is the attribute that gives privileges.
const capability = "security.capability"

// file merges a path at which theirs has something that is no directory.
func (p *mergePart) file(path string, f three) error {
	if f.b != nil && !f.b.info.IsDir() {
		same, err := p.sameAs(path, f.b, f.t, 0, 2)
		if err != nil {
			return err
		}
		if same {
			return p.onlyTime(path, f)
		}
	}
	take := func(added bool) error {
		group, err := p.links.group(2, p.views[2], f.t, path)
		if err != nil {
			return err
		}
		return p.step(step{path: path, kind: stepTake, from: Theirs, is: f.t.info, linked: true, group: group, added: added})
	}
	switch {
	case f.o == nil && f.b == nil && p.gone == 0:
		return take(true)
	case f.o == nil:
		return p.settle(path, f, Conflict{Kind: DeletedChanged}, func() error { return take(true) })
	case f.o.info.IsDir():
		if isDir(f.b) { // theirs put a file in the place of a directory
			changed, err := p.ours.differs(path)
			if err != nil {
				return err
			}
			if !changed {
				return take(false)
			}
		}
		return p.whole(path, f, Conflict{Kind: DirectoryFile})
	}
	if f.b != nil && !f.b.info.IsDir() {
		if same, err := p.sameAs(path, f.b, f.o, 0, 1); err != nil {
			return err
		} else if same {
			return take(false)
		}
	}
	if same, err := p.sameAs(path, f.o, f.t, 1, 2); same || err != nil {
		return err
	}
	if f.o.info.Mode&fileType != f.t.info.Mode&fileType || f.b != nil && f.b.info.Mode&fileType != f.t.info.Mode&fileType {
		kind := TypeChanged
		if f.b == nil {
			kind = BothChanged
		}
		return p.settle(path, f, Conflict{Kind: kind, What: []string{"type"}}, func() error { return take(false) })
	}
	return p.mix(path, f, func() error { return take(false) })
}

// fileType masks the type of a mode (S_IFMT).
const fileType = 0o170000

// onlyTime takes theirs where it differs by no more than its time, and ours is as the base. A file that was
// rewritten with what was in it stays as new as that makes it.
func (p *mergePart) onlyTime(path string, f three) error {
	if f.o == nil || f.o.info.IsDir() || f.b.info.Modified == f.t.info.Modified || f.o.info.Modified != f.b.info.Modified {
		return nil
	}
	same, err := p.sameAs(path, f.b, f.o, 0, 1)
	if !same || err != nil {
		return err
	}
	group, err := p.links.group(2, p.views[2], f.t, path)
	if err != nil {
		return err
	}
	return p.step(step{path: path, kind: stepTake, from: Theirs, is: f.t.info, linked: true, group: group})
}

// sameAs reports whether two sides' files, neither of which is a directory, are equal, and one with the same
// other names.
func (p *mergePart) sameAs(path string, a, b *shownFile, sideA, sideB int) (bool, error) {
	if a.root == b.root {
		return true, nil
	}
	equal, err := same(p.ctx, *a, *b, path, p.foreign(a, b))
	if !equal || err != nil {
		return false, err
	}
	groupA, err := p.links.group(sideA, p.views[sideA], a, path)
	if err != nil {
		return false, err
	}
	groupB, err := p.links.group(sideB, p.views[sideB], b, path)
	return slices.Equal(groupA, groupB), err
}

// foreign reports whether owners can't be compared: a workspace's source has the host's.
func (p *mergePart) foreign(a, b *shownFile) bool {
	return p.source != "" && (a.root == p.roots[p.source] || b.root == p.roots[p.source])
}

// mix merges two files of one type that both sides have changed, each part by itself: contents, owner, mode,
// each attribute, other names.
func (p *mergePart) mix(path string, f three, take func() error) error {
	a, err := p.attrsOf(path, f)
	if err != nil {
		return err
	}
	names, err := p.namesOf(path, f)
	if err != nil {
		return err
	}
	attr, what := a.merge(f.b != nil)
	c, err := p.content(path, f, names.single())
	if err != nil {
		return err
	}
	if c == noContent {
		what = append(what, "contents")
	}
	allOurs := (c == ourContent || c == sameContents) && attr.Equal(a.o)
	allTheirs := (c == theirContent || c == sameContents) && attr.Equal(a.t)
	linked, from, clash := names.merge(allOurs, allTheirs)
	if clash {
		what = append(what, "links")
	}
	if len(what) == 0 && !allOurs && !allTheirs && givesPrivileges(f, a, attr, c) {
		what = append(what, "privileges")
	}
	if len(what) > 0 {
		slices.Sort(what)
		return p.settle(path, f, Conflict{Kind: kindOf(what), What: what}, take)
	}
	s := step{path: path, kind: stepTake, from: Ours, is: f.o.info, linked: linked, attr: &attr}
	switch {
	case allOurs && from != Theirs:
		return nil // theirs is in ours already
	case allTheirs:
		s.from, s.is, s.attr = Theirs, f.t.info, nil
		if from == Theirs {
			s.group = names.t
		}
	case c == theirContent:
		s.from, s.is = Theirs, f.t.info
	case c == mergedContent:
		s.kind = stepText
		p.resolved = append(p.resolved, Conflict{
			Path: p.prefix + path, Kind: BothChanged, What: []string{"contents"}, Resolved: "text",
			Base: stateAt(f.b), Ours: stateAt(f.o), Theirs: stateAt(f.t),
		})
	}
	return p.step(s)
}

func kindOf(what []string) ConflictKind {
	switch {
	case slices.Contains(what, "contents"):
		return BothChanged
	case len(what) == 1 && what[0] == "links":
		return LinksChanged
	}
	return AttributesChanged
}

// contentOf says whose contents a merged file has.
type contentOf uint8

const (
	noContent    contentOf = iota // they conflict
	sameContents                  // both sides'
	ourContent
	theirContent
	mergedContent // by lines
)

func (p *mergePart) content(path string, f three, single bool) (contentOf, error) {
	if equal, err := sameData(p.ctx, *f.o, *f.t, path); equal || err != nil {
		return sameContents, err
	}
	if f.b == nil {
		return noContent, nil
	}
	if equal, err := sameData(p.ctx, *f.b, *f.o, path); equal || err != nil {
		return theirContent, err
	}
	if equal, err := sameData(p.ctx, *f.b, *f.t, path); equal || err != nil {
		return ourContent, err
	}
	if p.r.Text && single && f.o.info.IsRegular() {
		if _, ok, err := p.mergedText(path, f); ok || err != nil {
			return mergedContent, err
		}
	}
	return noContent, nil
}

// fileNames are, for each side, the names that are one file with a path; nil: it is alone.
type fileNames struct{ b, o, t []string }

func (p *mergePart) namesOf(path string, f three) (n fileNames, err error) {
	for i, to := range []*[]string{&n.b, &n.o, &n.t} {
		if side := [3]*shownFile{f.b, f.o, f.t}[i]; side != nil {
			if *to, err = p.links.group(i, p.views[i], side, path); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

func (n fileNames) single() bool { return n.b == nil && n.o == nil && n.t == nil }

// merge says whether names that are one file stay so, and whose they are; clash: the sides disagree. A side's
// own grouping only holds for a file that is wholly that side's.
func (n fileNames) merge(allOurs, allTheirs bool) (linked bool, from Side, clash bool) {
	switch {
	case slices.Equal(n.o, n.t):
		return n.o != nil, "", false
	case slices.Equal(n.b, n.o):
		return n.t != nil, Theirs, n.t != nil && !allTheirs
	case slices.Equal(n.b, n.t):
		return n.o != nil, Ours, n.o != nil && !allOurs
	}
	return false, "", true
}

// givesPrivileges reports whether a merged file has setuid, setgid or capabilities that neither side gave
// these contents with this owner: the kernel takes them away when a file is written to, and so a merge must not
// give them.
func givesPrivileges(f three, a attrs, attr fd.Attr, c contentOf) bool {
	_, caps := attr.Xattrs[capability]
	if !f.o.info.IsRegular() || attr.Mode&setid == 0 && !caps {
		return false
	}
	like := func(side fd.Attr) bool {
		return side.UID == attr.UID && side.GID == attr.GID && side.Mode&setid == attr.Mode&setid &&
			bytes.Equal(side.Xattrs[capability], attr.Xattrs[capability])
	}
	switch c {
	case theirContent:
		return !like(a.t)
	case ourContent:
		return !like(a.o)
	case sameContents:
		return !like(a.o) && !like(a.t)
	}
	return true
}

// attrs are the attributes of three files, or of fewer.
type attrs struct{ b, o, t fd.Attr }

func (p *mergePart) attrsOf(path string, f three) (a attrs, err error) {
	for _, side := range []struct {
		f  *shownFile
		to *fd.Attr
	}{{f.b, &a.b}, {f.o, &a.o}, {f.t, &a.t}} {
		if side.f == nil {
			continue
		}
		if *side.to, err = p.attrOf(path, side.f); err != nil {
			return a, err
		}
	}
	return a, nil
}

// attrOf reads the attributes of a file. In a workspace's source all is the sandbox's default user's.
func (p *mergePart) attrOf(path string, f *shownFile) (fd.Attr, error) {
	dirPath, name := fd.Split(path)
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return fd.Attr{}, err
	}
	defer dir.Close()
	if name == "" {
		name = "."
	}
	a, err := fd.AttrOf(dir, name, f.info, ownMark)
	if p.source != "" && f.root == p.roots[p.source] {
		a.UID, a.GID = defaultUID, defaultUID
	}
	return a, err
}

// merge joins the attributes of ours and theirs, each by itself, and names those that conflict. hasBase says
// that there is a base.
func (a attrs) merge(hasBase bool) (out fd.Attr, conflicts []string) {
	out = fd.Attr{UID: a.o.UID, GID: a.o.GID, Mode: a.o.Mode, Xattrs: maps.Clone(a.o.Xattrs)}
	owner := func(x fd.Attr) [2]uint32 { return [2]uint32{x.UID, x.GID} }
	switch o, t := owner(a.o), owner(a.t); {
	case o == t:
	case hasBase && o == owner(a.b):
		out.UID, out.GID = a.t.UID, a.t.GID
	case !hasBase || t != owner(a.b):
		conflicts = append(conflicts, "owner")
	}
	switch {
	case a.o.Mode == a.t.Mode:
	case hasBase && a.o.Mode == a.b.Mode:
		out.Mode = a.t.Mode
	case !hasBase || a.t.Mode != a.b.Mode:
		conflicts = append(conflicts, "mode")
	}
	names := maps.Clone(a.o.Xattrs)
	maps.Copy(names, a.t.Xattrs)
	for name := range names {
		o, t, b := valueOf(a.o, name), valueOf(a.t, name), valueOf(a.b, name)
		switch {
		case o == t:
		case hasBase && o == b:
			if delete(out.Xattrs, name); t.there {
				out.Xattrs[name] = a.t.Xattrs[name]
			}
		case !hasBase || t != b:
			conflicts = append(conflicts, name)
		}
	}
	slices.Sort(conflicts)
	return out, conflicts
}

// value is an attribute's, comparable.
type value struct {
	there bool
	text  string
}

func valueOf(side fd.Attr, name string) value {
	v, ok := side.Xattrs[name]
	return value{ok, string(v)}
}

// differences names the parts in which two sets of attributes differ.
func differences(a, b fd.Attr) (what []string) {
	_, what = attrs{o: a, t: b}.merge(false)
	return what
}
