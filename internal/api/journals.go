package api

import (
	"context"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// journals implements JournalService.
type journals struct{ *API }

var _ casematev1connect.JournalServiceHandler = (*journals)(nil)

// The sizes of one page of events.
const (
	defaultEvents = 100
	maxEvents     = 1000
)

// ListEvents implements JournalServiceHandler.
func (h *journals) ListEvents(ctx context.Context, req *v1.ListEventsRequest) (*v1.ListEventsResponse, error) {
	limit := int(req.GetLimit())
	switch {
	case limit < 0:
		return nil, errs.New(errs.InvalidArgument, "limit can't be negative")
	case limit == 0:
		limit = defaultEvents
	case limit > maxEvents:
		limit = maxEvents
	}
	events, err := h.cfg.Manager.Events(ctx, principalOf(ctx), req.GetSandbox(), req.GetAfter(), limit)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListEventsResponse{Events: make([]*v1.Event, 0, len(events))}
	for _, e := range events {
		resp.Events = append(resp.Events, eventMessage(e))
	}
	return resp, nil
}

// FollowEvents implements JournalServiceHandler.
func (h *journals) FollowEvents(ctx context.Context, req *v1.FollowEventsRequest, stream *connect.ServerStream[v1.Event]) error {
	send, stop := kept(h.API, stream, &v1.Event{})
	defer stop()
	err := h.cfg.Manager.FollowEvents(ctx, principalOf(ctx), req.GetSandbox(), req.GetAfter(), func(e journal.Event) error {
		return send(eventMessage(e))
	})
	return endOfFollow(ctx, err)
}
