package oci

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/rootfs"
)

// Source is what goes out: a template, or a committed layer with what people know of its commit.
type Source struct {
	Template string
	Layer    string
	// Commit and Message are the commit's id and message.
	Commit, Message string
	// Settings are what the commit's sandbox was given; nil: what its template says.
	Settings *rootfs.Settings
}

// built is an image whose layers' archives are files here.
type built struct {
	kind        types.MediaType
	rawManifest []byte
	rawConfig   []byte
	manifest    *v1.Manifest
	diffs       []v1.Hash
	paths       map[v1.Hash]string
	tree        string // the digest of the tree that the layers show, as the manifest has it; "": it has none
}

var _ partial.CompressedImageCore = (*built)(nil)

// RawConfigFile implements partial.CompressedImageCore.
func (b *built) RawConfigFile() ([]byte, error) { return b.rawConfig, nil }

// MediaType implements partial.CompressedImageCore.
func (b *built) MediaType() (types.MediaType, error) { return b.kind, nil }

// RawManifest implements partial.CompressedImageCore.
func (b *built) RawManifest() ([]byte, error) { return b.rawManifest, nil }

// LayerByDigest implements partial.CompressedImageCore.
func (b *built) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, d := range b.manifest.Layers {
		if d.Digest == h {
			return &builtLayer{d, b.paths[h]}, nil
		}
	}
	if h == b.manifest.Config.Digest {
		return partial.ConfigLayer(b)
	}
	return nil, fmt.Errorf("the image has no layer %s", h)
}

// builtLayer is one of its layers.
type builtLayer struct {
	desc v1.Descriptor
	path string
}

// Digest implements partial.CompressedLayer.
func (l *builtLayer) Digest() (v1.Hash, error) { return l.desc.Digest, nil }

// Compressed implements partial.CompressedLayer.
func (l *builtLayer) Compressed() (io.ReadCloser, error) { return os.Open(l.path) }

// Size implements partial.CompressedLayer.
func (l *builtLayer) Size() (int64, error) { return l.desc.Size, nil }

// MediaType implements partial.CompressedLayer.
func (l *builtLayer) MediaType() (types.MediaType, error) { return l.desc.MediaType, nil }

// build makes an image of a template or a commit. What was imported goes out as it came in, layer by layer, and the
// whole of it where nothing was added. The image is there until done is called.
func (s *Service) build(ctx context.Context, src Source, t *tracker) (_ *built, done func(), err error) {
	stack, release, err := s.cfg.Store.Stack(rootfs.StackOf{Layer: src.Layer, Template: src.Template})
	if err != nil {
		return nil, nil, err
	}
	defer release()
	note := s.imageBelow(stack.Image)
	if b := s.asImported(stack, src, note); b != nil {
		return b, func() {}, nil
	}
	dir, err := os.MkdirTemp(s.workDir(), "build-")
	if err != nil {
		return nil, nil, err
	}
	done = func() {
		if err := os.RemoveAll(dir); err != nil {
			s.log.Warn("remove what was packed", "error", err)
		}
	}
	b, err := s.packed(ctx, dir, stack, src, note, t)
	if err != nil {
		done()
		return nil, nil, err
	}
	return b, done, nil
}

// imageBelow returns what is kept of an imported image; nil where there is none.
func (s *Service) imageBelow(id string) *imageNote {
	if id == "" {
		return nil
	}
	img, err := s.cfg.Store.Image(id)
	if err != nil {
		return nil
	}
	var n imageNote
	if err := json.Unmarshal(img.Extra, &n); err != nil {
		return nil
	}
	return &n
}

// asImported returns an imported image as it came in; nil where something was added, or an archive is gone.
func (s *Service) asImported(stack rootfs.Stack, src Source, note *imageNote) *built {
	if note == nil || src.Layer != "" {
		return nil
	}
	for _, l := range stack.Layers {
		if l.Imported == "" {
			return nil
		}
	}
	c, err := parseManifest(note.Kind, note.Manifest, 1<<62)
	if err != nil || c.withConfig(note.Config) != nil {
		return nil
	}
	b := &built{
		kind: note.Kind, rawManifest: note.Manifest, rawConfig: note.Config, manifest: c.manifest,
		diffs: c.config.RootFS.DiffIDs, paths: map[v1.Hash]string{}, tree: c.tree(),
	}
	for _, d := range c.manifest.Layers {
		if !s.hasBlob(d.Digest) {
			return nil
		}
		b.paths[d.Digest] = s.blobPath(d.Digest)
	}
	return b
}

// packedLayer is one layer on its way out.
type packedLayer struct {
	desc v1.Descriptor
	diff v1.Hash
	path string
}

