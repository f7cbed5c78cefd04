package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// feed is a stream over plain HTTP: server-sent events where the request accepts them, else lines of
// JSON. Each item is one JSON object whose field "type" says what it is; server-sent events carry
// the type as "event" too, and the place to resume at as "id".
type feed struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	sse  bool
	beat *beat.Beat
	open bool // the header is written
}

const (
	typeSSE   = "text/event-stream"
	typeLines = "application/x-ndjson"
)

// accepts reports whether the request names the media type.
func accepts(r *http.Request, mediaType string) bool {
	for _, h := range r.Header["Accept"] {
		for part := range strings.SplitSeq(h, ",") {
			if name, _, _ := strings.Cut(part, ";"); strings.EqualFold(strings.TrimSpace(name), mediaType) {
				return true
			}
		}
	}
	return false
}

func (a *API) newFeed(w http.ResponseWriter, r *http.Request) *feed {
	f := &feed{w: w, rc: http.NewResponseController(w), sse: accepts(r, typeSSE)}
	f.beat = beat.New(a.cfg.KeepAlive, f.keepAlive)
	return f
}

// begin writes the header, so that the client sees the stream stand before its first item. Callers
// hold the beat's lock, or begin before anything else.
func (f *feed) begin() {
	if f.open {
		return
	}
	f.open = true
	h := f.w.Header()
	h.Set("Content-Type", typeLines)
	if f.sse {
		h.Set("Content-Type", typeSSE)
	}
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies in front must not hold items back
	h.Set("X-Content-Type-Options", "nosniff")
	f.w.WriteHeader(http.StatusOK)
	_ = f.rc.Flush()
}

// stand begins the stream before there is an item.
func (f *feed) stand() {
	f.beat.Do(f.begin)
}

func (f *feed) keepAlive() error {
	f.begin()
	text := `{"type":"keep_alive"}` + "\n"
	if f.sse {
		text = ": keep-alive\n\n"
	}
	if _, err := f.w.Write([]byte(text)); err != nil {
		return err
	}
	return f.rc.Flush()
}

// item sends v, a JSON object that carries its type. id is the place to resume at, or "".
func (f *feed) item(kind, id string, v any) error {
	body, err := encode(v)
	if err != nil {
		return err
	}
	return f.beat.Send(func() error {
		f.begin()
		var b []byte
		if f.sse {
			if id != "" {
				b = append(append(append(b, "id: "...), id...), '\n')
			}
			b = append(append(append(b, "event: "...), kind...), "\ndata: "...)
			b = append(append(b, body...), "\n\n"...) // JSON holds no raw line break
		} else {
			b = append(append(b, body...), '\n')
		}
		if _, err := f.w.Write(b); err != nil {
			return err
		}
		return f.rc.Flush()
	})
}

// encode is json.Marshal that leaves <, > and & as they are: output is full of them.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte{'\n'}), nil
}

// endFeed closes the feed. An error that comes before anything was sent is left to the caller, to answer
// with its own status; a later one is the last item.
func (a *API) endFeed(ctx context.Context, f *feed, what string, err error) error {
	f.beat.Stop()
	if err == nil {
		f.begin()
		return nil
	}
	if !f.open {
		return err
	}
	if ctx.Err() != nil && !errors.Is(context.Cause(ctx), errDraining) {
		return errReported // nobody is there to read it
	}
	p := a.problemOf(ctx, what, err)
	_ = f.item("error", "", struct {
		Type string `json:"type"`
		problem
	}{"error", p})
	f.beat.Stop() // sending has wound the clock again
	return errReported
}

// raw is a schema message inside an item.
type raw struct{ m proto.Message }

// MarshalJSON implements json.Marshaler as REST answers are written.
func (r raw) MarshalJSON() ([]byte, error) { return restJSON().Marshal(r.m) }

// The items of a process's output.
type (
	startedItem struct {
		Type    string `json:"type"`
		Process raw    `json:"process"`
	}
	outputItem struct {
		Type   string  `json:"type"`
		Stream string  `json:"stream"`
		Offset int64   `json:"offset"`
		Next   int64   `json:"next"`
		Text   *string `json:"text,omitempty"`
		Base64 []byte  `json:"base64,omitempty"` // where the bytes are not UTF-8
	}
	gapItem struct {
		Type string `json:"type"`
		From int64  `json:"from"`
		To   int64  `json:"to"`
	}
	moreItem struct {
		Type string `json:"type"`
		Next int64  `json:"next"`
	}
)

// outputFeed sends a process's output as items.
type outputFeed struct {
	*feed
	next int64 // the offset after the last item
	sent bool
}

var _ sandbox.RunSink = (*outputFeed)(nil)

// Started implements sandbox.RunSink.
func (f *outputFeed) Started(p sandbox.Process) error {
	return f.item("started", strconv.FormatInt(f.next, 10), startedItem{"started", raw{processMessage(p)}})
}

// Output implements sandbox.OutputSink.
func (f *outputFeed) Output(s sandbox.Stream, offset int64, data []byte) error {
	f.next, f.sent = offset+int64(len(data)), true
	it := outputItem{Type: "output", Stream: streamName(s), Offset: offset, Next: f.next}
	if utf8.Valid(data) {
		text := string(data)
		it.Text = &text
	} else {
		it.Base64 = data
	}
	return f.item("output", strconv.FormatInt(f.next, 10), it)
}

// Gap implements sandbox.OutputSink.
func (f *outputFeed) Gap(g sandbox.Gap) error {
	f.next, f.sent = g.To, true
	return f.item("gap", strconv.FormatInt(f.next, 10), gapItem{"gap", g.From, g.To})
}

// finish tells how the process ended, or where to go on.
func (f *outputFeed) finish(p sandbox.Process) error {
	at := strconv.FormatInt(f.next, 10)
	if p.End != sandbox.EndNone && f.next >= p.Bytes {
		return f.item("ended", at, startedItem{"ended", raw{processMessage(p)}})
	}
	return f.item("more", at, moreItem{"more", f.next})
}

func streamName(s sandbox.Stream) string {
	switch s {
	case sandbox.Stdout:
		return "stdout"
	case sandbox.Stderr:
		return "stderr"
	case sandbox.TTY:
		return "tty"
	}
	return "unknown"
}

// errEnough ends a long poll that has something to tell.
var errEnough = errors.New("enough")

// resumeOffset returns where a stream begins: the query's parameter, or after what a browser's
// EventSource has seen.
func resumeOffset(r *http.Request, param string) (int64, error) {
	s := r.URL.Query().Get(param)
	if last := r.Header.Get("Last-Event-Id"); last != "" {
		s = last
	}
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, errs.New(errs.InvalidArgument, "%q is no offset", s)
	}
	return n, nil
}

// kept returns what sends to a stream that never rests for long: idle is sent where nothing else was. It ends
// with stop.
func kept[M any](a *API, stream *connect.ServerStream[M], idle *M) (send func(*M) error, stop func()) {
	b := beat.New(a.cfg.KeepAlive, func() error { return stream.Send(idle) })
	return func(m *M) error { return b.Send(func() error { return stream.Send(m) }) }, b.Stop
}
