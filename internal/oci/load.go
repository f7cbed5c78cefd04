package oci

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"path"
	"strings"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/oci/registry"
)

// Import reads an archive of an image, an OCI layout or what docker save writes, as a tar archive that may be
// compressed, and makes a template of the image. name is the template's; "": the image's.
// Kinds: InvalidArgument, Unsupported, TooLarge, ResourceExhausted.
func (s *Service) Import(ctx context.Context, r io.Reader, name string, progress func(Progress)) (Imported, error) {
	defer s.begin()()
	t, stop := s.track(ctx, progress)
	defer stop()
	t.set(StepFetch)
	a, err := s.readArchive(ctx, r, t)
	if err != nil {
		return Imported{}, err
	}
	c, own, err := a.image(s.maxBytes())
	if err != nil {
		return Imported{}, err
	}
	if name, err = templateName(name, own); err != nil {
		return Imported{}, err
	}
	there := func(_ context.Context, d v1.Descriptor, done *atomic.Int64) error {
		if !s.hasBlob(d.Digest) {
			return badImage("the archive lacks the layer %s", d.Digest)
		}
		done.Store(d.Size)
		return nil
	}
	t.count(0, 0)
	current := &atomic.Pointer[tracker]{}
	warnings, err := s.importShared(ctx, c, there, t, current)
	if err != nil {
		return Imported{}, err
	}
	return s.name(c, name, own, warnings)
}

// archived is what an archive holds.
type archived struct {
	small map[string][]byte // what may be JSON, by its path
	blobs map[string]v1.Descriptor
	links map[string]string
}

// maxMembers bounds the files of an archive: layers, configurations and what older versions of docker add.
const maxMembers = 4096

// readArchive keeps the files of an archive: large ones as blobs, small ones in memory as well.
func (s *Service) readArchive(ctx context.Context, r io.Reader, t *tracker) (*archived, error) {
	plain, err := layer.Decompress(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = plain.Close() }()
	a := &archived{small: map[string][]byte{}, blobs: map[string]v1.Descriptor{}, links: map[string]string{}}
	in := tar.NewReader(plain)
	var sum, kept int64
	for n := 0; ; n++ {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return a, nil
		}
		if err != nil {
			return nil, errs.Wrap(err, errs.InvalidArgument, "the file is no archive of an image, or damaged: %v", err)
		}
		name := path.Clean("/" + h.Name)[1:]
		sum += h.Size
		switch {
		case n > maxMembers:
			return nil, errs.New(errs.TooLarge, "the archive holds more than %d files: it is no image's", maxMembers)
		case sum > s.maxBytes():
			return nil, errs.New(errs.TooLarge, "the image is larger than %d MB", s.maxBytes()>>20).
				WithHint("if you trust it, start the server with a larger --max-image-size")
		case h.Typeflag == tar.TypeSymlink || h.Typeflag == tar.TypeLink: // docker's for layers that are equal
			a.links[name] = path.Clean("/" + path.Join(path.Dir(name), h.Linkname))[1:]
			if h.Typeflag == tar.TypeLink {
				a.links[name] = path.Clean("/" + h.Linkname)[1:]
			}
			continue
		case h.Typeflag != tar.TypeReg:
			continue
		}
		if err := errors.Join(ctx.Err(), s.room(h.Size)); err != nil {
			return nil, err
		}
		if kept, err = s.member(a, name, h.Size, kept, in); err != nil {
			return nil, err
		}
		t.count(sum, 0)
	}
}

// maxSmall bounds what is kept in memory of an archive.
const maxSmall = 32 << 20

