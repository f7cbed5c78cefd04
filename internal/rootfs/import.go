package rootfs

import (
	"context"
	"fmt"
	"os"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// whiteoutPrefix marks removed files in archives of layers (OCI image-spec, layer.md). In a tree that is
// used as a layer it is a name like any other, which later would read as a removal.
const whiteoutPrefix = ".wh."

// overlayXattr reports whether overlayfs obeys an attribute in a lower layer. A sandbox can't set them (the
// kernel escapes what it writes), but whoever made an imported tree can: with them a file would show
// another one's contents, or hide what lies below.
func overlayXattr(name string) bool {
	return strings.HasPrefix(name, "user.overlay.") || strings.HasPrefix(name, "trusted.overlay.")
}

// stripImported makes a tree that comes from elsewhere fit to be a layer: it removes overlayfs's
// attributes, refuses names that mean a removal, and refuses devices.
func stripImported(dir string) error {
	root, err := fd.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := stripXattrs(root, ".", dir); err != nil {
		return err
	}
	return fd.Walk(context.Background(), root, func(e fd.Entry) error {
		switch {
		case strings.HasPrefix(e.Name, whiteoutPrefix):
			return errs.New(errs.InvalidArgument, "a layer can't hold the name %q", e.Path)
		case e.Info.IsDevice():
			return errs.New(errs.InvalidArgument, "a layer can't hold the device %q", e.Path)
		}
		return stripXattrs(e.Dir, e.Name, e.Path)
	})
}

// stripXattrs removes overlayfs's attributes from one file; path is for errors.
func stripXattrs(dir *os.File, name, path string) error {
	names, err := fd.Xattrs(dir, name)
	if err != nil {
		return err
	}
	for _, x := range names {
		if !overlayXattr(x) {
			continue
		}
		if err := fd.RemoveXattr(dir, name, x); err != nil {
			return fmt.Errorf("strip %s from %s: %w", x, path, err)
		}
	}
	return nil
}
