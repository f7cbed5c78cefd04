package api

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// files implements FileService.
type files struct{ *API }

var _ casematev1connect.FileServiceHandler = (*files)(nil)

// maxDepth bounds how deep one listing goes.
const maxDepth = 1 << 10

func pathRequest(user, path string) sandbox.PathRequest {
	return sandbox.PathRequest{Asker: sandbox.Asker{User: user}, Path: path}
}

// openFiles gives access to the files of the sandbox that a request names.
func (a *API) openFiles(ctx context.Context, id string) (*sandbox.Files, error) {
	return a.cfg.Manager.Files(ctx, principalOf(ctx), id)
}

func answerFile(f sandbox.FileInfo, err error) (*v1.File, error) {
	if err != nil {
		return nil, err
	}
	return fileMessage(f), nil
}

// StatFile implements FileServiceHandler.
func (h *files) StatFile(ctx context.Context, req *v1.StatFileRequest) (*v1.File, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	r := pathRequest(req.GetUser(), req.GetPath())
	r.Follow = req.GetFollow()
	return answerFile(fs.Stat(ctx, r))
}

// ListFiles implements FileServiceHandler.
func (h *files) ListFiles(ctx context.Context, req *v1.ListFilesRequest) (*v1.ListFilesResponse, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	if req.GetDepth() < 0 || req.GetDepth() > maxDepth {
		return nil, errs.New(errs.InvalidArgument, "depth must lie between 1 and %d", maxDepth)
	}
	resp := &v1.ListFilesResponse{}
	r := sandbox.ListRequest{PathRequest: pathRequest(req.GetUser(), req.GetPath()), Depth: max(1, int(req.GetDepth()))}
	size := 0
	err = fs.List(ctx, r, func(f sandbox.FileInfo) error {
		// The answer is one message, so what the guest sends must be bounded before it is held.
		if size += len(f.Path) + len(f.Name) + len(f.Target) + 64; size > maxMessage {
			return errs.New(errs.ResourceExhausted, "the listing is larger than %d MiB", maxMessage>>20).WithHint("list with a smaller depth")
		}
		resp.Files = append(resp.Files, fileMessage(f))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// MakeDirectory implements FileServiceHandler.
func (h *files) MakeDirectory(ctx context.Context, req *v1.MakeDirectoryRequest) (*v1.File, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	return answerFile(fs.MakeDir(ctx, sandbox.MakeDirRequest{
		PathRequest: pathRequest(req.GetUser(), req.GetPath()), Mode: req.GetMode(), Parents: req.GetParents(),
	}))
}

// MoveFile implements FileServiceHandler.
func (h *files) MoveFile(ctx context.Context, req *v1.MoveFileRequest) (*v1.File, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	return answerFile(fs.Move(ctx, sandbox.MoveRequest{
		PathRequest: pathRequest(req.GetUser(), req.GetPath()), To: req.GetTo(), Overwrite: req.GetOverwrite(),
	}))
}

// RemoveFile implements FileServiceHandler.
func (h *files) RemoveFile(ctx context.Context, req *v1.RemoveFileRequest) (*v1.RemoveFileResponse, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	r := sandbox.RemoveRequest{PathRequest: pathRequest(req.GetUser(), req.GetPath()), Recursive: req.GetRecursive()}
	if err := fs.Remove(ctx, r); err != nil {
		return nil, err
	}
	return &v1.RemoveFileResponse{}, nil
}

// ChangeMode implements FileServiceHandler.
func (h *files) ChangeMode(ctx context.Context, req *v1.ChangeModeRequest) (*v1.File, error) {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	r := sandbox.ChmodRequest{PathRequest: pathRequest(req.GetUser(), req.GetPath()), Mode: req.Mode, UID: -1, GID: -1}
	if req.Uid != nil {
		r.UID = int(req.GetUid())
	}
	if req.Gid != nil {
		r.GID = int(req.GetGid())
	}
	return answerFile(fs.Chmod(ctx, r))
}

// ReadFile implements FileServiceHandler.
func (h *files) ReadFile(ctx context.Context, req *v1.ReadFileRequest, stream *connect.ServerStream[v1.ReadFileResponse]) error {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return err
	}
	r := sandbox.ReadRequest{PathRequest: pathRequest(req.GetUser(), req.GetPath()), Offset: req.GetOffset(), Length: -1}
	r.Follow = true
	if req.Length != nil {
		r.Length = req.GetLength()
	}
	if r.Offset < 0 || (req.Length != nil && r.Length < 0) {
		return errs.New(errs.InvalidArgument, "offset and length can't be negative")
	}
	head := func(f sandbox.FileInfo) error {
		return stream.Send(&v1.ReadFileResponse{File: fileMessage(f)})
	}
	_, err = fs.Read(ctx, r, head, writerFunc(func(b []byte) error {
		return stream.Send(&v1.ReadFileResponse{Data: b})
	}))
	return err
}

// writerFunc is an io.Writer that takes all or fails.
type writerFunc func(b []byte) error

// Write implements io.Writer.
func (f writerFunc) Write(b []byte) (int, error) {
	if err := f(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// WriteFile implements FileServiceHandler.
func (h *files) WriteFile(ctx context.Context, stream *connect.ClientStream[v1.WriteFileRequest]) (*v1.File, error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, errs.New(errs.InvalidArgument, "the stream ended before its first message")
	}
	first := stream.Msg()
	fs, err := h.openFiles(ctx, first.GetSandbox())
	if err != nil {
		return nil, err
	}
	r := sandbox.WriteRequest{
		PathRequest: pathRequest(first.GetUser(), first.GetPath()),
		Mode:        first.GetMode(), Parents: first.GetParents(), Append: first.GetAppend(), Offset: -1, Size: -1,
	}
	if first.Offset != nil {
		r.Offset = first.GetOffset()
	}
	return answerFile(fs.Write(ctx, r, &messageReader[v1.WriteFileRequest, *v1.WriteFileRequest]{stream: stream, rest: first.GetData()}))
}

// messageReader reads the data of a stream of messages.
type messageReader[T any, M interface {
	*T
	GetData() []byte
}] struct {
	stream *connect.ClientStream[T]
	rest   []byte
}

// Read implements io.Reader.
func (m *messageReader[T, M]) Read(b []byte) (int, error) {
	for len(m.rest) == 0 {
		if !m.stream.Receive() {
			if err := m.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		m.rest = M(m.stream.Msg()).GetData()
	}
	n := copy(b, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// WatchFiles implements FileServiceHandler.
func (h *files) WatchFiles(ctx context.Context, req *v1.WatchFilesRequest, stream *connect.ServerStream[v1.WatchFilesResponse]) error {
	fs, err := h.openFiles(ctx, req.GetSandbox())
	if err != nil {
		return err
	}
	send, stop := kept(h.API, stream, &v1.WatchFilesResponse{Op: "keep_alive"})
	defer stop()
	r := sandbox.WatchRequest{PathRequest: pathRequest(req.GetUser(), req.GetPath()), Recursive: req.GetRecursive()}
	err = fs.Watch(ctx, r,
		func() error { return send(&v1.WatchFilesResponse{}) },
		func(e sandbox.WatchEvent) error { return send(&v1.WatchFilesResponse{Op: e.Op, Path: e.Path}) })
	return endOfFollow(ctx, err)
}

// endOfFollow makes the caller's own end of an endless stream no error.
func endOfFollow(ctx context.Context, err error) error {
	if errors.Is(err, context.Canceled) && errors.Is(context.Cause(ctx), context.Canceled) {
		return nil
	}
	return err
}
