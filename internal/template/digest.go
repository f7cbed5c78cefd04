package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
)

// uncompared reports whether a path is left out of digests: indexes and caches of package managers, which change
// with every look at a registry and are no part of what was installed.
func uncompared(p string) bool {
	for _, dir := range []string{"/var/lib/apt/lists", "/var/cache/apt", "/var/lib/apt/periodic", "/root/.npm", "/root/.cache"} {
		if p == dir || strings.HasPrefix(p, dir+"/") {
			return true
		}
	}
	if rest, ok := strings.CutPrefix(p, "/home/"); ok {
		_, rest, _ = strings.Cut(rest, "/")
		for _, dir := range []string{".npm", ".cache"} {
			if rest == dir || strings.HasPrefix(rest, dir+"/") {
				return true
			}
		}
	}
	return false
}

// changed returns what differs between two commits. Its digest is of names, types, modes, owners, contents, the
// targets of links, extended attributes. Times are not in it, nor what uncompared names.
func (x *execution) changed(ctx context.Context, from, to string, archives map[[2]string]string) (keptStep, error) {
	changes, err := x.b.m.Compare(ctx, x.p, from, to)
	if err != nil {
		return keptStep{}, err
	}
	t, err := x.b.m.CommitTree(ctx, x.p, to)
	if err != nil {
		return keptStep{}, err
	}
	defer t.Close()
	var out keptStep
	if out.Digest, err = digestChanges(ctx, t, changes); err != nil {
		return out, err
	}
	out.Brings, err = x.brings(ctx, from, t, changes, archives)
	return out, err
}

func digestChanges(ctx context.Context, t *rootfs.Tree, changes []sandbox.Change) (string, error) {
	h := sha256.New()
	for _, c := range changes {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		if uncompared(c.Path) {
			continue
		}
		if c.Op == "removed" {
			fmt.Fprintf(h, "removed %q\n", c.Path)
			continue
		}
		p, ok := guestwire.Unescape(c.Path)
		if !ok {
			return "", fmt.Errorf("the path %q is malformed", c.Path)
		}
		if err := digestFile(h, t, strings.TrimPrefix(p, "/")); err != nil {
			return "", err
		}
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

func digestFile(h io.Writer, t *rootfs.Tree, p string) error {
	f, err := t.Lstat(p)
	if err != nil {
		return err
	}
	fmt.Fprintf(h, "%s %q %o %d:%d %q %d\n", f.Type, p, f.Mode, f.UID, f.GID, f.Target, f.Size)
	attrs, err := t.Attrs(p)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(attrs)) {
		fmt.Fprintf(h, "attr %q %x\n", name, attrs[name])
	}
	if f.Type != "file" {
		return nil
	}
	in, err := t.Open(p)
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = io.Copy(h, in)
	return err
}
