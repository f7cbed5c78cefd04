package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Calls says which system calls of a sandbox are observed.
	Calls = v1.Calls
	// CallDefault says which are where a create does not say.
	CallDefault = v1.CallDefault
)

// CallDefaults shows and changes which system calls are observed where a create does not say.
type CallDefaults struct {
	conn *conn
	rpc  casematev1connect.CallServiceClient
}

// List shows them. The first that fits a sandbox decides.
func (d *CallDefaults) List(ctx context.Context) ([]*CallDefault, error) {
	m, err := d.rpc.ListCallDefaults(ctx, &v1.ListCallDefaultsRequest{})
	return m.GetDefaults(), d.conn.wrap(err)
}

// Set changes one, of a template or of a profile, for sandboxes to come, and returns all; without Calls it takes it away.
func (d *CallDefaults) Set(ctx context.Context, one *CallDefault) ([]*CallDefault, error) {
	m, err := d.rpc.SetCallDefault(ctx, &v1.SetCallDefaultRequest{Template: one.GetTemplate(), Profile: one.GetProfile(), Calls: one.GetCalls()})
	return m.GetDefaults(), d.conn.wrap(err)
}
