package template

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"
)

// Bounds of a build's log.
const (
	maxLogEntries = 100_000
	maxLogBytes   = 16 << 20
	maxLogLine    = 8 << 10
)

// buildLog is the log of one build that runs. It is written to a file as well, which is all that is left of
// it when the build is over.
type buildLog struct {
	// mu guards the fields below.
	mu      sync.Mutex
	now     func() time.Time
	entries []LogEntry
	bytes   int
	full    bool
	closed  bool
	grown   chan struct{} // closed when there is more, and replaced
	file    *os.File
}

func newBuildLog(path string, now func() time.Time) (*buildLog, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a build's log: %w", err)
	}
	return &buildLog{now: now, grown: make(chan struct{}), file: f}, nil
}

// add appends an entry. What exceeds the bounds is dropped; entries of the builder's own are not.
func (l *buildLog) add(level Level, step, stream, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if stream != "" && (len(l.entries) >= maxLogEntries || l.bytes >= maxLogBytes) {
		if l.full {
			return
		}
		l.full = true
		level, stream, text = Warning, "", "the log is full: what the steps print from here on is left out"
	}
	l.append(LogEntry{Level: level, Step: step, Stream: stream, Text: text})
}

func (l *buildLog) append(e LogEntry) {
	e.Offset, e.Time = len(l.entries), l.now().UTC().Round(0)
	l.entries = append(l.entries, e)
	l.bytes += len(e.Text)
	if data, err := json.Marshal(e); err == nil {
		// At once, so that a server that is killed leaves it; the entries in memory are what counts while it runs.
		_, _ = l.file.Write(append(data, '\n'))
	}
	close(l.grown)
	l.grown = make(chan struct{})
}

// page returns entries from an offset on, and a channel that is closed when there are more.
func (l *buildLog) page(offset, limit int) ([]LogEntry, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return pageOf(l.entries, offset, limit), l.grown
}

func pageOf(all []LogEntry, offset, limit int) []LogEntry {
	offset = min(max(offset, 0), len(all))
	end := len(all)
	if limit > 0 {
		end = min(end, offset+limit)
	}
	return append([]LogEntry(nil), all[offset:end]...)
}

// close writes out what is left. Followers see that there is no more.
func (l *buildLog) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.grown)
	l.grown = make(chan struct{})
	return l.file.Close()
}

// readLog reads the log of a build that is over. One that was killed may end in half a line.
func readLog(ctx context.Context, path string) ([]LogEntry, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read a build's log: %w", err)
	}
	var all []LogEntry
	for line := range bytes.Lines(data) {
		var e LogEntry
		if err := json.Unmarshal(line, &e); err != nil {
			break
		}
		e.Offset = len(all)
		all = append(all, e)
	}
	return all, ctx.Err()
}

// lines splits what a command prints into entries.
type lines struct {
	emit func(text string)
	rest []byte
}

func (l *lines) write(data []byte) {
	l.rest = append(l.rest, data...)
	for {
		i := bytes.IndexByte(l.rest, '\n')
		if i < 0 && len(l.rest) < maxLogLine {
			return
		}
		if i < 0 {
			i = maxLogLine - 1
			l.emit(printed(l.rest[:i]))
			l.rest = append(l.rest[:0], l.rest[i:]...)
			continue
		}
		l.emit(printed(l.rest[:i]))
		l.rest = append(l.rest[:0], l.rest[i+1:]...)
	}
}

func (l *lines) flush() {
	if len(l.rest) > 0 {
		l.emit(printed(l.rest))
	}
	l.rest = nil
}

// printed is a line as a terminal would show it at its end: what a carriage return begins again is the last.
func printed(line []byte) string {
	line = bytes.TrimRight(line, "\r")
	if i := bytes.LastIndexByte(line, '\r'); i >= 0 {
		line = line[i+1:]
	}
	return strings.ToValidUTF8(string(line), "\uFFFD")
}
