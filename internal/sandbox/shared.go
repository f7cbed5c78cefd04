package sandbox

import (
	"context"
	"maps"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// SharedTemplates returns the owners of the built templates that every key may start from, by the templates' names.
func (m *Manager) SharedTemplates(ctx context.Context) (map[string]string, error) {
	all, err := m.shared.read(ctx)
	return maps.Clone(all), err
}

// sharedFacts are the server's facts of template.shared.
//
//casemate:facts server template.shared
type sharedFacts struct {
	Template string `json:"template"`
	Owner    string `json:"owner"`
	Shared   bool   `json:"shared"` // false: no longer
}

// ShareTemplate lets every key start sandboxes from a template that was built here, by its name and its tags, and build
// upon it; with shared unset no longer. Sandboxes that are there keep what they have. It is for administrators.
// Idempotent. Kinds: PermissionDenied, NotFound, InvalidArgument (a commit's id), AlreadyExists (another key's template of
// that name is shared, or one of that name is everybody's anyway).
func (m *Manager) ShareTemplate(ctx context.Context, p Principal, name string, shared bool) error {
	if !p.admin() {
		return errs.New(errs.PermissionDenied, "only an administrator may share a template with other keys").WithHint("use an admin key")
	}
	if strings.HasPrefix(name, id.Commit) || strings.Contains(name, ":") {
		return invalid("%s is no template's name", quote(name)).WithHint("give the name alone: its tags are shared with it")
	}
	s := m.shared
	s.changing.Lock()
	defer s.changing.Unlock()
	now, err := s.read(ctx)
	if err != nil {
		return err
	}
	if !shared {
		if _, ok := now[name]; !ok {
			return nil
		}
		return m.putShared(ctx, p.ID, now, name, "")
	}
	if _, err := m.template(ctx, name); !errs.Is(err, errs.NotFound) {
		return errs.New(errs.AlreadyExists, "template %s is everybody's already", name)
	}
	owner, err := m.templateOwner(ctx, p, name)
	switch {
	case err != nil:
		return err
	case now[name] == owner:
		return nil
	case now[name] != "":
		return errs.New(errs.AlreadyExists, "a template %s of %s is shared", name, now[name]).
			WithHint("build yours under another name, or share that one no longer (casemate template share --stop %s)", name)
	}
	return m.putShared(ctx, p.ID, now, name, owner)
}

// templateOwner finds whose tags a template's name stands before: the administrator's own, or another's.
func (m *Manager) templateOwner(ctx context.Context, p Principal, name string) (string, error) {
	tags, err := m.db.CommitTags(ctx, "")
	if err != nil {
		return "", err
	}
	var owners []string
	for _, t := range tags {
		if templateOf(t.Name) == name && !slices.Contains(owners, t.Owner) {
			owners = append(owners, t.Owner)
		}
	}
	switch {
	case slices.Contains(owners, p.ID):
		return p.ID, nil
	case len(owners) == 1:
		return owners[0], nil
	case len(owners) > 1:
		return "", errs.New(errs.FailedPrecondition, "%d keys have a template %s", len(owners), name).
			WithHint("build one of your own under that name")
	}
	return "", errs.New(errs.NotFound, "no template %q was built here", name).WithHint("casemate template ls shows them")
}

// putShared records that a template is shared; without an owner, that it is so no longer. Preconditions: the caller holds
// changing.
func (m *Manager) putShared(ctx context.Context, actor string, now map[string]string, name, owner string) error {
	facts := sharedFacts{Template: name, Owner: or(owner, now[name]), Shared: owner != ""}
	by := &owner
	if owner == "" {
		by = nil
	}
	return m.shared.setLocked(ctx, name, by, event(journal.TemplateShared, actor, facts))
}

// TemplateGone ends the sharing of a template of owner's that is deleted: one that is built later under its name is
// another.
func (m *Manager) TemplateGone(ctx context.Context, p Principal, owner, name string) error {
	s := m.shared
	s.changing.Lock()
	defer s.changing.Unlock()
	now, err := s.read(ctx)
	if err != nil || now[name] != owner {
		return err
	}
	return m.putShared(ctx, p.ID, now, name, "")
}

// templateOf returns the template whose tag a commit's tag is: web of web and web:v2.
func templateOf(tag string) string {
	name, _, _ := strings.Cut(tag, ":")
	return name
}

// sharedCommit finds the commit that a reference leads to because its template is shared: by a tag of the template's, or
// by the whole id. NotFound: there is none.
func (m *Manager) sharedCommit(ctx context.Context, ref string) (Commit, error) {
	shared, err := m.shared.read(ctx)
	if err != nil {
		return Commit{}, err
	}
	var row store.Commit
	ok, tags := false, []store.CommitTag(nil)
	if strings.HasPrefix(ref, id.Commit) {
		if row, ok, err = m.db.GetCommit(ctx, ref); err == nil && ok {
			tags, err = m.db.CommitTags(ctx, row.Owner)
		}
	} else if owner := shared[templateOf(ref)]; owner != "" {
		if tags, err = m.db.CommitTags(ctx, owner); err == nil {
			for _, t := range tags {
				if t.Name == ref {
					row, ok, err = m.db.GetCommit(ctx, t.Target)
				}
			}
		}
	}
	if err != nil {
		return Commit{}, err
	}
	var names []string // that are shared: the owner's others are nobody's business
	for _, t := range tags {
		if t.Target == row.ID && shared[templateOf(t.Name)] == row.Owner {
			names = append(names, t.Name)
		}
	}
	if !ok || len(names) == 0 {
		return Commit{}, noCommit(ref)
	}
	c, err := ofCommitRow(row)
	c.Tags = names
	return c, err
}
