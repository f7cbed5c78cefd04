package api

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/meter"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// meters implements MeterService.
type meters struct{ *API }

var _ casematev1connect.MeterServiceHandler = (*meters)(nil)

// ListUsage implements MeterServiceHandler.
func (h *meters) ListUsage(ctx context.Context, req *v1.ListUsageRequest) (*v1.ListUsageResponse, error) {
	period, err := periodOf(req.GetSince(), req.GetUntil())
	if err != nil {
		return nil, err
	}
	list, next, err := h.cfg.Manager.Metered(ctx, principalOf(ctx), sandbox.MeterQuery{
		Sandbox: req.GetSandbox(), By: sandbox.MeterBy(req.GetBy()), Period: period,
		PageSize: int(req.GetPageSize()), PageToken: req.GetPageToken(),
	})
	if err != nil {
		return nil, err
	}
	resp := &v1.ListUsageResponse{NextPageToken: next}
	for _, m := range list {
		resp.Usage = append(resp.Usage, meteredMessage(m))
	}
	return resp, nil
}

func periodOf(since, until *timestamppb.Timestamp) (p meter.Period, err error) {
	for _, t := range []*timestamppb.Timestamp{since, until} {
		if t != nil && !t.IsValid() {
			return p, errs.New(errs.InvalidArgument, "a bound of the period is no time")
		}
	}
	if since != nil {
		p.Since = since.AsTime()
	}
	if until != nil {
		p.Until = until.AsTime()
	}
	return p, nil
}

func meteredMessage(m sandbox.Metered) *v1.MeteredUsage {
	u := &v1.MeteredUsage{
		Sandbox: m.Sandbox, Name: m.Name, Template: m.Template, Principal: m.Principal, Ended: m.Ended,
		Sandboxes: m.Sandboxes, ExecutionUs: m.ExecutionUS, RunningUs: m.RunningUS, PausedUs: m.PausedUS, CpuUs: m.CPUUS,
		MemoryByteSeconds: m.MemoryByteSeconds, SentBytes: m.SentBytes, ReceivedBytes: m.ReceivedBytes,
		Processes: m.Processes, Runs: m.Runs, Open: m.Open, OpenConnections: m.OpenConnections,
		Gaps: m.Gaps, UnmeteredUs: m.UnmeteredUS,
	}
	if m.MeteredUntil != nil {
		u.MeteredUntil = timestamppb.New(*m.MeteredUntil)
	}
	return u
}
