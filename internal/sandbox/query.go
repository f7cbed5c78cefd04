package sandbox

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/store"
)

// minPrefix is how much of an id must be given at least.
const minPrefix = 4

// admin reports whether p may see and change every sandbox. A sandbox that calls back never may.
func (p Principal) admin() bool { return p.Admin && p.Sandbox == "" }

// sees reports whether p may see, and so change, a sandbox: its owner, an administrator, and of the
// sandboxes those that it descends from. A sandbox does not see itself, since what it could change
// of itself are its limits.
func (m *Manager) sees(p Principal, owner, parent string) bool {
	if p.Sandbox == "" {
		return p.Admin || p.ID != "" && p.ID == owner
	}
	for parent != "" {
		if parent == p.Sandbox {
			return true
		}
		above := m.find(parent)
		if above == nil {
			return false
		}
		parent = above.parent
	}
	return false
}

func notFound(ref string) error {
	return errs.New(errs.NotFound, "no sandbox %s", quote(ref)).WithHint("casemate ls shows them")
}

// resolve finds the sandbox that ref names for p: its id, its name among those that are alive, a
// unique prefix of its id, or the name of one that has stopped. It returns either a box or, for a
// stopped one, what is kept of it. What p may not see is not found.
func (m *Manager) resolve(ctx context.Context, p Principal, ref string) (*box, Sandbox, error) {
	if b := m.find(ref); b != nil {
		if !m.sees(p, b.owner, b.parent) {
			return nil, Sandbox{}, notFound(ref)
		}
		return b, Sandbox{}, nil
	}
	if id.ValidSandbox(ref) {
		row, ok, err := m.db.GetSandbox(ctx, ref)
		if err != nil {
			return nil, Sandbox{}, err
		}
		if ok {
			return m.visibleRow(p, ref, row)
		}
	}
	if b, err := m.byName(p, ref); b != nil || err != nil {
		return b, Sandbox{}, err
	}
	return m.resolveStored(ctx, p, ref)
}

func (m *Manager) visibleRow(p Principal, ref string, row store.Sandbox) (*box, Sandbox, error) {
	if !m.sees(p, row.Owner, row.Parent) {
		return nil, Sandbox{}, notFound(ref)
	}
	if b := m.find(row.ID); b != nil {
		return b, Sandbox{}, nil
	}
	s, _, err := ofRow(row)
	return nil, s, err
}

func (m *Manager) byName(p Principal, name string) (*box, error) {
	var found *box
	for _, b := range m.boxes() {
		if b.name != name || !m.sees(p, b.owner, b.parent) {
			continue
		}
		if found != nil {
			return nil, ambiguous(name)
		}
		found = b
	}
	return found, nil
}

func ambiguous(ref string) error {
	return invalid("%s names several sandboxes", quote(ref)).WithHint("use more of the id")
}

// resolveStored looks for a prefix or the name of a stopped sandbox. More rows than are asked for
// could hide a visible one among invisible ones; then the whole id is needed, which the error says.
func (m *Manager) resolveStored(ctx context.Context, p Principal, ref string) (*box, Sandbox, error) {
	const most = 100
	var rows []store.Sandbox
	var err error
	if len(ref) >= minPrefix && len(ref) < id.SandboxLen && shaped(ref, id.SandboxLen, lowerOrNum, lowerOrNum, lowerOrNum) {
		if rows, err = m.db.SandboxesByPrefix(ctx, ref, most); err != nil {
			return nil, Sandbox{}, err
		}
	}
	visible := func(r store.Sandbox) bool { return m.sees(p, r.Owner, r.Parent) }
	var found []store.Sandbox
	for _, r := range rows {
		if visible(r) {
			found = append(found, r)
		}
	}
	if len(found) > 1 {
		return nil, Sandbox{}, ambiguous(ref)
	}
	if len(found) == 0 && dnsLabel(ref) {
		if rows, err = m.db.SandboxesByName(ctx, ref, most); err != nil {
			return nil, Sandbox{}, err
		}
		if i := slices.IndexFunc(rows, visible); i >= 0 {
			found = rows[i : i+1]
		}
	}
	if len(found) == 0 {
		return nil, Sandbox{}, notFound(ref)
	}
	return m.visibleRow(p, ref, found[0])
}

// get returns a sandbox by its whole id, without asking who may see it.
func (m *Manager) get(ctx context.Context, sandboxID string) (Sandbox, error) {
	if b := m.find(sandboxID); b != nil {
		return b.snapshot(), nil
	}
	row, ok, err := m.db.GetSandbox(ctx, sandboxID)
	if err != nil {
		return Sandbox{}, err
	}
	if !ok {
		return Sandbox{}, notFound(sandboxID)
	}
	s, _, err := ofRow(row)
	return s, err
}

