package envd

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/filesystem"
)

// watch is one watch of a directory, however its events are told.
type watch struct {
	fs   *sandbox.Files
	r    sandbox.WatchRequest
	root string
	// entry asks for a description of what each event names.
	entry bool
}

// newWatch checks what is to be watched: a directory that is there. The protocol refuses network file
// systems unless a caller allows them; a sandbox can mount none, so there is nothing to refuse.
func (s *files) newWatch(ctx context.Context, p string, recursive, entry bool) (*watch, error) {
	fs, r, c, err := s.open(ctx, p, true)
	if err != nil {
		return nil, err
	}
	f, err := fs.Stat(ctx, r)
	if err != nil {
		return nil, s.fault(ctx, c, err, "path not found", shown(r))
	}
	if f.Type != "dir" {
		return nil, refuse(connect.CodeInvalidArgument, "path %s not a directory", f.Path)
	}
	return &watch{fs: fs, r: sandbox.WatchRequest{PathRequest: r, Recursive: recursive}, root: f.Path, entry: entry}, nil
}

// run tells of changes until ctx ends or send fails.
func (w *watch) run(ctx context.Context, ready func() error, send func(*filesystem.FilesystemEvent) error) error {
	return w.fs.Watch(ctx, w.r, ready, func(e sandbox.WatchEvent) error {
		t := eventType(e.Op)
		if t == filesystem.EventType_EVENT_TYPE_UNSPECIFIED {
			return nil // an overflow, for which the protocol has no word
		}
		out := &filesystem.FilesystemEvent{Type: t, Name: "."}
		if name, below := strings.CutPrefix(e.Path, strings.TrimSuffix(w.root, "/")+"/"); below {
			out.Name = name
		}
		if w.entry && t != filesystem.EventType_EVENT_TYPE_REMOVE && t != filesystem.EventType_EVENT_TYPE_RENAME {
			r := w.r.PathRequest
			r.Path, r.Follow = e.Path, false
			if f, err := w.fs.Stat(ctx, r); err == nil {
				out.Entry = entryOf(f)
			}
		}
		return send(out)
	})
}

func eventType(op string) filesystem.EventType {
	switch op {
	case "create":
		return filesystem.EventType_EVENT_TYPE_CREATE
	case "write":
		return filesystem.EventType_EVENT_TYPE_WRITE
	case "remove":
		return filesystem.EventType_EVENT_TYPE_REMOVE
	case "rename":
		return filesystem.EventType_EVENT_TYPE_RENAME
	case "chmod":
		return filesystem.EventType_EVENT_TYPE_CHMOD
	}
	return filesystem.EventType_EVENT_TYPE_UNSPECIFIED
}

// WatchDir implements FilesystemHandler.
func (s *files) WatchDir(ctx context.Context, req *filesystem.WatchDirRequest, stream *connect.ServerStream[filesystem.WatchDirResponse]) error {
	w, err := s.newWatch(ctx, req.GetPath(), req.GetRecursive(), req.GetIncludeEntry())
	if err != nil {
		return err
	}
	c := callOf(ctx)
	stands := false
	b := beat.New(c.ping, func() error {
		if !stands {
			return nil // the start comes first
		}
		return stream.Send(&filesystem.WatchDirResponse{
			Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}},
		})
	})
	defer b.Stop()
	err = w.run(ctx, func() error {
		return b.Send(func() error {
			stands = true
			return stream.Send(&filesystem.WatchDirResponse{
				Event: &filesystem.WatchDirResponse_Start{Start: &filesystem.WatchDirResponse_StartEvent{}},
			})
		})
	}, func(e *filesystem.FilesystemEvent) error {
		return b.Send(func() error {
			return stream.Send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: e}})
		})
	})
	if stands && (errors.Is(ctx.Err(), context.Canceled) || ctx.Err() == nil && s.over(ctx, c)) {
		cutOff()
	}
	return s.rpcError(ctx, "watch", err)
}

const (
	// maxWatchers bounds the watches that are polled, per sandbox.
	maxWatchers = 64
	// maxQueued bounds the events that wait for a poll; the oldest go first.
	maxQueued = 10_000
	// unpolled is how long a watch that nobody asks is kept.
	unpolled = time.Hour
)

// watchers are the watches that callers poll.
type watchers struct {
	// mu guards the fields below, and the fields of each watcher that say so.
	mu     sync.Mutex
	byID   map[string]*watcher
	closed bool
}

