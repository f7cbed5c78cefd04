package api

import (
	"context"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/policy"
	v1 "casemate.dev/proto/casemate/v1"
)

// gate is the one place where access is enforced. It reads from the schema what each method needs;
// a method that names nothing is refused.
type gate struct {
	api     *API
	methods map[string]*method // by procedure, "/casemate.v1.SandboxService/GetSandbox"
}

// method is what the gate knows of one RPC.
type method struct {
	access policy.Access
	calls  *observe.Method
}

var _ connect.Interceptor = (*gate)(nil)

func newGate(a *API) *gate {
	g := &gate{api: a, methods: make(map[string]*method)}
	for _, s := range schemaServices() {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			name := procedureOf(m)
			g.methods[name] = &method{access: accessOf(m), calls: a.cfg.Calls.Method(strings.TrimPrefix(name, "/"))}
		}
	}
	return g
}

// schemaServices returns every service of the native API.
func schemaServices() []protoreflect.ServiceDescriptor {
	var out []protoreflect.ServiceDescriptor
	for _, f := range []protoreflect.FileDescriptor{
		v1.File_casemate_v1_sandbox_proto,
		v1.File_casemate_v1_process_proto,
		v1.File_casemate_v1_context_proto,
		v1.File_casemate_v1_file_proto,
		v1.File_casemate_v1_system_proto,
		v1.File_casemate_v1_trust_proto,
		v1.File_casemate_v1_secret_proto,
		v1.File_casemate_v1_network_proto,
		v1.File_casemate_v1_call_proto,
		v1.File_casemate_v1_history_proto,
		v1.File_casemate_v1_commit_proto,
		v1.File_casemate_v1_state_proto,
		v1.File_casemate_v1_image_proto,
		v1.File_casemate_v1_build_proto,
		v1.File_casemate_v1_proof_proto,
		v1.File_casemate_v1_record_proto,
		v1.File_casemate_v1_meter_proto,
		v1.File_casemate_v1_replay_proto,
	} {
		for i := range f.Services().Len() {
			out = append(out, f.Services().Get(i))
		}
	}
	return out
}

func procedureOf(m protoreflect.MethodDescriptor) string {
	return "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
}

// accessOf reads a method's access option; 0 where it has none.
func accessOf(m protoreflect.MethodDescriptor) policy.Access {
	a, ok := proto.GetExtension(m.Options(), v1.E_Access).(v1.Access)
	if !ok {
		return 0
	}
	return policy.Access(a)
}

// admit decides whether the caller in ctx may use procedure at all. Whether it may on a particular
// sandbox is the Manager's to decide.
func (g *gate) admit(ctx context.Context, procedure string) (*method, error) {
	m, ok := g.methods[procedure]
	if !ok || m.access == 0 {
		return nil, errs.New(errs.PermissionDenied, "%s names no access and is refused", procedure)
	}
	c := callerOf(ctx)
	if policy.Allow(c.principal, m.access, "") {
		return m, nil
	}
	if c.err != nil {
		return m, c.err
	}
	return m, errs.New(errs.PermissionDenied, "this key may not do that").
		WithHint("it needs an admin key: `casemate keys create --admin`")
}

// WrapUnary implements connect.Interceptor.
func (g *gate) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		procedure := req.Spec().Procedure
		m, err := g.admit(ctx, procedure)
		ctx, c := m.begin(ctx, req.Header(), err == nil)
		defer c.End(observe.Aborted())
		if err != nil {
			c.End(outcome(err))
			return nil, g.api.rpcError(ctx, procedure, err)
		}
		resp, err := next(ctx, req)
		c.End(outcome(err))
		if err != nil {
			return nil, g.api.proveError(g.api.rpcError(ctx, procedure, err))
		}
		g.api.prove(resp.Header())
		return resp, nil
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *gate) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		procedure := conn.Spec().Procedure
		m, err := g.admit(ctx, procedure)
		ctx, c := m.begin(ctx, conn.RequestHeader(), err == nil)
		defer c.End(observe.Aborted())
		if err != nil {
			c.End(outcome(err))
			return g.api.rpcError(ctx, procedure, err)
		}
		ctx, stop := g.api.whileServing(ctx)
		defer stop()
		err = next(ctx, conn)
		c.End(outcome(err))
		if err != nil {
			return g.api.proveError(g.api.rpcError(ctx, procedure, err))
		}
		g.api.prove(conn.ResponseTrailer())
		return nil
	}
}

// WrapStreamingClient implements connect.Interceptor; the server makes no calls.
func (g *gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// plainHandler serves a plain HTTP path. It writes nothing before it returns an error, unless it
// reports the error in its own stream.
type plainHandler func(w http.ResponseWriter, r *http.Request) error

// twin serves h under the access that procedure names.
func (g *gate) twin(procedure string, h plainHandler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		m, err := g.admit(r.Context(), procedure)
		ctx, c := m.begin(r.Context(), r.Header, err == nil)
		defer c.End(observe.Aborted())
		if err == nil {
			ctx, stop := g.api.whileServing(ctx)
			defer stop()
			r = r.WithContext(ctx)
			proving := &provingWriter{ResponseWriter: w, api: g.api}
			w = proving
			err = g.api.guarded(h, w, r)
			proving.end()
		}
		c.End(outcome(err))
		if err != nil {
			g.api.writeError(w, r, err)
		}
	}
}
