package api

import (
	"context"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// replays implements ReplayService.
type replays struct{ *API }

var _ casematev1connect.ReplayServiceHandler = (*replays)(nil)

// SetAnswers implements ReplayServiceHandler.
func (h *replays) SetAnswers(ctx context.Context, req *v1.SetAnswersRequest) (*v1.SetAnswersResponse, error) {
	list := make([]sandbox.RecordedAnswer, 0, len(req.GetAnswers()))
	for _, m := range req.GetAnswers() {
		list = append(list, recordedAnswerOf(m))
	}
	if err := h.cfg.Manager.SetAnswers(ctx, principalOf(ctx), req.GetSandbox(), list, req.GetMore()); err != nil {
		return nil, err
	}
	return &v1.SetAnswersResponse{}, nil
}

func recordedAnswerOf(m *v1.RecordedAnswer) sandbox.RecordedAnswer {
	a := sandbox.RecordedAnswer{
		Method: m.GetMethod(), URL: m.GetUrl(), Size: m.GetBodyBytes(), Salt: m.GetBodySalt(), Hash: m.GetBodyHash(),
		Status: int(m.GetStatus()), Header: make(map[string][]string, len(m.GetHeader())), Data: m.GetData(),
	}
	for _, f := range m.GetHeader() {
		a.Header[f.GetName()] = f.GetValues()
	}
	return a
}
