package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/selftest"
)

// peerTimeout bounds one script in a peer.
const peerTimeout = 2 * time.Minute

const (
	runcName       = "runc"
	bubblewrapName = "bubblewrap"
)

// peerNames are the columns beside ours.
func peerNames() []string { return []string{runcName, bubblewrapName} }

// What keeps a case from being tried in a peer.
const (
	noWayOut = "neither has a way out that is judged by rules: a network is the host's, or leads nowhere"
	noAPI    = "neither has an API for files, or another way in while a command runs"
	noInit   = "each command is a sandbox of its own, which ends with it"
	noKeeper = "output, time limits and what is left of a command are whoever starts it's"
	noDisk   = "it limits no disk: its root is a directory of the host's"
	noLimits = "it limits nothing"
)

// unfit says why a case is not tried in a peer; "" where it is.
func unfit(name string, c selftest.Case) string {
	switch {
	case c.Flow != nil:
		return noWayOut
	}
	switch c.ID {
	case "A07", "D17", "X01":
		return noAPI
	case "D09", "D13", "X04":
		return noInit
	case "D01", "D07", "D08", "D10", "D11", "D12":
		return noKeeper
	case "D20":
		return ""
	}
	switch {
	case c.ID[0] == 'D' && name == bubblewrapName:
		return noLimits
	case c.ID == "D03", c.ID == "D05", c.ID == "D06":
		return noDisk
	}
	return ""
}

// peer is another program's sandbox, made anew for each command.
type peer struct {
	name string
	// argv wraps what is to be run within limits, which are nil where nothing is said of them.
	argv func(c selftest.Command, l *selftest.Limits) ([]string, error)
	// end is what ends the last one, should killing what started it not do; nil where it does.
	end func() []string
	// gone removes what it was made of; nil where that is nothing.
	gone func() error
	// limits are those of the case under way.
	limits *selftest.Limits
	// cpu is the processor time of all that ran in it.
	cpu *time.Duration
}

var _ selftest.Sandbox = peer{}

func (r *results) runPeers(ctx context.Context) (err error) {
	if err := keepDescriptors(); err != nil {
		return err
	}
	runc, err := newRunc(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runc.gone()) }()
	for _, p := range []peer{runc, {name: bubblewrapName, argv: bubblewrap, cpu: new(time.Duration)}} {
		// The programs are the host's own: whatever tries to change one must find it read-only.
		hello := selftest.Command{Argv: []string{"/bin/sh", "-c", "test -w /usr/bin/env || echo hello"}}
		if got, err := p.Run(ctx, hello); err != nil || got.Output != "hello\n" {
			return errors.Join(fmt.Errorf("%s does not work here: %q", p.name, got.Output), err)
		}
		for _, c := range selftest.Cases() {
			if unfit(p.name, c) != "" {
				continue
			}
			held := p.hold(ctx, c)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			r.beside[p.name][c.ID] = word(c, held == nil)
			if held != nil {
				fmt.Fprintf(os.Stdout, "%s %s %s: %v\n", p.name, c.ID, c.Title, held)
			}
		}
	}
	return nil
}

