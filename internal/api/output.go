package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
)

// The bounds of a long poll.
const (
	maxWait      = 5 * time.Minute
	rawLimit     = 1 << 20 // bytes of a raw answer where the request names no limit
	maxRawLimit  = 16 << 20
	octetStream  = "application/octet-stream"
	headerOffset = "Casemate-Offset"
	headerNext   = "Casemate-Next-Offset"
	headerGap    = "Casemate-Dropped"
	headerEnd    = "Casemate-Process-End"
	headerCode   = "Casemate-Process-Code"
)

// outputQuery is what the output twin reads from a request.
type outputQuery struct {
	sandbox, process string
	sandbox.OutputOptions
	wait   time.Duration
	stream string // raw answers only: "stdout", "stderr", "tty" or "" for all
}

func readOutputQuery(r *http.Request) (outputQuery, error) {
	q := outputQuery{sandbox: r.PathValue("sandbox"), process: r.PathValue("process"), stream: r.URL.Query().Get("stream")}
	var err error
	if q.Offset, err = resumeOffset(r, "offset"); err != nil {
		return q, err
	}
	v := r.URL.Query()
	if q.Follow, err = boolParam(v.Get("follow"), accepts(r, typeSSE)); err != nil {
		return q, err
	}
	if q.Hold, err = boolParam(v.Get("hold"), false); err != nil {
		return q, err
	}
	if s := v.Get("limit"); s != "" {
		if q.Limit, err = strconv.ParseInt(s, 10, 64); err != nil || q.Limit < 0 {
			return q, errs.New(errs.InvalidArgument, "limit %q is no number of bytes", s)
		}
	}
	if s := v.Get("wait"); s != "" {
		if q.wait, err = waitParam(s); err != nil {
			return q, err
		}
	}
	return q, nil
}

// waitParam reads a duration, or a plain number of seconds.
func waitParam(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		d, err = time.ParseDuration(s + "s")
	}
	if err != nil || d < 0 {
		return 0, errs.New(errs.InvalidArgument, "wait %q is no duration", s).WithHint("write 30s, or 30")
	}
	return min(d, maxWait), nil
}

func boolParam(s string, unset bool) (bool, error) {
	if s == "" {
		return unset, nil
	}
	b, err := strconv.ParseBool(s)
	if err != nil {
		return false, errs.New(errs.InvalidArgument, "%q is neither true nor false", s)
	}
	return b, nil
}

// serveOutput is the twin of ProcessService.Output: a long poll, or a stream to the end.
func (a *API) serveOutput(w http.ResponseWriter, r *http.Request) error {
	q, err := readOutputQuery(r)
	if err != nil {
		return err
	}
	if accepts(r, octetStream) {
		return a.serveRawOutput(w, r, q)
	}
	f := &outputFeed{feed: a.newFeed(w, r), next: q.Offset}
	defer f.beat.Stop()
	p, err := a.poll(r.Context(), q, f, func() bool { return f.sent })
	if err == nil {
		err = f.finish(p)
	}
	return a.endFeed(r.Context(), f.feed, "output", err)
}

// poll sends what there is from the query's offset on. Where there is nothing and the query waits, it
// sends the next piece that comes.
func (a *API) poll(ctx context.Context, q outputQuery, sink sandbox.OutputSink, sent func() bool) (sandbox.Process, error) {
	m, who := a.cfg.Manager, principalOf(ctx)
	p, err := m.Output(ctx, who, q.sandbox, q.process, q.OutputOptions, sink)
	over := p.End != sandbox.EndNone && p.Bytes <= q.Offset // it may have printed, and ended, since it was read
	if err != nil || q.wait == 0 || q.Follow || sent() || over {
		return p, err
	}
	waiting, cancel := context.WithTimeout(ctx, q.wait)
	defer cancel()
	o := q.OutputOptions
	o.Follow = true
	p, err = m.Output(waiting, who, q.sandbox, q.process, o, firstPiece{sink})
	switch {
	case errors.Is(err, errEnough), err != nil && waiting.Err() != nil && ctx.Err() == nil:
		return m.GetProcess(ctx, who, q.sandbox, q.process)
	default:
		return p, err
	}
}

// firstPiece ends an Output after its first piece.
type firstPiece struct{ sandbox.OutputSink }

// Output implements sandbox.OutputSink.
func (f firstPiece) Output(s sandbox.Stream, offset int64, data []byte) error {
	if err := f.OutputSink.Output(s, offset, data); err != nil {
		return err
	}
	return errEnough
}

// serveRawOutput answers with the bytes themselves; where they stand is in the header.
func (a *API) serveRawOutput(w http.ResponseWriter, r *http.Request, q outputQuery) error {
	if q.Follow {
		return errs.New(errs.InvalidArgument, "raw output can't be followed").WithHint("poll with wait=30s, or accept text/event-stream")
	}
	if q.Limit == 0 || q.Limit > maxRawLimit {
		q.Limit = min(max(q.Limit, rawLimit), maxRawLimit)
	}
	c := &collected{next: q.Offset, stream: q.stream}
	p, err := a.poll(r.Context(), q, c, func() bool { return c.next > q.Offset })
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", octetStream)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set(headerOffset, strconv.FormatInt(q.Offset, 10))
	h.Set(headerNext, strconv.FormatInt(c.next, 10))
	if c.dropped > 0 {
		h.Set(headerGap, strconv.FormatInt(c.dropped, 10))
	}
	if p.End != sandbox.EndNone && c.next >= p.Bytes {
		h.Set(headerEnd, string(p.End))
		h.Set(headerCode, strconv.Itoa(p.Code))
	}
	h.Set("Content-Length", strconv.Itoa(c.buf.Len()))
	_, _ = w.Write(c.buf.Bytes())
	return nil
}

