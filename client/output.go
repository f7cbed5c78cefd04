package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Piece is part of what a process printed, standard output and error in the order in which they came.
type Piece struct {
	Data []byte
	// Offset is where the piece was asked for, and Next where the following one begins; they differ by
	// more than Data where the buffer no longer held Dropped bytes between.
	Offset, Next, Dropped int64
	// End says how the process ended, once it has and this piece is the last; else it is "".
	End string
	// Code is its exit code where End is "exited".
	Code int
}

// ReadOutput returns what a process printed from an offset on, at most limit bytes (0: the server's
// limit, 1 MiB). Where there is nothing yet it waits for the next output, or the end, as long as wait
// says. Use Attach to follow a process to its end.
func (p *Processes) ReadOutput(ctx context.Context, sandbox, process string, offset, limit int64, wait time.Duration) (*Piece, error) {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if limit > 0 {
		q.Set("limit", strconv.FormatInt(limit, 10))
	}
	if wait > 0 {
		q.Set("wait", wait.String())
	}
	target := p.conn.base + "/v1/sandboxes/" + url.PathEscape(sandbox) + "/processes/" + url.PathEscape(process) + "/output?" + q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, &Error{Kind: InvalidArgument, Message: "the request can't be made", Err: err}
	}
	req.Header.Set("Accept", "application/octet-stream")
	resp, err := p.conn.http.Do(req)
	if err != nil {
		return nil, p.conn.wrap(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, httpError(resp)
	}
	piece := &Piece{Offset: offset, End: resp.Header.Get("Casemate-Process-End")}
	if piece.Data, err = io.ReadAll(resp.Body); err != nil {
		return nil, p.conn.wrap(err)
	}
	// Headers of the server's own: what it leaves out is zero.
	piece.Next, _ = strconv.ParseInt(resp.Header.Get("Casemate-Next-Offset"), 10, 64)
	piece.Dropped, _ = strconv.ParseInt(resp.Header.Get("Casemate-Dropped"), 10, 64)
	piece.Code, _ = strconv.Atoi(resp.Header.Get("Casemate-Process-Code"))
	return piece, nil
}
