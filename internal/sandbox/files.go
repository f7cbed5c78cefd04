package sandbox

import (
	"context"
	"errors"
	"io"
	"strconv"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// FileInfo describes a file.
type FileInfo = guestwire.FileInfo

// WatchEvent is one change below a watched directory.
type WatchEvent = guestwire.WatchEvent

// The requests of Files, as package guestwire documents them.
type (
	// PathRequest names a file.
	PathRequest = guestwire.PathRequest
	// Asker is who asks inside, and from where relative paths start.
	Asker = guestwire.Asker
	// ListRequest lists a directory.
	ListRequest = guestwire.ListRequest
	// ReadRequest reads a file or a part of it.
	ReadRequest = guestwire.ReadRequest
	// WriteRequest writes a file.
	WriteRequest = guestwire.WriteRequest
	// MakeDirRequest makes a directory.
	MakeDirRequest = guestwire.MakeDirRequest
	// MoveRequest renames a file.
	MoveRequest = guestwire.MoveRequest
	// RemoveRequest removes a file or a tree.
	RemoveRequest = guestwire.RemoveRequest
	// ChmodRequest changes a file's mode and owner.
	ChmodRequest = guestwire.ChmodRequest
	// UnpackRequest puts a tree of files below a directory.
	UnpackRequest = guestwire.UnpackRequest
	// UnpackReply says what was unpacked.
	UnpackReply = guestwire.UnpackReply
	// WatchRequest watches a directory.
	WatchRequest = guestwire.WatchRequest
)

// Files works on one sandbox's files, as the asking user and inside its walls: no path is resolved
// outside. Changes and reads are recorded; a change is recorded before its call returns.
type Files struct {
	m   *Manager
	box *box
	p   Principal
}

// Files gives access to a sandbox's files. It holds nothing; each of its calls looks again whether
// the sandbox can be used.
func (m *Manager) Files(ctx context.Context, p Principal, ref string) (*Files, error) {
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	m.done(b)
	return &Files{m: m, box: b, p: p}, nil
}

// fileFacts are the server's facts of a file event: what was asked for, and how much went over.
//
//casemate:facts server file.written file.read file.removed file.moved file.mode directory.made
type fileFacts struct {
	Path   string `json:"path"`
	To     string `json:"to,omitempty"`
	User   string `json:"user,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Mode   string `json:"mode,omitempty"`
	Tree   bool   `json:"tree,omitempty"`
}

// fileResult are the guest's facts of a file event: what it says came of it.
//
//casemate:facts guest file.written file.read file.moved file.mode directory.made
type fileResult struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
	Mode string `json:"mode"`
	UID  int    `json:"uid"`
}

func (f *Files) event(t journal.Type, facts fileFacts, info *FileInfo) journal.Event {
	facts.Path, facts.To = cut(facts.Path), cut(facts.To)
	e := event(t, f.p.ID, facts)
	e.Sandbox = f.box.id
	if info != nil {
		e = e.With(journal.Guest, fileResult{Path: cut(info.Path), Size: info.Size, Mode: octal(info.Mode), UID: info.UID})
	}
	return e
}

func octal(mode uint32) string { return "0" + strconv.FormatUint(uint64(mode), 8) }

// with adds the content that went over to an event.
func (f *Files) with(e journal.Event, k *journal.Keeper) journal.Event {
	//casemate:fact server file.written,file.read content body
	return e.WithKept(journal.Server, "content", k)
}

// changed records a change. That it can't be recorded is told to the caller, since the file then
// has a history with a hole.
func (f *Files) changed(ctx context.Context, t journal.Type, facts fileFacts, info *FileInfo) error {
	return f.record(ctx, f.event(t, facts, info))
}

func (f *Files) record(ctx context.Context, e journal.Event) error {
	_, err := f.m.journal.Record(ctx, e)
	return err
}

// begin frames a call to the guest. What it returns ends when the guest answers nothing any more.
func (f *Files) begin(ctx context.Context) (gctx context.Context, end func(), err error) {
	if err := f.m.enter(f.box, false); err != nil {
		return nil, nil, err
	}
	gctx, stop := f.m.attended(ctx, f.box.guest)
	return gctx, func() { stop(); f.m.done(f.box) }, nil
}

// Stat describes a file.
func (f *Files) Stat(ctx context.Context, r PathRequest) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	info, err := f.box.guest.Stat(gctx, r)
	return info, cause(gctx, err)
}

// List calls each for every entry below a directory.
func (f *Files) List(ctx context.Context, r ListRequest, each func(FileInfo) error) error {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	stream, err := f.box.guest.ListDir(gctx, r)
	if err != nil {
		return cause(gctx, err)
	}
	defer stream.Close()
	return cause(gctx, drain(stream, each))
}

func drain[T any](stream *guestwire.EventStream[T], each func(T) error) error {
	for {
		v, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = each(v)
		}
		if err != nil {
			return err
		}
	}
}

// Read calls head with the file's description, then copies its bytes to w. An error after head means
// that w did not get all.
func (f *Files) Read(ctx context.Context, r ReadRequest, head func(FileInfo) error, w io.Writer) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	info, body, err := f.box.guest.Read(gctx, r)
	if err != nil {
		return FileInfo{}, cause(gctx, err)
	}
	defer func() { _ = body.Close() }()
	if err := head(info); err != nil {
		return info, err
	}
	content := f.box.keeper(RecordAll)
	n, err := io.Copy(w, io.TeeReader(body, content))
	f.m.journal.Post(f.with(f.event(journal.FileRead, fileFacts{Path: r.Path, User: r.User, Bytes: n, Offset: r.Offset}, &info), content))
	return info, cause(gctx, err)
}

// Write replaces or changes a file with what in gives.
func (f *Files) Write(ctx context.Context, r WriteRequest, in io.Reader) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	defer f.box.changes.call()()
	content := f.box.keeper(RecordAll)
	info, err := f.box.guest.Write(gctx, r, io.TeeReader(in, content))
	if err != nil {
		return FileInfo{}, cause(gctx, err)
	}
	facts := fileFacts{Path: r.Path, User: r.User, Bytes: content.Size(), Offset: max(r.Offset, 0)}
	return info, f.record(ctx, f.with(f.event(journal.FileWritten, facts, &info), content))
}

// Unpack puts a tree of files below a directory. in gives it as guestwire.Pack writes it. One event tells of
// all of it.
func (f *Files) Unpack(ctx context.Context, r UnpackRequest, in io.Reader) (UnpackReply, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return UnpackReply{}, err
	}
	defer end()
	defer f.box.changes.call()()
	content := f.box.keeper(RecordAll)
	done, err := f.box.guest.Unpack(gctx, r, io.TeeReader(in, content))
	if err != nil {
		return UnpackReply{}, cause(gctx, err)
	}
	return done, f.record(ctx, f.with(f.event(journal.FileWritten, fileFacts{Path: r.Path, User: r.User, Bytes: content.Size(), Tree: true}, nil), content))
}

// MakeDir makes a directory.
func (f *Files) MakeDir(ctx context.Context, r MakeDirRequest) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	defer f.box.changes.call()()
	info, err := f.box.guest.MakeDir(gctx, r)
	if err != nil {
		return FileInfo{}, cause(gctx, err)
	}
	return info, f.changed(ctx, journal.DirectoryMade, fileFacts{Path: r.Path, User: r.User}, &info)
}

// Move renames a file.
func (f *Files) Move(ctx context.Context, r MoveRequest) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	defer f.box.changes.call()()
	info, err := f.box.guest.Move(gctx, r)
	if err != nil {
		return FileInfo{}, cause(gctx, err)
	}
	return info, f.changed(ctx, journal.FileMoved, fileFacts{Path: r.Path, To: r.To, User: r.User}, &info)
}

// Remove removes a file, or with Recursive a tree.
func (f *Files) Remove(ctx context.Context, r RemoveRequest) error {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	defer f.box.changes.call()()
	if err := f.box.guest.Remove(gctx, r); err != nil {
		return cause(gctx, err)
	}
	return f.changed(ctx, journal.FileRemoved, fileFacts{Path: r.Path, User: r.User, Tree: r.Recursive}, nil)
}

// Chmod changes a file's mode and owner.
func (f *Files) Chmod(ctx context.Context, r ChmodRequest) (FileInfo, error) {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return FileInfo{}, err
	}
	defer end()
	defer f.box.changes.call()()
	info, err := f.box.guest.Chmod(gctx, r)
	if err != nil {
		return FileInfo{}, cause(gctx, err)
	}
	facts := fileFacts{Path: r.Path, User: r.User}
	if r.Mode != nil {
		facts.Mode = octal(*r.Mode)
	}
	return info, f.changed(ctx, journal.FileMode, facts, &info)
}

// Watch calls ready once the watch stands, then each for every change, until ctx ends or one of them
// fails.
func (f *Files) Watch(ctx context.Context, r WatchRequest, ready func() error, each func(WatchEvent) error) error {
	gctx, end, err := f.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	stream, err := f.box.guest.Watch(gctx, r)
	if err != nil {
		return cause(gctx, err)
	}
	defer stream.Close()
	if err := ready(); err != nil {
		return err
	}
	return cause(gctx, drain(stream, each))
}
