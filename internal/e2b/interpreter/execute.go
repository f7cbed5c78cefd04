package interpreter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// execution is the body of POST /execute.
type execution struct {
	Code      string            `json:"code"`
	ContextID string            `json:"context_id"`
	Language  string            `json:"language"`
	EnvVars   map[string]string `json:"env_vars"`
}

func (h *Handler) execute(c call) error {
	var req execution
	if err := read(c, &req); err != nil {
		return err
	}
	if req.ContextID != "" && req.Language != "" {
		return &refusal{http.StatusBadRequest, "Only one of context_id or language can be provided"}
	}
	contextID, err := h.contextFor(c, req)
	if err != nil {
		return err
	}
	spec := sandbox.CodeSpec{ID: id.New(id.Run), Context: contextID, Code: req.Code, Env: req.EnvVars, Hold: true}
	out := newStream(c.w, h.cfg.KeepAlive)
	defer out.beat.Stop()
	run, err := h.run(c, spec, out)
	if err != nil && !out.begun {
		if errs.Is(err, errs.NotFound) {
			return noContext(req.ContextID)
		}
		return err
	}
	if c.r.Context().Err() != nil {
		h.abandon(c, contextID, spec.ID)
		return nil
	}
	return out.end(run, err)
}

// run runs code, in a new interpreter where the context's has ended.
func (h *Handler) run(c call, spec sandbox.CodeSpec, out *stream) (sandbox.CodeRun, error) {
	run, err := h.cfg.Manager.RunCode(c.r.Context(), c.p, c.s.ID, spec, "", out)
	if !errs.Is(err, errs.FailedPrecondition) || out.begun {
		return run, err
	}
	x, look := h.cfg.Manager.GetContext(c.r.Context(), c.p, c.s.ID, spec.Context)
	if look != nil || x.State != "ended" {
		return run, err
	}
	if _, err := h.cfg.Manager.RestartContext(c.r.Context(), c.p, c.s.ID, spec.Context); err != nil {
		return run, err
	}
	return h.cfg.Manager.RunCode(c.r.Context(), c.p, c.s.ID, spec, "", out)
}

// abandon interrupts a run whose caller has left, so that it holds up nobody. One that was cut off because
// its sandbox is paused or ends goes on or ends with it.
func (h *Handler) abandon(c call, contextID, run string) {
	var state *sandbox.TransitionError
	if errors.As(context.Cause(c.r.Context()), &state) {
		return
	}
	_, _ = h.cfg.Manager.InterruptContext(context.WithoutCancel(c.r.Context()), c.p, c.s.ID, contextID, run)
}

// contextFor returns the context that code is for. The languages' own ones are made at their first use.
func (h *Handler) contextFor(c call, req execution) (string, error) {
	language := req.Language
	switch {
	case req.ContextID == "":
	case c.isOwn(req.ContextID):
		language = strings.TrimPrefix(req.ContextID, ownPrefix)
	default:
		return req.ContextID, nil
	}
	d, err := driverOf(language)
	if err != nil {
		return "", err
	}
	own := spec(ownPrefix+d.Language, d.Language, "", c.s.Spec.Profile)
	if _, err := h.cfg.Manager.CreateContext(c.r.Context(), c.p, c.s.ID, own); err != nil {
		return "", notCreated(err)
	}
	return own.ID, nil
}

// stream is the answer to an execution: one JSON object a line, and never an empty line.
type stream struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	beat  *beat.Beat
	begun bool
}

var _ sandbox.CodeSink = (*stream)(nil)

func newStream(w http.ResponseWriter, every time.Duration) *stream {
	s := &stream{w: w, rc: http.NewResponseController(w)}
	s.beat = beat.New(every, func() error {
		if !s.begun {
			return nil // the status comes first
		}
		return s.put(struct {
			Type string `json:"type"`
		}{"keepalive"})
	})
	return s
}

// put writes one line; the beat's lock is held.
func (s *stream) put(v any) error {
	b, err := line(v)
	if err != nil {
		return err
	}
	if _, err := s.w.Write(b); err != nil {
		return err
	}
	return s.rc.Flush()
}

func (s *stream) send(v any) error { return s.beat.Send(func() error { return s.put(v) }) }

