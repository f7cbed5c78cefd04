package oci

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/oci/registry"
)

// The files of an archive: an OCI layout (image-spec, image-layout.md), and docker's list of images.
const (
	layoutFile   = "oci-layout"
	indexFile    = "index.json"
	dockerFile   = "manifest.json"
	blobPrefix   = "blobs/sha256/"
	layoutText   = `{"imageLayoutVersion":"1.0.0"}`
	refName      = "org.opencontainers.image.ref.name" // annotations.md
	containerdID = "io.containerd.image.name"          // docker and containerd take the name from here
)

// dockerImage is one entry of docker's list.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// writeArchive writes an image as a tar archive, the same way every time. The layers are files in it as they are.
func writeArchive(ctx context.Context, w io.Writer, b *built, o ExportOptions) error {
	out := tar.NewWriter(w)
	index, err := json.Marshal(indexOf(b, o.Name))
	if err != nil {
		return err
	}
	small := func(name string, data []byte) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(data)), Format: tar.FormatUSTAR}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		_, err := out.Write(data)
		return err
	}
	blob := func(h v1.Hash) string { return blobPrefix + h.Hex }
	for _, f := range []struct {
		name string
		data []byte
	}{
		{layoutFile, []byte(layoutText)},
		{indexFile, index},
		{blob(digestOf(b.rawManifest)), b.rawManifest},
		{blob(digestOf(b.rawConfig)), b.rawConfig},
	} {
		if err := small(f.name, f.data); err != nil {
			return err
		}
	}
	if o.Docker {
		d := dockerImage{Config: blob(digestOf(b.rawConfig))}
		if o.Name != "" {
			d.RepoTags = []string{o.Name}
		}
		for _, l := range b.manifest.Layers {
			d.Layers = append(d.Layers, blob(l.Digest))
		}
		list, err := json.Marshal([]dockerImage{d})
		if err != nil {
			return err
		}
		if err := small(dockerFile, list); err != nil {
			return err
		}
	}
	written := map[v1.Hash]bool{}
	for _, l := range b.manifest.Layers {
		if written[l.Digest] {
			continue
		}
		written[l.Digest] = true
		if err := copyBlob(ctx, out, blob(l.Digest), b.paths[l.Digest], l.Size); err != nil {
			return err
		}
	}
	return out.Close()
}

func copyBlob(ctx context.Context, out *tar.Writer, name, path string, size int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	format := tar.FormatUSTAR
	if size >= 8<<30 {
		format = tar.FormatPAX
	}
	if err := out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, Format: format}); err != nil {
		return err
	}
	if _, err := io.CopyN(out, f, size); err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return nil
}

func indexOf(b *built, name string) v1.IndexManifest {
	host := hostPlatform()
	d := v1.Descriptor{MediaType: b.kind, Digest: digestOf(b.rawManifest), Size: int64(len(b.rawManifest)), Platform: &host}
	if name != "" {
		d.Annotations = map[string]string{refName: name}
		if r, err := registry.ParseRef(name); err == nil {
			d.Annotations[containerdID] = r.String()
		}
	}
	return v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{d}}
}
