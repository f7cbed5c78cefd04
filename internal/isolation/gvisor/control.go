package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"casemate.dev/internal/errs"
)

// The control socket speaks gVisor's urpc (pkg/urpc): a call and a result, each one JSON value.

// Methods of the control socket (runsc/boot/controller.go).
const (
	methodPause  = "containerManager.Pause"
	methodResume = "containerManager.Resume"
)

// maxAnswer bounds an answer: the Sentry's word is trusted no more than the sandbox's.
const maxAnswer = 1 << 20

type controlCall struct {
	Method string    `json:"method"`
	Arg    *struct{} `json:"arg"` // none
}

type controlResult struct {
	Success bool   `json:"success"`
	Err     string `json:"err"`
}

// call makes one call, which takes and returns nothing.
func (i *Instance) call(ctx context.Context, method string) error {
	conn, err := i.Cell.DialCell(ctx, controlSocket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := exchange(conn, controlCall{Method: method})
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return errs.Wrap(fmt.Errorf("%s: %w", method, err), errs.Unavailable, "the sandbox's kernel does not answer")
	}
	if !answer.Success {
		return fmt.Errorf("%s: %s", method, answer.Err)
	}
	return nil
}

func exchange(conn net.Conn, c controlCall) (controlResult, error) {
	var r controlResult
	data, err := json.Marshal(c)
	if err != nil {
		return r, err
	}
	if _, err := conn.Write(data); err != nil {
		return r, err
	}
	err = json.NewDecoder(&bounded{conn, maxAnswer}).Decode(&r)
	return r, err
}

// bounded is a reader that fails beyond a number of bytes.
type bounded struct {
	conn net.Conn
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errors.New("the answer is too long")
	}
	n, err := b.conn.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
