package client

import (
	"context"
	"errors"
	"io"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Checkpoint is a signed head of the journal.
	Checkpoint = v1.Checkpoint
	// Event is one recorded thing that happened.
	Event = v1.Event
	// Body is content that an event speaks of, as far as it is kept.
	Body = v1.ReadBodyResponse
	// Version names a server and what it runs on.
	Version = v1.Version
	// Authority is a server's own certificate authority.
	Authority = v1.Authority
	// Host tells what a server's machine can do.
	Host = v1.Host
	// Template is what a sandbox starts from.
	Template = v1.Template
	// BuildProgress is one step or line of a template's build.
	BuildProgress = v1.BuildProgress
	// Key is an API key, without its secret.
	Key = v1.Key
	// CreateKeyRequest says what key to make.
	CreateKeyRequest = v1.CreateKeyRequest
)

// Journal reads the record of what happened to sandboxes.
type Journal struct {
	conn   *conn
	rpc    casematev1connect.JournalServiceClient
	proofs casematev1connect.ProofServiceClient
	bodies casematev1connect.RecordServiceClient
}

// Checkpoint returns the journal's newest signed checkpoint and the key that it is verified with. Keep it where
// the server can't reach: a bundle exported later is held against it.
func (j *Journal) Checkpoint(ctx context.Context) (*Checkpoint, error) {
	c, err := j.proofs.GetCheckpoint(ctx, &v1.GetCheckpointRequest{})
	return c, j.conn.wrap(err)
}

// Export writes the record of a sandbox with its proofs to w, as a bundle that `casemate verify` checks. The
// bundle proves that the log began with each of heads, checkpoints from before. FailedPrecondition: it
// did not.
func (j *Journal) Export(ctx context.Context, sandbox string, heads []string, w io.Writer) error {
	stream, err := j.proofs.ExportBundle(ctx, &v1.ExportBundleRequest{Sandbox: sandbox, Heads: heads})
	if err != nil {
		return j.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if _, err := w.Write(stream.Msg().GetData()); err != nil {
			return err
		}
	}
	return j.conn.wrap(stream.Err())
}

// Events returns the events with a counter greater than after, at most limit (0: 100).
func (j *Journal) Events(ctx context.Context, sandbox string, after uint64, limit int) ([]*Event, error) {
	resp, err := j.rpc.ListEvents(ctx, &v1.ListEventsRequest{Sandbox: sandbox, After: after, Limit: int32(min(limit, 1000))})
	return resp.GetEvents(), j.conn.wrap(err)
}

// Body returns content that an event speaks of, with its name as "guest.stdout". NotFound: it was erased, or never kept.
func (j *Journal) Body(ctx context.Context, sandbox string, event uint64, name string) (*Body, error) {
	b, err := j.bodies.ReadBody(ctx, &v1.ReadBodyRequest{Sandbox: sandbox, Event: event, Name: name})
	return b, j.conn.wrap(err)
}

// Redact erases content that an event speaks of, the named bodies or all of them, and returns the event that records it.
func (j *Journal) Redact(ctx context.Context, sandbox string, event uint64, names []string, reason string) (*Event, error) {
	e, err := j.bodies.RedactEvent(ctx, &v1.RedactEventRequest{Sandbox: sandbox, Event: event, Names: names, Reason: reason})
	return e, j.conn.wrap(err)
}

// Follow calls each with every event after the counter after, as they are recorded, until ctx ends,
// the server closes the stream, or each fails; it takes a broken connection up again. It returns the
// error of each, or nil when the server closed the stream.
func (j *Journal) Follow(ctx context.Context, sandbox string, after uint64, each func(*Event) error) error {
	again := newRetry(j.conn.retry)
	for {
		err := j.follow(ctx, sandbox, &after, again, each)
		if err == nil || !again.worth(ctx, err) {
			return unmark(err)
		}
	}
}

