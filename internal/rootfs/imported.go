package rootfs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// An imported image is a list of layers that lie on each other. Each layer is a directory of its own among the
// templates, layer-<id>/, which images share; an image is a note, image-<id>/image.json. Layers never change. What
// no image needs, and images that no template, sandbox or commit needs, go with the templates' sweep.

const (
	layerPrefix = "layer-"
	imagePrefix = "image-"
	tmpPrefix   = "tmp-"
)

// maxShown is how many layers of an image are mounted for a sandbox: each costs its start a mount. An image
// that has more is shown by one layer that was merged of all.
const maxShown = 16

// maxImageLayers bounds the layers of an image: overlayfs itself takes 500.
const maxImageLayers = 128

// Image is an imported image.
type Image struct {
	// ID names it: lower-case hexadecimal digits of whatever identifies it.
	ID string `json:"-"`
	// Layers are the ids of its layers, the lowest first.
	Layers []string `json:"layers"`
	// Merged says that one merged layer shows them all.
	Merged bool `json:"merged,omitempty"`
	// Extra is kept for whoever imported it; nothing here reads it.
	Extra json.RawMessage `json:"extra,omitempty"`
}

func (i Image) base() string { return imagePrefix + i.ID }

// LayerNote is what is kept beside an imported layer.
type LayerNote struct {
	SizeBytes int64 `json:"size_bytes"`
	Files     int64 `json:"files"`
	// Extra is kept for whoever imported it; nothing here reads it.
	Extra json.RawMessage `json:"extra,omitempty"`
}

// validHex reports whether an id is safe as a part of a file name.
func validHex(id string) bool {
	return len(id) >= 8 && len(id) <= 64 && strings.Trim(id, "0123456789abcdef") == ""
}

func (s *Store) imageDir(id string) string { return filepath.Join(s.templateDir(), imagePrefix+id) }
func (s *Store) importedDir(id string) string {
	return filepath.Join(s.templateDir(), layerPrefix+id)
}

// openImages reads which images there are.
func (s *Store) openImages() error {
	s.templates.images = map[string]Image{}
	dirs, err := filepath.Glob(filepath.Join(s.templateDir(), imagePrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		id := strings.TrimPrefix(filepath.Base(dir), imagePrefix)
		data, err := os.ReadFile(filepath.Join(dir, "image.json"))
		if notThere(err) {
			continue // half an image: swept
		}
		if err != nil {
			return err
		}
		img := Image{ID: id}
		if err := json.Unmarshal(data, &img); err != nil {
			return fmt.Errorf("read the note of image %s: %w", id, err)
		}
		s.templates.images[id] = img
	}
	return nil
}

// shownBy returns the directories that show an image, the topmost first.
func (s *Store) shownBy(img Image) []string {
	if img.Merged {
		return []string{s.imageDir(img.ID) + "/root"}
	}
	var all []string
	for _, id := range slices.Backward(img.Layers) {
		all = append(all, s.importedDir(id)+"/root")
	}
	return all
}

// imported reports whether a layer of a plan is an imported one, or was merged of such.
func (s *Store) imported(dir string) bool {
	rel, below := strings.CutPrefix(dir, s.templateDir()+"/")
	return below && (strings.HasPrefix(rel, layerPrefix) || strings.HasPrefix(rel, imagePrefix))
}

// HoldTemplates keeps what is imported, and not part of an image or named yet, until release is called.
func (s *Store) HoldTemplates() (release func()) {
	t := &s.templates
	t.mu.Lock()
	t.held++
	t.mu.Unlock()
	return func() {
		t.mu.Lock()
		t.held--
		t.mu.Unlock()
		s.dropTemplates()
	}
}

// ImportedLayer returns an imported layer's note and the directory of its files. Kinds: NotFound.
func (s *Store) ImportedLayer(id string) (LayerNote, string, error) {
	if !validHex(id) {
		return LayerNote{}, "", errs.New(errs.InvalidArgument, "%q is no imported layer's id", id)
	}
	var n LayerNote
	data, err := os.ReadFile(filepath.Join(s.importedDir(id), "layer.json"))
	if notThere(err) {
		return n, "", errs.Wrap(err, errs.NotFound, "there is no imported layer %s", id)
	}
	if err != nil {
		return n, "", err
	}
	return n, s.importedDir(id) + "/root", json.Unmarshal(data, &n)
}

// Image returns an imported image. Kinds: NotFound.
func (s *Store) Image(id string) (Image, error) {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	if img, ok := t.images[id]; ok {
		return img, nil
	}
	return Image{}, errs.New(errs.NotFound, "there is no image %s", id)
}

// Draft is a layer that is being imported. Whoever made it ends it with Finish or Discard, and holds the
// templates (HoldTemplates) until then.
type Draft struct {
	s   *Store
	dir string
}

// NewDraft makes an empty layer.
func (s *Store) NewDraft() (*Draft, error) {
	dir, err := os.MkdirTemp(s.templateDir(), tmpPrefix+layerPrefix)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir+"/root", 0o755); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &Draft{s: s, dir: dir}, nil
}

