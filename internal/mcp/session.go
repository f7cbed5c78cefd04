package mcp

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// The labels of a session's own sandbox.
const (
	labelSession = "mcp-session" // "own"
	labelClient  = "mcp-client"  // what the client calls itself
)

// session is one client's conversation.
type session struct {
	client *client.Client
	key    string // of the client's, as it showed it
	want   *client.CreateRequest
	given  string // an existing sandbox to use; "": make one

	ctx       context.Context //nolint:containedctx // the session's life, not a request's; done once interrupt was called
	interrupt context.CancelFunc

	// mu guards the fields below. It is held while the sandbox is made, so that calls at once make one.
	mu    sync.Mutex
	box   string // the session's own sandbox; "": not made yet
	try   string // the idempotency key of its making
	ended bool
}

func newSession(cfg Config, c *client.Client, ss *sdk.ServerSession, key string) *session {
	want := &client.CreateRequest{}
	if cfg.Box != nil {
		want = proto.CloneOf(cfg.Box)
	}
	if want.Lifetime == nil {
		want.Lifetime = durationpb.New(0) // it ends with the session
	}
	if want.Idle == nil {
		want.Idle = durationpb.New(boxIdle)
	}
	if want.Labels == nil {
		want.Labels = make(map[string]string)
	}
	want.Labels[labelSession] = "own"
	if name := clientName(ss); name != "" {
		want.Labels[labelClient] = name
	}
	x := &session{client: c, key: key, want: want, given: cfg.Sandbox}
	x.ctx, x.interrupt = context.WithCancel(context.Background())
	return x
}

// clientName is what the client calls itself, as far as a label takes it.
func clientName(ss *sdk.ServerSession) string {
	p := ss.InitializeParams()
	if p == nil || p.ClientInfo == nil {
		return ""
	}
	name := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, p.ClientInfo.Name)
	return name[:min(len(name), 60)]
}

// bind returns ctx cut short by the session's end. The caller calls stop when it is through.
func (x *session) bind(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(x.ctx, cancel)
	return ctx, func() { unhook(); cancel() }
}

// sandbox returns the sandbox that a call is for: the one that it names, or the session's.
func (x *session) sandbox(ctx context.Context, named string) (string, error) {
	if named != "" {
		return named, nil
	}
	if x.given != "" {
		return x.given, nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.box != "" {
		return x.box, nil
	}
	if x.ended {
		return "", &client.Error{Kind: client.Unavailable, Message: "the session has ended"}
	}
	if x.try == "" {
		x.try = "mcp-" + rand.Text() // again after a lost answer, so that it makes no second one
	}
	sb, err := x.client.Sandboxes.CreateOnce(ctx, x.try, x.want)
	if err != nil {
		return "", err
	}
	x.box = sb.GetId()
	return x.box, nil
}

// own returns the session's own sandbox, or "".
func (x *session) own() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.box
}

// lost forgets the session's own sandbox where it is gone, so that the next call makes a new one, and
// reports whether that is so.
func (x *session) lost(ctx context.Context, box string) bool {
	if box == "" || box != x.own() {
		return false
	}
	sb, err := x.client.Sandboxes.Get(ctx, box)
	gone := client.KindOf(err) == client.NotFound || err == nil && (sb.GetState() == "stopped" || sb.GetState() == "stopping")
	if !gone {
		return false
	}
	x.forget(box)
	return true
}

func (x *session) forget(box string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.box == box {
		x.box, x.try = "", ""
	}
}

// end deletes the session's own sandbox.
func (x *session) end() error {
	x.interrupt()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ended = true
	defer x.client.Close()
	if x.try == "" {
		return nil // none was asked for
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	if x.box == "" { // it was asked for, and the answer was not awaited: ask again for the same one
		sb, err := x.client.Sandboxes.CreateOnce(ctx, x.try, x.want)
		if err != nil {
			return err
		}
		x.box = sb.GetId()
	}
	_, err := x.client.Sandboxes.Delete(ctx, x.box)
	return err
}
