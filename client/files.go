package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"google.golang.org/protobuf/encoding/protojson"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// File describes a file in a sandbox.
	File = v1.File
	// WatchEvent is one change of a file.
	WatchEvent = v1.WatchFilesResponse
)

// Files reads and writes sandboxes' files, as the asking user and inside the sandbox's walls.
// Relative paths start at the user's home.
type Files struct {
	conn *conn
	rpc  casematev1connect.FileServiceClient
}

// ReadOptions say what part of a file to read, and as whom.
type ReadOptions struct {
	User string // default: the sandbox's
	// Offset and Length choose a part; Length 0 means to the end.
	Offset, Length int64
}

// WriteOptions say how to write a file, and as whom.
type WriteOptions struct {
	User string // default: the sandbox's
	// Mode of a new file; 0 means 0644.
	Mode uint32
	// Parents makes missing directories.
	Parents bool
	// Append adds at the end of the existing file instead of replacing it.
	Append bool
	// Size is how many bytes will come; 0 means unknown. With it a cut connection can't leave a part.
	Size int64
}

// Open returns a file's bytes as a stream; the caller closes it.
func (f *Files) Open(ctx context.Context, sandbox, path string, o ReadOptions) (io.ReadCloser, error) {
	req, err := f.request(ctx, http.MethodGet, sandbox, path, o.User, nil, nil)
	if err != nil {
		return nil, err
	}
	if o.Offset > 0 || o.Length > 0 {
		last := ""
		if o.Length > 0 {
			last = strconv.FormatInt(o.Offset+o.Length-1, 10)
		}
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%s", o.Offset, last))
	}
	resp, err := f.conn.http.Do(req)
	if err != nil {
		return nil, f.conn.wrap(err)
	}
	switch resp.StatusCode {
	case http.StatusOK, http.StatusPartialContent:
		return resp.Body, nil
	case http.StatusRequestedRangeNotSatisfiable: // at or past the end: nothing there, as in a file
		_ = resp.Body.Close()
		return http.NoBody, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, httpError(resp)
}

// ReadAll returns a whole file. Use Open for big ones.
func (f *Files) ReadAll(ctx context.Context, sandbox, path string) ([]byte, error) {
	r, err := f.Open(ctx, sandbox, path, ReadOptions{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	b, err := io.ReadAll(r)
	return b, f.conn.wrap(err)
}

// Write replaces a file with what r gives, at once: nobody sees half of it. When r fails, the file
// stays as it was.
func (f *Files) Write(ctx context.Context, sandbox, path string, r io.Reader, o WriteOptions) (*File, error) {
	q := url.Values{}
	if o.Mode != 0 {
		q.Set("mode", strconv.FormatUint(uint64(o.Mode), 8))
	}
	if o.Parents {
		q.Set("parents", "true")
	}
	if o.Append {
		q.Set("append", "true")
	}
	req, err := f.request(ctx, http.MethodPut, sandbox, path, o.User, q, io.NopCloser(r))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	if o.Size > 0 {
		req.ContentLength = o.Size
	}
	resp, err := f.conn.http.Do(req)
	if err != nil {
		return nil, f.conn.wrap(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusCreated {
		return nil, httpError(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, f.conn.wrap(err)
	}
	file := &File{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body, file); err != nil {
		return nil, &Error{Kind: Internal, Message: "the server's answer can't be read", Err: err}
	}
	return file, nil
}

func (f *Files) request(ctx context.Context, method, sandbox, path, user string, q url.Values, body io.Reader) (*http.Request, error) {
	if q == nil {
		q = url.Values{}
	}
	q.Set("path", path)
	if user != "" {
		q.Set("user", user)
	}
	target := f.conn.base + "/v1/sandboxes/" + url.PathEscape(sandbox) + "/files?" + q.Encode()
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, &Error{Kind: InvalidArgument, Message: "the request can't be made", Err: err}
	}
	return req, nil
}

// Stat describes a file; with follow what a symbolic link at its end points at.
func (f *Files) Stat(ctx context.Context, sandbox, path, user string, follow bool) (*File, error) {
	file, err := f.rpc.StatFile(ctx, &v1.StatFileRequest{Sandbox: sandbox, Path: path, User: user, Follow: follow})
	return file, f.conn.wrap(err)
}

// List describes what a directory holds, down to depth (0 means 1).
func (f *Files) List(ctx context.Context, sandbox, path, user string, depth int) ([]*File, error) {
	resp, err := f.rpc.ListFiles(ctx, &v1.ListFilesRequest{Sandbox: sandbox, Path: path, User: user, Depth: int32(min(depth, 1<<20))})
	return resp.GetFiles(), f.conn.wrap(err)
}

// MakeDir makes a directory; with parents also those above it, and it may exist.
func (f *Files) MakeDir(ctx context.Context, sandbox, path, user string, mode uint32, parents bool) (*File, error) {
	file, err := f.rpc.MakeDirectory(ctx, &v1.MakeDirectoryRequest{Sandbox: sandbox, Path: path, User: user, Mode: mode, Parents: parents})
	return file, f.conn.wrap(err)
}

// Move renames a file.
func (f *Files) Move(ctx context.Context, sandbox, path, to, user string, overwrite bool) (*File, error) {
	file, err := f.rpc.MoveFile(ctx, &v1.MoveFileRequest{Sandbox: sandbox, Path: path, To: to, User: user, Overwrite: overwrite})
	return file, f.conn.wrap(err)
}

// Remove removes a file, or with recursive a tree.
func (f *Files) Remove(ctx context.Context, sandbox, path, user string, recursive bool) error {
	_, err := f.rpc.RemoveFile(ctx, &v1.RemoveFileRequest{Sandbox: sandbox, Path: path, User: user, Recursive: recursive})
	return f.conn.wrap(err)
}

// Chmod changes a file's mode.
func (f *Files) Chmod(ctx context.Context, sandbox, path, user string, mode uint32) (*File, error) {
	file, err := f.rpc.ChangeMode(ctx, &v1.ChangeModeRequest{Sandbox: sandbox, Path: path, User: user, Mode: &mode})
	return file, f.conn.wrap(err)
}

// Watch calls each for every change below a directory until ctx ends or each fails, whose error it
// returns. ready, unless nil, is called when the watch stands.
func (f *Files) Watch(ctx context.Context, sandbox, path, user string, recursive bool, ready func(), each func(*WatchEvent) error) error {
	stream, err := f.rpc.WatchFiles(ctx, &v1.WatchFilesRequest{Sandbox: sandbox, Path: path, User: user, Recursive: recursive})
	if err != nil {
		return f.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		switch e := stream.Msg(); e.GetOp() {
		case "":
			if ready != nil {
				ready()
			}
		case "keep_alive":
		default:
			if err := each(e); err != nil {
				return err
			}
		}
	}
	return f.conn.wrap(stream.Err())
}
