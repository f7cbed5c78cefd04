package envd_test

import (
	"errors"
	"net/http"
	"testing"

	"connectrpc.com/connect"

	"casemate.dev/proto/e2b/filesystem"
	"casemate.dev/proto/e2b/filesystem/filesystemconnect"
	"casemate.dev/proto/e2b/process"
	"casemate.dev/proto/e2b/process/processconnect"
)

// named sends every request to one sandbox.
type named struct{ id string }

// RoundTrip implements http.RoundTripper.
func (n named) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("E2b-Sandbox-Id", n.id)
	return http.DefaultTransport.RoundTrip(r)
}

// testBinary makes calls in Connect's binary encoding, which the SDKs do not use, but others may.
func testBinary(t *testing.T, h *harness) {
	client := &http.Client{Transport: named{h.id}}
	stream, err := processconnect.NewProcessClient(client, h.url).Start(t.Context(), &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "echo out; exit 7"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	out := ""
	var end *process.ProcessEvent_EndEvent
	for stream.Receive() {
		out += string(stream.Msg().GetEvent().GetData().GetStdout())
		if e := stream.Msg().GetEvent().GetEnd(); e != nil {
			end = e
		}
	}
	if err := stream.Err(); err != nil || out != "out\n" || end.GetExitCode() != 7 || !end.GetExited() {
		t.Errorf("process: %q, %v, %v", out, end, err)
	}
	_, err = filesystemconnect.NewFilesystemClient(client, h.url).Stat(t.Context(), &filesystem.StatRequest{Path: "/nope"})
	var e *connect.Error
	if !errors.As(err, &e) || e.Code() != connect.CodeNotFound {
		t.Errorf("file: %v", err)
	}
}
