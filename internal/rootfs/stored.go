package rootfs

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// A stored template is a name for an imported image, or for a committed layer, with what its maker says of the
// processes in it. Its note, names/<name>.json among the templates, is all that makes it one: written at
// once, so that a name leads to the old files or to the new ones, whenever the server is killed.

// Stored is a template that was made of an image or of a commit.
type Stored struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Profiles are those that it allows, the default first; none: locked and standard.
	Profiles []string `json:"profiles,omitempty"`
	Settings Settings `json:"settings"`
	// Image is the imported image whose layers it is, Layer a committed layer. One of them is set.
	Image string `json:"image,omitempty"`
	Layer string `json:"layer,omitempty"`
	// Source is where it came from, as people write it, and Digest what identifies that: sha256:….
	Source string `json:"source,omitempty"`
	Digest string `json:"digest,omitempty"`
	// Tree is the digest of its files (TreeDigest) where whoever exported the image said it, and it was checked.
	Tree      string    `json:"tree,omitempty"`
	Made      time.Time `json:"made"`
	SizeBytes int64     `json:"size_bytes"`
	// Extra is kept for whoever made it; nothing here reads it.
	Extra json.RawMessage `json:"extra,omitempty"`
}

func (s *Store) nameDir() string { return filepath.Join(s.templateDir(), "names") }

// notePath is the file of a stored template's note: names may hold slashes.
func (s *Store) notePath(name string) string {
	return filepath.Join(s.nameDir(), url.PathEscape(name)+".json")
}

// openStored reads the stored templates. A note whose files are gone can't be used, and is told of.
func (s *Store) openStored() error {
	if err := os.MkdirAll(s.nameDir(), 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.nameDir())
	if err != nil {
		return err
	}
	s.templates.stored = map[string]Stored{}
	for _, e := range entries {
		path := filepath.Join(s.nameDir(), e.Name())
		if !strings.HasSuffix(e.Name(), ".json") { // half a note
			if err := os.Remove(path); err != nil {
				return err
			}
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var t Stored
		if err := json.Unmarshal(data, &t); err != nil {
			return fmt.Errorf("read the note of template %s: %w", e.Name(), err)
		}
		s.templates.stored[t.Name] = t
	}
	return nil
}

// PutTemplate makes a name lead to an image or a committed layer, in the place of what it led to before:
// sandboxes on that keep it. When it returns, the name survives a power loss.
// Kinds: InvalidArgument (a built-in template's name), NotFound (no such image or layer).
func (s *Store) PutTemplate(t Stored) error {
	if t.Name == "" || len(t.Name) > 200 || t.Name == "host" {
		return errs.New(errs.InvalidArgument, "a template can't be called %q", t.Name)
	}
	if _, is := recipeOf(t.Name); is {
		return errs.New(errs.InvalidArgument, "%s is a template that comes with the server", t.Name).WithHint("choose another name")
	}
	if t.Made.IsZero() {
		t.Made = time.Now().UTC()
	}
	if len(t.Profiles) == 0 {
		t.Profiles = []string{"locked", "standard"}
	}
	// No layer goes between being found and being named.
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	m := &s.templates
	m.mu.Lock()
	defer m.mu.Unlock()
	var err error
	switch {
	case (t.Image == "") == (t.Layer == ""):
		return errs.New(errs.InvalidArgument, "template %s needs an image or a layer, and not both", t.Name)
	case t.Layer != "":
		_, err = s.Layer(t.Layer)
	default:
		if _, ok := m.images[t.Image]; !ok {
			err = errs.New(errs.NotFound, "there is no image %s", t.Image)
		}
	}
	if err != nil {
		return err
	}
	data, err := json.Marshal(t)
	if err != nil {
		return err
	}
	if err := durable.Replace(s.notePath(t.Name), data); err != nil {
		return fmt.Errorf("note template %s: %w", t.Name, err)
	}
	m.stored[t.Name] = t
	return nil
}

// DropTemplate removes a stored template's name; what only it needed goes once no sandbox and no commit
// stands on it. Kinds: NotFound, FailedPrecondition (it comes with the server).
func (s *Store) DropTemplate(name string) error {
	if _, is := recipeOf(name); is || name == "host" {
		return errs.New(errs.FailedPrecondition, "template %s comes with the server and can't be removed", name)
	}
	t := &s.templates
	t.mu.Lock()
	if _, ok := t.stored[name]; !ok {
		t.mu.Unlock()
		return errs.New(errs.NotFound, "no template %q", name).WithHint("casemate template ls shows them")
	}
	err := os.Remove(s.notePath(name))
	if err == nil || notThere(err) {
		delete(t.stored, name)
		err = nil
	}
	t.mu.Unlock()
	if err != nil {
		return err
	}
	s.dropTemplates()
	return nil
}

// StoredTemplate returns a template that was made of an image or a commit. Kinds: NotFound.
func (s *Store) StoredTemplate(name string) (Stored, error) {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	if st, ok := t.stored[name]; ok {
		return st, nil
	}
	return Stored{}, errs.New(errs.NotFound, "no template %q", name).WithHint("casemate template ls shows them")
}

// StoredTemplates returns the templates that were made of images and commits, by name.
func (s *Store) StoredTemplates() []Stored {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Stored
	for _, name := range slices.Sorted(maps.Keys(t.stored)) {
		all = append(all, t.stored[name])
	}
	return all
}

// storedLayers returns the committed layers that templates lead to.
func (s *Store) storedLayers() []string {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, st := range t.stored {
		if st.Layer != "" {
			all = append(all, st.Layer)
		}
	}
	return all
}

// template is how it is listed.
func (t Stored) template() Template {
	what := t.Description
	if what == "" && t.Source != "" {
		what = "from " + t.Source
	}
	return Template{
		Name: t.Name, Description: what, Profiles: slices.Clone(t.Profiles), Ready: true, SizeBytes: t.SizeBytes, BuiltAt: t.Made,
		Settings: t.Settings, Source: t.Source, Digest: t.Digest,
	}
}

// fromStored plans a sandbox of a stored template, and notes that the sandbox uses it.
func (s *Store) fromStored(t Stored, r Request) (Plan, error) {
	if t.Layer != "" {
		p, err := s.planLayers(t.Layer, r.ID)
		if err == nil {
			t.Settings.apply(&p, r.Profile)
		}
		return p, err
	}
	s.templates.mu.Lock()
	img, ok := s.templates.images[t.Image]
	s.templates.mu.Unlock()
	if !ok {
		return Plan{}, errs.New(errs.FailedPrecondition, "the files of template %s are gone", t.Name).WithHint("import it again")
	}
	if err := s.use(r.ID, use{base: img.base()}); err != nil {
		return Plan{}, err
	}
	p := Plan{Lowers: s.shownBy(img)}
	t.Settings.apply(&p, r.Profile)
	return p, nil
}