// Root is the directory to fill: with overlayfs's whiteouts and marks, and inside-ids.
func (d *Draft) Root() string { return d.dir + "/root" }

// Free returns how many bytes are free where drafts lie.
func (d *Draft) Free() (int64, error) { return FreeBytes(d.dir) }

// Discard removes it. Idempotent; after Finish it does nothing.
func (d *Draft) Discard() {
	if d.dir != "" {
		d.s.warnIf("remove a layer that was not imported", removeTree(d.dir))
		d.dir = ""
	}
}

// Fit says how an imported layer is made to fit those below it. Paths are relative to the root, which is ".".
type Fit struct {
	// Below are the layers that it lies on, the lowest first.
	Below []string
	// Implied are directories that the layer does not describe, the shallow ones before the deep: they get
	// to look as the layers below show them.
	Implied []string
	// Whiteouts are those in the layer. One that hides nothing goes, since overlayfs would show it as a device.
	Whiteouts []string
}

// Finish makes it the layer id, unless that is there already. When it returns, the layer survives a power
// loss. Kinds: InvalidArgument (it can't lie on those below).
func (d *Draft) Finish(ctx context.Context, id string, fit Fit, n LayerNote) error {
	defer d.Discard()
	if !validHex(id) {
		return errs.New(errs.InvalidArgument, "%q is no imported layer's id", id)
	}
	if _, _, err := d.s.ImportedLayer(id); err == nil {
		return nil
	}
	if err := d.s.fit(ctx, d.Root(), fit); err != nil {
		return err
	}
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	if err := os.WriteFile(d.dir+"/layer.json", data, 0o600); err != nil {
		return err
	}
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := fd.SyncFS(dir); err != nil {
		return err
	}
	if err := durable.Rename(d.dir, d.s.importedDir(id)); err != nil {
		if _, _, rerr := d.s.ImportedLayer(id); rerr == nil {
			return nil // another import was faster
		}
		return err
	}
	d.dir = ""
	return nil
}

// importedView opens imported layers, the lowest first, to look at what they show.
func (s *Store) importedView(layers []string) (v view, closeAll func(), err error) {
	closeAll = func() {
		for _, f := range v {
			_ = f.Close()
		}
	}
	for _, id := range slices.Backward(layers) {
		var f *os.File
		_, dir, err := s.ImportedLayer(id)
		if err == nil {
			f, err = fd.OpenRoot(dir)
		}
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		v = append(v, f)
	}
	return v, closeAll, nil
}

// fit makes the layer in root lie on those below it.
func (s *Store) fit(ctx context.Context, root string, fit Fit) error {
	v, closeView, err := s.importedView(fit.Below)
	if err != nil {
		return err
	}
	defer closeView()
	to, err := fd.OpenRoot(root)
	if err != nil {
		return err
	}
	defer to.Close()
	c := fd.NewCopier(to)
	defer c.Close()
	for _, path := range fit.Whiteouts { // before the directories: removing changes their times
		if err := errors.Join(ctx.Err(), dropIdle(c, v, path)); err != nil {
			return fmt.Errorf("whiteout %q: %w", path, err)
		}
	}
	for _, path := range fit.Implied {
		if err := errors.Join(ctx.Err(), likeShown(c, v, path)); err != nil {
			return fmt.Errorf("directory %q: %w", path, err)
		}
	}
	return nil
}

// dropIdle removes a whiteout that hides nothing.
func dropIdle(c *fd.Copier, v view, path string) error {
	shown, err := v.find(path)
	if err != nil || shown != nil {
		return err
	}
	if i, err := c.Lstat(path); err != nil || !i.IsWhiteout() {
		return ignoreMissing(err)
	}
	return removeUnnoticed(c, path)
}

