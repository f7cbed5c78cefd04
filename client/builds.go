package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"google.golang.org/protobuf/encoding/protojson"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// BuildRequest says what to build.
	BuildRequest = v1.CreateBuildRequest
	// BuildStep is one step of a build.
	BuildStep = v1.BuildStep
	// Dockerfile is a build in Docker's language.
	Dockerfile = v1.Dockerfile
	// Build is one build of a template.
	Build = v1.Build
	// BuildLogEntry is one line of a build's log.
	BuildLogEntry = v1.BuildLogEntry
	// ListBuildsRequest says which builds to show.
	ListBuildsRequest = v1.ListBuildsRequest
	// BuildDifference is what two builds differ in.
	BuildDifference = v1.BuildDifference
)

// The states of a build in which it is over.
const (
	BuildReady    = "ready"
	BuildFailed   = "failed"
	BuildCanceled = "canceled"
)

// Builds builds templates by steps and from Dockerfiles. What comes of a build is a commit that is tagged with
// the template's name, which CreateRequest takes.
type Builds struct {
	conn *conn
	rpc  casematev1connect.BuildServiceClient
}

// Upload keeps an archive of files for a build, and returns the name that BuildRequest.Files takes. archive is tar,
// perhaps compressed by gzip, bzip2 or zstd. name is what it is kept as; "" makes one up.
func (b *Builds) Upload(ctx context.Context, name string, archive io.Reader) (string, error) {
	target := b.conn.base + "/v1/build-files"
	if name != "" {
		target += "?name=" + url.QueryEscape(name)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, target, io.NopCloser(archive))
	if err != nil {
		return "", &Error{Kind: InvalidArgument, Message: "the request can't be made", Err: err}
	}
	req.Header.Set("Content-Type", "application/x-tar")
	resp, err := b.conn.http.Do(req)
	if err != nil {
		return "", b.conn.wrap(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return "", httpError(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return "", b.conn.wrap(err)
	}
	var kept v1.BuildFiles
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body, &kept); err != nil {
		return "", &Error{Kind: Internal, Message: "the server's answer can't be read", Err: err}
	}
	return kept.GetName(), nil
}

// Create begins a build and does not wait for it.
func (b *Builds) Create(ctx context.Context, req *BuildRequest) (*Build, error) {
	build, err := b.rpc.CreateBuild(ctx, req)
	return build, b.conn.wrap(err)
}

// Get shows a build by its id, or the newest of a template that is ready by the template's name.
func (b *Builds) Get(ctx context.Context, build string) (*Build, error) {
	got, err := b.rpc.GetBuild(ctx, &v1.GetBuildRequest{Build: build})
	return got, b.conn.wrap(err)
}

// List shows builds, the newest first, without their lock files.
func (b *Builds) List(ctx context.Context, req *ListBuildsRequest) ([]*Build, error) {
	resp, err := b.rpc.ListBuilds(ctx, req)
	return resp.GetBuilds(), b.conn.wrap(err)
}

// Logs shows entries of a build's log from an offset on, at most limit; 0: 1000.
func (b *Builds) Logs(ctx context.Context, build string, offset, limit int32) ([]*BuildLogEntry, error) {
	resp, err := b.rpc.ListBuildLogs(ctx, &v1.ListBuildLogsRequest{Build: build, Offset: offset, Limit: limit})
	return resp.GetEntries(), b.conn.wrap(err)
}

// Follow calls each for the entries of a build's log from an offset on until the build is over, and returns it.
// A broken connection is made again, for as long as the client's reconnect time says.
func (b *Builds) Follow(ctx context.Context, build string, offset int32, each func(*BuildLogEntry) error) (*Build, error) {
	again := newRetry(b.conn.retry)
	for {
		done, err := b.follow(ctx, build, &offset, again, each)
		if err == nil || !again.worth(ctx, err) {
			return done, unmark(err)
		}
	}
}

func (b *Builds) follow(ctx context.Context, build string, offset *int32, again *retry, each func(*BuildLogEntry) error) (*Build, error) {
	stream, err := b.rpc.FollowBuild(ctx, &v1.FollowBuildRequest{Build: build, Offset: *offset})
	if err != nil {
		return nil, b.conn.wrap(err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		again.progress()
		m := stream.Msg()
		if m.GetBuild() != nil {
			return m.GetBuild(), nil
		}
		if m.GetEntry() == nil {
			continue // a sign of life
		}
		*offset = m.GetEntry().GetOffset() + 1
		if err := each(m.GetEntry()); err != nil {
			return nil, callerError{err}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, b.conn.wrap(err)
	}
	return nil, &Error{Kind: Unavailable, Message: "the server closed the stream before the build was over"}
}

// Cancel ends a build, and returns it once nothing is left of it.
func (b *Builds) Cancel(ctx context.Context, build string) (*Build, error) {
	got, err := b.rpc.CancelBuild(ctx, &v1.CancelBuildRequest{Build: build})
	return got, b.conn.wrap(err)
}

// Delete removes a template that was built, with all its builds.
func (b *Builds) Delete(ctx context.Context, template string) error {
	_, err := b.rpc.DeleteBuiltTemplate(ctx, &v1.DeleteBuiltTemplateRequest{Name: template})
	return b.conn.wrap(err)
}

// Share lets every key start from a template that was built, or with stop no longer. It is for administrators.
func (b *Builds) Share(ctx context.Context, template string, stop bool) error {
	_, err := b.rpc.ShareTemplate(ctx, &v1.ShareTemplateRequest{Name: template, Stop: stop})
	return b.conn.wrap(err)
}

// Compare tells what two builds differ in. Each is a build's id, or a template's name.
func (b *Builds) Compare(ctx context.Context, from, to string) (*BuildDifference, error) {
	d, err := b.rpc.CompareBuilds(ctx, &v1.CompareBuildsRequest{From: from, To: to})
	return d, b.conn.wrap(err)
}
