package client

import (
	"context"

	"google.golang.org/protobuf/proto"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// RecordedAnswer is a request that stands in a record, with the answer that it got.
	RecordedAnswer = v1.RecordedAnswer
	// RecordedHeader is a field of an answer's header.
	RecordedHeader = v1.RecordedHeader
)

// Replays helps to run again what a record tells of.
type Replays struct {
	conn *conn
	rpc  casematev1connect.ReplayServiceClient
}

// answersAtOnce bounds what one request brings, in bytes, unless it is one answer's.
const answersAtOnce = 2 << 20

// SetAnswers gives a sandbox whose network is recorded the answers of a record, in place of those that it had. When it
// returns, everything is recorded that the sandbox asked for before.
func (r *Replays) SetAnswers(ctx context.Context, sandbox string, answers []*RecordedAnswer) error {
	for more := false; ; more = true {
		n, bytes := 0, 0
		for n < len(answers) && (n == 0 || bytes < answersAtOnce) {
			bytes += proto.Size(answers[n])
			n++
		}
		_, err := r.rpc.SetAnswers(ctx, &v1.SetAnswersRequest{Sandbox: sandbox, Answers: answers[:n], More: more})
		if answers = answers[n:]; err != nil || len(answers) == 0 {
			return r.conn.wrap(err)
		}
	}
}
