package rootfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
)

// Built templates are Debian root file systems of their own, for both profiles. Their files have
// inside-ids: they belong to root, 0, and are shown to each sandbox through its id map. Setuid bits are
// kept, so that sudo works inside; the store's directory and mounts keep them from the host's users.

// recipe is how a template is built.
type recipe struct {
	name string
	// version changes when what is built changes: an older build is not used any more.
	version     int
	description string
	// make fills root, and returns what it is made of. It leaves nothing outside root.
	make func(s *Store, ctx context.Context, root string, progress Progress) (source string, err error)
}

// recipes are the templates that can be built, in the order in which they are listed.
func recipes() []recipe {
	return []recipe{
		{"base", baseVersion, "Debian 12 with bash, python3, git, curl and sudo", (*Store).makeBase},
		{
			"code-interpreter", interpreterVersion,
			"base with IPython, numpy, pandas, matplotlib and Node.js, for running code in contexts", (*Store).makeInterpreter,
		},
	}
}

func recipeOf(name string) (recipe, bool) {
	all := recipes()
	i := slices.IndexFunc(all, func(r recipe) bool { return r.name == name })
	if i < 0 {
		return recipe{}, false
	}
	return all[i], true
}

// builtTemplate is a built root file system.
type builtTemplate struct {
	dir  string
	meta meta
}

func (t *builtTemplate) plan() Plan {
	return Plan{
		Lowers: []string{t.dir + "/root"},
		Env: map[string]string{
			"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
		},
		User: defaultUser, Dir: "/home/" + defaultUser,
	}
}

// openBuilt finds the newest complete build; nil where there is none.
func (s *Store) openBuilt(r recipe) (*builtTemplate, error) {
	dirs, err := filepath.Glob(filepath.Join(s.templateDir(), r.name+"-[0-9]*"))
	if err != nil {
		return nil, err
	}
	var newest *builtTemplate
	for _, dir := range dirs {
		m, err := readMeta(dir)
		if err != nil || m.Version != r.version {
			continue
		}
		if newest == nil || m.BuiltAt.After(newest.meta.BuiltAt) {
			newest = &builtTemplate{dir: dir, meta: m}
		}
	}
	return newest, nil
}

// Progress is called while a template is built: step names what is done, fraction says how much of the
// whole is done, line is one line of output or "".
type Progress func(step string, fraction float64, line string)

// part returns the progress of a step that goes from one fraction of the whole to another.
func (p Progress) part(from, to float64) Progress {
	return func(step string, fraction float64, line string) { p(step, from+fraction*(to-from), line) }
}

// Build builds a template that is not built yet, or with force again. It downloads packages, takes a
// minute or two, and leaves nothing behind where it fails. A second call while one runs is refused.
// Kinds: NotFound, FailedPrecondition (being built), Unsupported (debootstrap is missing), Unavailable
// (the packages are out of reach).
func (s *Store) Build(ctx context.Context, name string, force bool, progress func(step string, fraction float64, line string)) (Template, error) {
	if progress == nil {
		progress = func(string, float64, string) {}
	}
	r, found := recipeOf(name)
	switch {
	case found:
		if err := s.build(ctx, r, force, progress); err != nil {
			return Template{}, err
		}
	case name != "host":
		return Template{}, errs.New(errs.NotFound, "no template %q", name)
	case s.templates.host == nil:
		return Template{}, errs.Wrap(s.templates.hostErr, errs.Unsupported, "template host is not available on this machine")
	}
	all, err := s.Templates(ctx)
	if err != nil {
		return Template{}, err
	}
	for _, t := range all {
		if t.Name == name {
			return t, nil
		}
	}
	return Template{}, errs.New(errs.NotFound, "no template %q", name)
}

func (s *Store) build(ctx context.Context, r recipe, force bool, progress Progress) error {
	t := &s.templates
	t.mu.Lock()
	switch {
	case t.building[r.name]:
		t.mu.Unlock()
		return errs.New(errs.FailedPrecondition, "template %s is being built", r.name)
	case t.built[r.name] != nil && !force:
		t.mu.Unlock()
		return nil
	}
	t.building[r.name] = true
	t.mu.Unlock()
	built, err := s.makeTemplate(ctx, r, progress)
	t.mu.Lock()
	delete(t.building, r.name)
	if err == nil {
		t.built[r.name] = built
	}
	t.mu.Unlock()
	if err != nil {
		return err
	}
	s.dropTemplates()
	progress("done", 1, "")
	return nil
}

// makeTemplate builds in a directory of its own, and gives it its name when all is done.
func (s *Store) makeTemplate(ctx context.Context, r recipe, progress Progress) (*builtTemplate, error) {
	tmp, err := os.MkdirTemp(s.templateDir(), "tmp-"+r.name+"-")
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { s.warnIf("remove a build's leftovers", os.RemoveAll(tmp)) })
	defer undo.Run()
	root := filepath.Join(tmp, "root")
	source, err := r.make(s, ctx, root, progress.part(0, 0.98))
	if err != nil {
		return nil, err
	}
	progress("measure", 0.98, "")
	size, err := treeSize(root)
	if err != nil {
		return nil, err
	}
	m := meta{Version: r.version, SizeBytes: size, BuiltAt: time.Now().UTC(), Source: source}
	if err := writeMeta(tmp, m); err != nil {
		return nil, err
	}
	dir := filepath.Join(s.templateDir(), fmt.Sprintf("%s-%d", r.name, m.BuiltAt.UnixNano()))
	if err := os.Rename(tmp, dir); err != nil {
		return nil, err
	}
	undo.Release()
	return &builtTemplate{dir: dir, meta: m}, nil
}

// dropTemplates removes layers of templates that are not the newest and that no sandbox uses, and what
// builds left that were killed.
func (s *Store) dropTemplates() {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.building) > 0 || t.held > 0 {
		return // a build may be reading what is to go; whoever ends last looks
	}
	used := map[string]bool{filepath.Base(s.emptyDir()): true, filepath.Base(s.nameDir()): true}
	if t.host != nil {
		used[filepath.Base(t.host.dir)] = true
	}
	for _, b := range t.built {
		used[filepath.Base(b.dir)] = true
	}
	uses, err := s.uses()
	if err != nil {
		s.warn("list templates in use", err)
		return
	}
	for _, u := range uses {
		used[u.base] = true
	}
	for _, base := range s.keptBases() {
		used[base] = true
	}
	s.neededTemplatesLocked(used)
	entries, err := os.ReadDir(s.templateDir())
	s.warnIf("list templates", err)
	for _, e := range entries {
		if used[e.Name()] {
			continue
		}
		s.warnIf("remove old template", removeTree(filepath.Join(s.templateDir(), e.Name())))
	}
}