// collected holds the bytes of a raw answer.
type collected struct {
	buf     bytes.Buffer
	stream  string
	next    int64
	dropped int64
}

// Output implements sandbox.OutputSink.
func (c *collected) Output(s sandbox.Stream, offset int64, data []byte) error {
	c.next = offset + int64(len(data))
	if c.stream == "" || c.stream == streamName(s) {
		c.buf.Write(data)
	}
	return nil
}

// Gap implements sandbox.OutputSink.
func (c *collected) Gap(g sandbox.Gap) error {
	c.next = g.To
	c.dropped += g.To - g.From
	return nil
}

// serveRun is the twin of ProcessService.Run: it starts a process and streams it to its end.
func (a *API) serveRun(w http.ResponseWriter, r *http.Request) error {
	req := &v1.RunRequest{}
	if err := readMessage(w, r, req); err != nil {
		return err
	}
	if req.GetProcess() == nil {
		return errNoProcess()
	}
	key, err := checkIdempotencyKey(r.Header.Get("Idempotency-Key"))
	if err != nil {
		return err
	}
	f := &outputFeed{feed: a.newFeed(w, r)}
	defer f.beat.Stop()
	spec := processSpecOf(req.GetProcess())
	o := sandbox.RunOptions{IdempotencyKey: key, Hold: spec.Hold}
	p, err := a.cfg.Manager.Run(r.Context(), principalOf(r.Context()), r.PathValue("sandbox"), spec, o, f)
	if err == nil {
		f.next = max(f.next, p.Bytes) // a run ends with its end, whatever a limit would say
		err = f.finish(p)
	}
	return a.endFeed(r.Context(), f.feed, "run", err)
}

// readMessage reads a JSON body into m.
func readMessage(w http.ResponseWriter, r *http.Request, m proto.Message) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return errs.New(errs.TooLarge, "the request's body is larger than %d MiB", maxMessage>>20)
	case err != nil:
		return errs.Wrap(err, errs.InvalidArgument, "the request's body can't be read")
	}
	if err := protojson.Unmarshal(body, m); err != nil {
		return errs.New(errs.InvalidArgument, "the request's body is not the JSON that is wanted: %v", err)
	}
	return nil
}

// serveEvents is the twin of JournalService.FollowEvents.
func (a *API) serveEvents(w http.ResponseWriter, r *http.Request) error {
	after, err := resumeOffset(r, "after")
	if err != nil {
		return err
	}
	m, who, id := a.cfg.Manager, principalOf(r.Context()), r.PathValue("sandbox")
	if _, err := m.Get(r.Context(), who, id); err != nil {
		return err // before the stream stands, so that the status tells
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	f.stand()
	err = m.FollowEvents(r.Context(), who, id, uint64(after), func(e journal.Event) error { //nolint:gosec // not negative
		return f.item(string(e.Type), strconv.FormatUint(e.Seq, 10), raw{eventMessage(e)})
	})
	return a.endFeed(r.Context(), f, "events", endOfFollow(r.Context(), err))
}

// serveWatch is the twin of FileService.WatchFiles.
func (a *API) serveWatch(w http.ResponseWriter, r *http.Request) error {
	v := r.URL.Query()
	recursive, err := boolParam(v.Get("recursive"), false)
	if err != nil {
		return err
	}
	fs, err := a.openFiles(r.Context(), r.PathValue("sandbox"))
	if err != nil {
		return err
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	type change struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
	req := sandbox.WatchRequest{PathRequest: pathRequest(v.Get("user"), v.Get("path")), Recursive: recursive}
	err = fs.Watch(r.Context(), req,
		func() error { return f.item("ready", "", change{Type: "ready"}) },
		func(e sandbox.WatchEvent) error { return f.item(e.Op, "", change{e.Op, e.Path}) })
	return a.endFeed(r.Context(), f, "watch", endOfFollow(r.Context(), err))
}

// serveBuild is the twin of SystemService.BuildTemplate.
func (a *API) serveBuild(w http.ResponseWriter, r *http.Request) error {
	force, err := boolParam(r.URL.Query().Get("force"), false)
	if err != nil {
		return err
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	type progress struct {
		Type     string  `json:"type"`
		Step     string  `json:"step,omitempty"`
		Fraction float64 `json:"fraction"`
		Line     string  `json:"line,omitempty"`
		Template *raw    `json:"template,omitempty"`
	}
	req := &v1.BuildTemplateRequest{Name: r.PathValue("name"), Force: force}
	err = a.buildTemplate(r.Context(), req, func(m *v1.BuildProgress) error {
		it := progress{Type: "progress", Step: m.GetStep(), Fraction: m.GetFraction(), Line: m.GetLine()}
		if t := m.GetTemplate(); t != nil {
			it.Type, it.Template = "built", &raw{t}
		}
		return f.item(it.Type, "", it)
	})
	return a.endFeed(r.Context(), f, "build", err)
}