func (j *Journal) follow(ctx context.Context, sandbox string, after *uint64, again *retry, each func(*Event) error) error {
	stream, err := j.rpc.FollowEvents(ctx, &v1.FollowEventsRequest{Sandbox: sandbox, After: *after})
	if err != nil {
		return j.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		again.progress()
		e := stream.Msg()
		if e.GetSeq() == 0 {
			continue // a keep-alive
		}
		*after = e.GetSeq()
		if err := each(e); err != nil {
			return callerError{err}
		}
	}
	return j.conn.wrap(stream.Err())
}

// callerError marks an error of the caller's own function, which no retry may swallow.
type callerError struct{ error }

// Unwrap returns the caller's error.
func (e callerError) Unwrap() error { return e.error }

// unmark returns err as the caller's function gave it.
func unmark(err error) error {
	var own callerError
	if errors.As(err, &own) {
		return own.error
	}
	return err
}

// System tells about a server, its templates and its keys.
type System struct {
	conn  *conn
	rpc   casematev1connect.SystemServiceClient
	trust casematev1connect.TrustServiceClient
}

// Version tells which server answers. It needs no key.
func (s *System) Version(ctx context.Context) (*Version, error) {
	v, err := s.rpc.GetVersion(ctx, &v1.GetVersionRequest{})
	return v, s.conn.wrap(err)
}

// Authority returns the certificate authority by which the server's TLS addresses show who they are. It
// needs no key. The error's kind is FailedPrecondition where the server was given a certificate instead.
func (s *System) Authority(ctx context.Context) (*Authority, error) {
	a, err := s.trust.GetAuthority(ctx, &v1.GetAuthorityRequest{})
	return a, s.conn.wrap(err)
}

// Host tells what the server's machine can do.
func (s *System) Host(ctx context.Context) (*Host, error) {
	h, err := s.rpc.GetHost(ctx, &v1.GetHostRequest{})
	return h, s.conn.wrap(err)
}

// Templates shows what sandboxes can start from.
func (s *System) Templates(ctx context.Context) ([]*Template, error) {
	resp, err := s.rpc.ListTemplates(ctx, &v1.ListTemplatesRequest{})
	return resp.GetTemplates(), s.conn.wrap(err)
}

// BuildTemplate builds a built-in template and calls progress with what happens. With force it builds
// it again though it is there.
func (s *System) BuildTemplate(ctx context.Context, name string, force bool, progress func(*BuildProgress)) (*Template, error) {
	stream, err := s.rpc.BuildTemplate(ctx, &v1.BuildTemplateRequest{Name: name, Force: force})
	if err != nil {
		return nil, s.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	var built *Template
	for stream.Receive() {
		if t := stream.Msg().GetTemplate(); t != nil {
			built = t
		}
		progress(stream.Msg())
	}
	if err := stream.Err(); err != nil && !errors.Is(err, io.EOF) {
		return nil, s.conn.wrap(err)
	}
	if built == nil {
		return nil, &Error{Kind: Unavailable, Message: "the server closed the stream before the template was built"}
	}
	return built, nil
}

// CreateKey makes an API key. The secret is in this answer and never again.
func (s *System) CreateKey(ctx context.Context, req *CreateKeyRequest) (key *Key, secret string, err error) {
	resp, err := s.rpc.CreateKey(ctx, req)
	return resp.GetKey(), resp.GetSecret(), s.conn.wrap(err)
}

// Keys shows the keys, without their secrets.
func (s *System) Keys(ctx context.Context) ([]*Key, error) {
	resp, err := s.rpc.ListKeys(ctx, &v1.ListKeysRequest{})
	return resp.GetKeys(), s.conn.wrap(err)
}

// RevokeKey ends a key at once. Idempotent.
func (s *System) RevokeKey(ctx context.Context, key string) (*Key, error) {
	k, err := s.rpc.RevokeKey(ctx, &v1.RevokeKeyRequest{Key: key})
	return k, s.conn.wrap(err)
}
