package state

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// Links say what a version belongs to.
type Links struct {
	// Sandbox is a reference to a sandbox, which may have ended; "": none. The event is recorded in its journal.
	Sandbox string
	// Commit is a reference to a commit, which is kept as long as the version; "": none.
	Commit string
}

// SetRequest says what a document shall be.
type SetRequest struct {
	Ref
	Links
	Content []byte
	// ContentType defaults to the version's before, else to JSON where the content is, else to Bytes.
	ContentType string
	// Expect is the version that must be the newest; 0: there must be no document. nil: whatever there is.
	Expect *uint64
}

// Set writes a new version. Of several writers that expect the same version one wins, even where they write the
// same. Kinds: InvalidArgument, NotFound (a link), Conflict (Expect), TooLarge, ResourceExhausted.
func (d *Documents) Set(ctx context.Context, p sandbox.Principal, r SetRequest) (Document, error) {
	return d.change(ctx, p, r.Ref, r.Links, r.Expect, func(head store.StateVersion, there bool) (content, error) {
		return contentOf(r.Content, r.ContentType, head, there)
	})
}

// content is what a new version holds.
type content struct {
	data    []byte
	kind    string
	deleted bool
}

func contentOf(data []byte, kind string, head store.StateVersion, there bool) (content, error) {
	if err := checkSize(len(data)); err != nil {
		return content{}, err
	}
	switch {
	case kind != "":
		var err error
		if kind, err = checkType(kind); err != nil {
			return content{}, err
		}
	case there && (!isJSON(head.ContentType) || json.Valid(data)):
		kind = head.ContentType
	case json.Valid(data):
		kind = JSON
	default:
		kind = Bytes
	}
	if isJSON(kind) {
		if err := checkJSON(data); err != nil {
			return content{}, err
		}
	}
	return content{data: data, kind: kind}, nil
}

func checkSize(n int) error {
	if n > MaxDocument {
		return errs.New(errs.TooLarge, "the document has %d bytes, limit %d", n, MaxDocument).
			WithHint("split it into several documents, or keep large things in files and link to a commit")
	}
	return nil
}

// checkJSON says where content is no JSON.
func checkJSON(data []byte) error {
	if json.Valid(data) {
		return nil
	}
	var v any
	err := json.Unmarshal(data, &v)
	at := ""
	if s, ok := err.(*json.SyntaxError); ok { //nolint:errorlint // what Unmarshal returns
		at = fmt.Sprintf(" (byte %d)", s.Offset)
	}
	return invalid("the content is no JSON%s: %v", at, err).WithHint("name another content type, such as text/plain, for what is none")
}

// DeleteRequest says which document to delete.
type DeleteRequest struct {
	Ref
	Expect *uint64 // as in SetRequest, but not 0
}

// Delete makes a version that says the document is deleted; its history stays. Kinds: InvalidArgument, NotFound,
// Conflict.
func (d *Documents) Delete(ctx context.Context, p sandbox.Principal, r DeleteRequest) (Document, error) {
	return d.change(ctx, p, r.Ref, Links{}, r.Expect, func(head store.StateVersion, there bool) (content, error) {
		if !there {
			return content{}, noDocument(r.Ref, head)
		}
		return content{deleted: true, kind: head.ContentType}, nil
	})
}

func noDocument(r Ref, head store.StateVersion) error {
	if head.Deleted {
		return errs.New(errs.NotFound, "document %s/%s was deleted at version %d", r.Agent, r.Name, head.Version).
			WithHint("casemate state history shows its versions, and casemate state get --version reads one")
	}
	return errs.New(errs.NotFound, "agent %s has no document %q", r.Agent, r.Name).WithHint("casemate state ls %s shows them", r.Agent)
}

