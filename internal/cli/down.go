package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/server"
)

// stopTimeout is how long a server may take to go down: draining calls, writing the journal.
const stopTimeout = time.Minute

func (a *app) downCmd() *cobra.Command {
	var runDir string
	var sandboxes bool
	cmd := &cobra.Command{
		Use:   "down [flags]",
		Short: "Stop the server that runs in the background",
		Long: `Stop the server. Sandboxes go on without it, keep their time limits and hold their output; the next
server on the same directories takes them up again. With --sandboxes they are ended first.

Exit codes: 0 when no server is up any more, 125 when it could not be stopped.`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			dir, err := filepath.Abs(runDir)
			if err != nil {
				return err
			}
			return a.down(ctx, dir, sandboxes)
		},
	}
	cmd.Flags().StringVar(&runDir, "run-dir", server.DefaultRunDir, "the server's run directory")
	cmd.Flags().BoolVar(&sandboxes, "sandboxes", false, "end all sandboxes first")
	return cmd
}

func (a *app) down(ctx context.Context, runDir string, sandboxes bool) error {
	st, err := readStatus(runDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return cannot(err, "stop the server")
	}
	socket := filepath.Join(runDir, "casemate.sock")
	if st.Socket != "" {
		socket = st.Socket[len("unix://"):]
	}
	pid, err := listenerPID(ctx, socket)
	if err != nil {
		if a.json {
			return a.printJSON(map[string]any{})
		}
		a.note("no server is up in %s", runDir)
		return nil
	}
	left, err := a.endSandboxes(ctx, socket, sandboxes)
	if err != nil {
		return err
	}
	// A handle of the process, not its number: the kernel gives a number away again (pidfd_open(2)).
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Signal(syscall.SIGTERM)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return cannot(err, "stop the server")
	}
	if err := awaitExit(ctx, p); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"pid": pid, "sandboxes_left": left})
	}
	fmt.Fprintln(a.stdout, "casemate is down")
	if left > 0 {
		a.note("%s left running; the next \"casemate up\" takes over again", plural(int64(left), "sandbox is", "sandboxes are"))
	}
	return nil
}

// listenerPID asks the kernel who listens on a socket (SO_PEERCRED, unix(7)).
func listenerPID(ctx context.Context, socket string) (int, error) {
	conn, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, os.NewSyscallError("getsockopt", credErr)
	}
	return int(cred.Pid), nil
}

// endSandboxes ends all sandboxes where asked to, and returns how many are left.
func (a *app) endSandboxes(ctx context.Context, socket string, end bool) (int, error) {
	c, err := client.New("unix://"+socket, "")
	if err != nil {
		return 0, err
	}
	defer c.Close()
	ctx, stop := context.WithTimeout(ctx, stopTimeout)
	defer stop()
	list, err := c.Sandboxes.All(ctx, &client.ListRequest{})
	if err != nil {
		if end {
			return 0, cannot(err, "end the sandboxes")
		}
		return 0, nil // a server that answers no more can still be stopped
	}
	if !end {
		return len(list), nil
	}
	for _, sb := range list {
		if _, err := c.Sandboxes.Delete(ctx, sb.GetId()); err != nil {
			return 0, cannot(err, "end sandbox %s", sb.GetId())
		}
	}
	if len(list) > 0 {
		a.note("%s ended", plural(int64(len(list)), "sandbox", "sandboxes"))
	}
	return 0, nil
}

// awaitExit waits until p, which is no child of ours, has ended.
func awaitExit(ctx context.Context, p *os.Process) error {
	ctx, stop := context.WithTimeout(ctx, stopTimeout)
	defer stop()
	err := poll(ctx, func() {}, func() (bool, error) { return p.Signal(syscall.Signal(0)) != nil, nil })
	if err != nil {
		return errs.New(errs.DeadlineExceeded, "cannot stop the server: process %d still runs", p.Pid).
			WithHint("kill -9 %d ends it; sandboxes survive that", p.Pid)
	}
	return nil
}
