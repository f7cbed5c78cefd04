package api

import (
	"context"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// records implements RecordService.
type records struct{ *API }

var _ casematev1connect.RecordServiceHandler = (*records)(nil)

// The bounds of a redaction.
const (
	maxRedacted = 16
	maxReason   = 1000
)

// ReadBody implements RecordServiceHandler.
func (h *records) ReadBody(ctx context.Context, req *v1.ReadBodyRequest) (*v1.ReadBodyResponse, error) {
	b, err := h.cfg.Manager.ReadBody(ctx, principalOf(ctx), req.GetSandbox(), req.GetEvent(), req.GetName())
	if err != nil {
		return nil, err
	}
	m := &v1.ReadBodyResponse{Data: b.Data, Bytes: b.Size}
	if int64(len(b.Data)) < b.Size {
		m.Tail = b.Tail
	}
	return m, nil
}

// RedactEvent implements RecordServiceHandler.
func (h *records) RedactEvent(ctx context.Context, req *v1.RedactEventRequest) (*v1.Event, error) {
	if len(req.GetNames()) > maxRedacted || len(req.GetReason()) > maxReason {
		return nil, errs.New(errs.InvalidArgument, "a redaction names at most %d bodies, and its reason has at most %d bytes", maxRedacted, maxReason)
	}
	e, err := h.cfg.Manager.Redact(ctx, principalOf(ctx), req.GetSandbox(), journal.Redaction{
		Event: req.GetEvent(), Names: req.GetNames(), Reason: req.GetReason(),
	})
	if err != nil {
		return nil, err
	}
	return eventMessage(e), nil
}
