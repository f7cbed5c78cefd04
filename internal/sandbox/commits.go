package sandbox

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

func noCommit(ref string) error {
	return errs.New(errs.NotFound, "no commit %s", quote(ref)).WithHint("casemate log shows them")
}

// tag checks a name for a commit.
func (c *checker) tag(name string) {
	c.that(shaped(name, 128, lowerOrNum, plus(lowerOrNum, "._/:-"), lowerOrNum) && !strings.HasPrefix(name, id.Commit),
		"use lower-case letters, digits and . _ / : -, at most 128, as in web/ready", "tag %s is no tag's name", quote(name))
}

// seesCommit reports whether p may see a commit: its owner and administrators. A sandbox that calls back
// sees those of the sandboxes that it sees.
func (m *Manager) seesCommit(p Principal, r store.Commit) bool {
	if p.Sandbox == "" {
		return m.sees(p, r.Owner, "")
	}
	b := m.find(r.Sandbox)
	return b != nil && m.sees(p, b.owner, b.parent)
}

// GetCommit returns a commit by its id, a unique beginning of it, or a tag of the principal's; or what a tag of a shared
// template leads to, which may be read and started from.
func (m *Manager) GetCommit(ctx context.Context, p Principal, ref string) (Commit, error) {
	c, err := m.ownCommit(ctx, p, ref)
	if !errs.Is(err, errs.NotFound) {
		return c, err
	}
	if shared, serr := m.sharedCommit(ctx, ref); !errs.Is(serr, errs.NotFound) {
		return shared, serr
	}
	return c, err
}

// ownCommit returns a commit that the principal may change.
func (m *Manager) ownCommit(ctx context.Context, p Principal, ref string) (Commit, error) {
	row, err := m.commitRow(ctx, p, ref)
	if err != nil {
		return Commit{}, err
	}
	c, err := ofCommitRow(row)
	if err != nil {
		return Commit{}, err
	}
	tags, err := m.tagsOf(ctx, c.Owner)
	c.Tags = tags[c.ID]
	return c, err
}

func (m *Manager) commitRow(ctx context.Context, p Principal, ref string) (store.Commit, error) {
	if strings.HasPrefix(ref, id.Commit) {
		return m.commitByID(ctx, p, ref)
	}
	tags, err := m.db.CommitTags(ctx, "")
	if err != nil {
		return store.Commit{}, err
	}
	for _, own := range []bool{true, false} { // an administrator's own come first
		for _, t := range tags {
			if t.Name != ref || (t.Owner == p.ID) != own {
				continue
			}
			row, ok, err := m.db.GetCommit(ctx, t.Target)
			if err != nil {
				return store.Commit{}, err
			}
			if ok && m.seesCommit(p, row) {
				return row, nil
			}
		}
	}
	return store.Commit{}, noCommit(ref)
}

