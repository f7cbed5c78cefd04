package envd

import (
	"context"
	"io/fs"
	"path"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/filesystem"
)

// metadataPrefix begins the extended attributes that hold a file's metadata.
const metadataPrefix = "user.e2b."

// asker says who asks for a file: with the protocol, file calls ask no permission inside, and what they
// make belongs to the user. A relative path starts at the sandbox's working directory; one of a user
// whom the sandbox does not have by default, at that one's home.
func (h *Handler) asker(ctx context.Context, c *call) (sandbox.Asker, error) {
	a := sandbox.Asker{User: c.user, Privileged: true}
	sb, err := h.m.Get(ctx, c.p, c.sandbox)
	if c.user == "" || c.user == sb.Spec.User {
		a.Dir = sb.Spec.Dir
	}
	return a, err
}

// pathRequest names a file as the protocol does. An empty path is the working directory.
func (h *Handler) pathRequest(ctx context.Context, c *call, p string, follow bool) (sandbox.PathRequest, error) {
	r := sandbox.PathRequest{Path: p, Follow: follow, Resolve: true, Attributes: metadataPrefix}
	if p == "" {
		r.Path = "."
	}
	var err error
	r.Asker, err = h.asker(ctx, c)
	return r, err
}

// shown returns a request's path as messages show it.
func shown(r sandbox.PathRequest) string {
	switch {
	case path.IsAbs(r.Path):
		return path.Clean(r.Path)
	case r.Dir != "" && r.Path != "~" && !strings.HasPrefix(r.Path, "~/"):
		return path.Join(r.Dir, r.Path)
	}
	return r.Path
}

// emptyDir is what a directory takes where its file system says that it takes nothing.
const emptyDir = 4096

// entryOf describes a file. A symbolic link is described itself, but with the type and the permissions
// of what it leads to.
func entryOf(f sandbox.FileInfo) *filesystem.EntryInfo {
	e := &filesystem.EntryInfo{
		Name: f.Name, Path: f.Path, Type: typeOf(f.Type), Size: f.Size, Mode: f.Mode & 0o777,
		Permissions: permissions(f), Owner: f.Owner, Group: f.Group,
		ModifiedTime: timestamppb.New(time.Unix(0, f.MTime)), Metadata: f.Attributes,
	}
	if f.Owner == "" {
		e.Owner = itoa(f.UID)
	}
	if f.Group == "" {
		e.Group = itoa(f.GID)
	}
	switch {
	case f.Type == "dir" && f.Size == 0:
		e.Size = emptyDir
	case f.Type == "symlink" && f.LeadsTo != nil:
		e.SymlinkTarget, e.Type, e.Mode = &f.LeadsTo.Path, typeOf(f.LeadsTo.Type), f.LeadsTo.Mode&0o777
	case f.Type == "symlink":
		e.SymlinkTarget, e.Type, e.Mode = &f.Path, filesystem.FileType_FILE_TYPE_UNSPECIFIED, 0
	}
	return e
}

func typeOf[T ~string](t T) filesystem.FileType {
	switch t {
	case "file":
		return filesystem.FileType_FILE_TYPE_FILE
	case "dir":
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case "symlink":
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

// permissions returns a file's mode as Go prints it.
func permissions(f sandbox.FileInfo) string {
	mode := fs.FileMode(f.Mode & 0o777)
	for _, b := range []struct {
		bit  uint32
		flag fs.FileMode
	}{{0o4000, fs.ModeSetuid}, {0o2000, fs.ModeSetgid}, {0o1000, fs.ModeSticky}} {
		if f.Mode&b.bit != 0 {
			mode |= b.flag
		}
	}
	switch f.Type {
	case "dir":
		mode |= fs.ModeDir
	case "symlink":
		mode |= fs.ModeSymlink
	case "other":
		mode |= fs.ModeIrregular
	}
	return mode.String()
}
