package selftest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// weakSetup builds a twin's root: everything that the host's own root holds, writable, but every
// write goes to memory and is gone with the twin. One directory of the host's root is left out, so
// that the two can be told apart. Only mounts of the twin's own mount namespace are made.
const weakSetup = `set -e
D=$1; shift
mount -t tmpfs -o size=600m t $D
mkdir $D/u $D/w $D/r
mount -t overlay o -o lowerdir=/,upperdir=$D/u,workdir=$D/w $D/r
mount -t proc p $D/r/proc
mount --rbind /sys $D/r/sys
mount --rbind /dev $D/r/dev
mount -t tmpfs -o size=400m t $D/r/dev/shm
mount -t tmpfs -o size=400m t $D/r/tmp
rmdir $D/r/srv $D/r/mnt $D/r/media 2>/dev/null || true
cd $D/r
`

// initProgram is a twin's first process: it waits for its standard input to end and for nobody else,
// as a first process must not.
const initProgram = `exec /usr/bin/python3 -c 'import sys; print("up", flush=True); sys.stdin.read()'`

// weakBox is a deliberately weak sandbox. It exists in tests only.
type weakBox struct {
	twin  Twin
	pid   int
	dir   string
	leak  *os.File
	stdin interface{ Close() error }
	cmd   *exec.Cmd
	cpu   atomic.Int64 // nanoseconds of what ran in it
	env   []string
}

var _ Sandbox = (*weakBox)(nil)

// newWeakBox builds a twin.
func newWeakBox(t *testing.T, twin Twin) *weakBox {
	t.Helper()
	testenv.Root(t)
	w := &weakBox{twin: twin, dir: t.TempDir()}
	flags, enter := []string{"--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"}, "mkdir -p tmp/old; pivot_root . tmp/old; cd /; umount -l /tmp/old; rmdir /tmp/old; "+initProgram
	switch twin {
	case Shared, OpenNetwork:
		flags = []string{"--mount"}
	case Chroot:
		flags, enter = []string{"--mount", "--pid", "--fork", "--kill-child"}, initProgram
	}
	leak, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	w.leak = leak
	w.cmd = exec.Command("unshare", append(flags, "sh", "-c", weakSetup+enter, "sh", w.dir)...)
	var stderr bytes.Buffer
	w.cmd.Stderr = &stderr
	stdin, err := w.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := w.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	w.stdin = stdin
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Delete(context.Background()) })
	var line [3]byte
	if _, err := stdout.Read(line[:]); err != nil || string(line[:2]) != "up" {
		t.Fatalf("twin %s did not come up: %v\n%s", twin, err, stderr.String())
	}
	w.pid = w.cmd.Process.Pid
	if twin != Shared && twin != OpenNetwork {
		w.pid = onlyChild(t, w.pid) // unshare forks, and the child is the first process
	}
	return w
}

func onlyChild(t *testing.T, parent int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", parent, parent))
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		t.Fatalf("children of %d: %q: %v", parent, b, err)
	}
	return pid
}

// opens lets the twin use the world as the host itself does, with the key in its environment.
func (w *weakBox) opens(t *testing.T, net *world.World, internet *Internet) {
	t.Helper()
	w.env = []string{"KEY=" + internet.sentinel, "SSL_CERT_FILE=/etc/world.pem", "PATIENCE=1"}
	script := "rm -f /etc/resolv.conf; echo nameserver " + world.Resolver + " > /etc/resolv.conf; cat > /etc/world.pem"
	r, err := w.Run(t.Context(), Command{Argv: []string{"/bin/sh", "-c", script}, Input: string(net.CAPEM())})
	if err != nil || r.Code != 0 {
		t.Fatalf("open the network: %v, %s", err, r.Output)
	}
}

func (w *weakBox) ID() string { return string(w.twin) }

func (w *weakBox) CPU(context.Context) (time.Duration, error) {
	return time.Duration(w.cpu.Load()), nil
}

func (w *weakBox) Ended(context.Context) (string, error) { return "", nil }

// Delete ends the twin. Idempotent.
func (w *weakBox) Delete(context.Context) error {
	if w.cmd == nil {
		return nil
	}
	_ = w.stdin.Close()
	// A case may have stopped the first process for good (ptrace), so it is not asked but killed.
	_ = syscall.Kill(w.pid, syscall.SIGKILL)
	_ = w.cmd.Wait() // it was killed: nothing else can be said
	w.cmd = nil
	return w.leak.Close()
}

// twinOf marks what runs in the twins of this test program, beside those of others.
func twinOf() string { return fmt.Sprintf("TWIN_OF=%d.", os.Getpid()) }

// command enters the twin with everything that a careless server would hand on: a descriptor of a
// host directory, the server's environment, no limits.
func (w *weakBox) command(ctx context.Context, c Command) *exec.Cmd {
	flags := []string{"-t", fmt.Sprint(w.pid), "--mount", "--root", "--wd"}
	script := `ulimit -n 20000; cd "${TWIN_DIR:-/}" || exit 99; exec "$@"`
	switch w.twin {
	case Bare, Unlimited:
		flags = append(flags, "--pid", "--net", "--ipc", "--uts", "--cgroup")
	case Chroot:
		flags = append(flags, "--pid")
		script = `exec chroot ` + w.dir + `/r "$@"`
	}
	argv := c.Argv
	if c.TTY {
		argv = []string{"script", "-qefc", quoted(c.Argv), "/dev/null"}
	}
	cmd := exec.CommandContext(ctx, "nsenter", append(append(flags, "--", "/bin/sh", "-c", script, "sh"), argv...)...)
	cmd.ExtraFiles = []*os.File{w.leak}
	cmd.Env = append(os.Environ(), "AWS_SECRET_ACCESS_KEY=careless", "TWIN_DIR="+c.Dir, twinOf(), "HOME=/root")
	cmd.Env = append(cmd.Env, w.env...)
	for k, v := range c.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Stdin = strings.NewReader(c.Input)
	// A careless server ends only the process that it started, or its group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

func quoted(argv []string) string {
	out := make([]string, len(argv))
	for i, a := range argv {
		out[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(out, " ")
}

func (w *weakBox) Run(ctx context.Context, c Command) (Result, error) {
	timeout := c.Timeout
	if timeout == 0 {
		timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := w.command(ctx, c)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	begun := time.Now()
	err := cmd.Run()
	if s := cmd.ProcessState; s != nil {
		w.cpu.Add(int64(s.UserTime() + s.SystemTime()))
	}
	r := Result{End: "exited", Output: out.String(), Bytes: int64(out.Len()), Took: time.Since(begun)}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		r.End = "timed_out"
	case errors.As(err, &exit):
		r.Code = exit.ExitCode()
		if ws := exit.Sys().(syscall.WaitStatus); ws.Signaled() {
			r.End, r.Code, r.Signal = "signaled", 0, int(ws.Signal())
		}
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		return r, err
	}
	return r, nil
}

// List and Read are a file API that resolves paths in a process with the careless server's
// descriptors.
func (w *weakBox) List(ctx context.Context, path string) ([]string, error) {
	r, err := w.Run(ctx, Command{Argv: []string{"ls", "-A", path + "/"}})
	if err == nil && r.Code != 0 {
		err = errors.New(r.Output)
	}
	return strings.Fields(r.Output), err
}

func (w *weakBox) Read(ctx context.Context, path string) ([]byte, error) {
	r, err := w.Run(ctx, Command{Argv: []string{"head", "-c", "100", path}})
	if err == nil && r.Code != 0 {
		err = errors.New(r.Output)
	}
	return []byte(r.Output), err
}
