package oci

import (
	"context"
	"io"
	"sync/atomic"

	"github.com/google/go-containerregistry/pkg/v1/partial"

	"casemate.dev/internal/oci/registry"
)

// Exported is what went out.
type Exported struct {
	// Digest is the image's: its manifest's.
	Digest string
	// Tree is the digest of the files that it shows, as rootfs.Store's TreeDigest; "": what came in without one
	// goes out without one.
	Tree string
	// Size is that of its layers' archives together, Layers how many they are.
	Size   int64
	Layers int
}

func (b *built) exported() Exported {
	e := Exported{Digest: digestOf(b.rawManifest).String(), Tree: b.tree, Layers: len(b.manifest.Layers)}
	for _, d := range b.manifest.Layers {
		e.Size += d.Size
	}
	return e
}

// Push puts a template or a commit into a registry. What is there already is not sent again.
// Kinds: those of Pull, and FailedPrecondition (it holds what no image can, or stands on this machine's files).
func (s *Service) Push(ctx context.Context, src Source, ref string, auth Auth, progress func(Progress)) (Exported, error) {
	r, err := registry.ParseRef(ref)
	if err != nil {
		return Exported{}, err
	}
	defer s.begin()()
	t, stop := s.track(ctx, progress)
	defer stop()
	if auth, err = s.authFor(r, auth); err != nil {
		return Exported{}, err
	}
	// Before the work of packing: whether it can go there at all.
	repo, err := s.remote.Open(ctx, r, auth, true)
	if err != nil {
		return Exported{}, err
	}
	b, done, err := s.build(ctx, src, t)
	if err != nil {
		return Exported{}, err
	}
	defer done()
	img, err := partial.CompressedToImage(b)
	if err != nil {
		return Exported{}, err
	}
	t.set(StepPush)
	if err := repo.Push(ctx, img, t.count); err != nil {
		return Exported{}, err
	}
	return b.exported(), nil
}

// track begins to tell of an operation's progress.
func (s *Service) track(ctx context.Context, progress func(Progress)) (t *tracker, stop func()) {
	t = &tracker{step: StepResolve}
	current := &atomic.Pointer[tracker]{}
	current.Store(t)
	return t, tell(ctx, current, progress)
}

// ExportOptions go with an Export.
type ExportOptions struct {
	// Docker adds what docker load reads, beside the OCI layout.
	Docker bool
	// Name is what the image is called in the archive; "": the template's, or the commit's id.
	Name string
}

// Export writes a template or a commit as an archive: an OCI layout, with what docker load reads if that is asked
// for. ready is called once it is certain that there is something to write.
// Kinds: as Push.
func (s *Service) Export(ctx context.Context, src Source, o ExportOptions, w io.Writer, ready func(Exported) error) (Exported, error) {
	defer s.begin()()
	b, done, err := s.build(ctx, src, &tracker{})
	if err != nil {
		return Exported{}, err
	}
	defer done()
	e := b.exported()
	if err := ready(e); err != nil {
		return e, err
	}
	return e, writeArchive(ctx, w, b, o)
}