// removeUnnoticed removes a file, and leaves its directory the time that it has.
func removeUnnoticed(c *fd.Copier, path string) error {
	parent, _ := fd.Split(path)
	if parent == "" {
		parent = "."
	}
	dir, err := c.Lstat(parent)
	if err != nil {
		return err
	}
	if err := c.Remove(path); err != nil {
		return err
	}
	return c.Touch(parent, dir.Modified)
}

func likeShown(c *fd.Copier, v view, path string) error {
	if path == "." {
		if len(v) == 0 {
			return nil
		}
		return c.CopyRoot(v[0], overlayXattr) // each layer's root was made like the one below it
	}
	shown, err := v.find(path)
	if err != nil || shown == nil {
		return err
	}
	switch {
	case shown.info.IsSymlink():
		return errs.New(errs.InvalidArgument, "a layer has files below %q, which is a symbolic link in a layer beneath it", "/"+path).
			WithHint("build the image again with a tool that writes the directory that the link leads to")
	case !shown.info.IsDir():
		return nil // it takes the file's place
	}
	dirPath, name := fd.Split(path)
	dir, err := dirIn(shown.root, dirPath)
	if err != nil {
		return err
	}
	defer dir.Close()
	return c.Merge(fd.Entry{Path: path, Name: name, Dir: dir, Info: shown.info}, overlayXattr)
}

// PutImage keeps an image whose layers were imported. Idempotent. Kinds: NotFound (a layer is missing).
func (s *Store) PutImage(ctx context.Context, img Image) error {
	if !validHex(img.ID) || len(img.Layers) == 0 || len(img.Layers) > maxImageLayers {
		return errs.New(errs.InvalidArgument, "image %q with %d layers can't be kept: between 1 and %d are possible",
			img.ID, len(img.Layers), maxImageLayers)
	}
	if have, err := s.Image(img.ID); err == nil && slices.Equal(have.Layers, img.Layers) {
		return nil
	}
	tmp, err := os.MkdirTemp(s.templateDir(), tmpPrefix+imagePrefix)
	if err != nil {
		return err
	}
	defer func() { s.warnIf("remove an image that was not kept", removeTree(tmp)) }()
	for _, id := range img.Layers {
		if _, _, err := s.ImportedLayer(id); err != nil {
			return err
		}
	}
	if img.Merged = len(img.Layers) > maxShown; img.Merged {
		if err := s.mergeImported(ctx, img.Layers, tmp+"/root"); err != nil {
			return fmt.Errorf("merge the image's layers: %w", err)
		}
	}
	data, err := json.Marshal(img)
	if err != nil {
		return err
	}
	if err := durable.Replace(tmp+"/image.json", data); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.imageDir(img.ID)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	s.templates.mu.Lock()
	s.templates.images[img.ID] = img
	s.templates.mu.Unlock()
	return nil
}

// mergeImported makes dst what layers, the lowest first, show together.
func (s *Store) mergeImported(ctx context.Context, layers []string, dst string) error {
	if err := os.Mkdir(dst, 0o755); err != nil {
		return err
	}
	for _, id := range layers {
		if err := overlayOnto(ctx, s.importedDir(id)+"/root", dst); err != nil {
			return err
		}
	}
	dir, err := fd.OpenRoot(dst)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dropWhiteouts(ctx, dir); err != nil {
		return err
	}
	return fd.SyncFS(dir)
}

// dropWhiteouts removes every whiteout from a tree that lies on nothing.
func dropWhiteouts(ctx context.Context, root *os.File) error {
	var all []string
	err := fd.Walk(ctx, root, func(e fd.Entry) error {
		if e.Info.IsWhiteout() {
			all = append(all, e.Path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	c := fd.NewCopier(root)
	defer c.Close()
	for _, path := range all {
		if err := removeUnnoticed(c, path); err != nil {
			return err
		}
	}
	return nil
}

// removeTree removes a tree of anybody's making.
func removeTree(path string) error {
	parent, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	return fd.RemoveAll(parent, filepath.Base(path))
}

// neededTemplatesLocked adds to what is in use, by the names of directories, what that needs, and forgets images
// that nothing needs.
func (s *Store) neededTemplatesLocked(used map[string]bool) {
	t := &s.templates
	for _, st := range t.stored {
		if st.Image != "" {
			used[imagePrefix+st.Image] = true
		}
	}
	for id, img := range t.images {
		if !used[imagePrefix+id] {
			delete(t.images, id)
			continue
		}
		for _, l := range img.Layers {
			used[layerPrefix+l] = true
		}
	}
}
