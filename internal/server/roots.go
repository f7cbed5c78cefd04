package server

import (
	"casemate.dev/internal/api"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// openReal opens the store of layers and the namespace backend.
func (s *Server) openReal(guest []byte) (sandbox.Roots, api.BuildFunc, error) {
	return nil, nil, errs.New(errs.Unsupported, "no root file systems")
}