// change writes the version that make makes of the newest one.
func (d *Documents) change(ctx context.Context, p sandbox.Principal, r Ref, l Links, expect *uint64, make func(head store.StateVersion, there bool) (content, error)) (Document, error) {
	r, err := resolve(p, r)
	if err != nil {
		return Document{}, err
	}
	if l, err = d.link(ctx, p, l); err != nil {
		return Document{}, err
	}
	release, err := d.acquire(ctx, r)
	if err != nil {
		return Document{}, err
	}
	defer release()
	head, found, err := d.cfg.DB.StateHead(ctx, r.Owner, r.Agent, r.Name)
	if err != nil {
		return Document{}, fmt.Errorf("read document: %w", err)
	}
	there := found && !head.Deleted
	if expect != nil && !matches(*expect, head, there) {
		return Document{}, lostRace(r, *expect, head, there)
	}
	c, err := make(head, there)
	if err != nil {
		return Document{}, err
	}
	digest := sha256.Sum256(c.data)
	v := store.StateVersion{
		Owner: r.Owner, Agent: r.Agent, Name: r.Name, Version: head.Version + 1, Created: d.cfg.Clock.Now().UnixNano(), Author: p.ID,
		ContentType: c.kind, Deleted: c.deleted, Size: int64(len(c.data)), Digest: digest[:], Sandbox: l.Sandbox, Commit: l.Commit,
		Content: append([]byte{}, c.data...), // never nil, and not the caller's
	}
	return d.write(ctx, p, v)
}

// matches reports whether the newest version is the one that a writer expects.
func matches(expect uint64, head store.StateVersion, there bool) bool {
	return expect == head.Version || expect == 0 && !there
}

func lostRace(r Ref, expect uint64, head store.StateVersion, there bool) error {
	is := fmt.Sprintf("is at version %d", head.Version)
	if !there {
		is = "does not exist"
		if head.Deleted {
			is = fmt.Sprintf("was deleted at version %d", head.Version)
		}
	}
	want := fmt.Sprintf("version %d is expected", expect)
	if expect == 0 {
		want = "it is expected not to exist"
	}
	return errs.New(errs.Conflict, "document %s/%s %s, and %s", r.Agent, r.Name, is, want).
		WithHint("read it again, apply your change to what is there, and write with that version")
}

// link returns the ids that links name.
func (d *Documents) link(ctx context.Context, p sandbox.Principal, l Links) (Links, error) {
	if l.Sandbox != "" {
		s, err := d.cfg.Sandboxes.Get(ctx, p, l.Sandbox)
		if err != nil {
			return l, err
		}
		l.Sandbox = s.ID
	}
	if l.Commit != "" {
		c, err := d.cfg.Sandboxes.GetCommit(ctx, p, l.Commit)
		if err != nil {
			return l, err
		}
		if c.Owner != p.ID && !p.Admin { // of a shared template: a link would keep its owner from removing it
			return l, errs.New(errs.PermissionDenied, "commit %s is another key's", c.ID).
				WithHint("link a commit of your own: casemate commit makes one of a sandbox")
		}
		l.Commit = c.ID
	}
	return l, nil
}

// versionFacts are the server's facts of document.set and document.deleted. The content's digest is not among
// them: short contents could be guessed from it, and the journal outlives them.
//
//casemate:facts server document.set document.deleted document.forgotten
type versionFacts struct {
	Owner       string `json:"owner"`
	Agent       string `json:"agent"`
	Name        string `json:"name"`
	Version     uint64 `json:"version"`
	Revision    uint64 `json:"revision"`
	ContentType string `json:"content_type,omitempty"`
	Size        int64  `json:"size"`
	Commit      string `json:"commit,omitempty"`
}

