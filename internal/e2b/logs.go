package e2b

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/journal"
)

// The bounds of a call for logs.
const (
	maxLogs     = 1000
	maxScanned  = 20_000 // events looked at
	logPageSize = 1000
)

// logJSON is a line of a sandbox's log: an event of its journal.
type logJSON struct {
	Timestamp time.Time         `json:"timestamp"`
	Message   string            `json:"message"`
	Level     string            `json:"level"`
	Fields    map[string]string `json:"fields"`
}

func logOf(e journal.Event) logJSON {
	l := logJSON{
		Timestamp: e.Time.UTC(), Message: string(e.Type), Level: "info",
		Fields: map[string]string{"seq": strconv.FormatUint(e.Seq, 10), "actor": e.Actor},
	}
	switch e.Type {
	case journal.ProcessFailed, journal.Conflict:
		l.Level = "error"
	case journal.SandboxDegraded, journal.Gap:
		l.Level = "warn"
	}
	if e.Process != "" {
		l.Fields["process"] = e.Process
	}
	for who, facts := range e.Facts {
		l.Fields[string(who)] = string(facts)
	}
	return l
}

// logQuery says which lines are wanted.
type logQuery struct {
	from     time.Time // nothing before
	to       time.Time // nothing after; zero: no bound
	limit    int
	backward bool
	least    int // rank of the levels wanted
	search   string
}

// logRank orders levels; -1 is none.
func logRank(level string) int {
	return slices.Index([]string{"debug", "info", "warn", "error"}, level)
}

// levelOf returns the rank of a level that a query names; "": the lowest.
func levelOf(level string) (int, error) {
	if level == "" {
		return 0, nil
	}
	rank := logRank(level)
	if rank < 0 {
		return 0, fail(http.StatusBadRequest, "Error when parsing request: level must be debug, info, warn or error")
	}
	return rank, nil
}

// backwardOf reports whether a query asks for the newest first.
func backwardOf(q url.Values) (bool, error) {
	switch q.Get("direction") {
	case "", "forward":
		return false, nil
	case "backward":
		return true, nil
	}
	return false, fail(http.StatusBadRequest, "Error when parsing request: direction must be forward or backward")
}

func (q logQuery) takes(l logJSON) bool {
	switch {
	case l.Timestamp.Before(q.from), !q.to.IsZero() && l.Timestamp.After(q.to):
		return false
	case logRank(l.Level) < q.least:
		return false
	}
	if q.search == "" || strings.Contains(l.Message, q.search) {
		return true
	}
	for _, v := range l.Fields {
		if strings.Contains(v, q.search) {
			return true
		}
	}
	return false
}

// logs collects the lines that q wants, in its order.
func (a *API) logs(c call, q logQuery) ([]logJSON, error) {
	s, err := a.find(c)
	if err != nil {
		return nil, err
	}
	out := []logJSON{}
	if text := standInNotice(keptOf(s).Template, s.Spec.Template); text != "" {
		if l := (logJSON{Timestamp: s.CreatedAt.UTC(), Message: text, Level: "warn", Fields: map[string]string{}}); q.takes(l) {
			out = append(out, l)
		}
	}
	var after uint64
	for range maxScanned / logPageSize {
		events, err := a.cfg.Manager.Events(c.r.Context(), c.p, s.ID, after, logPageSize)
		if err != nil {
			return nil, err
		}
		for _, e := range events {
			after = e.Seq
			if l := logOf(e); q.takes(l) {
				out = append(out, l)
			}
		}
		if len(events) < logPageSize || !q.backward && len(out) >= q.limit {
			break
		}
	}
	if q.backward {
		slices.Reverse(out)
	}
	return out[:min(len(out), q.limit)], nil
}

func (a *API) logsV1(c call) error {
	q := logQuery{limit: maxLogs}
	var err error
	if q.from, err = milliTime(c.r.URL.Query(), "start"); err != nil {
		return err
	}
	if q.limit, err = logLimit(c.r.URL.Query()); err != nil {
		return err
	}
	lines, err := a.logs(c, q)
	if err != nil {
		return err
	}
	type line struct {
		Timestamp time.Time `json:"timestamp"`
		Line      string    `json:"line"`
	}
	plain := make([]line, 0, len(lines))
	for _, l := range lines {
		text, _ := json.Marshal(l) // strings only: can't fail
		plain = append(plain, line{Timestamp: l.Timestamp, Line: string(text)})
	}
	return c.json(http.StatusOK, map[string]any{"logs": plain, "logEntries": lines})
}

func (a *API) logsV2(c call) error {
	values := c.r.URL.Query()
	q := logQuery{search: values.Get("search")}
	var err error
	if q.least, err = levelOf(values.Get("level")); err != nil {
		return err
	}
	if q.backward, err = backwardOf(values); err != nil {
		return err
	}
	cursor, err := milliTime(values, "cursor")
	if err != nil {
		return err
	}
	if q.backward {
		q.to = cursor
	} else {
		q.from = cursor
	}
	if q.limit, err = logLimit(values); err != nil {
		return err
	}
	lines, err := a.logs(c, q)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, map[string]any{"logs": lines})
}

func milliTime(q url.Values, name string) (time.Time, error) {
	v := q.Get(name)
	if v == "" {
		return time.Time{}, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return time.Time{}, fail(http.StatusBadRequest, "Error when parsing request: %s is no Unix time in milliseconds", name)
	}
	return time.UnixMilli(n).UTC(), nil
}

func logLimit(q url.Values) (int, error) {
	v := q.Get("limit")
	if v == "" {
		return maxLogs, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n > maxLogs {
		return 0, fail(http.StatusBadRequest, "Error when parsing request: limit must be 0 to %d", maxLogs)
	}
	return n, nil
}
