package e2b

import (
	"cmp"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// maxPage is the most that a page holds, and what it holds where nothing is said.
const maxPage = 100

// selection is what a list asks for.
type selection struct {
	states   []sandbox.State
	metadata map[string]string
	template string
	after    time.Time
	oldest   bool // first
	limit    int
	from     position
}

// position is where a page begins: after this sandbox.
type position struct {
	started int64
	id      string
}

func (p position) token() string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(p.started, 10) + "." + p.id))
}

func parsePosition(token string) (position, error) {
	b, err := base64.RawURLEncoding.DecodeString(token)
	started, name, ok := strings.Cut(string(b), ".")
	n, nerr := strconv.ParseInt(started, 10, 64)
	if err != nil || !ok || nerr != nil || !id.ValidSandbox(name) {
		return position{}, fail(http.StatusBadRequest, "Invalid next token")
	}
	return position{started: n, id: name}, nil
}

// compare orders sandboxes by their start, the newest first.
func (p position) compare(q position) int {
	return cmp.Or(cmp.Compare(q.started, p.started), strings.Compare(p.id, q.id))
}

func positionOf(s sandbox.Sandbox) position {
	return position{started: s.StartedAt.UnixNano(), id: s.ID}
}

// pageSize reads how many entries a page may have.
func pageSize(q url.Values) (int, error) {
	v := q.Get("limit")
	if v == "" {
		return maxPage, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > maxPage {
		return 0, fail(http.StatusBadRequest, "Error when parsing request: limit must be 1 to %d", maxPage)
	}
	return n, nil
}

// parseSelection reads a list's query.
func parseSelection(q url.Values) (selection, error) {
	sel := selection{template: q.Get("template")}
	var err error
	if sel.metadata, err = parseMetadata(q.Get("metadata")); err != nil {
		return sel, err
	}
	for _, values := range q["state"] {
		for _, s := range strings.Split(values, ",") {
			switch s {
			case "running", "paused":
				sel.states = append(sel.states, sandbox.State(s))
			case "":
			default:
				return sel, fail(http.StatusBadRequest, "Error when parsing request: unknown state %q", s)
			}
		}
	}
	if len(sel.states) == 0 {
		sel.states = []sandbox.State{sandbox.Running, sandbox.Paused}
	}
	if sel.limit, err = pageSize(q); err != nil {
		return sel, err
	}
	switch v := q.Get("order"); v {
	case "", "desc":
	case "asc":
		sel.oldest = true
	default:
		return sel, fail(http.StatusBadRequest, "Error when parsing request: order must be asc or desc")
	}
	if v := q.Get("startedAfter"); v != "" {
		if sel.after, err = time.Parse(time.RFC3339Nano, v); err != nil {
			return sel, fail(http.StatusBadRequest, "Error when parsing request: startedAfter is no RFC 3339 time")
		}
	}
	if v := q.Get("nextToken"); v != "" {
		sel.from, err = parsePosition(v)
	}
	return sel, err
}

// parseMetadata reads pairs from an already decoded value. The SDKs encode names and values one by
// one and then the whole once more, before it becomes a part of the query.
func parseMetadata(v string) (map[string]string, error) {
	if v == "" {
		return nil, nil
	}
	malformed := fail(http.StatusBadRequest, "Error when parsing request: metadata is malformed")
	text, err := url.QueryUnescape(v)
	if err != nil {
		return nil, malformed
	}
	all := make(map[string]string)
	for pair := range strings.SplitSeq(text, "&") {
		name, value, ok := strings.Cut(pair, "=")
		name, nameErr := url.QueryUnescape(name)
		value, valueErr := url.QueryUnescape(value)
		if !ok || nameErr != nil || valueErr != nil {
			return nil, malformed
		}
		all[name] = value
	}
	return all, nil
}

func (a *API) listV2(c call) error {
	sel, err := parseSelection(c.r.URL.Query())
	if err != nil {
		return err
	}
	all, err := a.matching(c, sel)
	if err != nil {
		return err
	}
	running := 0
	for _, s := range all {
		if s.State == sandbox.Running {
			running++
		}
	}
	order := func(x, y sandbox.Sandbox) int {
		n := positionOf(x).compare(positionOf(y))
		if sel.oldest {
			return -n
		}
		return n
	}
	slices.SortFunc(all, order)
	if sel.from.id != "" {
		all = slices.DeleteFunc(all, func(s sandbox.Sandbox) bool {
			n := positionOf(s).compare(sel.from)
			return n == 0 || (n < 0) != sel.oldest
		})
	}
	if len(all) > sel.limit {
		all = all[:sel.limit]
		c.w.Header().Set("X-Next-Token", positionOf(all[len(all)-1]).token())
	}
	c.w.Header().Set("X-Total-Running", strconv.Itoa(running))
	return c.json(http.StatusOK, listedAll(all))
}

// listV1 lists what runs, in one answer.
func (a *API) listV1(c call) error {
	metadata, err := parseMetadata(c.r.URL.Query().Get("metadata"))
	if err != nil {
		return err
	}
	all, err := a.matching(c, selection{states: []sandbox.State{sandbox.Running}, metadata: metadata})
	if err != nil {
		return err
	}
	c.w.Header().Set("X-Total-Running", strconv.Itoa(len(all)))
	return c.json(http.StatusOK, listedAll(all))
}

func listedAll(all []sandbox.Sandbox) []listedJSON {
	out := make([]listedJSON, 0, len(all))
	for _, s := range all {
		out = append(out, listed(s))
	}
	return out
}

// matching returns every sandbox that a selection names, whatever its page. Only what is alive is
// asked for, which is not many.
func (a *API) matching(c call, sel selection) ([]sandbox.Sandbox, error) {
	labels, _ := labelled(sel.metadata)
	q := sandbox.Query{Labels: labels, States: sel.states, PageSize: 1000}
	var all []sandbox.Sandbox
	for {
		page, next, err := a.cfg.Manager.List(c.r.Context(), c.p, q)
		if err != nil {
			return nil, err
		}
		for _, s := range page {
			if sel.takes(s) {
				all = append(all, s)
			}
		}
		if next == "" {
			return all, nil
		}
		q.PageToken = next
	}
}

// takes checks what the Manager can't be asked for.
func (sel selection) takes(s sandbox.Sandbox) bool {
	k := keptOf(s)
	metadata := k.metadata(s.Spec.Labels)
	for name, want := range sel.metadata {
		if got, ok := metadata[name]; !ok || got != want {
			return false
		}
	}
	if sel.template != "" {
		if name, tag := parseTemplate(sel.template); tag != defaultTag || name != templateOf(s, k) && name != s.Spec.Template {
			return false
		}
	}
	return s.StartedAt.IsZero() || !s.StartedAt.Before(sel.after)
}
