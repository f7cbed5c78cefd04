package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Document is one version of an agent's document.
	Document = v1.Document
	// GetDocumentRequest says which document, and which version of it.
	GetDocumentRequest = v1.GetDocumentRequest
	// SetDocumentRequest says what a document shall be, and which version it replaces.
	SetDocumentRequest = v1.SetDocumentRequest
	// PatchDocumentRequest says how to change a document.
	PatchDocumentRequest = v1.PatchDocumentRequest
	// DeleteDocumentRequest says which document to delete.
	DeleteDocumentRequest = v1.DeleteDocumentRequest
	// ListDocumentsRequest says which documents to show.
	ListDocumentsRequest = v1.ListDocumentsRequest
	// ListedDocuments is a page of documents, and the revision from which a watch goes on.
	ListedDocuments = v1.ListDocumentsResponse
	// ListVersionsRequest says of which document to show versions.
	ListVersionsRequest = v1.ListVersionsRequest
	// WatchDocumentsRequest says which versions to watch for.
	WatchDocumentsRequest = v1.WatchDocumentsRequest
	// WatchedDocument is a version that was written, or a gap where some are no longer kept.
	WatchedDocument = v1.WatchDocumentsResponse
	// ListAgentsRequest says which agents to show.
	ListAgentsRequest = v1.ListAgentsRequest
	// StateAgent is what an agent's documents are together.
	StateAgent = v1.StateAgent
	// SetRetentionRequest says how much of an agent's history is kept.
	SetRetentionRequest = v1.SetRetentionRequest
	// Retention says how much of a history is kept.
	Retention = v1.Retention
)

// State keeps documents of agents, JSON or bytes, with all their versions, outside every sandbox.
type State struct {
	conn *conn
	rpc  casematev1connect.StateServiceClient
}

// Get reads a document with its content.
func (s *State) Get(ctx context.Context, req *GetDocumentRequest) (*Document, error) {
	d, err := s.rpc.GetDocument(ctx, req)
	return d, s.conn.wrap(err)
}

// Set writes a new version of a document. The error's kind is Conflict where ExpectedVersion is not the newest.
func (s *State) Set(ctx context.Context, req *SetDocumentRequest) (*Document, error) {
	d, err := s.rpc.SetDocument(ctx, req)
	return d, s.conn.wrap(err)
}

// Update writes what change makes of a document's newest version, which is nil where there is none, and calls it
// again where somebody else has written meanwhile. change must not keep the document.
func (s *State) Update(ctx context.Context, agent, name string, change func(*Document) ([]byte, error)) (*Document, error) {
	for {
		now, err := s.Get(ctx, &GetDocumentRequest{Agent: agent, Name: name})
		if KindOf(err) == NotFound {
			now, err = nil, nil
		}
		if err != nil {
			return nil, err
		}
		content, err := change(now)
		if err != nil {
			return nil, err
		}
		expect := now.GetVersion()
		d, err := s.Set(ctx, &SetDocumentRequest{Agent: agent, Name: name, Content: content, ExpectedVersion: &expect})
		if KindOf(err) != Conflict {
			return d, err
		}
	}
}

// Patch changes a document that holds JSON, in one step.
func (s *State) Patch(ctx context.Context, req *PatchDocumentRequest) (*Document, error) {
	d, err := s.rpc.PatchDocument(ctx, req)
	return d, s.conn.wrap(err)
}

// Delete deletes a document, with Forget also its history.
func (s *State) Delete(ctx context.Context, req *DeleteDocumentRequest) (*Document, error) {
	d, err := s.rpc.DeleteDocument(ctx, req)
	return d, s.conn.wrap(err)
}

// List returns one page of an agent's documents, without their content.
func (s *State) List(ctx context.Context, req *ListDocumentsRequest) (*ListedDocuments, error) {
	page, err := s.rpc.ListDocuments(ctx, req)
	return page, s.conn.wrap(err)
}

// Versions returns versions of a document, the newest first, without their content.
func (s *State) Versions(ctx context.Context, req *ListVersionsRequest) ([]*Document, error) {
	resp, err := s.rpc.ListVersions(ctx, req)
	return resp.GetVersions(), s.conn.wrap(err)
}

// Agents returns one page of agents, and the token of the next page or "".
func (s *State) Agents(ctx context.Context, req *ListAgentsRequest) (page []*StateAgent, next string, err error) {
	resp, err := s.rpc.ListAgents(ctx, req)
	return resp.GetAgents(), resp.GetNextPageToken(), s.conn.wrap(err)
}

// SetRetention says how much of an agent's history is kept.
func (s *State) SetRetention(ctx context.Context, req *SetRetentionRequest) (*StateAgent, error) {
	a, err := s.rpc.SetRetention(ctx, req)
	return a, s.conn.wrap(err)
}

// Watch calls each with every version that the request names, in the order in which they were written, and with
// gaps, until ctx ends, the server closes the stream, or each fails; it takes a broken connection up again, so that
// nothing is missed and nothing comes twice. ready, unless nil, is called once the watch stands. It returns the error of
// each, or nil when the server closed the stream.
func (s *State) Watch(ctx context.Context, req *WatchDocumentsRequest, ready func(), each func(*WatchedDocument) error) error {
	again := newRetry(s.conn.retry)
	at := &WatchDocumentsRequest{
		Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName(), Prefix: req.GetPrefix(), After: req.GetAfter(),
		AfterVersion: req.GetAfterVersion(), Content: req.GetContent(),
	}
	for {
		err := s.watch(ctx, at, again, func() {
			if ready != nil {
				ready()
				ready = nil
			}
		}, each)
		if err == nil || !again.worth(ctx, err) {
			return unmark(err)
		}
	}
}

func (s *State) watch(ctx context.Context, at *WatchDocumentsRequest, again *retry, ready func(), each func(*WatchedDocument) error) error {
	stream, err := s.rpc.WatchDocuments(ctx, at)
	if err != nil {
		return s.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		again.progress()
		m := stream.Msg()
		if m.GetDocument() == nil && m.GetGapTo() == 0 {
			ready()
			continue
		}
		if err := each(m); err != nil {
			return callerError{err}
		}
		if m.GetDocument() != nil {
			at.After, at.AfterVersion = m.GetDocument().GetRevision(), 0
		}
	}
	return s.conn.wrap(stream.Err())
}
