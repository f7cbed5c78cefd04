package inspect

import (
	"bytes"
	"io"
	"net/http"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
)

// recordedWay is the way to what stands in a record, in place of the way to a server.
type recordedWay struct{ x *flow }

// RoundTrip implements http.RoundTripper. A request is held against those of the record when all of it is there.
func (w recordedWay) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		l := &lease{h: &w.x.in.held, sandbox: w.x.f.Sandbox}
		defer l.end()
		var err error
		if body, err = readHeld(r.Body, l); err != nil {
			if r.Context().Err() != nil {
				return nil, err
			}
			return nil, &egress.RefusedError{Target: w.x.host, Verdict: rules.Verdict{
				Code: rules.NotRecorded, Reason: "the request can't be held against the record: " + err.Error(),
			}}
		}
	}
	a, err := w.x.f.Recorded(r.Method, r.URL.String(), body)
	if err != nil {
		return nil, err
	}
	return &http.Response{
		StatusCode: a.Status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header(a.Header).Clone(),
		Body: io.NopCloser(bytes.NewReader(a.Data)), ContentLength: int64(len(a.Data)), Request: r,
	}, nil
}
