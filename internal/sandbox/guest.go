package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"os"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// guest is what the Manager asks of a sandbox's guest; guestwire.Client implements it.
type guest interface {
	Claim(ctx context.Context, r guestwire.Claim) error
	Restored(ctx context.Context, r guestwire.Restored) error
	Status(ctx context.Context) (guestwire.Status, error)
	Env(ctx context.Context) (map[string]string, error)
	Start(ctx context.Context, r guestwire.StartProcess, files []*os.File) (guestwire.ProcessInfo, error)
	Run(ctx context.Context, r guestwire.RunProcess, files []*os.File) (guestwire.ProcessInfo, *guestwire.OutputStream, error)
	Output(ctx context.Context, r guestwire.OutputRequest) (*guestwire.OutputStream, error)
	Input(ctx context.Context, r guestwire.InputRequest, in io.Reader) (guestwire.InputReply, error)
	Signal(ctx context.Context, r guestwire.SignalRequest) error
	Resize(ctx context.Context, r guestwire.ResizeRequest) error
	Get(ctx context.Context, id string) (guestwire.ProcessInfo, error)
	Wait(ctx context.Context, id string) (guestwire.ProcessInfo, error)
	List(ctx context.Context) ([]guestwire.ProcessInfo, error)
	Stat(ctx context.Context, r guestwire.PathRequest) (guestwire.FileInfo, error)
	ListDir(ctx context.Context, r guestwire.ListRequest) (*guestwire.EventStream[guestwire.FileInfo], error)
	Read(ctx context.Context, r guestwire.ReadRequest) (guestwire.FileInfo, io.ReadCloser, error)
	Write(ctx context.Context, r guestwire.WriteRequest, in io.Reader) (guestwire.FileInfo, error)
	MakeDir(ctx context.Context, r guestwire.MakeDirRequest) (guestwire.FileInfo, error)
	Move(ctx context.Context, r guestwire.MoveRequest) (guestwire.FileInfo, error)
	Remove(ctx context.Context, r guestwire.RemoveRequest) error
	Chmod(ctx context.Context, r guestwire.ChmodRequest) (guestwire.FileInfo, error)
	Unpack(ctx context.Context, r guestwire.UnpackRequest, in io.Reader) (guestwire.UnpackReply, error)
	Watch(ctx context.Context, r guestwire.WatchRequest) (*guestwire.EventStream[guestwire.WatchEvent], error)
	DialPort(ctx context.Context, r guestwire.DialRequest) (net.Conn, error)
	Listenings(ctx context.Context) ([]int, error)
	ListenPort(ctx context.Context, r guestwire.ListenRequest) (*guestwire.EventStream[guestwire.Accepted], error)
	TakePort(ctx context.Context, a guestwire.Accepted) (net.Conn, error)
	CreateContext(ctx context.Context, r guestwire.CreateContext, files []*os.File) (guestwire.ContextInfo, error)
	Contexts(ctx context.Context) ([]guestwire.ContextInfo, error)
	ContextRuns(ctx context.Context, id string) ([]guestwire.RunInfo, error)
	WaitContext(ctx context.Context, r guestwire.WaitContext) (guestwire.ContextInfo, error)
	RunCode(ctx context.Context, r guestwire.RunCode, code string) (guestwire.RunInfo, *guestwire.ItemStream, error)
	Items(ctx context.Context, r guestwire.ItemsRequest) (*guestwire.ItemStream, error)
	WaitRun(ctx context.Context, r guestwire.RunRef) (guestwire.RunInfo, error)
	Interrupt(ctx context.Context, r guestwire.RunRef) (guestwire.InterruptReply, error)
	RestartContext(ctx context.Context, id string) (guestwire.ContextInfo, error)
	DeleteContext(ctx context.Context, id string) error
	Fork(ctx context.Context, r guestwire.ForkContexts, files []*os.File, each func(id string, info guestwire.ContextInfo, err error)) error
	Drop(ctx context.Context, ids []string) error
	Close()
}

var _ guest = (*guestwire.Client)(nil)

// brief bounds what the server or the kernel tells of an instance at once.
func (m *Manager) brief(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, m.cfg.Defaults.Connect)
}

// cause puts the reason why ctx ended in the place of a bare deadline or cancellation.
func cause(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
		return err
	}
	return context.Cause(ctx)
}

// refusal reports whether the guest itself said no, so that it is known that nothing happened.
func refusal(err error) bool {
	switch errs.KindOf(err) {
	case errs.Unavailable, errs.DeadlineExceeded, errs.Canceled, errs.Internal:
		return false
	}
	return true
}
