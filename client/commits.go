package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Commit is an immutable saved state of a sandbox's files.
	Commit = v1.Commit
	// CommitRequest says of which sandbox to make a commit, and with what message and tag.
	CommitRequest = v1.CreateCommitRequest
	// ListCommitsRequest says which commits to show.
	ListCommitsRequest = v1.ListCommitsRequest
	// ForkRequest says of which sandbox to make how many forks.
	ForkRequest = v1.ForkSandboxRequest
	// Forks are the sandboxes that a fork made, and the commit that they start from.
	Forks = v1.ForkSandboxResponse
	// CheckoutRequest says which sandbox goes to which commit.
	CheckoutRequest = v1.CheckoutRequest
	// CheckedOut is a sandbox after a checkout, and what it had before.
	CheckedOut = v1.CheckoutResponse
	// Collected is what a clean-up removed, or would.
	Collected = v1.CollectCommitsResponse
)

// Commits saves the files of sandboxes, and starts and restores sandboxes from them. A commit is named by
// its id, a unique beginning of it, or a tag; in CreateRequest the same names stand in the place of a
// template.
type Commits struct {
	conn *conn
	rpc  casematev1connect.CommitServiceClient
}

// Create saves the files of a sandbox as they are now.
func (s *Commits) Create(ctx context.Context, req *CommitRequest) (*Commit, error) {
	c, err := s.rpc.CreateCommit(ctx, req)
	return c, s.conn.wrap(err)
}

// Get shows one commit.
func (s *Commits) Get(ctx context.Context, commit string) (*Commit, error) {
	c, err := s.rpc.GetCommit(ctx, &v1.GetCommitRequest{Commit: commit})
	return c, s.conn.wrap(err)
}

// List returns one page of commits, the newest first, and the token of the next page or "".
func (s *Commits) List(ctx context.Context, req *ListCommitsRequest) (page []*Commit, next string, err error) {
	resp, err := s.rpc.ListCommits(ctx, req)
	return resp.GetCommits(), resp.GetNextPageToken(), s.conn.wrap(err)
}

// Tag gives a commit a name, which the commit that has it loses.
func (s *Commits) Tag(ctx context.Context, commit, tag string) (*Commit, error) {
	c, err := s.rpc.TagCommit(ctx, &v1.TagCommitRequest{Commit: commit, Tag: tag})
	return c, s.conn.wrap(err)
}

// Untag takes a name from a commit. Idempotent.
func (s *Commits) Untag(ctx context.Context, commit, tag string) (*Commit, error) {
	c, err := s.rpc.UntagCommit(ctx, &v1.UntagCommitRequest{Commit: commit, Tag: tag})
	return c, s.conn.wrap(err)
}

// Delete removes a commit with its tags. What stands on it keeps what it needs.
func (s *Commits) Delete(ctx context.Context, commit string) (*Commit, error) {
	c, err := s.rpc.DeleteCommit(ctx, &v1.DeleteCommitRequest{Commit: commit})
	return c, s.conn.wrap(err)
}

// Fork makes new sandboxes with the files, settings and environment that a sandbox has now.
func (s *Commits) Fork(ctx context.Context, req *ForkRequest) (*Forks, error) {
	f, err := s.rpc.ForkSandbox(ctx, req)
	return f, s.conn.wrap(err)
}

// Checkout puts a commit's files in the place of a sandbox's.
func (s *Commits) Checkout(ctx context.Context, req *CheckoutRequest) (*CheckedOut, error) {
	c, err := s.rpc.Checkout(ctx, req)
	return c, s.conn.wrap(err)
}

// Compare tells which files differ between two states, each a commit or a sandbox as it is now.
func (s *Commits) Compare(ctx context.Context, from, to string) ([]*Change, error) {
	resp, err := s.rpc.CompareStates(ctx, &v1.CompareStatesRequest{From: from, To: to})
	return resp.GetChanges(), s.conn.wrap(err)
}

// Collect removes what nobody needs; with dry it only tells. Above 0, olderThan also takes commits of that
// age that have no tag.
func (s *Commits) Collect(ctx context.Context, olderThan time.Duration, dry bool) (*Collected, error) {
	req := &v1.CollectCommitsRequest{DryRun: dry}
	if olderThan > 0 {
		req.OlderThan = durationpb.New(olderThan)
	}
	c, err := s.rpc.CollectCommits(ctx, req)
	return c, s.conn.wrap(err)
}
