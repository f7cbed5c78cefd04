package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// MergeRequest says what to merge into what, and how conflicts are settled.
	MergeRequest = v1.MergeStatesRequest
	// MergeChoice settles the conflicts at a path and below it.
	MergeChoice = v1.MergeChoice
	// Merged is what came of a merge.
	Merged = v1.MergeStatesResponse
	// MergeConflict is a path that both sides of a merge changed in ways that exclude each other.
	MergeConflict = v1.Conflict
	// DiffRequest says which states to compare, and how closely.
	DiffRequest = v1.DiffStatesRequest
	// Diffed are the files that differ between two states.
	Diffed = v1.DiffStatesResponse
	// FileDiff is one file that differs.
	FileDiff = v1.FileDiff
	// FileState is what a state has at a path.
	FileState = v1.FileState
	// Lineage is what a commit comes from, and what came of it.
	Lineage = v1.Lineage
	// Relative is a commit in the lineage of another one.
	Relative = v1.Relative
	// Verified is the digest of a commit's files, and whether it is the one that was recorded.
	Verified = v1.VerifyCommitResponse
)

// The outcomes of a merge.
const (
	MergeDone      = v1.MergeOutcome_MERGE_OUTCOME_MERGED
	MergeUpToDate  = v1.MergeOutcome_MERGE_OUTCOME_UP_TO_DATE
	MergeForward   = v1.MergeOutcome_MERGE_OUTCOME_FAST_FORWARD
	MergeConflicts = v1.MergeOutcome_MERGE_OUTCOME_CONFLICTS
)

// History merges, compares and relates saved states. A state is named as a commit is, or as a sandbox, which
// stands for its files as they are now.
type History struct {
	conn *conn
	rpc  casematev1connect.HistoryServiceClient
}

// Merge takes what one state changed since a common ancestor into another one. Conflicts are no error: they are
// told, and nothing is changed.
func (s *History) Merge(ctx context.Context, req *MergeRequest) (*Merged, error) {
	m, err := s.rpc.MergeStates(ctx, req)
	return m, s.conn.wrap(err)
}

// Diff tells which files differ between two states, and how.
func (s *History) Diff(ctx context.Context, req *DiffRequest) (*Diffed, error) {
	d, err := s.rpc.DiffStates(ctx, req)
	return d, s.conn.wrap(err)
}

// Lineage tells what a commit comes from, and which commits and living sandboxes come from it.
func (s *History) Lineage(ctx context.Context, commit string) (*Lineage, error) {
	l, err := s.rpc.GetLineage(ctx, &v1.GetLineageRequest{Commit: commit})
	return l, s.conn.wrap(err)
}

// CommonAncestors returns the nearest common ancestors of two commits: mostly one; none where they have only
// the template in common.
func (s *History) CommonAncestors(ctx context.Context, a, b string) ([]*Relative, error) {
	resp, err := s.rpc.FindCommonAncestors(ctx, &v1.FindCommonAncestorsRequest{Commit: a, Other: b})
	return resp.GetAncestors(), s.conn.wrap(err)
}

// Verify reads all files of a commit and tells their digest, and whether it is the one that was recorded first.
func (s *History) Verify(ctx context.Context, commit string) (*Verified, error) {
	v, err := s.rpc.VerifyCommit(ctx, &v1.VerifyCommitRequest{Commit: commit})
	return v, s.conn.wrap(err)
}
