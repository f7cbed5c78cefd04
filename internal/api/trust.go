package api

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/internal/errs"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Authority is what the API tells of a server's own certificate authority; see v1.Authority.
type Authority struct {
	PEM      string
	SHA256   string
	Names    []string
	NotAfter time.Time
	Domain   string
}

// trust implements TrustService.
type trust struct{ *API }

var _ casematev1connect.TrustServiceHandler = (*trust)(nil)

// GetAuthority implements TrustServiceHandler.
func (h *trust) GetAuthority(context.Context, *v1.GetAuthorityRequest) (*v1.Authority, error) {
	a := h.cfg.Authority
	if a == nil {
		return nil, errs.New(errs.FailedPrecondition, "this server has no certificate authority of its own").
			WithHint("it has where it listens on TCP and was given no certificate by --tls-cert")
	}
	return &v1.Authority{Pem: a.PEM, Sha256: a.SHA256, Names: a.Names, NotAfter: timestamppb.New(a.NotAfter), Domain: a.Domain}, nil
}
