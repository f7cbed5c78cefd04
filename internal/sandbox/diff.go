package sandbox

import (
	"context"
	"path"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// DiffOptions say what Diff tells.
type DiffOptions struct {
	// Paths are absolute inside; only what lies at or below one of them is told. None: everything.
	Paths []string
	// Patches tells which lines of text files differ.
	Patches bool
	// Part is "/" for the root file system alone, or a workspace's path for that one; "": all of them.
	Part string
}

// Diffed is what Diff tells. From and To are the ids of what was compared; From is "" for a template.
type Diffed struct {
	From, To string
	Files    []FileDiff
}

// Diff tells which files differ between two states, and how, in workspaces as well. An empty from is what to comes
// from: a commit's parent, or what a sandbox was last committed to. Paths and targets are text as in Files.
// Kinds: NotFound, FailedPrecondition (what to comes from was removed), ResourceExhausted.
func (m *Manager) Diff(ctx context.Context, p Principal, from, to string, o DiffOptions) (Diffed, error) {
	raw := make([]string, len(o.Paths))
	for i, at := range o.Paths {
		text, ok := guestwire.Unescape(at)
		if !ok || !path.IsAbs(text) {
			return Diffed{}, invalid("path %s is not absolute", quote(at)).WithHint("use one as in the answer")
		}
		raw[i] = path.Clean(text)
	}
	after, err := m.mergeSide(ctx, p, to)
	if err != nil {
		return Diffed{}, err
	}
	out := Diffed{To: after.tip()}
	if after.box != nil {
		out.To = after.box.id
	}
	before, id, err := m.diffFrom(ctx, p, from, after)
	if err != nil {
		return Diffed{}, err
	}
	out.From = id
	out.Files, err = m.cfg.Roots.Diff(ctx, before, after.state(), rootfs.DiffOptions{Paths: raw, Patches: o.Patches, Part: o.Part})
	for i := range out.Files {
		f := &out.Files[i]
		f.Path = guestwire.Escape(f.Path)
		f.TargetBefore, f.TargetAfter = guestwire.Escape(f.TargetBefore), guestwire.Escape(f.TargetAfter)
		for k, name := range f.Attributes {
			f.Attributes[k] = guestwire.Escape(name)
		}
	}
	return out, err
}

// diffFrom finds what a state is compared with, and its id.
func (m *Manager) diffFrom(ctx context.Context, p Principal, from string, to mergeSide) (rootfs.State, string, error) {
	if from != "" {
		s, err := m.mergeSide(ctx, p, from)
		if err != nil {
			return rootfs.State{}, "", err
		}
		if s.box != nil {
			return s.state(), s.box.id, nil
		}
		return s.state(), s.commit.ID, nil
	}
	parent := to.commit.Parent
	if to.box != nil {
		parent = to.head
	}
	if parent == "" {
		base := to.state()
		base.Template = true
		return base, "", nil
	}
	// What it comes from it had: also where that is another key's, of a template that was shared when it began.
	row, ok, err := m.db.GetCommit(ctx, parent)
	if err == nil && !ok {
		err = errs.New(errs.FailedPrecondition, "commit %s, which it comes from, was removed", parent).
			WithHint("name what to compare with")
	}
	return rootfs.State{Layer: row.Layer}, row.ID, err
}

// Verified is what VerifyCommit tells.
type Verified struct {
	Commit Commit
	// Digest is what the files have now, Recorded what was recorded before, or "".
	Digest, Recorded string
	Files, Bytes     int64
}

// Intact reports whether the files are what was recorded, or nothing was.
func (v Verified) Intact() bool { return v.Recorded == "" || v.Recorded == v.Digest }

// verifiedFacts are the server's facts of commit.verified.
//
//casemate:facts server commit.verified
type verifiedFacts struct {
	Commit   string `json:"commit"`
	Digest   string `json:"digest"`
	Recorded string `json:"recorded,omitempty"`
	Intact   bool   `json:"intact"`
}

// VerifyCommit reads all files of a commit and tells their digest. The first time it is recorded, with the
// commit and in the journal; later ones are held against that. Commits with the same files have the same
// digest, whatever they were made of. Kinds: NotFound.
func (m *Manager) VerifyCommit(ctx context.Context, p Principal, ref string) (Verified, error) {
	c, err := m.GetCommit(ctx, p, ref)
	if err != nil {
		return Verified{}, err
	}
	d, err := m.cfg.Roots.Digest(ctx, c.layer)
	if err != nil {
		return Verified{}, err
	}
	v := Verified{Commit: c, Digest: d.Text, Recorded: c.Digest, Files: d.Files, Bytes: d.Bytes}
	e := event(journal.CommitVerified, p.ID, verifiedFacts{Commit: c.ID, Digest: v.Digest, Recorded: v.Recorded, Intact: v.Intact()})
	e.Sandbox = c.Sandbox
	var writes []store.Write
	if c.Digest == "" {
		v.Commit.Digest = d.Text
		writes = append(writes, store.PutCommitDigest(c.ID, d.Text))
	}
	_, err = m.journal.Record(ctx, e, writes...)
	return v, err
}
