package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API that Meter uses.
type (
	// MeteredUsage is what one sandbox used, or several together.
	MeteredUsage = v1.MeteredUsage
	// UsageRequest says of what, and of which period.
	UsageRequest = v1.ListUsageRequest
)

// Meter tells what sandboxes used, from the events of the journal alone. What one uses at this moment is told by
// Sandboxes.Usage.
type Meter struct {
	conn *conn
	rpc  casematev1connect.MeterServiceClient
}

// List returns one page, and the token of the next one, "" after the last.
func (m *Meter) List(ctx context.Context, req *UsageRequest) ([]*MeteredUsage, string, error) {
	resp, err := m.rpc.ListUsage(ctx, req)
	return resp.GetUsage(), resp.GetNextPageToken(), m.conn.wrap(err)
}

// All returns what req asks for, over all pages.
func (m *Meter) All(ctx context.Context, req *UsageRequest) ([]*MeteredUsage, error) {
	q := &UsageRequest{Sandbox: req.GetSandbox(), By: req.GetBy(), Since: req.GetSince(), Until: req.GetUntil(), PageSize: req.GetPageSize()}
	return allPages(func(token string) ([]*MeteredUsage, string, error) {
		q.PageToken = token
		return m.List(ctx, q)
	})
}
