package envd

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"casemate.dev/internal/errs"
	"casemate.dev/proto/e2b/filesystem"
	"casemate.dev/proto/e2b/process"
)

// Route names what a request asks for: "process.Process/Start", or "GET :49983/files"; "": nothing that is served.
func Route(r *http.Request) string {
	name := strings.TrimPrefix(r.URL.Path, "/")
	if service, method, ok := strings.Cut(name, "/"); ok {
		for _, f := range []protoreflect.FileDescriptor{process.File_e2b_process_process_proto, filesystem.File_e2b_filesystem_filesystem_proto} {
			s := f.Services().Get(0)
			if string(s.FullName()) == service && s.Methods().ByName(protoreflect.Name(method)) != nil {
				return name
			}
		}
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	switch method + " " + r.URL.Path {
	case "GET /health", "GET /metrics", "GET /envs", "GET /files", "POST /files", "POST /files/compose":
		return method + " :49983" + r.URL.Path
	}
	return ""
}

// teller tells of calls of Connect that fail: the status of a stream does not.
type teller struct {
	failed func(ctx context.Context, kind errs.Kind)
}

var _ connect.Interceptor = teller{}

func (t teller) tell(ctx context.Context, err error) {
	if ready := (*connect.Error)(nil); errors.As(err, &ready) {
		t.failed(ctx, errs.FromGRPC(int(ready.Code())))
	} else if err != nil {
		t.failed(ctx, errs.KindOf(err))
	}
}

// WrapUnary implements connect.Interceptor.
func (t teller) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		t.tell(ctx, err)
		return resp, err
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (t teller) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := next(ctx, conn)
		t.tell(ctx, err)
		return err
	}
}

// WrapStreamingClient implements connect.Interceptor; nobody is called.
func (teller) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