// watcher is one of them.
type watcher struct {
	sandbox string
	owner   string
	cancel  context.CancelFunc
	came    chan struct{} // holds a token where events wait

	// What follows is guarded by watchers.mu.
	events []*filesystem.FilesystemEvent
	idle   *time.Timer
}

func newWatchers() *watchers { return &watchers{byID: make(map[string]*watcher)} }

func (ws *watchers) close() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.closed = true
	for _, w := range ws.byID {
		w.cancel()
	}
}

// add takes a watcher up under a new id, unless there are too many.
func (ws *watchers) add(w *watcher) (string, bool) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	n := 0
	for _, other := range ws.byID {
		if other.sandbox == w.sandbox {
			n++
		}
	}
	if ws.closed || n >= maxWatchers {
		return "", false
	}
	key := id.New("w")
	ws.byID[key] = w
	w.idle = time.AfterFunc(unpolled, w.cancel)
	return key, true
}

func (ws *watchers) remove(key string) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.byID[key]; w != nil {
		w.idle.Stop()
		delete(ws.byID, key)
	}
}

func (ws *watchers) put(w *watcher, e *filesystem.FilesystemEvent) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(w.events) >= maxQueued {
		w.events = append(w.events[:0], w.events[1:]...)
	}
	w.events = append(w.events, e)
	select {
	case w.came <- struct{}{}:
	default: // there is one
	}
}

// take returns a watcher that the caller made, and the events that wait; the watcher is nil where it is
// not known, or not theirs.
func (ws *watchers) take(key string, c *call) (*watcher, []*filesystem.FilesystemEvent) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w := ws.byID[key]
	if w == nil || w.sandbox != c.sandbox || w.owner != c.p.ID {
		return nil, nil
	}
	w.idle.Reset(unpolled)
	events := w.events
	w.events = nil
	select {
	case <-w.came:
	default:
	}
	return w, events
}

// CreateWatcher implements FilesystemHandler.
func (s *files) CreateWatcher(ctx context.Context, req *filesystem.CreateWatcherRequest) (*filesystem.CreateWatcherResponse, error) {
	w, err := s.newWatch(ctx, req.GetPath(), req.GetRecursive(), req.GetIncludeEntry())
	if err != nil {
		return nil, err
	}
	c := callOf(ctx)
	wctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	polled := &watcher{sandbox: c.sandbox, owner: c.p.ID, cancel: cancel, came: make(chan struct{}, 1)}
	key, ok := s.watchers.add(polled)
	if !ok {
		cancel()
		return nil, refuse(connect.CodeResourceExhausted, "%d watchers of this sandbox are open already", maxWatchers)
	}
	stands := make(chan error, 2)
	go func() {
		defer cancel()
		err := w.run(wctx, func() error {
			stands <- nil
			return nil
		}, func(e *filesystem.FilesystemEvent) error {
			s.watchers.put(polled, e)
			return nil
		})
		s.watchers.remove(key)
		stands <- err // of interest only where it never stood
	}()
	select {
	case err = <-stands:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		cancel()
		return nil, s.rpcError(ctx, "watch", err)
	}
	return &filesystem.CreateWatcherResponse{WatcherId: key}, nil
}

// eventWait is how long a poll that finds nothing waits for an event: what a caller did right before it may still be
// on its way here.
const eventWait = 200 * time.Millisecond

// GetWatcherEvents implements FilesystemHandler.
func (s *files) GetWatcherEvents(ctx context.Context, req *filesystem.GetWatcherEventsRequest) (*filesystem.GetWatcherEventsResponse, error) {
	w, events := s.watchers.take(req.GetWatcherId(), callOf(ctx))
	if w != nil && len(events) == 0 {
		wait := time.NewTimer(eventWait)
		defer wait.Stop()
		select {
		case <-w.came:
		case <-wait.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		w, events = s.watchers.take(req.GetWatcherId(), callOf(ctx))
	}
	if w == nil {
		return nil, refuse(connect.CodeNotFound, "watcher with id %s not found", req.GetWatcherId())
	}
	return &filesystem.GetWatcherEventsResponse{Events: events}, nil
}

// RemoveWatcher implements FilesystemHandler.
func (s *files) RemoveWatcher(ctx context.Context, req *filesystem.RemoveWatcherRequest) (*filesystem.RemoveWatcherResponse, error) {
	w, _ := s.watchers.take(req.GetWatcherId(), callOf(ctx))
	if w == nil {
		return nil, refuse(connect.CodeNotFound, "watcher with id %s not found", req.GetWatcherId())
	}
	s.watchers.remove(req.GetWatcherId())
	w.cancel()
	return &filesystem.RemoveWatcherResponse{}, nil
}
