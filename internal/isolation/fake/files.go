package fake

import (
	"bytes"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// place is where and as whom a file request acts.
type place struct {
	user user
	path string
	dir  string
}

func (m *machine) place(r guestwire.PathRequest) (place, error) {
	u, err := m.user(r.User)
	if err != nil {
		return place{}, err
	}
	raw, ok := guestwire.Unescape(r.Path)
	if !ok || raw == "" {
		return place{}, errs.New(errs.InvalidArgument, "not a path: %q", r.Path)
	}
	u.privileged = r.Privileged && m.spec.Profile != isolation.Locked
	dir := u.home
	if r.Dir != "" {
		dir = absolute(r.Dir, u.home, u)
	}
	return place{user: u, path: absolute(raw, dir, u), dir: dir}, nil
}

// told returns a description as the wire has it.
func (m *machine) told(i guestwire.FileInfo, r guestwire.PathRequest) guestwire.FileInfo {
	i = m.tree.more(i, r)
	i.Path, i.Name, i.Target = guestwire.Escape(i.Path), guestwire.Escape(i.Name), guestwire.Escape(i.Target)
	return i
}

func (m *machine) answerFile(c *guestwire.Conn, call guestwire.Call) error {
	switch call.Method {
	case guestwire.MethodStat:
		return onFile(m, c, call, func(r guestwire.PathRequest, at place) (guestwire.FileInfo, error) {
			return m.tree.stat(at.path, r.Follow)
		}, func(r guestwire.PathRequest) guestwire.PathRequest { return r })
	case guestwire.MethodMakeDir:
		return onFile(m, c, call, func(r guestwire.MakeDirRequest, at place) (guestwire.FileInfo, error) {
			return m.tree.mkdir(at.user, at.path, r.Mode, r.Parents)
		}, func(r guestwire.MakeDirRequest) guestwire.PathRequest { return r.PathRequest })
	case guestwire.MethodMove:
		return onFile(m, c, call, func(r guestwire.MoveRequest, at place) (guestwire.FileInfo, error) {
			to, ok := guestwire.Unescape(r.To)
			if !ok {
				return guestwire.FileInfo{}, errs.New(errs.InvalidArgument, "not a path: %q", r.To)
			}
			return m.tree.move(at.user, at.path, absolute(to, at.dir, at.user), r.Overwrite)
		}, func(r guestwire.MoveRequest) guestwire.PathRequest { return r.PathRequest })
	case guestwire.MethodRemove:
		return onFile(m, c, call, func(r guestwire.RemoveRequest, at place) (guestwire.FileInfo, error) {
			return guestwire.FileInfo{}, m.tree.remove(at.user, at.path, r.Recursive)
		}, func(r guestwire.RemoveRequest) guestwire.PathRequest { return r.PathRequest })
	case guestwire.MethodChmod:
		return onFile(m, c, call, func(r guestwire.ChmodRequest, at place) (guestwire.FileInfo, error) {
			return m.tree.chmod(at.user, at.path, r.Follow, r.Mode, r.UID, r.GID)
		}, func(r guestwire.ChmodRequest) guestwire.PathRequest { return r.PathRequest })
	case guestwire.MethodListDir:
		return m.listDir(c, call)
	case guestwire.MethodRead:
		return m.readFile(c, call)
	case guestwire.MethodWrite:
		return m.writeFile(c, call)
	case guestwire.MethodWatch:
		return m.watchDir(c, call)
	}
	return errs.New(errs.Unsupported, "this guest knows no method %q", call.Method)
}

// onFile decodes a request, finds the place it names and replies with the file's description.
func onFile[T any](
	m *machine, c *guestwire.Conn, call guestwire.Call,
	act func(T, place) (guestwire.FileInfo, error), path func(T) guestwire.PathRequest,
) error {
	return reply(c, call, func(r T) (any, error) {
		at, err := m.place(path(r))
		if err != nil {
			return nil, err
		}
		info, err := act(r, at)
		return m.told(info, path(r)), err
	})
}

func (m *machine) listDir(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.ListRequest](call)
	if err != nil {
		return err
	}
	at, err := m.place(r.PathRequest)
	if err != nil {
		return err
	}
	files, err := m.tree.list(at.user, at.path, r.Depth)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := c.Event(m.told(f, r.PathRequest)); err != nil {
			return err
		}
	}
	return c.End(nil)
}

func (m *machine) readFile(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.ReadRequest](call)
	if err != nil {
		return err
	}
	at, err := m.place(r.PathRequest)
	if err != nil {
		return err
	}
	data, info, err := m.tree.read(at.user, at.path)
	if err != nil {
		return err
	}
	if err := c.Reply(m.told(info, r.PathRequest)); err != nil {
		return err
	}
	data = data[min(int64(len(data)), max(0, r.Offset)):]
	if r.Length >= 0 {
		data = data[:min(int64(len(data)), r.Length)]
	}
	if err := c.Data(data); err != nil {
		return err
	}
	return c.End(nil)
}

func (m *machine) writeFile(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.WriteRequest](call)
	if err != nil {
		return err
	}
	at, err := m.place(r.PathRequest)
	if err != nil {
		return err
	}
	var data bytes.Buffer
	for {
		f, err := c.ReadFrame()
		if err != nil {
			return err
		}
		if f.Kind == guestwire.FrameEnd {
			break
		}
		data.Write(f.Payload)
	}
	if r.Size >= 0 && r.Size != int64(data.Len()) {
		return errs.New(errs.InvalidArgument, "%d bytes were announced and %d sent", r.Size, data.Len())
	}
	info, err := m.tree.write(at.user, at.path, data.Bytes(), writeOptions{
		mode: r.Mode, offset: max(0, r.Offset), inPlace: r.Offset >= 0, appends: r.Append, parents: r.Parents,
		prefix: r.Attributes, attrs: r.SetAttributes,
	})
	if err != nil {
		return err
	}
	return c.Reply(m.told(info, r.PathRequest))
}

func (m *machine) watchDir(c *guestwire.Conn, call guestwire.Call) error {
	r, err := decode[guestwire.WatchRequest](call)
	if err != nil {
		return err
	}
	at, err := m.place(r.PathRequest)
	if err != nil {
		return err
	}
	w, err := m.tree.watch(at.path, r.Recursive)
	if err != nil {
		return err
	}
	defer m.tree.unwatch(w)
	if err := c.Reply(nil); err != nil {
		return err
	}
	gone := make(chan struct{})
	go func() {
		var b [1]byte
		_, _ = c.Read(b[:])
		close(gone)
	}()
	for {
		select {
		case e := <-w.events:
			e.Path = guestwire.Escape(e.Path)
			if err := c.Event(e); err != nil {
				return err
			}
		case <-gone:
			return nil
		}
	}
}