// keepDescriptors keeps from peers what this program itself was started with beside its standard streams. Some hand on all that
// they have, and then would be judged by what some shell had left open.
func keepDescriptors() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, f := range open {
		if fd, err := strconv.Atoi(f.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
	return nil
}

// hold tries a case, judged as profile locked is, and returns what came out wrong. What takes resources takes no more than
// it may in a twin, should nothing hold it.
func (p peer) hold(ctx context.Context, c selftest.Case) error {
	if c.ID[0] == 'D' {
		l := c.Bounds()
		p.limits = &l
		c.Env = maps.Clone(c.Env)
		if c.Env == nil {
			c.Env = map[string]string{}
		}
		maps.Copy(c.Env, c.TwinEnv)
	}
	_, err := selftest.Attack(ctx, c, selftest.Column{Profile: "locked"}, p, selftest.Scene{Local: true})
	return err
}

// word says what came of a case in a peer.
func word(c selftest.Case, right bool) string {
	switch {
	case c.Class == selftest.Compat && right:
		return "works"
	case c.Class == selftest.Compat:
		return "lacks"
	case right:
		return "held"
	}
	return "open"
}

// bubblewrap is how its users start it: everything unshared, the host's programs read-only, no capabilities.
func bubblewrap(c selftest.Command, _ *selftest.Limits) ([]string, error) {
	return onTerminal(c, append([]string{
		"bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
		"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
		"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/home/user", "--",
	}, c.Argv...)), nil
}

// variables are a command's, with those that every program wants.
func variables(c selftest.Command) []string {
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/home/user"}
	for k, v := range c.Env {
		env = append(env, k+"="+v)
	}
	return env
}

// onTerminal runs what starts a peer on a terminal where the command is to have one.
func onTerminal(c selftest.Command, argv []string) []string {
	if !c.TTY {
		return argv
	}
	quoted := make([]string, len(argv))
	for i, a := range argv {
		quoted[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return []string{"script", "-qefc", strings.Join(quoted, " "), "/dev/null"}
}

// newRunc makes a bundle of what `runc spec` writes, with the host's programs as its root.
// It lies where no path has our name, which one case looks for.
func newRunc(ctx context.Context) (peer, error) {
	dir, err := os.MkdirTemp("/tmp", "peer-")
	if err != nil {
		return peer{}, err
	}
	bundle := filepath.Join(dir, "bundle")
	root := filepath.Join(bundle, "rootfs")
	for _, d := range []string{"usr", "proc", "dev", "sys", "tmp", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return peer{}, err
		}
	}
	for _, l := range []string{"bin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+l, filepath.Join(root, l)); err != nil {
			return peer{}, err
		}
	}
	if out, err := exec.CommandContext(ctx, "runc", "spec", "--bundle", bundle).CombinedOutput(); err != nil {
		return peer{}, fmt.Errorf("runc spec: %w: %s", err, out)
	}
	file := filepath.Join(bundle, "config.json")
	raw, err := os.ReadFile(file)
	if err != nil {
		return peer{}, err
	}
	serial := 0
	runc := func(args ...string) []string {
		name := fmt.Sprintf("peer-%d-%d", os.Getpid(), serial)
		return append(append([]string{"runc", "--root", filepath.Join(dir, "runc")}, args...), name)
	}
	return peer{
		name: runcName, cpu: new(time.Duration),
		argv: func(c selftest.Command, l *selftest.Limits) ([]string, error) {
			serial++
			config, err := forCommand(raw, c, l)
			if err != nil {
				return nil, err
			}
			return onTerminal(c, runc("run", "--bundle", bundle)), os.WriteFile(file, config, 0o600)
		},
		end:  func() []string { return runc("delete", "--force") },
		gone: func() error { return os.RemoveAll(dir) },
	}, nil
}

// forCommand changes no more of runc's own specification than it takes to run a command with the host's programs, and to
// limit it where a case is about limits.
func forCommand(raw []byte, c selftest.Command, l *selftest.Limits) ([]byte, error) {
	var spec map[string]any
	if err := json.Unmarshal(raw, &spec); err != nil {
		return nil, err
	}
	process, ok := spec["process"].(map[string]any)
	mounts, ok2 := spec["mounts"].([]any)
	linux, ok3 := spec["linux"].(map[string]any)
	if !ok || !ok2 || !ok3 {
		return nil, errors.New("runc spec writes no process, no mounts or no linux")
	}
	process["terminal"], process["args"], process["env"] = c.TTY, c.Argv, variables(c)
	spec["mounts"] = append(mounts,
		map[string]any{"destination": "/usr", "type": "bind", "source": "/usr", "options": []string{"rbind", "ro"}},
		map[string]any{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "nodev", "mode=1777"}},
	)
	if l != nil {
		const period = 100_000 // µs, the kernel's default (cgroups(7))
		resources, _ := linux["resources"].(map[string]any)
		if resources == nil {
			resources = map[string]any{}
			linux["resources"] = resources
		}
		resources["memory"] = map[string]any{"limit": l.MemoryBytes}
		resources["pids"] = map[string]any{"limit": l.Pids}
		resources["cpu"] = map[string]any{"quota": int64(l.CPUs * period), "period": period}
		process["rlimits"] = []any{map[string]any{"type": "RLIMIT_NOFILE", "hard": l.OpenFiles, "soft": l.OpenFiles}}
	}
	return json.Marshal(spec)
}

// Run implements selftest.Sandbox. A status of 137 is the kernel's doing, for want of memory: nobody else kills here.
func (p peer) Run(ctx context.Context, c selftest.Command) (selftest.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	argv, err := p.argv(c, p.limits)
	if err != nil {
		return selftest.Result{}, err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, &out, variables(c)
	cmd.WaitDelay = time.Second
	begun := time.Now()
	err = cmd.Run()
	if s := cmd.ProcessState; s != nil {
		*p.cpu += s.UserTime() + s.SystemTime() // of all that it has waited for, too (wait4(2))
	}
	r := selftest.Result{End: "exited", Output: out.String(), Bytes: int64(out.Len()), Took: time.Since(begun)}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		r.End = "timed_out"
		if p.end == nil {
			return r, nil
		}
		argv := p.end()
		return r, exec.CommandContext(context.WithoutCancel(ctx), argv[0], argv[1:]...).Run()
	case errors.As(err, &exit):
		r.Code = exit.ExitCode()
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			r.End, r.Code, r.Signal = "signaled", 0, int(ws.Signal())
		}
		if r.Code == 128+int(syscall.SIGKILL) {
			r.End = "oom_killed"
		}
	case err != nil:
		return r, err
	}
	return r, nil
}

var errNoFiles = errors.New("there is no file API")

// ID implements selftest.Sandbox.
func (p peer) ID() string { return p.name }

// List implements selftest.Sandbox.
func (peer) List(context.Context, string) ([]string, error) { return nil, errNoFiles }

// Read implements selftest.Sandbox.
func (peer) Read(context.Context, string) ([]byte, error) { return nil, errNoFiles }

// CPU implements selftest.Sandbox.
func (p peer) CPU(context.Context) (time.Duration, error) { return *p.cpu, nil }

// Ended implements selftest.Sandbox.
func (peer) Ended(context.Context) (string, error) { return "", nil }

// Delete implements selftest.Sandbox.
func (peer) Delete(context.Context) error { return nil }
