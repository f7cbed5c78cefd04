package state

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// The sizes of a page.
const (
	defaultPage = 100
	maxPage     = 1000
)

// Get returns a version of a document with its content; version 0 is the newest. Kinds: InvalidArgument, NotFound.
func (d *Documents) Get(ctx context.Context, p sandbox.Principal, r Ref, version uint64) (Document, error) {
	r, err := resolve(p, r)
	if err != nil {
		return Document{}, err
	}
	v, ok, err := d.cfg.DB.GetStateVersion(ctx, r.Owner, r.Agent, r.Name, version)
	if err != nil {
		return Document{}, fmt.Errorf("read document: %w", err)
	}
	switch {
	case ok && (!v.Deleted || version != 0):
		return ofRow(v), nil
	case ok || version == 0:
		return Document{}, noDocument(r, v)
	}
	head, found, err := d.cfg.DB.StateHead(ctx, r.Owner, r.Agent, r.Name)
	if err != nil {
		return Document{}, fmt.Errorf("read document: %w", err)
	}
	switch {
	case !found:
		return Document{}, noDocument(r, head)
	case version > head.Version:
		return Document{}, errs.New(errs.NotFound, "document %s/%s has no version %d: it is at %d", r.Agent, r.Name, version, head.Version)
	}
	return Document{}, errs.New(errs.NotFound, "version %d of document %s/%s is no longer kept", version, r.Agent, r.Name).
		WithHint("casemate state keep says how many versions are")
}

// Query selects documents of an agent.
type Query struct {
	Owner, Agent string
	// Prefix is what names begin with, as in "memory/".
	Prefix string
	// Deleted also shows those that are deleted and still have their history.
	Deleted bool
	// PageSize is at most 1000; 0: 100.
	PageSize  int
	PageToken string
}

// List returns a page of documents by name, without their content, the token of the next page or "", and the
// agent's revision from which a watch sees everything that the first page does not. Kinds: InvalidArgument.
func (d *Documents) List(ctx context.Context, p sandbox.Principal, q Query) (all []Document, next string, revision uint64, err error) {
	own, err := scope(p, q.Owner, q.Agent, q.Prefix)
	if err != nil {
		return nil, "", 0, err
	}
	size, after, err := page(q.PageSize, q.PageToken)
	if err != nil {
		return nil, "", 0, err
	}
	a, err := d.cfg.DB.GetStateAgent(ctx, own, q.Agent) // before the documents: what comes between is seen twice, not never
	if err != nil {
		return nil, "", 0, fmt.Errorf("read agent: %w", err)
	}
	rows, err := d.cfg.DB.StateDocuments(ctx, own, q.Agent, q.Prefix, after, q.Deleted, size+1)
	if err != nil {
		return nil, "", 0, fmt.Errorf("list documents: %w", err)
	}
	if len(rows) > size {
		rows = rows[:size]
		next = token(rows[size-1].Name)
	}
	return ofRows(rows), next, a.Revision, nil
}

// scope checks what a list or a watch is of, and returns its owner.
func scope(p sandbox.Principal, ownerID, agent, prefix string) (string, error) {
	own, err := owner(p, ownerID)
	if err != nil {
		return "", err
	}
	if err := checkAgent(agent); err != nil {
		return "", err
	}
	return own, checkPrefix(prefix)
}

func token(last string) string { return base64.RawURLEncoding.EncodeToString([]byte(last)) }

func page(size int, tok string) (int, string, error) {
	if size < 0 || size > maxPage {
		return 0, "", invalid("page_size is %d", size).WithHint("use 1 to %d", maxPage)
	}
	after, err := base64.RawURLEncoding.DecodeString(tok)
	if err != nil {
		return 0, "", invalid("page_token is none of ours").WithHint("pass on the next_page_token of the answer before")
	}
	return cmp.Or(size, defaultPage), string(after), nil
}

// History returns versions of a document, the newest first, without their content: at most limit (0: 100), and
// below a version unless that is 0. NotFound: it never was.
func (d *Documents) History(ctx context.Context, p sandbox.Principal, r Ref, below uint64, limit int) ([]Document, error) {
	r, err := resolve(p, r)
	if err != nil {
		return nil, err
	}
	if limit < 0 || limit > maxPage {
		return nil, invalid("limit is %d", limit).WithHint("use 1 to %d", maxPage)
	}
	rows, err := d.cfg.DB.StateHistory(ctx, r.Owner, r.Agent, r.Name, cmp.Or(below, 1<<62), cmp.Or(limit, defaultPage))
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	if len(rows) == 0 && below == 0 {
		return nil, noDocument(r, store.StateVersion{})
	}
	return ofRows(rows), nil
}

// Agent is what is known of an agent: its documents' sums, and how much of their history is kept.
type Agent struct {
	Owner     string
	Name      string
	Documents int64
	Bytes     int64  // of all versions that are kept
	Revision  uint64 // of the newest
	Retention
}

// Agents returns a page of agents by name, and the token of the next page or "": the principal's own, or for
// administrators with everybody those of all.
func (d *Documents) Agents(ctx context.Context, p sandbox.Principal, ownerID string, everybody bool, size int, tok string) ([]Agent, string, error) {
	own, err := owner(p, ownerID)
	if err != nil {
		return nil, "", err
	}
	if everybody {
		if !p.Admin {
			return nil, "", errs.New(errs.PermissionDenied, "only an administrator may see everybody's agents").WithHint("use an admin key")
		}
		own = ""
	}
	size, after, err := page(size, tok)
	if err != nil {
		return nil, "", err
	}
	afterOwner, afterName, _ := strings.Cut(after, "\n")
	rows, err := d.cfg.DB.StateAgents(ctx, own, afterOwner, afterName, size+1)
	if err != nil {
		return nil, "", fmt.Errorf("list agents: %w", err)
	}
	next := ""
	if len(rows) > size {
		rows = rows[:size]
		next = token(rows[size-1].Owner + "\n" + rows[size-1].Agent)
	}
	all := make([]Agent, len(rows))
	for i, r := range rows {
		all[i] = ofAgentRow(r)
	}
	return all, next, nil
}

func ofAgentRow(r store.StateAgent) Agent {
	return Agent{r.Owner, r.Agent, r.Documents, r.Bytes, r.Revision, Retention{int(r.KeepVersions), time.Duration(r.KeepFor)}}
}
