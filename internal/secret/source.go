package secret

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
)

// SourceKind says where a secret's value comes from.
type SourceKind string

// The kinds.
const (
	Stored  SourceKind = "stored"  // sealed in the store
	File    SourceKind = "file"    // read from a file of the host
	Env     SourceKind = "env"     // a variable of the server's environment
	Command SourceKind = "command" // what a program prints
)

// The bounds of an external source.
const (
	defaultRefresh = 5 * time.Minute
	minRefresh     = time.Second
	retryAfter     = 10 * time.Second
	defaultTimeout = 10 * time.Second
	maxTimeout     = 2 * time.Minute
	maxArgv        = 64
)

// Source is where a value comes from. An external one (anything but Stored) is read when it is first
// needed and again after Refresh; its value is never written to the store.
type Source struct {
	Kind SourceKind `json:"kind"`
	Path string     `json:"path,omitempty"` // File: absolute
	Name string     `json:"name,omitempty"` // Env
	// Argv is Command's program, by its absolute path, and arguments. It runs as the server does, without a
	// shell, with PATH and HOME as its whole environment; what it prints to stdout is the value.
	Argv    []string      `json:"argv,omitempty"`
	Timeout time.Duration `json:"timeout,omitempty"` // Command; 0: 10 s
	Refresh time.Duration `json:"refresh,omitempty"` // 0: 5 min
}

func (s Source) check() error {
	external := s.Kind != Stored
	switch {
	case s.Kind == Stored && (s.Path != "" || s.Name != "" || len(s.Argv) > 0 || s.Refresh != 0 || s.Timeout != 0):
		return invalid("a stored secret has no file, variable or command")
	case s.Kind == File && !filepath.IsAbs(s.Path):
		return invalid("the file %.200q is no absolute path", s.Path)
	case s.Kind == Env && !envName(s.Name):
		return invalid("%.80q is no variable's name", s.Name)
	case s.Kind == Command && (len(s.Argv) == 0 || !filepath.IsAbs(s.Argv[0])):
		return invalid("the command must begin with the absolute path of a program")
	case s.Kind == Command && len(s.Argv) > maxArgv:
		return invalid("the command has %d arguments, limit %d", len(s.Argv), maxArgv)
	case s.Kind != Stored && s.Kind != File && s.Kind != Env && s.Kind != Command:
		return invalid("source %.40q is unknown", s.Kind).WithHint("use a value, or a file, env or command")
	case external && s.Refresh != 0 && s.Refresh < minRefresh:
		return invalid("refresh is %s: use %s or more", s.Refresh, minRefresh)
	case s.Timeout < 0 || s.Timeout > maxTimeout:
		return invalid("timeout is %s: use up to %s", s.Timeout, maxTimeout)
	}
	return nil
}

func (s Source) refresh() time.Duration {
	if s.Refresh == 0 {
		return defaultRefresh
	}
	return s.Refresh
}

// read fetches an external value. Its errors name what failed and never what was read.
func (s Source) read(ctx context.Context, getenv func(string) string) (Value, error) {
	var raw []byte
	var err error
	switch s.Kind {
	case File:
		raw, err = readFile(s.Path)
	case Env:
		raw = []byte(getenv(s.Name))
	case Command:
		raw, err = s.run(ctx)
	default:
		return Value{}, errs.New(errs.Internal, "source %s has nothing to read", s.Kind)
	}
	if err != nil {
		clear(raw)
		return Value{}, errs.Wrap(err, errs.Unavailable, "the secret's %s can't be read", s.Kind).
			WithHint("the server's log says why")
	}
	raw = trimLine(raw)
	if err := checkValue(raw); err != nil {
		clear(raw)
		return Value{}, errs.Wrap(err, errs.Unavailable, "the secret's %s holds no usable value", s.Kind)
	}
	return NewValue(raw), nil
}

// trimLine cuts the line end that editors and echo put behind a value.
func trimLine(b []byte) []byte { return bytes.TrimRight(b, "\r\n") }

// checkValue says why b can't be a secret's value; it never quotes it.
func checkValue(b []byte) error {
	switch {
	case len(b) < MinValue:
		return invalid("the value has %d bytes: a secret needs %d or more", len(b), MinValue).
			WithHint("a shorter one could be guessed, and could not be taken out of responses")
	case len(b) > MaxValue:
		return invalid("the value is longer than %d bytes", MaxValue)
	case !HeaderValue(string(b)) || bytes.ContainsRune(b, '\t'):
		return invalid("the value holds control characters, which no header can carry")
	case b[0] == ' ' || b[len(b)-1] == ' ':
		return invalid("the value begins or ends with a space, which a header would lose")
	}
	return nil
}

func readFile(path string) ([]byte, error) {
	// A FIFO would hold the server up for ever; a device never ends.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return nil, err
	} else if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	return readBounded(f)
}

func readBounded(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, MaxValue+3)) // with a line end, and one more to see the excess
	if err != nil {
		clear(b)
		return nil, err
	}
	return b, nil
}

// bounded keeps what a command prints, up to a limit; the rest is counted as too much.
type bounded struct{ buf []byte }

// Write implements io.Writer. It refuses what is too much, which ends the command's copy.
func (b *bounded) Write(p []byte) (int, error) {
	if len(b.buf)+len(p) > MaxValue+2 {
		return 0, errors.New("it prints more than a value can be long")
	}
	b.buf = append(b.buf, p...)
	return len(p), nil
}

func (s Source) run(ctx context.Context) ([]byte, error) {
	timeout := s.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out := &bounded{buf: make([]byte, 0, MaxValue+2)} // never grows, so that no copy is left behind
	cmd := exec.CommandContext(ctx, s.Argv[0], s.Argv[1:]...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"}
	cmd.Dir = "/"
	cmd.Stdout = out
	// A group of its own, so that the time limit takes its children along.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		clear(out.buf)
		if ctx.Err() != nil {
			err = fmt.Errorf("it took longer than %s", timeout)
		}
		return nil, fmt.Errorf("run %s: %w", s.Argv[0], err)
	}
	return out.buf, nil
}
