package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
)

// The control socket speaks gVisor's urpc (pkg/urpc): a call and a result, each one JSON value.

// Methods of the control socket (runsc/boot/controller.go).
const (
	methodPause  = "containerManager.Pause"
	methodResume = "containerManager.Resume"
	methodSave   = "containerManager.Checkpoint"
	methodTraces = "containerManager.ListTraceSessions"
)

// maxAnswer bounds an answer: the Sentry's word is trusted no more than the sandbox's.
const maxAnswer = 1 << 20

type controlCall struct {
	Method string       `json:"method"`
	Arg    *saveOptions `json:"arg"` // nil: none
}

// saveOptions are what methodSave takes (pkg/sentry/control/state.go). With it go three files: for the kernel's state,
// for what lies where in the third, and for memory.
type saveOptions struct {
	Metadata map[string]string `json:"metadata"`
	// Pages says that there is a file for memory of its own.
	Pages bool `json:"have_pages_file"`
	// NoZero leaves out pages that hold nothing but zeros.
	NoZero bool `json:"app_mf_exclude_committed_zero_pages"`
	// Resume lets the sandbox live, as it was before, also where it can't be saved.
	Resume bool
}

type controlResult struct {
	Success bool            `json:"success"`
	Err     string          `json:"err"`
	Result  json.RawMessage `json:"result"`
}

// call makes one call, which returns nothing. What files it takes goes with it.
func (i *Instance) call(ctx context.Context, method string, arg *saveOptions, files ...*os.File) error {
	_, err := i.ask(ctx, method, arg, files...)
	return err
}

// ask makes one call and returns its result.
func (i *Instance) ask(ctx context.Context, method string, arg *saveOptions, files ...*os.File) (json.RawMessage, error) {
	conn, err := i.Cell.DialCell(ctx, controlSocket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := exchange(conn, controlCall{Method: method, Arg: arg}, files)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, errs.Wrap(fmt.Errorf("%s: %w", method, err), errs.Unavailable, "the sandbox's kernel does not answer")
	}
	if !answer.Success {
		return nil, fmt.Errorf("%s: %s", method, answer.Err)
	}
	return answer.Result, nil
}

func exchange(conn net.Conn, c controlCall, files []*os.File) (controlResult, error) {
	var r controlResult
	data, err := json.Marshal(c)
	if err != nil {
		return r, err
	}
	if err := send(conn, data, files); err != nil {
		return r, err
	}
	err = json.NewDecoder(&bounded{conn, maxAnswer}).Decode(&r)
	return r, err
}

func send(conn net.Conn, data []byte, files []*os.File) error {
	if len(files) == 0 {
		_, err := conn.Write(data)
		return err
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("files can't go over a %T", conn)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	n, _, err := u.WriteMsgUnix(data, syscall.UnixRights(fds...), nil)
	if err == nil && n < len(data) {
		_, err = u.Write(data[n:])
	}
	return err
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