// packed packs the layers that did not come in as archives, and writes the configuration and the manifest.
func (s *Service) packed(ctx context.Context, dir string, stack rootfs.Stack, src Source, note *imageNote, t *tracker) (*built, error) {
	t.set(StepPack)
	all := make([]packedLayer, len(stack.Layers))
	dirs := make([]string, len(stack.Layers))
	var tree rootfs.Digest
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for i, l := range stack.Layers {
		dirs[i] = l.Dir
		g.Go(func() (err error) {
			all[i], err = s.outgoing(gctx, dir, i, l, t)
			return err
		})
	}
	g.Go(func() (err error) {
		tree, err = s.cfg.Store.TreeDigest(gctx, dirs)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	cf := configFile(stack, src, note, all)
	b := &built{kind: types.OCIManifestSchema1, paths: map[v1.Hash]string{}, diffs: cf.RootFS.DiffIDs, tree: tree.Text}
	var err error
	if b.rawConfig, err = json.Marshal(cf); err != nil {
		return nil, err
	}
	b.manifest = &v1.Manifest{
		SchemaVersion: 2, MediaType: b.kind,
		Config:      v1.Descriptor{MediaType: types.OCIConfigJSON, Digest: digestOf(b.rawConfig), Size: int64(len(b.rawConfig))},
		Annotations: map[string]string{treeDigest: b.tree},
	}
	for _, l := range all {
		b.manifest.Layers = append(b.manifest.Layers, l.desc)
		b.paths[l.desc.Digest] = l.path
	}
	b.rawManifest, err = json.Marshal(b.manifest)
	return b, err
}

// outgoing returns a layer as it came in, or packs it.
func (s *Service) outgoing(ctx context.Context, dir string, i int, l rootfs.StackLayer, t *tracker) (packedLayer, error) {
	if l.Imported != "" {
		if n, err := s.layerNote(l.Imported); err == nil && s.hasBlob(n.Digest) {
			kind := types.OCILayer
			switch n.Kind {
			case types.OCILayerZStd, types.OCIUncompressedLayer:
				kind = n.Kind
			case types.DockerUncompressedLayer:
				kind = types.OCIUncompressedLayer
			}
			return packedLayer{desc: v1.Descriptor{MediaType: kind, Digest: n.Digest, Size: n.Size}, diff: n.DiffID, path: s.blobPath(n.Digest)}, nil
		}
	}
	track := t.add("", 0)
	path := fmt.Sprintf("%s/%d", dir, i)
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return packedLayer{}, err
	}
	p, err := packTo(ctx, l.Dir, out, track)
	p.path = path
	return p, errors.Join(err, out.Close())
}

// packTo writes a layer's archive, compressed, and tells what it is. The same layer gives the same bytes.
func packTo(ctx context.Context, dir string, out io.Writer, track *layerTrack) (packedLayer, error) {
	root, err := fd.OpenRoot(dir)
	if err != nil {
		return packedLayer{}, err
	}
	defer root.Close()
	diff, sum := sha256.New(), sha256.New()
	counted := &counter{w: io.MultiWriter(out, sum)}
	z, err := gzip.NewWriterLevel(counted, gzip.DefaultCompression)
	if err != nil {
		return packedLayer{}, err
	}
	err = layer.Pack(ctx, root, io.MultiWriter(diff, z, &counter{w: io.Discard, seen: func(n int64) { track.unpacked.Store(n) }}))
	if err != nil {
		return packedLayer{}, err
	}
	if err := z.Close(); err != nil {
		return packedLayer{}, err
	}
	hash := func(b []byte) v1.Hash { return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(b)} }
	return packedLayer{
		desc: v1.Descriptor{MediaType: types.OCILayer, Digest: hash(sum.Sum(nil)), Size: counted.n},
		diff: hash(diff.Sum(nil)),
	}, nil
}

// counter counts what is written.
type counter struct {
	w    io.Writer
	n    int64
	seen func(int64)
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	if c.seen != nil {
		c.seen(c.n)
	}
	return n, err
}

// configFile makes an image's configuration. Nothing in it changes from one export to the next.
func configFile(stack rootfs.Stack, src Source, note *imageNote, all []packedLayer) *v1.ConfigFile {
	host := hostPlatform()
	cf := &v1.ConfigFile{OS: host.OS, Architecture: host.Architecture, Config: configOf(stack.Settings)}
	below := 0
	if note != nil {
		if base, err := v1.ParseConfigFile(bytes.NewReader(note.Config)); err == nil {
			below = len(base.RootFS.DiffIDs)
			cf.History = base.History
			if src.Layer != "" { // a sandbox's settings hold no more than what holds at run time
				cf.Config = base.Config
			}
			cf.Variant, cf.OSVersion = base.Variant, base.OSVersion
		}
	}
	if src.Settings != nil {
		cf.Config = configOf(*src.Settings)
	}
	if told(cf.History) != below { // a history that does not fit is none
		cf.History = nil
		for range below {
			cf.History = append(cf.History, v1.History{CreatedBy: "imported"})
		}
	}
	cf.RootFS.Type = "layers"
	for i, l := range all {
		cf.RootFS.DiffIDs = append(cf.RootFS.DiffIDs, l.diff)
		if i < below {
			continue
		}
		h := v1.History{CreatedBy: "casemate", Created: v1.Time{Time: stack.Layers[i].Made.UTC().Truncate(time.Second)}}
		if i == len(all)-1 && src.Commit != "" {
			h.CreatedBy, h.Comment = "casemate commit "+src.Commit, src.Message
		}
		cf.History = append(cf.History, h)
		cf.Created = h.Created
	}
	return cf
}

// told counts the layers that a history tells of.
func told(all []v1.History) (n int) {
	for _, h := range all {
		if !h.EmptyLayer {
			n++
		}
	}
	return n
}
