package otlp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
)

// Collector is where spans are sent: an OTLP endpoint that speaks HTTP and JSON.
type Collector struct {
	// URL is the endpoint's base, as http://localhost:4318, or that of traces.
	URL string
	// Header goes with every request, say for authorization.
	Header http.Header
	// Client defaults to http.DefaultClient's behaviour with a limit of 30 s a request.
	Client *http.Client
	// Pause is the first pause before a request is sent again; default 1 s, doubled each time.
	Pause time.Duration
}

// sendTries bounds how often one request is sent, and maxAnswer what is read of an answer.
const (
	sendTries = 5
	maxAnswer = 64 << 10
	maxPause  = 30 * time.Second
)

// Send sends requests in order, each of Encode, and returns how many spans the collector refused. Unavailable: it could not be
// reached, or had no room for too long.
func (c Collector) Send(ctx context.Context, requests [][]byte) (refused int64, err error) {
	to, err := c.traces()
	if err != nil {
		return 0, err
	}
	for _, r := range requests {
		n, err := c.send(ctx, to, r)
		if err != nil {
			return refused, err
		}
		refused += n
	}
	return refused, nil
}

// traces is the URL that takes traces.
func (c Collector) traces() (string, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", errs.New(errs.InvalidArgument, "%q is no URL of a collector", c.URL).WithHint("as http://localhost:4318")
	}
	if !strings.HasSuffix(u.Path, "/v1/traces") {
		u = u.JoinPath("v1", "traces")
	}
	return u.String(), nil
}

// send sends one request, again where the collector says that this may help.
func (c Collector) send(ctx context.Context, to string, body []byte) (refused int64, err error) {
	pause := c.Pause
	if pause <= 0 {
		pause = time.Second
	}
	for try := 1; ; try++ {
		refused, after, err := c.once(ctx, to, body)
		if err == nil || after < 0 || try == sendTries {
			return refused, err
		}
		if after == 0 {
			after = pause
		}
		t := time.NewTimer(min(after, maxPause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return 0, ctx.Err()
		}
		pause *= 2
	}
}

// once sends one request. With an error, after says when to try again: 0 is after a pause, below 0 never.
func (c Collector) once(ctx context.Context, to string, body []byte) (refused int64, after time.Duration, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return 0, -1, fmt.Errorf("send spans: %w", err)
	}
	for name, values := range c.Header {
		req.Header[name] = values
	}
	req.Header.Set("Content-Type", "application/json")
	client := c.Client
	if client == nil {
		client = &http.Client{Timeout: 30 * time.Second}
	}
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return 0, -1, ctx.Err()
		}
		if whole := (*url.Error)(nil); errors.As(err, &whole) {
			err = whole.Err // the rest is the URL, credentials and all
		}
		return 0, 0, errs.Wrap(err, errs.Unavailable, "the collector can't be reached at %s", shown(to))
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return 0, 0, errs.Wrap(err, errs.Unavailable, "the collector's answer was cut off")
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return partial(answer), 0, nil
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return 0, time.Duration(max(seconds, 0)) * time.Second, errs.New(errs.Unavailable, "the collector has no room: %s", resp.Status)
	case http.StatusUnauthorized, http.StatusForbidden:
		return 0, -1, errs.New(errs.PermissionDenied, "the collector refuses: %s", resp.Status).WithHint("give its credentials with --header")
	}
	return 0, -1, errs.New(errs.FailedPrecondition, "the collector answers %s", resp.Status).WithHint("is %s an OTLP endpoint that takes JSON over HTTP?", shown(to))
}

// shown is a URL as messages have it: without what may be secret.
func shown(to string) string {
	u, err := url.Parse(to)
	if err != nil {
		return "its address"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// partial is how many spans an answer says were refused.
func partial(answer []byte) int64 {
	var m struct {
		PartialSuccess struct {
			RejectedSpans json.RawMessage `json:"rejectedSpans"` // a number, or as text
		} `json:"partialSuccess"`
	}
	if json.Unmarshal(answer, &m) != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.Trim(string(m.PartialSuccess.RejectedSpans), `"`), 10, 64)
	return n
}
