package gvisor

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
)

// minRelease is the oldest release, by its date, that has what this backend needs of runsc.
const minRelease = "20260801"

// remedy says how to get a runsc.
const remedy = "run `make runsc` in Casemate's source, or give the path of one that is at least release " + minRelease + " with --runsc"

// program is runsc on this host. What was found out about it stands until the file changes.
type program struct {
	path string

	mu      sync.Mutex // guards the fields below
	seen    os.FileInfo
	version string
	err     error
}

// versionTimeout bounds the asking for a version: the program is large, and the disk may be slow.
const versionTimeout = 30 * time.Second

// check returns the version of a program that can be used.
func (p *program) check(ctx context.Context) (string, error) {
	if p.path == "" {
		return "", errs.New(errs.Unsupported, "isolation gvisor needs runsc, and this server has none").WithHint("%s", remedy)
	}
	info, err := os.Stat(p.path)
	if err != nil {
		return "", errs.Wrap(err, errs.Unsupported, "isolation gvisor needs runsc, and there is none at %s", p.path).WithHint("%s", remedy)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || info.Mode().Perm()&0o022 != 0 {
		return "", errs.New(errs.Unsupported, "the runsc at %s could be changed by others than root, and the server runs it", p.path).
			WithHint("chown root and chmod go-w it, or %s", remedy)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seen != nil && os.SameFile(p.seen, info) && p.seen.ModTime().Equal(info.ModTime()) && p.seen.Size() == info.Size() {
		return p.version, p.err
	}
	version, err := askVersion(ctx, p.path)
	if ctx.Err() != nil {
		return "", context.Cause(ctx) // says nothing about the program
	}
	p.seen, p.version, p.err = info, version, err
	return version, err
}

func askVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version") //nolint:forbidigo // a program of the host, not of a sandbox
	cmd.Env = []string{}
	out, err := cmd.Output()
	if err != nil {
		return "", errs.Wrap(err, errs.Unsupported, "the runsc at %s does not tell its version", path).WithHint("%s", remedy)
	}
	line, _, _ := bytes.Cut(out, []byte("\n"))
	version, ok := strings.CutPrefix(string(line), "runsc version ")
	if !ok {
		return "", errs.New(errs.Unsupported, "%s is no runsc: it says %q", path, line).WithHint("%s", remedy)
	}
	if r := release(version); r < minRelease {
		return version, errs.New(errs.Unsupported, "%s is release %q of runsc, at least %s is needed", path, version, minRelease).WithHint("%s", remedy)
	}
	return version, nil
}

// release finds the date in a version, as "release-20260105.0" and "v0.0.0-20260905035102-160fafc42237" have it; ""
// where there is none.
func release(version string) string {
	for _, part := range strings.FieldsFunc(version, func(r rune) bool { return r < '0' || r > '9' }) {
		if len(part) >= len(minRelease) && strings.HasPrefix(part, "20") {
			return part[:len(minRelease)]
		}
	}
	return ""
}