// member keeps one file of an archive. kept counts what is in memory.
func (s *Service) member(a *archived, name string, size, kept int64, in io.Reader) (int64, error) {
	var want *v1.Hash
	if rest, ok := strings.CutPrefix(name, blobPrefix); ok && len(rest) == 64 {
		want = &v1.Hash{Algorithm: "sha256", Hex: rest}
	}
	head := bufio.NewReader(in)
	first, _ := head.Peek(4)
	if len(first) > 0 && (first[0] == '{' || first[0] == '[') && size <= registry.MaxManifest && kept+size <= maxSmall {
		data, err := io.ReadAll(head)
		switch {
		case err != nil:
			return kept, damaged(err, name)
		case want != nil && digestOf(data) != *want:
			return kept, badImage("the archive's blob %s is damaged", want)
		case json.Valid(data):
			a.small[name] = data
			return kept + size, nil
		}
		head = bufio.NewReader(bytes.NewReader(data)) // a layer may begin with a file of such a name
	}
	h, n, err := s.takeBlob(head, want)
	if err != nil {
		return kept, damaged(err, name)
	}
	kind := types.OCIUncompressedLayer
	switch {
	case bytes.HasPrefix(first, []byte{0x1f, 0x8b}):
		kind = types.OCILayer
	case bytes.HasPrefix(first, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		kind = types.OCILayerZStd
	}
	a.blobs[name] = v1.Descriptor{Digest: h, Size: n, MediaType: kind}
	return kept, nil
}

func damaged(err error, name string) error {
	if errs.KindOf(err) != errs.Internal {
		return err
	}
	return errs.Wrap(err, errs.InvalidArgument, "the archive's file %.100q can't be read", name)
}

// image finds the image of an archive, and its own name; "": it says none.
func (a *archived) image(bytesMax int64) (*contents, string, error) {
	if index, ok := a.small[indexFile]; ok {
		return a.ociImage(index, bytesMax)
	}
	if list, ok := a.small[dockerFile]; ok {
		return a.dockerImage(list, bytesMax)
	}
	return nil, "", badImage("the file is no archive of an image: it holds neither %s nor %s", indexFile, dockerFile)
}

// ociImage finds the image of an OCI layout that is for this machine.
func (a *archived) ociImage(raw []byte, bytesMax int64) (*contents, string, error) {
	for range 3 { // an index may list an index
		d, err := choose(raw, true)
		if err != nil {
			return nil, "", err
		}
		own := d.Annotations[containerdID]
		if own == "" {
			own = d.Annotations[refName]
		}
		data, ok := a.small[blobPrefix+d.Digest.Hex]
		if !ok {
			return nil, "", badImage("the archive lacks the manifest %s", d.Digest)
		}
		if d.MediaType.IsIndex() {
			raw = data
			continue
		}
		c, err := parseManifest(d.MediaType, data, bytesMax)
		if err != nil {
			return nil, "", err
		}
		config, ok := a.small[blobPrefix+c.manifest.Config.Digest.Hex]
		if !ok {
			return nil, "", badImage("the archive lacks the configuration %s", c.manifest.Config.Digest)
		}
		return c, shortName(own), c.withConfig(config)
	}
	return nil, "", badImage("the archive's indexes are nested too deep")
}

// shortName is an image's name as people write it; "" where it is none.
func shortName(s string) string {
	r, err := registry.ParseRef(s)
	if s == "" || err != nil {
		return ""
	}
	return r.Short()
}

// dockerImage finds the image of docker's list, and writes the manifest that it lacks.
func (a *archived) dockerImage(raw []byte, bytesMax int64) (*contents, string, error) {
	var list []dockerImage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, "", errs.Wrap(err, errs.InvalidArgument, "the archive's %s can't be read", dockerFile)
	}
	if len(list) != 1 {
		return nil, "", badImage("the archive holds %d images; save one at a time", len(list))
	}
	config, ok := a.small[path.Clean("/" + list[0].Config)[1:]]
	if !ok {
		return nil, "", badImage("the archive lacks the configuration %.100q", list[0].Config)
	}
	m := v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: types.OCIConfigJSON, Digest: digestOf(config), Size: int64(len(config))},
	}
	for _, name := range list[0].Layers {
		d, ok := a.find(path.Clean("/" + name)[1:])
		if !ok {
			return nil, "", badImage("the archive lacks the layer %.100q", name)
		}
		m.Layers = append(m.Layers, d)
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		return nil, "", err
	}
	c, err := parseManifest(m.MediaType, manifest, bytesMax)
	if err != nil {
		return nil, "", err
	}
	own := ""
	if len(list[0].RepoTags) > 0 {
		own = shortName(list[0].RepoTags[0])
	}
	return c, own, c.withConfig(config)
}

// find follows links between files of the archive.
func (a *archived) find(name string) (v1.Descriptor, bool) {
	for range 8 {
		if d, ok := a.blobs[name]; ok {
			return d, true
		}
		name = a.links[name]
	}
	return v1.Descriptor{}, false
}