// Get returns a sandbox by its id, a unique prefix of it of at least 4 characters, or its name.
// Stopped ones are found too.
func (m *Manager) Get(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil || b == nil {
		return stopped, err
	}
	return b.snapshot(), nil
}

// Query selects sandboxes.
type Query struct {
	// Labels must each be there with this value.
	Labels map[string]string
	// States default to every state but stopped.
	States []State
	// Parent, where set, selects the children of one sandbox.
	Parent string
	// PageSize defaults to 100, at most 1000.
	PageSize  int
	PageToken string
}

// nobody owns no sandbox.
const nobody = "\x00"

const (
	defaultPage = 100
	maxPage     = 1000
)

// position is what a page token holds: where the page before ended.
type position struct {
	Created int64  `json:"c"`
	ID      string `json:"i"`
}

func (p position) token() string {
	b, _ := json.Marshal(p) // plain data: can't fail
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseToken(token string) (position, error) {
	var p position
	if token == "" {
		return p, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil || p.Created <= 0 || !id.ValidSandbox(strings.TrimPrefix(p.ID, id.Commit)) {
		return p, invalid("page_token is none of ours").WithHint("pass on the next_page_token of the answer before")
	}
	return p, nil
}

// List returns a page of sandboxes, the newest first, and the token of the next page, which is ""
// after the last one. Sandboxes that are made or stopped between pages may be missing from them, but
// none is on two pages.
func (m *Manager) List(ctx context.Context, p Principal, q Query) ([]Sandbox, string, error) {
	sq, err := m.listQuery(p, q)
	if err != nil {
		return nil, "", err
	}
	// States are searched in the store, and Get tells of a new one as soon as it is on its way there. What can't
	// be written is told to whoever waits for it; what is there is listed.
	_ = m.db.Flush()
	size := sq.Limit
	sq.Limit++ // one more tells whether there is another page
	page := make([]Sandbox, 0, min(size, 16))
	var at position
	for {
		rows, err := m.db.ListSandboxes(ctx, sq)
		if err != nil {
			return nil, "", err
		}
		for _, r := range rows {
			if len(page) == size {
				return page, at.token(), nil
			}
			at = position{Created: r.Created, ID: r.ID}
			s, ok, err := m.listed(p, q, r)
			if err != nil {
				return nil, "", err
			}
			if ok {
				page = append(page, s)
			}
		}
		if len(rows) < sq.Limit {
			return page, "", nil
		}
		sq.Created, sq.ID = at.Created, at.ID
	}
}

func (m *Manager) listQuery(p Principal, q Query) (store.SandboxQuery, error) {
	at, err := parseToken(q.PageToken)
	if err != nil {
		return store.SandboxQuery{}, err
	}
	if q.PageSize < 0 || q.PageSize > maxPage {
		return store.SandboxQuery{}, invalid("page_size is %d", q.PageSize).WithHint("use 1 to %d", maxPage)
	}
	var c checker
	for k := range q.Labels {
		c.labelKey(k)
	}
	states := q.States
	if len(states) == 0 {
		states = []State{Starting, Running, Paused, Stopping}
	}
	sq := store.SandboxQuery{
		Labels: q.Labels, Parent: q.Parent, Created: at.Created, ID: at.ID,
		Limit: cmp.Or(q.PageSize, defaultPage),
	}
	for _, s := range states {
		switch s {
		case Starting, Running, Paused, Stopping, Stopped:
		default:
			return sq, invalid("state %s is unknown", quote(string(s))).
				WithHint("use starting, running, paused, stopping or stopped")
		}
		sq.States = append(sq.States, string(s))
	}
	switch {
	case p.Sandbox != "":
		// Its descendants belong to whom it belongs to; which of them they are, sees tells.
		sq.Owner = nobody
		if b := m.find(p.Sandbox); b != nil {
			sq.Owner = b.owner
		}
	case !p.Admin:
		sq.Owner = or(p.ID, nobody)
	}
	return sq, c.err
}

// listed returns a row as it is by now, and whether it still belongs on the page.
func (m *Manager) listed(p Principal, q Query, r store.Sandbox) (Sandbox, bool, error) {
	if !m.sees(p, r.Owner, r.Parent) {
		return Sandbox{}, false, nil
	}
	b := m.find(r.ID)
	if b == nil {
		s, _, err := ofRow(r)
		return s, true, err
	}
	s := b.snapshot()
	in := len(q.States) == 0 && s.State != Stopped || slices.Contains(q.States, s.State)
	return s, in, nil
}
