package api

import (
	"context"
	"time"

	"casemate.dev/internal/egress"
)

// noGateway takes every sandbox and carries nothing.
type noGateway struct{}

func (noGateway) Attach(context.Context, egress.Member) error            { return nil }
func (noGateway) Configure(context.Context, string, egress.Policy) error { return nil }
func (noGateway) Detach(context.Context, string) error                   { return nil }

func (noGateway) Refused(context.Context, string, time.Time) ([]egress.Refusal, error) {
	return nil, nil
}

func (noGateway) SetAnswers(context.Context, string, []egress.RecordedAnswer, bool) error { return nil }

func (noGateway) Settle(context.Context, string) error { return nil }

func (noGateway) Stats() (egress.Stats, bool) {
	return egress.Stats{Sandboxes: 1, Connections: 7}, true
}

func (noGateway) Usage(context.Context, string) (egress.Usage, error) { return egress.Usage{}, nil }

func (noGateway) Adopt(context.Context, []egress.Member) map[string]error { return nil }