// write records a version and makes room behind it. Preconditions: the caller has the document's turn.
func (d *Documents) write(ctx context.Context, p sandbox.Principal, v store.StateVersion) (Document, error) {
	key := agentKey{v.Owner, v.Agent}
	a, leave := d.enter(key)
	defer leave()
	settings, err := d.cfg.DB.GetStateAgent(ctx, v.Owner, v.Agent)
	if err != nil {
		return Document{}, fmt.Errorf("read agent: %w", err)
	}
	if err := d.admit(ctx, v); err != nil {
		return Document{}, err
	}
	a.order.Lock()
	if !a.loaded {
		a.loaded, a.revision = true, settings.Revision
	}
	a.revision++
	v.Revision = a.revision
	writes := []store.Write{store.AddStateVersion(v)}
	if keep := keepVersions(settings); keep > 0 && v.Version > keep {
		writes = append(writes, store.DropStateVersions(v.Owner, v.Agent, v.Name, v.Version-keep))
	}
	pending := d.cfg.Journal.Enqueue(event(p, v), writes...)
	a.order.Unlock()
	if _, err := pending.Wait(); err != nil {
		return Document{}, fmt.Errorf("store document: %w", err)
	}
	d.tell(a)
	v.Content = nil
	return ofRow(v), nil
}

// admit says whether there is room for a version. A deletion always finds some.
func (d *Documents) admit(ctx context.Context, v store.StateVersion) error {
	used, err := d.cfg.DB.StateUsed(ctx, v.Owner)
	if err != nil {
		return fmt.Errorf("read what documents hold: %w", err)
	}
	if !v.Deleted && used+v.Size+store.StateOverhead > d.cfg.MaxBytes {
		return errs.New(errs.ResourceExhausted, "the documents of %s hold %d bytes with their histories, and %d more are over the limit of %d",
			v.Owner, used, v.Size, d.cfg.MaxBytes).
			WithHint("keep fewer versions (casemate state keep), or remove documents with their histories (casemate state rm --forget)")
	}
	return nil
}

func event(p sandbox.Principal, v store.StateVersion) journal.Event {
	e := journal.Event{Sandbox: v.Sandbox, Type: journal.DocumentSet, Actor: p.ID}
	if e.Sandbox == "" {
		e.Sandbox = journal.ServerStream
	}
	f := versionFacts{v.Owner, v.Agent, v.Name, v.Version, v.Revision, v.ContentType, v.Size, v.Commit}
	if v.Deleted {
		e.Type, f.ContentType = journal.DocumentDeleted, ""
	}
	return e.With(journal.Server, f)
}

// Forget removes a document with all its versions, as if it had never been; a later one begins at version 1. With
// Expect, it must be the newest version. Kinds: InvalidArgument, NotFound, Conflict.
func (d *Documents) Forget(ctx context.Context, p sandbox.Principal, r DeleteRequest) (Document, error) {
	ref, err := resolve(p, r.Ref)
	if err != nil {
		return Document{}, err
	}
	release, err := d.acquire(ctx, ref)
	if err != nil {
		return Document{}, err
	}
	defer release()
	head, found, err := d.cfg.DB.StateHead(ctx, ref.Owner, ref.Agent, ref.Name)
	if err != nil {
		return Document{}, fmt.Errorf("read document: %w", err)
	}
	if !found {
		return Document{}, noDocument(ref, head)
	}
	if r.Expect != nil && *r.Expect != head.Version {
		return Document{}, lostRace(ref, *r.Expect, head, !head.Deleted)
	}
	return ofRow(head), d.forget(p.ID, head)
}

func (d *Documents) forget(actor string, head store.StateVersion) error {
	e := journal.Event{Sandbox: journal.ServerStream, Type: journal.DocumentForgotten, Actor: actor}.
		With(journal.Server, versionFacts{Owner: head.Owner, Agent: head.Agent, Name: head.Name, Version: head.Version, Revision: head.Revision})
	a, leave := d.enter(agentKey{head.Owner, head.Agent})
	defer leave()
	_, err := d.cfg.Journal.Record(context.Background(), e, store.ForgetStateDocument(head.Owner, head.Agent, head.Name))
	if err != nil {
		return fmt.Errorf("forget document: %w", err)
	}
	d.tell(a)
	return nil
}
