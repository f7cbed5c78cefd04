package journal

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// active is a file that names the streams which this process records events of, each with the counter up to
// which they were in the tree before. After a kill only these can have events that are in the store and
// not in the tree, so that a start need not look at all.
//
//	line 1     "casemate-active 1", the machine's boot id, the size of the tree when the file was begun, and
//	           "open", or "closed" once everything is in the tree
//	other      stream and counter; one without its line feed was never used
type active struct {
	path string
	f    *os.File
}

const (
	activeName  = "active"
	activeMagic = "casemate-active 1"
)

// activeState is what an earlier process left.
type activeState struct {
	boot    string
	base    int64
	closed  bool
	streams map[string]uint64
}

// bootID tells one run of the machine from another (proc_sys_kernel(5)).
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// readActive returns what an earlier process left; nil where there is nothing that can be relied on.
func readActive(dir string) (*activeState, error) {
	b, err := os.ReadFile(filepath.Join(dir, activeName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read active streams: %w", err)
	}
	first, rest, _ := bytes.Cut(b, []byte("\n"))
	var s activeState
	fields := strings.Fields(strings.TrimPrefix(string(first), activeMagic))
	if len(fields) != 3 || !bytes.HasPrefix(first, []byte(activeMagic)) {
		return nil, nil
	}
	if s.base, err = strconv.ParseInt(fields[1], 10, 64); err != nil || s.base < 0 {
		return nil, nil
	}
	s.boot, s.closed, s.streams = fields[0], fields[2] == "closed", make(map[string]uint64)
	if end := bytes.LastIndexByte(rest, '\n'); end >= 0 {
		rest = rest[:end+1]
	} else {
		rest = nil
	}
	for lines := bufio.NewScanner(bytes.NewReader(rest)); lines.Scan(); {
		stream, counter, _ := strings.Cut(lines.Text(), " ")
		seq, err := strconv.ParseUint(counter, 10, 64)
		if err != nil {
			return nil, nil
		}
		if _, ok := s.streams[stream]; !ok { // the first one counts: others came after events that may be lost
			s.streams[stream] = seq
		}
	}
	return &s, nil
}

// beginActive begins the file anew, for a tree of that size, which holds everything.
func beginActive(dir string, size int64, state string) (*active, error) {
	path := filepath.Join(dir, activeName)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("begin active streams: %w", err)
	}
	_, err = fmt.Fprintf(f, "%s %s %d %s\n", activeMagic, bootID(), size, state)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = durable.Rename(path+".new", path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin active streams: %w", err), f.Close())
	}
	return &active{path: path, f: f}, nil
}

// add names a stream, before its next event can be anywhere.
func (a *active) add(stream string, seq uint64) error {
	if _, err := fmt.Fprintf(a.f, "%s %d\n", stream, seq); err != nil {
		return errs.Wrap(fmt.Errorf("write active streams: %w", err), errs.Unavailable, "cannot record what happens: the server's disk fails or is full")
	}
	return nil
}

func (a *active) close() error { return a.f.Close() }
