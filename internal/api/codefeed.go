package api

import (
	"encoding/json"
	"net/http"
	"strconv"
	"unicode/utf8"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
)

// The items of a run of code.
type (
	runItem struct {
		Type string `json:"type"`
		Run  raw    `json:"run"`
	}
	textItem struct {
		Type   string  `json:"type"` // stdout or stderr
		Number int64   `json:"number"`
		Text   *string `json:"text,omitempty"`
		Base64 []byte  `json:"base64,omitempty"` // where the bytes are not UTF-8
	}
	resultItem struct {
		Type   string                     `json:"type"`
		Number int64                      `json:"number"`
		Main   bool                       `json:"main"`
		Data   map[string]json.RawMessage `json:"data"`
	}
	errorItem struct {
		Type      string `json:"type"`
		Number    int64  `json:"number"`
		Name      string `json:"name"`
		Value     string `json:"value"`
		Traceback string `json:"traceback"`
	}
)

// codeFeed sends what a run says as items. An item's id is the number to go on at.
type codeFeed struct {
	*feed
	next int64
}

var _ sandbox.CodeSink = (*codeFeed)(nil)

func (f *codeFeed) at() string { return strconv.FormatInt(f.next, 10) }

// Started implements sandbox.CodeSink.
func (f *codeFeed) Started(r sandbox.CodeRun) error {
	return f.item("started", f.at(), runItem{"started", raw{runMessage(r)}})
}

// Item implements sandbox.CodeSink.
func (f *codeFeed) Item(i sandbox.CodeItem) error {
	f.next = i.Number + 1
	switch i.Kind {
	case sandbox.ItemResult:
		return f.item("result", f.at(), resultItem{"result", i.Number, i.Result.Main, i.Result.Data})
	case sandbox.ItemError:
		// A run's error is an item; "error" alone ends a feed and says that the feed itself failed.
		return f.item("code_error", f.at(), errorItem{"code_error", i.Number, i.Error.Name, i.Error.Value, i.Error.Traceback})
	}
	it := textItem{Type: "stdout", Number: i.Number}
	if i.Kind == sandbox.ItemStderr {
		it.Type = "stderr"
	}
	if utf8.Valid(i.Text) {
		text := string(i.Text)
		it.Text = &text
	} else {
		it.Base64 = i.Text
	}
	return f.item(it.Type, f.at(), it)
}

// Gap implements sandbox.CodeSink.
func (f *codeFeed) Gap(g sandbox.Gap) error {
	f.next = g.To
	return f.item("gap", f.at(), gapItem{"gap", g.From, g.To})
}

// finish tells how the run ended, or where to go on.
func (f *codeFeed) finish(r sandbox.CodeRun) error {
	if r.End != sandbox.RunNone {
		return f.item("ended", f.at(), runItem{"ended", raw{runMessage(r)}})
	}
	return f.item("more", f.at(), moreItem{"more", f.next})
}

// serveRunCode is the twin of ContextService.RunCode.
func (a *API) serveRunCode(w http.ResponseWriter, r *http.Request) error {
	req := &v1.RunCodeRequest{}
	if err := readMessage(w, r, req); err != nil {
		return err
	}
	if req.GetRun() == nil {
		return errNoCode()
	}
	key, err := checkIdempotencyKey(r.Header.Get("Idempotency-Key"))
	if err != nil {
		return err
	}
	f := &codeFeed{feed: a.newFeed(w, r)}
	defer f.beat.Stop()
	run, err := a.cfg.Manager.RunCode(r.Context(), principalOf(r.Context()), r.PathValue("sandbox"), codeSpecOf(req.GetRun()), key, f)
	if err == nil {
		err = f.finish(run)
	}
	return a.endFeed(r.Context(), f.feed, "run code", err)
}

// serveRunItems is the twin of ContextService.FollowRun.
func (a *API) serveRunItems(w http.ResponseWriter, r *http.Request) error {
	o := sandbox.CodeItemsOptions{}
	var err error
	if o.Offset, err = resumeOffset(r, "offset"); err != nil {
		return err
	}
	v := r.URL.Query()
	if o.Follow, err = boolParam(v.Get("follow"), accepts(r, typeSSE)); err != nil {
		return err
	}
	if o.Hold, err = boolParam(v.Get("hold"), false); err != nil {
		return err
	}
	f := &codeFeed{feed: a.newFeed(w, r), next: o.Offset}
	defer f.beat.Stop()
	run, err := a.cfg.Manager.CodeItems(r.Context(), principalOf(r.Context()), r.PathValue("sandbox"), r.PathValue("context"), r.PathValue("run"), o, f)
	if err == nil {
		err = f.finish(run)
	}
	return a.endFeed(r.Context(), f.feed, "run items", err)
}