func (m *Manager) commitByID(ctx context.Context, p Principal, ref string) (store.Commit, error) {
	row, ok, err := m.db.GetCommit(ctx, ref)
	if err != nil {
		return store.Commit{}, err
	}
	if ok && m.seesCommit(p, row) {
		return row, nil
	}
	if len(ref) < len(id.Commit)+minPrefix || !shaped(ref[len(id.Commit):], id.SandboxLen, lowerOrNum, lowerOrNum, lowerOrNum) {
		return store.Commit{}, noCommit(ref)
	}
	const most = 100
	rows, err := m.db.CommitsByPrefix(ctx, ref, most)
	if err != nil {
		return store.Commit{}, err
	}
	var found []store.Commit
	for _, r := range rows {
		if m.seesCommit(p, r) {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return store.Commit{}, noCommit(ref)
	case 1:
		return found[0], nil
	}
	return store.Commit{}, invalid("%s names several commits", quote(ref)).WithHint("use more of the id")
}

// tagsOf returns an owner's tags by commit; "": everybody's.
func (m *Manager) tagsOf(ctx context.Context, owner string) (map[string][]string, error) {
	rows, err := m.db.CommitTags(ctx, owner)
	if err != nil {
		return nil, err
	}
	tags := make(map[string][]string)
	for _, t := range rows {
		tags[t.Target] = append(tags[t.Target], t.Name)
	}
	return tags, nil
}

// CommitQuery selects commits.
type CommitQuery struct {
	// Sandbox is a reference to the sandbox that they were made of; "": of any.
	Sandbox string
	// Tagged leaves out those without a tag, and Explicit the automatic ones.
	Tagged, Explicit bool
	// PageSize is at most 1000; 0: 100.
	PageSize  int
	PageToken string
}

// ListCommits returns a page of commits, the newest first, and the token of the next page or "".
func (m *Manager) ListCommits(ctx context.Context, p Principal, q CommitQuery) ([]Commit, string, error) {
	at, err := parseToken(q.PageToken)
	if err != nil {
		return nil, "", err
	}
	if q.PageSize < 0 || q.PageSize > maxPage {
		return nil, "", invalid("page_size is %d", q.PageSize).WithHint("use 1 to %d", maxPage)
	}
	size := cmp.Or(q.PageSize, defaultPage)
	sq := store.CommitQuery{Created: at.Created, ID: at.ID, Limit: size + 1}
	if !p.admin() && p.Sandbox == "" {
		sq.Owner = or(p.ID, nobody)
	}
	if q.Sandbox != "" {
		if sq.Sandbox, err = m.known(ctx, p, q.Sandbox); err != nil {
			return nil, "", err
		}
	}
	tags, err := m.tagsOf(ctx, "")
	if err != nil {
		return nil, "", err
	}
	var page []Commit
	for {
		rows, err := m.db.ListCommits(ctx, sq)
		if err != nil {
			return nil, "", err
		}
		for _, r := range rows {
			if len(page) == size {
				last := page[size-1]
				return page, position{Created: last.CreatedAt.UnixNano(), ID: last.ID}.token(), nil
			}
			sq.Created, sq.ID = r.Created, r.ID
			c, err := ofCommitRow(r)
			if err != nil {
				return nil, "", err
			}
			c.Tags = tags[c.ID]
			if !m.seesCommit(p, r) || q.Tagged && len(c.Tags) == 0 || q.Explicit && c.Automatic {
				continue
			}
			page = append(page, c)
		}
		if len(rows) < sq.Limit {
			return page, "", nil
		}
	}
}

// tagFacts are the server's facts of commit.tagged.
//
//casemate:facts server commit.tagged
type tagFacts struct {
	Commit  string `json:"commit"`
	Tag     string `json:"tag"`
	Removed bool   `json:"removed,omitempty"`
}

// TagCommit gives a commit a name, which its owner's other commits lose; with remove it takes the name away
// from it. Idempotent. Kinds: InvalidArgument, NotFound.
func (m *Manager) TagCommit(ctx context.Context, p Principal, ref, name string, remove bool) (Commit, error) {
	var check checker
	if check.tag(name); check.err != nil {
		return Commit{}, check.err
	}
	c, err := m.ownCommit(ctx, p, ref)
	if err != nil {
		return Commit{}, err
	}
	write := store.PutCommitTag(store.CommitTag{Owner: c.Owner, Name: name, Target: c.ID, Moved: m.clock.Now().UnixNano()})
	if remove {
		if !slices.Contains(c.Tags, name) {
			return c, nil
		}
		write = store.DropCommitTag(c.Owner, name)
	}
	e := event(journal.CommitTagged, p.ID, tagFacts{Commit: c.ID, Tag: name, Removed: remove})
	e.Sandbox = c.Sandbox
	if _, err := m.journal.Record(ctx, e, write); err != nil {
		return Commit{}, err
	}
	return m.GetCommit(ctx, p, c.ID)
}

// DeleteCommit removes a commit and its tags. Sandboxes that were started from it, and commits made after
// it, keep what they need. Kinds: NotFound; FailedPrecondition where an agent's document names it, or a sandbox is on
// its way to it.
func (m *Manager) DeleteCommit(ctx context.Context, p Principal, ref string) (Commit, error) {
	c, err := m.ownCommit(ctx, p, ref)
	if err != nil {
		return Commit{}, err
	}
	links, err := m.db.StateLinks(ctx)
	if err != nil {
		return Commit{}, err
	}
	if document := links[c.ID]; document != "" {
		return Commit{}, errs.New(errs.FailedPrecondition, "commit %s is linked from document %s", c.ID, document).
			WithHint("write the document anew without the link, or remove it (casemate state rm)")
	}
	dropped, err := m.dropCommit(ctx, p.ID, c, true, m.bound)
	if err == nil && !dropped {
		err = errs.New(errs.FailedPrecondition, "a sandbox is just being checked out to commit %s", c.ID).WithHint("try again")
	}
	if err != nil {
		return Commit{}, err
	}
	_, err = m.collect(ctx, false)
	return c, err
}

// dropCommit removes a commit unless needed says that it is among those that must stay; with old also one that a
// document once named.
func (m *Manager) dropCommit(ctx context.Context, actor string, c Commit, old bool, needed func(b *box) [4]string) (bool, error) {
	m.keep.Lock() // nobody comes to need it meanwhile
	defer m.keep.Unlock()
	for _, b := range m.boxes() {
		b.mu.Lock()
		ids := needed(b)
		b.mu.Unlock()
		if slices.Contains(ids[:], c.ID) {
			return false, nil
		}
	}
	//casemate:fact server commit.dropped commit text
	e := event(journal.CommitDropped, actor, map[string]string{"commit": c.ID})
	e.Sandbox = c.Sandbox
	_, err := m.journal.Record(ctx, e, store.DropCommit(c.ID, old))
	return err == nil, err
}

// bound returns the commits that a sandbox is on its way to. Preconditions: the caller holds b.mu.
func (m *Manager) bound(b *box) [4]string { return [4]string{b.bound, b.body.Checkout} }

// standsOn returns those that it stands on, too.
func (m *Manager) standsOn(b *box) [4]string {
	return [4]string{b.bound, b.body.Checkout, b.sb.Head, b.sb.Spec.Commit}
}

// bind keeps a commit from being removed while b goes to it, until unbind.
func (m *Manager) bind(ctx context.Context, b *box, commit string) error {
	m.keep.RLock()
	defer m.keep.RUnlock()
	_, ok, err := m.db.GetCommit(ctx, commit)
	if err != nil {
		return err
	}
	if !ok {
		return noCommit(commit)
	}
	b.bindTo(commit)
	return nil
}

func (b *box) bindTo(commit string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bound = commit
}

// CollectOptions say which commits Collect removes.
type CollectOptions struct {
	// Dry removes nothing and tells what it would.
	Dry bool
	// OlderThan removes commits of that age which have no tag; 0: only automatic ones, a day after they were
	// made.
	OlderThan time.Duration
}

// automaticFor is how long commits that were made on the way to something else are kept at least.
const automaticFor = 24 * time.Hour

// Collected is what Collect removed, or would.
type Collected struct {
	Commits []Commit
	Layers  []Freed
	// Bytes is what that gives back at least.
	Bytes int64
}

// Collect removes commits that nobody needs, and the layers that no commit and no sandbox needs. What a
// sandbox was started from, or was last committed to, is needed, what an agent's documents name in any version
// that is kept, and where lines of history part that both go on. It is for administrators.
func (m *Manager) Collect(ctx context.Context, p Principal, o CollectOptions) (Collected, error) {
	if !p.admin() {
		return Collected{}, errs.New(errs.PermissionDenied, "only an administrator may clean up the store").WithHint("use an admin key")
	}
	if o.OlderThan < 0 {
		return Collected{}, invalid("older_than is %s", o.OlderThan).WithHint("use 0 or more")
	}
	var out Collected
	going, forgotten, err := m.unneeded(ctx, o)
	if err != nil {
		return out, err
	}
	without := map[string]bool{}
	for _, c := range going {
		if !o.Dry {
			if dropped, err := m.dropCommit(ctx, p.ID, c, false, m.standsOn); err != nil {
				return out, err
			} else if !dropped {
				continue
			}
		}
		without[c.ID] = true
		out.Commits = append(out.Commits, c)
	}
	if !o.Dry && len(forgotten) > 0 {
		if err := m.db.Write(store.ForgetCommits(forgotten)); err != nil {
			return out, err
		}
	}
	out.Layers, err = m.collectBut(ctx, o.Dry, without)
	for _, f := range out.Layers {
		out.Bytes += f.Bytes
	}
	return out, err
}

// unneeded returns the commits that Collect removes, the newest first, and the ids of removed ones whose place
// in history nobody needs any more. A commit in which lines of history meet that both go on is needed: it is what
// they would be merged by.
func (m *Manager) unneeded(ctx context.Context, o CollectOptions) (going []Commit, forgotten []string, err error) {
	rows, err := m.db.ListCommits(ctx, store.CommitQuery{})
	if err != nil {
		return nil, nil, err
	}
	byID := make(map[string]store.Commit, len(rows))
	for _, r := range rows {
		byID[r.ID] = r
	}
	h, err := m.history(ctx)
	if err != nil {
		return nil, nil, err
	}
	tags, err := m.tagsOf(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	used, err := m.commitsInUse(ctx)
	if err != nil {
		return nil, nil, err
	}
	links, err := m.db.StateLinks(ctx)
	if err != nil {
		return nil, nil, err
	}
	lines := map[string]int{}    // that come from a commit and go on
	for _, id := range h.order { // children before their parents
		_, linked := links[id]
		stays := used[id] || linked
		if r, ok := byID[id]; ok {
			c, err := ofCommitRow(r)
			if err != nil {
				return nil, nil, err
			}
			age := m.clock.Now().Sub(c.CreatedAt)
			old := o.OlderThan > 0 && age > o.OlderThan || c.Automatic && age > automaticFor
			if stays = stays || len(tags[id]) > 0 || !old || lines[id] > 1; !stays {
				going = append(going, c)
			}
		} else if !stays && lines[id] == 0 {
			forgotten = append(forgotten, id)
		}
		if stays || lines[id] > 0 {
			lines[h.commits[id].Parent]++
			lines[h.commits[id].Merged]++
		}
	}
	return going, forgotten, nil
}

// commitsInUse returns the commits that sandboxes stand on, and those that builds of templates keep.
func (m *Manager) commitsInUse(ctx context.Context) (map[string]bool, error) {
	used, err := m.db.BuildTargets(ctx)
	if err != nil {
		return nil, err
	}
	for _, b := range m.boxes() {
		b.mu.Lock()
		for _, id := range m.standsOn(b) {
			used[id] = true
		}
		b.mu.Unlock()
	}
	return used, nil
}

// collect removes the layers that nothing names.
func (m *Manager) collect(ctx context.Context, dry bool) ([]Freed, error) {
	return m.collectBut(ctx, dry, nil)
}

// collectBut is collect as if the commits in without were gone.
func (m *Manager) collectBut(ctx context.Context, dry bool, without map[string]bool) ([]Freed, error) {
	m.keep.Lock()
	defer m.keep.Unlock()
	rows, err := m.db.ListCommits(ctx, store.CommitQuery{})
	if err != nil {
		return nil, err
	}
	keep := make(map[string]bool, len(rows))
	for _, r := range rows {
		if !without[r.ID] {
			keep[r.Layer] = true
		}
	}
	return m.cfg.Roots.Collect(ctx, keep, dry)
}
