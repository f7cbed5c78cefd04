package api

import (
	"context"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// callDefaults implements CallService.
type callDefaults struct{ *API }

var _ casematev1connect.CallServiceHandler = (*callDefaults)(nil)

// ListCallDefaults implements CallServiceHandler.
func (h *callDefaults) ListCallDefaults(ctx context.Context, _ *v1.ListCallDefaultsRequest) (*v1.ListCallDefaultsResponse, error) {
	list, err := h.cfg.Manager.CallDefaults(ctx)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListCallDefaultsResponse{}
	for _, d := range list {
		resp.Defaults = append(resp.Defaults, &v1.CallDefault{Template: d.Template, Profile: string(d.Profile), Calls: callsMessage(d.Calls)})
	}
	return resp, nil
}

// SetCallDefault implements CallServiceHandler.
func (h *callDefaults) SetCallDefault(ctx context.Context, req *v1.SetCallDefaultRequest) (*v1.ListCallDefaultsResponse, error) {
	d := sandbox.CallDefault{Template: req.GetTemplate(), Profile: sandbox.Profile(req.GetProfile()), Calls: callsOf(req.GetCalls())}
	if err := h.cfg.Manager.SetCallDefault(ctx, principalOf(ctx), d); err != nil {
		return nil, err
	}
	return h.ListCallDefaults(ctx, nil)
}
