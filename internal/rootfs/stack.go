package rootfs

import (
	"path/filepath"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// StackOf names what Stack returns the layers of: a committed layer, or a template.
type StackOf struct{ Layer, Template string }

// Stack is what something is made of.
type Stack struct {
	// Layers are its layers, the lowest first.
	Layers []StackLayer
	// Image is the imported image at the bottom; "": none.
	Image string
	// Settings are the template's, or those that a sandbox of the layer has.
	Settings Settings

	layer string // the committed one at the top; "": none
}

// StackLayer is one layer of a Stack.
type StackLayer struct {
	// Imported is an imported layer's id; "": it is one of ours.
	Imported string
	// Dir holds its files, as overlayfs takes them.
	Dir  string
	Made time.Time
}

// Stack returns the layers of a commit or a template, which stay until release is called. A layer that was merged
// of others is one. Workspaces are no part of it.
// Kinds: NotFound, FailedPrecondition (it stands on files of this machine; it is not built).
func (s *Store) Stack(of StackOf) (_ Stack, release func(), err error) {
	templates := s.HoldTemplates()
	s.kept.change.RLock() // no layer goes between being found and being held
	defer s.kept.change.RUnlock()
	st, err := s.stack(of)
	if err != nil {
		templates()
		return Stack{}, nil, err
	}
	layers := s.holdFound(State{Layer: st.layer})
	return st, func() {
		layers()
		templates()
	}, nil
}

func (s *Store) stack(of StackOf) (Stack, error) {
	if of.Layer != "" {
		return s.stackOfLayer(of.Layer)
	}
	if t, err := s.StoredTemplate(of.Template); err == nil {
		var st Stack
		if t.Layer != "" {
			st, err = s.stackOfLayer(t.Layer)
		} else {
			st.Image = t.Image
			st.Layers, err = s.imageLayers(t.Image)
		}
		st.Settings = t.Settings
		return st, err
	}
	m := &s.templates
	m.mu.Lock()
	defer m.mu.Unlock()
	_, known := recipeOf(of.Template)
	b := m.built[of.Template]
	switch {
	case of.Template == "host":
		return Stack{}, errLocal()
	case !known:
		return Stack{}, errs.New(errs.NotFound, "no template %q", of.Template).WithHint("casemate template ls shows them")
	case b == nil:
		return Stack{}, errs.New(errs.FailedPrecondition, "template %s is not built", of.Template).
			WithHint("casemate template build %s", of.Template)
	}
	return Stack{
		Layers: []StackLayer{{Dir: b.dir + "/root", Made: b.meta.BuiltAt}}, Settings: settingsOf(b.plan()),
	}, nil
}

// errLocal says that something can't leave this machine.
func errLocal() error {
	return errs.New(errs.FailedPrecondition, "template host is this machine's own /usr: it is in no layer, and can't leave it").
		WithHint("start from another template: casemate template ls")
}

// stackOfLayer returns a committed layer's stack. Preconditions: kept.change is held.
func (s *Store) stackOfLayer(id string) (Stack, error) {
	l, err := s.Layer(id)
	if err != nil {
		return Stack{}, err
	}
	if len(l.Plan.Binds) > 0 {
		return Stack{}, errLocal()
	}
	st := Stack{Settings: settingsOf(l.Plan), layer: id}
	if image, ok := strings.CutPrefix(l.Base, imagePrefix); ok {
		st.Image = image
		if st.Layers, err = s.imageLayers(image); err != nil {
			return Stack{}, err
		}
	} else {
		for _, dir := range slices.Backward(l.Plan.Lowers) {
			sl := StackLayer{Dir: s.absolute(dir)}
			if m, err := readMeta(filepath.Dir(sl.Dir)); err == nil {
				sl.Made = m.BuiltAt
			}
			st.Layers = append(st.Layers, sl)
		}
	}
	for _, below := range slices.Backward(l.stack()) {
		kept, err := s.Layer(below)
		if err != nil {
			return Stack{}, err
		}
		st.Layers = append(st.Layers, StackLayer{Dir: s.keptPath(below) + "/upper", Made: kept.Made})
	}
	return st, nil
}

func (s *Store) imageLayers(id string) ([]StackLayer, error) {
	img, err := s.Image(id)
	if err != nil {
		return nil, err
	}
	var all []StackLayer
	for _, l := range img.Layers {
		_, dir, err := s.ImportedLayer(l)
		if err != nil {
			return nil, err
		}
		all = append(all, StackLayer{Imported: l, Dir: dir})
	}
	return all, nil
}

// ImportedLayers returns the ids of the imported layers.
func (s *Store) ImportedLayers() ([]string, error) {
	dirs, err := filepath.Glob(filepath.Join(s.templateDir(), layerPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for i, dir := range dirs {
		dirs[i] = strings.TrimPrefix(filepath.Base(dir), layerPrefix)
	}
	return dirs, nil
}

// maxLinks is how many symbolic links lie on a path at most, as the kernel has it (path_resolution(7)).
const maxLinks = 40

// ShowsDir reports whether imported layers, the lowest first, show a directory at a path, links followed.
func (s *Store) ShowsDir(layers []string, path string) (bool, error) {
	v, closeView, err := s.importedView(layers)
	if err != nil {
		return false, err
	}
	defer closeView()
	todo, at, links := strings.Split(path, "/"), "", 0
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at, _ = fd.Split(at)
			continue
		}
		next := strings.TrimPrefix(at+"/"+name, "/")
		shown, err := v.find(next)
		switch {
		case err != nil:
			return false, err
		case shown == nil:
			return false, nil
		case shown.info.IsDir():
			at = next
		case shown.info.IsSymlink():
			if links++; links > maxLinks {
				return false, nil
			}
			target, err := readShown(shown, next)
			if err != nil {
				return false, err
			}
			if strings.HasPrefix(target, "/") {
				at = ""
			}
			todo = append(strings.Split(target, "/"), todo...)
		default:
			return false, nil
		}
	}
	return true, nil
}

func readShown(f *shownFile, path string) (string, error) {
	dirPath, name := fd.Split(path)
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	return fd.Readlink(dir, name)
}
