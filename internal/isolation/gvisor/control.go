package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// The control socket speaks gVisor's urpc (pkg/urpc): a call and a result, each one JSON value; files travel
// with the call's first byte.

// Methods of the control socket (runsc/boot/controller.go).
const (
	methodPause      = "containerManager.Pause"
	methodResume     = "containerManager.Resume"
	methodCheckpoint = "containerManager.Checkpoint"
	methodExecute    = "containerManager.ExecuteAsync"
)

// maxAnswer bounds an answer: the Sentry's word is trusted no more than the sandbox's.
const maxAnswer = 1 << 20

type controlCall struct {
	Method string `json:"method"`
	Arg    any    `json:"arg"`
}

type controlResult struct {
	Success bool            `json:"success"`
	Err     string          `json:"err"`
	Result  json.RawMessage `json:"result"`
}

// call makes one call. arg and result may be nil.
func (i *Instance) call(ctx context.Context, method string, arg any, files []*os.File, result any) error {
	conn, err := i.Cell.DialCell(ctx, controlSocket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := exchange(conn, controlCall{method, arg}, files)
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return errs.Wrap(fmt.Errorf("%s: %w", method, err), errs.Unavailable, "the sandbox's kernel does not answer")
	}
	if !answer.Success {
		return fmt.Errorf("%s: %s", method, answer.Err)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(answer.Result, result); err != nil {
		return fmt.Errorf("%s: decode the answer: %w", method, err)
	}
	return nil
}

func exchange(conn net.Conn, c controlCall, files []*os.File) (controlResult, error) {
	var r controlResult
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return r, fmt.Errorf("the control socket is a %T", conn)
	}
	data, err := json.Marshal(c)
	if err != nil {
		return r, err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := u.WriteMsgUnix(data, rights, nil)
	if err == nil && n < len(data) {
		_, err = u.Write(data[n:])
	}
	if err != nil {
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
