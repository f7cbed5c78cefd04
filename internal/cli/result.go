package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"

	"casemate.dev/client"
)

// result is what run and exec print with --json. Output that is no UTF-8 stands in the _base64 field.
type result struct {
	ExitCode     int             `json:"exit_code"`
	Stdout       string          `json:"stdout"`
	Stderr       string          `json:"stderr"`
	StdoutBase64 []byte          `json:"stdout_base64,omitempty"`
	StderrBase64 []byte          `json:"stderr_base64,omitempty"`
	DroppedBytes int64           `json:"dropped_bytes,omitempty"`
	Process      json.RawMessage `json:"process"`
}

// maxResult bounds what --json holds of each stream; the server's buffer holds less.
const maxResult = 64 << 20

// execJSON runs spec, waits for its end and prints a result. The exit code is the process's as well.
func (a *app) execJSON(ctx context.Context, s *session, spec *client.ProcessSpec) error {
	var stdout, stderr capped
	var dropped int64
	o := client.RunOptions{
		Stdout:  &stdout,
		Stderr:  &stderr,
		Gap:     func(g *client.Gap) { dropped += g.GetTo() - g.GetFrom() },
		Started: func(p *client.Process) { s.signals.target(s.client, s.sandbox, p.GetId()) },
	}
	if s.flags.interactive {
		o.Stdin = a.stdin
	}
	p, err := s.client.Processes.Run(ctx, s.sandbox, spec, o)
	if err != nil {
		return cannot(err, "run %s", quoteArgv(spec.GetArgv()[:1]))
	}
	raw, err := protojson.Marshal(p)
	if err != nil {
		return err
	}
	code, _, _ := processExit(p)
	r := result{ExitCode: code, DroppedBytes: dropped + stdout.dropped + stderr.dropped, Process: raw}
	r.Stdout, r.StdoutBase64 = stdout.text()
	r.Stderr, r.StderrBase64 = stderr.text()
	if err := a.printJSON(r); err != nil {
		return err
	}
	if code != 0 {
		return &exitError{code: code}
	}
	return nil
}

// capped keeps what is written up to maxResult and counts the rest.
type capped struct {
	bytes.Buffer
	dropped int64
}

// Write implements io.Writer. It always takes all of p.
func (c *capped) Write(p []byte) (int, error) {
	n := min(len(p), maxResult-c.Len())
	c.dropped += int64(len(p) - n)
	c.Buffer.Write(p[:n])
	return len(p), nil
}

// text returns the bytes as a string, or as bytes where they are no text.
func (c *capped) text() (string, []byte) {
	if b := c.Bytes(); !utf8.Valid(b) {
		return "", b
	}
	return c.String(), nil
}
