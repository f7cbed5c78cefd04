package api

import (
	"context"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// history implements HistoryService.
type history struct{ *API }

var _ casematev1connect.HistoryServiceHandler = (*history)(nil)

// maxMerged bounds the changes that the answer to a merge lists.
const maxMerged = 10_000

// MergeStates implements HistoryServiceHandler.
func (h *history) MergeStates(ctx context.Context, req *v1.MergeStatesRequest) (*v1.MergeStatesResponse, error) {
	o := sandbox.MergeOptions{
		From: req.GetFrom(), Base: req.GetBase(), Text: req.GetText(), Dry: req.GetDryRun(),
		CommitOptions: sandbox.CommitOptions{Message: req.GetMessage(), Tag: req.GetTag()},
	}
	for _, c := range req.GetChoices() {
		o.Choices = append(o.Choices, sandbox.Choice{Path: c.GetPath(), Side: sandbox.Side(c.GetSide())})
	}
	got, err := h.cfg.Manager.Merge(ctx, principalOf(ctx), req.GetInto(), o)
	if err != nil {
		return nil, err
	}
	resp := &v1.MergeStatesResponse{
		Outcome: mergeOutcome(got.Outcome), Commit: commitMessage(got.Commit), Saved: commitMessage(got.Saved), Base: got.Base,
		Conflicts: conflictMessages(got.Conflicts), Resolved: conflictMessages(got.Resolved), Changed: clamp32(len(got.Changes)),
		Changes: changeMessages(got.Changes[:min(len(got.Changes), maxMerged)]),
	}
	if got.Sandbox.ID != "" {
		resp.Sandbox = sandboxMessage(got.Sandbox)
	}
	return resp, nil
}

func mergeOutcome(o sandbox.MergeOutcome) v1.MergeOutcome {
	switch o {
	case sandbox.MergeDone:
		return v1.MergeOutcome_MERGE_OUTCOME_MERGED
	case sandbox.MergeUpToDate:
		return v1.MergeOutcome_MERGE_OUTCOME_UP_TO_DATE
	case sandbox.MergeForward:
		return v1.MergeOutcome_MERGE_OUTCOME_FAST_FORWARD
	case sandbox.MergeConflicts:
		return v1.MergeOutcome_MERGE_OUTCOME_CONFLICTS
	}
	return v1.MergeOutcome_MERGE_OUTCOME_UNSPECIFIED
}

func conflictMessages(all []sandbox.Conflict) []*v1.Conflict {
	out := make([]*v1.Conflict, 0, len(all))
	for _, c := range all {
		out = append(out, &v1.Conflict{
			Path: c.Path, Kind: string(c.Kind), What: c.What, Resolved: c.Resolved,
			Base: fileState(c.Base), Ours: fileState(c.Ours), Theirs: fileState(c.Theirs),
		})
	}
	return out
}

func fileState(s *sandbox.FileState) *v1.FileState {
	if s == nil {
		return nil
	}
	return &v1.FileState{Type: s.Type, Mode: s.Mode, Uid: s.UID, Gid: s.GID, Size: s.Size}
}

// DiffStates implements HistoryServiceHandler.
func (h *history) DiffStates(ctx context.Context, req *v1.DiffStatesRequest) (*v1.DiffStatesResponse, error) {
	got, err := h.cfg.Manager.Diff(ctx, principalOf(ctx), req.GetFrom(), req.GetTo(),
		sandbox.DiffOptions{Paths: req.GetPaths(), Patches: req.GetPatches(), Part: req.GetPart()})
	if err != nil {
		return nil, err
	}
	resp := &v1.DiffStatesResponse{From: got.From, To: got.To}
	for _, f := range got.Files {
		resp.Files = append(resp.Files, &v1.FileDiff{
			Op: f.Op, Path: f.Path, Before: fileState(f.Before), After: fileState(f.After),
			TargetBefore: f.TargetBefore, TargetAfter: f.TargetAfter, Patch: f.Patch,
			LinesAdded: clamp32(f.Added), LinesRemoved: clamp32(f.Removed), LeftOut: f.LeftOut, Attributes: f.Attributes,
		})
	}
	return resp, nil
}

// GetLineage implements HistoryServiceHandler.
func (h *history) GetLineage(ctx context.Context, req *v1.GetLineageRequest) (*v1.Lineage, error) {
	got, err := h.cfg.Manager.GetLineage(ctx, principalOf(ctx), req.GetCommit())
	if err != nil {
		return nil, err
	}
	resp := &v1.Lineage{
		Commit: commitMessage(got.Commit), Ancestors: relativeMessages(got.Ancestors), Descendants: relativeMessages(got.Descendants),
	}
	for _, s := range got.Sandboxes {
		resp.Sandboxes = append(resp.Sandboxes, &v1.DerivedSandbox{Id: s.ID, Name: s.Name, State: string(s.State), Head: s.Head})
	}
	return resp, nil
}

func relativeMessages(all []sandbox.Relative) []*v1.Relative {
	out := make([]*v1.Relative, 0, len(all))
	for _, r := range all {
		out = append(out, &v1.Relative{Id: r.ID, Parent: r.Parent, Merged: r.Merged, Commit: commitMessage(r.Commit)})
	}
	return out
}

// FindCommonAncestors implements HistoryServiceHandler.
func (h *history) FindCommonAncestors(ctx context.Context, req *v1.FindCommonAncestorsRequest) (*v1.FindCommonAncestorsResponse, error) {
	got, err := h.cfg.Manager.CommonAncestors(ctx, principalOf(ctx), req.GetCommit(), req.GetOther())
	if err != nil {
		return nil, err
	}
	return &v1.FindCommonAncestorsResponse{Ancestors: relativeMessages(got)}, nil
}

// VerifyCommit implements HistoryServiceHandler.
func (h *history) VerifyCommit(ctx context.Context, req *v1.VerifyCommitRequest) (*v1.VerifyCommitResponse, error) {
	got, err := h.cfg.Manager.VerifyCommit(ctx, principalOf(ctx), req.GetCommit())
	if err != nil {
		return nil, err
	}
	return &v1.VerifyCommitResponse{
		Commit: commitMessage(got.Commit), Digest: got.Digest, Recorded: got.Recorded, Intact: got.Intact(), Files: got.Files, Bytes: got.Bytes,
	}, nil
}