// Started implements sandbox.CodeSink.
func (s *stream) Started(sandbox.CodeRun) error {
	return s.beat.Send(func() error {
		s.begun = true
		h := s.w.Header()
		h.Set("Content-Type", "application/json")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		s.w.WriteHeader(http.StatusOK)
		return s.rc.Flush()
	})
}

type (
	textLine struct {
		Type      string `json:"type"` // stdout or stderr
		Text      string `json:"text"`
		Timestamp string `json:"timestamp"`
	}
	errorLine struct {
		Type      string `json:"type"`
		Name      string `json:"name"`
		Value     string `json:"value"`
		Traceback string `json:"traceback"`
	}
	countLine struct {
		Type  string `json:"type"`
		Count int64  `json:"execution_count"`
	}
	endLine struct {
		Type string `json:"type"`
	}
)

// Item implements sandbox.CodeSink.
func (s *stream) Item(i sandbox.CodeItem) error {
	switch i.Kind {
	case sandbox.ItemResult:
		return s.send(resultLine(i.Result))
	case sandbox.ItemError:
		return s.send(errorLine{"error", i.Error.Name, i.Error.Value, i.Error.Traceback})
	}
	l := textLine{Type: "stdout", Text: string(i.Text), Timestamp: time.Now().UTC().Format(time.RFC3339Nano)}
	if i.Kind == sandbox.ItemStderr {
		l.Type = "stderr"
	}
	return s.send(l)
}

// Gap implements sandbox.CodeSink. The protocol has no word for output that is not kept any more.
func (s *stream) Gap(g sandbox.Gap) error {
	return s.send(textLine{"stderr", fmt.Sprintf("[%d pieces of output were dropped]\n", g.To-g.From), time.Now().UTC().Format(time.RFC3339Nano)})
}

// end tells how the run ended.
func (s *stream) end(run sandbox.CodeRun, err error) error {
	if err != nil {
		_ = s.send(errorLine{"error", "ExecutionLost", publicText(err), ""})
		return s.send(endLine{"unexpected_end_of_execution"})
	}
	if run.Count > 0 {
		_ = s.send(countLine{"number_of_executions", run.Count})
	}
	switch run.End {
	case sandbox.RunCanceled:
		_ = s.send(errorLine{"error", "ContextRestarting", "Context was restarted", ""})
	case sandbox.RunDriverEnded, sandbox.RunTimedOut:
		if run.Driver == "" {
			break
		}
		_ = s.send(errorLine{"error", "InterpreterEnded", lastWords(run), ""})
		return s.send(endLine{"unexpected_end_of_execution"})
	}
	return s.send(endLine{"end_of_execution"})
}

// lastWords tells how an interpreter ended.
func lastWords(run sandbox.CodeRun) string {
	how := fmt.Sprintf("exited with code %d", run.Code)
	switch run.Driver {
	case sandbox.EndOOMKilled:
		how = "ran out of memory"
	case sandbox.EndSignaled:
		how = "was ended by a signal: " + syscall.Signal(run.Signal).String()
	case sandbox.EndProcessLost:
		how = "is gone"
	}
	return "the interpreter " + how + "; its variables are lost, and the next run gets a new one"
}

// resultLine puts a result into the protocol's fields.
func resultLine(r *sandbox.CodeResult) map[string]any {
	fields := map[string]string{
		"text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
		"image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
		"application/javascript": "javascript", "dataframe": "data", "chart": "chart",
	}
	out := map[string]any{"type": "result", "is_main_result": r.Main}
	extra := map[string]json.RawMessage{}
	for mime, value := range r.Data {
		switch field := fields[mime]; field {
		case "":
			extra[mime] = value
		case "text":
			out[field] = unquoted(value)
		default:
			out[field] = value
		}
	}
	out["extra"] = extra
	return out
}

// unquoted takes one pair of quotes off a text, as E2B does: the value of 'x' shows as x.
func unquoted(value json.RawMessage) any {
	var s string
	if json.Unmarshal(value, &s) != nil {
		return value
	}
	if s == "'" || s == `"` {
		return ""
	}
	if n := len(s); n > 1 && (s[0] == '\'' || s[0] == '"') && s[n-1] == s[0] {
		return s[1 : n-1]
	}
	return s
}
