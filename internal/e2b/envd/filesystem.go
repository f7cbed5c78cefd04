package envd

import (
	"context"
	"path"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/filesystem"
	"casemate.dev/proto/e2b/filesystem/filesystemconnect"
)

// files implements E2B's service Filesystem.
type files struct{ *Handler }

var _ filesystemconnect.FilesystemHandler = (*files)(nil)

// maxDepth is the guest's bound of a list's depth.
const maxDepth = 128

// open returns access to a sandbox's files, and a request for a path in it.
func (s *files) open(ctx context.Context, p string, follow bool) (*sandbox.Files, sandbox.PathRequest, *call, error) {
	c := callOf(ctx)
	fs, err := s.m.Files(ctx, c.p, c.sandbox)
	if err != nil {
		return nil, sandbox.PathRequest{}, c, s.rpcError(ctx, "files", err)
	}
	r, err := s.pathRequest(ctx, c, p, follow)
	return fs, r, c, s.rpcError(ctx, "files", err)
}

// fault says what went wrong with a file. missing is what is said where it is not there.
func (s *files) fault(ctx context.Context, c *call, err error, missing, p string) error {
	switch {
	case s.unknownUser(ctx, c, err):
		return invalidUsername(c.user)
	case errs.Is(err, errs.NotFound):
		return refuse(connect.CodeNotFound, "%s: %s", missing, p)
	}
	return s.rpcError(ctx, "files", err)
}

// Stat implements FilesystemHandler.
func (s *files) Stat(ctx context.Context, req *filesystem.StatRequest) (*filesystem.StatResponse, error) {
	fs, r, c, err := s.open(ctx, req.GetPath(), false)
	if err != nil {
		return nil, err
	}
	f, err := fs.Stat(ctx, r)
	if err != nil {
		return nil, s.fault(ctx, c, err, "file not found", shown(r))
	}
	return &filesystem.StatResponse{Entry: entryOf(f)}, nil
}

// MakeDir implements FilesystemHandler.
func (s *files) MakeDir(ctx context.Context, req *filesystem.MakeDirRequest) (*filesystem.MakeDirResponse, error) {
	fs, r, c, err := s.open(ctx, req.GetPath(), true)
	if err != nil {
		return nil, err
	}
	switch f, err := fs.Stat(ctx, r); {
	case err == nil && f.Type == "dir":
		return nil, refuse(connect.CodeAlreadyExists, "directory already exists: %s", shown(r))
	case err == nil:
		return nil, refuse(connect.CodeInvalidArgument, "path already exists but it is not a directory: %s", shown(r))
	case !errs.Is(err, errs.NotFound):
		return nil, s.fault(ctx, c, err, "", "")
	}
	f, err := fs.MakeDir(ctx, sandbox.MakeDirRequest{PathRequest: r, Parents: true})
	if err != nil {
		return nil, s.fault(ctx, c, err, "path not found", shown(r))
	}
	return &filesystem.MakeDirResponse{Entry: entryOf(f)}, nil
}

// Move implements FilesystemHandler.
func (s *files) Move(ctx context.Context, req *filesystem.MoveRequest) (*filesystem.MoveResponse, error) {
	fs, r, c, err := s.open(ctx, req.GetSource(), false)
	if err != nil {
		return nil, err
	}
	if req.GetSource() == "" || req.GetDestination() == "" {
		return nil, refuse(connect.CodeInvalidArgument, "a move needs a source and a destination")
	}
	move := sandbox.MoveRequest{PathRequest: r, To: req.GetDestination(), Overwrite: true}
	f, err := fs.Move(ctx, move)
	if errs.Is(err, errs.NotFound) {
		// Either is not there: the source, or the directory that is to hold it.
		if _, err := fs.Stat(ctx, r); err != nil {
			return nil, s.fault(ctx, c, err, "source file not found", shown(r))
		}
		parent := r
		parent.Path, parent.Follow = path.Dir(move.To), true
		if _, err := fs.MakeDir(ctx, sandbox.MakeDirRequest{PathRequest: parent, Parents: true}); err != nil {
			return nil, s.fault(ctx, c, err, "path not found", shown(parent))
		}
		f, err = fs.Move(ctx, move)
	}
	if err != nil {
		return nil, s.fault(ctx, c, err, "source file not found", shown(r))
	}
	return &filesystem.MoveResponse{Entry: entryOf(f)}, nil
}

// ListDir implements FilesystemHandler.
func (s *files) ListDir(ctx context.Context, req *filesystem.ListDirRequest) (*filesystem.ListDirResponse, error) {
	fs, r, c, err := s.open(ctx, req.GetPath(), true)
	if err != nil {
		return nil, err
	}
	resp := &filesystem.ListDirResponse{}
	depth := int(min(max(req.GetDepth(), 1), maxDepth))
	err = fs.List(ctx, sandbox.ListRequest{PathRequest: r, Depth: depth}, func(f sandbox.FileInfo) error {
		resp.Entries = append(resp.Entries, entryOf(f))
		return nil
	})
	if err == nil {
		return resp, nil
	}
	if f, serr := fs.Stat(ctx, r); serr == nil && f.Type != "dir" {
		return nil, refuse(connect.CodeInvalidArgument, "path is not a directory: %s", shown(r))
	}
	link := r
	link.Follow = false
	if f, serr := fs.Stat(ctx, link); serr == nil && f.Type == "symlink" && !errs.Is(err, errs.NotFound) {
		return nil, refuse(connect.CodeFailedPrecondition, "path is a loop of symbolic links: %s", shown(r))
	}
	return nil, s.fault(ctx, c, err, "directory not found", shown(r))
}

// Remove implements FilesystemHandler.
func (s *files) Remove(ctx context.Context, req *filesystem.RemoveRequest) (*filesystem.RemoveResponse, error) {
	fs, r, c, err := s.open(ctx, req.GetPath(), false)
	if err != nil {
		return nil, err
	}
	err = fs.Remove(ctx, sandbox.RemoveRequest{PathRequest: r, Recursive: true})
	if err != nil && (!errs.Is(err, errs.NotFound) || s.unknownUser(ctx, c, err)) {
		return nil, s.fault(ctx, c, err, "path not found", shown(r))
	}
	return &filesystem.RemoveResponse{}, nil
}
