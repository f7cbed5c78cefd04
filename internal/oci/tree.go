package oci

import (
	"context"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"casemate.dev/internal/errs"
)

// treeDigest is the annotation of a manifest that holds the digest of the files which the image's layers show
// together (rootfs.Store's TreeDigest). Digests of archives say that these are the same bytes; this one says that
// what they unpack to is the same tree, whatever unpacks it, and however it is spread over layers.
const treeDigest = "dev.casemate.tree-digest"

// tree returns the digest of the tree that the image says it has; "": it says none.
func (c *contents) tree() string { return c.manifest.Annotations[treeDigest] }

// checkTree reads what an image's layers, the lowest first, show, and holds it against what the image says of it.
// Kinds: InvalidArgument.
func (s *Service) checkTree(ctx context.Context, c *contents, ids []string) error {
	want := c.tree()
	if want == "" {
		return nil
	}
	if _, err := s.cfg.Store.Image(c.digest.Hex); err == nil { // it was checked when it came in
		return nil
	}
	if _, err := v1.NewHash(want); err != nil {
		return badImage("the image's annotation %s is no digest: %.100q", treeDigest, want)
	}
	dirs := make([]string, len(ids))
	for i, id := range ids {
		_, dir, err := s.cfg.Store.ImportedLayer(id)
		if err != nil {
			return err
		}
		dirs[i] = dir
	}
	got, err := s.cfg.Store.TreeDigest(ctx, dirs)
	if err != nil {
		return err
	}
	if got.Text != want {
		return errs.New(errs.InvalidArgument, "the image's files have the digest %s, and the image says %s: they are not what was exported", got.Text, want).
			WithHint("export it again; a tool that changed the image on purpose must take the annotation %s off its manifest", treeDigest)
	}
	return nil
}
