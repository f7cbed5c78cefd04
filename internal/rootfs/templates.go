package rootfs

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
)

// templates is what the store offers to start from.
type templates struct {
	// mu guards the fields below.
	mu sync.Mutex
	// host is set where this machine can give its own /usr; hostErr says why not.
	host    *hostTemplate
	hostErr error
	// built are the templates that were built, by name.
	built map[string]*builtTemplate
	// building are the names of those that are being built.
	building map[string]bool
	// stored are those that were made of images and commits, by name, and images the imported ones, by id.
	stored map[string]Stored
	images map[string]Image
	// held counts those who import.
	held int
}

// meta is what lies beside a stored layer of a template.
type meta struct {
	Version   int       `json:"version"`
	SizeBytes int64     `json:"size_bytes"`
	BuiltAt   time.Time `json:"built_at"`
	Source    string    `json:"source"` // the distribution's release
}

// openTemplates makes what costs nothing and looks for what was built before.
func (s *Store) openTemplates(ctx context.Context) error {
	for _, dir := range []string{s.emptyDir(), s.useDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	t := &s.templates
	t.host, t.hostErr = s.openHost(ctx)
	if t.hostErr != nil {
		s.warn("template host is not available", t.hostErr)
	}
	t.built, t.building = map[string]*builtTemplate{}, map[string]bool{}
	for _, r := range recipes() {
		b, err := s.openBuilt(r)
		if err != nil {
			return err
		}
		if b != nil {
			t.built[r.name] = b
		}
	}
	if err := errors.Join(s.openImages(), s.openStored()); err != nil {
		return err
	}
	s.dropTemplates()
	return nil
}

// Templates lists what a sandbox can start from, also what is not built yet.
func (s *Store) Templates(context.Context) ([]Template, error) {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	host := Template{
		Name: "host", Profiles: []string{"locked"}, Ready: t.host != nil,
		Description: "this machine's own /usr, read-only, with a made-up /etc; nothing to download",
	}
	if t.host != nil {
		host.Settings = settingsOf(t.host.plan(s.emptyDir()))
		host.BuiltAt, host.SizeBytes = t.host.meta.BuiltAt, t.host.meta.SizeBytes
	}
	all := []Template{host}
	for _, r := range recipes() {
		b := t.built[r.name]
		tm := Template{Name: r.name, Profiles: []string{"locked", "standard"}, Ready: b != nil, Description: r.description}
		if b != nil {
			tm.BuiltAt, tm.SizeBytes, tm.Settings = b.meta.BuiltAt, b.meta.SizeBytes, settingsOf(b.plan())
		}
		all = append(all, tm)
	}
	for _, name := range slices.Sorted(maps.Keys(t.stored)) {
		all = append(all, t.stored[name].template())
	}
	return all, nil
}

// fromTemplate returns the part of a plan that every sandbox of a template shares, and notes that the
// sandbox uses it.
func (s *Store) fromTemplate(ctx context.Context, r Request) (Plan, error) {
	all, err := s.Templates(ctx)
	if err != nil {
		return Plan{}, err
	}
	i := slices.IndexFunc(all, func(t Template) bool { return t.Name == r.Template })
	if i < 0 {
		return Plan{}, errs.New(errs.NotFound, "no template %q", r.Template)
	}
	if r.Profile != "" && !slices.Contains(all[i].Profiles, r.Profile) {
		return Plan{}, errs.New(errs.FailedPrecondition, "template %s does not allow profile %s", r.Template, r.Profile)
	}
	if st, err := s.StoredTemplate(r.Template); err == nil {
		return s.fromStored(st, r)
	}
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.Template == "host" && t.host != nil:
		return t.host.plan(s.emptyDir()), s.use(r.ID, use{base: filepath.Base(t.host.dir)})
	case t.built[r.Template] != nil:
		b := t.built[r.Template]
		return b.plan(), s.use(r.ID, use{base: filepath.Base(b.dir)})
	case r.Template == "host":
		return Plan{}, errs.Wrap(t.hostErr, errs.FailedPrecondition, "template host is not available on this machine").
			WithHint("build another one: casemate template build base")
	}
	return Plan{}, errs.New(errs.FailedPrecondition, "template %s is not built", r.Template).
		WithHint("casemate template build %s", r.Template)
}

// use notes which stored layers a sandbox has below it, so that nothing removes them.
func (s *Store) use(id string, u use) error {
	err := os.Symlink(u.text(), filepath.Join(s.useDir(), id))
	if errors.Is(err, fs.ErrExist) {
		return errs.Wrap(err, errs.AlreadyExists, "sandbox %s has a root already", id)
	}
	return err
}

// unuse is for a sandbox that is gone. Idempotent.
func (s *Store) unuse(id string) error {
	if err := os.Remove(filepath.Join(s.useDir(), id)); err != nil && !notThere(err) {
		return err
	}
	return nil
}

// readMeta returns a stored layer's meta; errors match fs.ErrNotExist where there is none.
func readMeta(dir string) (meta, error) {
	var m meta
	data, err := os.ReadFile(filepath.Join(dir, "meta.json"))
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(data, &m)
}

func writeMeta(dir string, m meta) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "meta.json"), data, 0o600)
}
