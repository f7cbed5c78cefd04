package sandbox

import (
	"context"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

// alive finds a sandbox that runs or is paused, without counting as activity.
func (m *Manager) alive(ctx context.Context, p Principal, ref string) (*box, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	if b == nil {
		return nil, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State != Running && b.sb.State != Paused {
		return nil, &TransitionError{ID: b.id, From: b.sb.State}
	}
	return b, nil
}

// Usage reads the kernel's accounting. What is read counts for the record of what was used, too.
func (m *Manager) Usage(ctx context.Context, p Principal, ref string) (Usage, error) {
	b, err := m.alive(ctx, p, ref)
	if err != nil {
		return Usage{}, err
	}
	if b.inst.now() == nil {
		return Usage{}, nil // it has nothing but files
	}
	u, err := b.inst.Usage(ctx)
	m.metered(b, u, err, meterTick)
	return u, err
}

// Changes tells which files differ from the template, or with workspace, the target of one, from
// that workspace's source. Paths are text as in Files.
func (m *Manager) Changes(ctx context.Context, p Principal, ref, workspace string) ([]Change, error) {
	b, err := m.alive(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	plan, spaces := b.body.Plan, b.sb.Spec.Workspaces
	b.mu.Unlock()
	if workspace != "" && !slices.ContainsFunc(spaces, func(w Workspace) bool { return w.Target == workspace }) {
		return nil, errs.New(errs.NotFound, "sandbox %s has no workspace at %s", b.id, quote(workspace)).
			WithHint("casemate inspect shows its workspaces")
	}
	return legible(m.cfg.Roots.Changes(ctx, b.id, plan, workspace))
}

// legible makes paths text: a name may hold any byte, and one that is no text would fail the whole answer, so
// that a program could hide what it changed.
func legible(changes []Change, err error) ([]Change, error) {
	for i := range changes {
		changes[i].Path = guestwire.Escape(changes[i].Path)
	}
	return changes, err
}

// Compare tells which files of the root file system differ between two states, each the reference of a commit
// or of a sandbox as it is now; a sandbox's name goes before a tag. Paths are text as in Files.
func (m *Manager) Compare(ctx context.Context, p Principal, from, to string) ([]Change, error) {
	before, err := m.stateOf(ctx, p, from)
	if err != nil {
		return nil, err
	}
	after, err := m.stateOf(ctx, p, to)
	if err != nil {
		return nil, err
	}
	return legible(m.cfg.Roots.Compare(ctx, before, after))
}

func (m *Manager) stateOf(ctx context.Context, p Principal, ref string) (rootfs.State, error) {
	b, c, err := m.sandboxOrCommit(ctx, p, ref)
	if b == nil || err != nil {
		return rootfs.State{Layer: c.layer}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return rootfs.State{ID: b.id, Plan: b.body.Plan}, nil
}

// sandboxOrCommit finds the living sandbox that a reference names, or else the commit.
func (m *Manager) sandboxOrCommit(ctx context.Context, p Principal, ref string) (*box, Commit, error) {
	if strings.HasPrefix(ref, id.Commit) {
		c, err := m.GetCommit(ctx, p, ref)
		return nil, c, err
	}
	b, err := m.alive(ctx, p, ref)
	if err == nil {
		return b, Commit{}, nil
	}
	c, cerr := m.GetCommit(ctx, p, ref)
	switch {
	case cerr == nil:
		return nil, c, nil
	case !errs.Is(err, errs.NotFound):
		return nil, Commit{}, err
	}
	return nil, Commit{}, errs.New(errs.NotFound, "no sandbox or commit %s", quote(ref)).
		WithHint("casemate ls and casemate log show them")
}

// CommitTree opens the files of a commit for reading. The caller closes it soon: until then no layer is removed.
func (m *Manager) CommitTree(ctx context.Context, p Principal, ref string) (*rootfs.Tree, error) {
	c, err := m.GetCommit(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	return m.cfg.Roots.Tree(c.layer)
}

// Events returns a sandbox's events with a counter greater than after, oldest first, at most limit
// (0: 1000). Those of stopped sandboxes are kept.
func (m *Manager) Events(ctx context.Context, p Principal, ref string, after uint64, limit int) ([]journal.Event, error) {
	sandboxID, err := m.known(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	return m.journal.Events(ctx, sandboxID, after, limit)
}

// FollowEvents sends a sandbox's events from after on until ctx ends or send fails.
func (m *Manager) FollowEvents(ctx context.Context, p Principal, ref string, after uint64, send func(journal.Event) error) error {
	sandboxID, err := m.known(ctx, p, ref)
	if err != nil {
		return err
	}
	return m.journal.Follow(ctx, sandboxID, after, send)
}

// Recorded returns the name of the stream of events that ref means, for those who may read it: a sandbox's whole
// id, also of one that has ended.
func (m *Manager) Recorded(ctx context.Context, p Principal, ref string) (string, error) {
	return m.known(ctx, p, ref)
}

// known returns the whole id of a sandbox, alive or not; or, for an administrator, the name of the stream of
// events that belong to none.
func (m *Manager) known(ctx context.Context, p Principal, ref string) (string, error) {
	if ref == journal.ServerStream {
		if !p.admin() {
			return "", errs.New(errs.PermissionDenied, "what happens to the server itself is for administrators")
		}
		return ref, nil
	}
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil || b == nil {
		return stopped.ID, err
	}
	return b.id, nil
}

// DialPort connects to a TCP port inside a sandbox. The caller closes the connection, which counts
// as activity while it is open. Unavailable: nothing listens there.
func (m *Manager) DialPort(ctx context.Context, p Principal, ref string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, invalid("port %d does not exist", port).WithHint("use 1 to 65535")
	}
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	dctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	conn, err := b.guest.DialPort(dctx, guestwire.DialRequest{Network: "tcp", Port: port})
	if err != nil {
		m.done(b)
		return nil, cause(dctx, err)
	}
	//casemate:fact server port.dialed port number
	e := event(journal.PortDialed, p.ID, map[string]int{"port": port})
	e.Sandbox = b.id
	m.journal.Post(e)
	return &portConn{Conn: conn, closed: func() { m.done(b) }}, nil
}

// portConn tells when it is closed.
type portConn struct {
	net.Conn
	once   sync.Once
	closed func()
}

// Close implements net.Conn.
func (c *portConn) Close() error {
	c.once.Do(c.closed)
	return c.Conn.Close()
}

// CloseWrite ends the sending half, where the connection can.
func (c *portConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errs.New(errs.Unsupported, "this connection can't be closed by halves")
}

// Ports returns the TCP ports that something inside listens on, in order.
func (m *Manager) Ports(ctx context.Context, p Principal, ref string) ([]int, error) {
	b, err := m.alive(ctx, p, ref)
	if err != nil || b.inst.now() == nil {
		return nil, err
	}
	ctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	ports, err := b.guest.Listenings(ctx)
	return ports, cause(ctx, err)
}

// CommitEnv returns the environment that a sandbox which starts from a commit has: the template's at the bottom,
// and what was kept with the commit.
func (m *Manager) CommitEnv(ctx context.Context, p Principal, ref string) (map[string]string, error) {
	c, err := m.GetCommit(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	env := map[string]string{}
	all, err := m.cfg.Roots.Templates(ctx)
	if err != nil {
		return nil, err
	}
	for _, t := range all {
		if t.Name == c.Spec.Template {
			for _, kv := range t.Settings.Env {
				name, value, _ := strings.Cut(kv, "=")
				env[name] = value
			}
		}
	}
	kept, err := m.cfg.Roots.LayerEnv(c.layer)
	maps.Copy(env, kept)
	return env, err
}
