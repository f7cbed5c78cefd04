package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/client"
)

// What stays of a build at a terminal: a line for each step with how long it took or that it was kept, and every warning.
func TestBuildView(t *testing.T) {
	begun := time.Unix(1_800_000_000, 0)
	var out bytes.Buffer
	v := &buildView{bar: &progress{w: &out, fd: -1, tty: true, start: time.Now()}, of: 3}
	for _, e := range []struct {
		at                        time.Duration
		step, level, stream, text string
	}{
		{0, "base", "info", "", "FROM base"},
		{time.Second, "1", "info", "", "RUN apt-get update \\\n && apt-get install"},
		{2 * time.Second, "1", "info", "stdout", "Get:1 \x1b[31mpackages"},
		{3 * time.Second, "1", "warn", "", "refused: tcp example.com:443: no rule allows it"},
		{9 * time.Second, "1", "debug", "", "done in 8s: cmt_a"},
		{9 * time.Second, "2", "info", "", "COPY . " + strings.Repeat("x", 200)},
		{9 * time.Second, "2", "info", "", "kept from an earlier build: cmt_b"},
		{9 * time.Second, "3", "info", "", "RUN false"},
		{9500 * time.Millisecond, "3", "error", "", "Dockerfile:3: exit code 1"},
	} {
		v.show(&client.BuildLogEntry{Time: timestamppb.New(begun.Add(e.at)), Step: e.step, Level: e.level, Stream: e.stream, Text: e.text})
	}
	v.end(false)
	v.bar.done()
	var stays []string
	for _, line := range strings.SplitAfter(out.String(), "\n") {
		if strings.HasSuffix(line, "\n") {
			parts := strings.Split(strings.TrimSuffix(line, "\n"), "\r\x1b[K")
			stays = append(stays, parts[len(parts)-1])
		}
	}
	want := []string{
		"✓ FROM base",
		"! refused: tcp example.com:443: no rule allows it",
		"✓ [1/3] RUN apt-get update \\  8s",
		"✓ [2/3] COPY . " + strings.Repeat("x", 57) + "…  kept",
		"✗ [3/3] RUN false  500ms",
	}
	if got := strings.Join(stays, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
	if strings.Contains(out.String(), "\x1b[31m") {
		t.Error("what a step prints steers the terminal")
	}
	for _, line := range strings.Split(out.String(), "\r\x1b[K") {
		if n := len([]rune(strings.TrimSpace(line))); n > 79 {
			t.Errorf("a line of %d columns: %q", n, line)
		}
	}
}
