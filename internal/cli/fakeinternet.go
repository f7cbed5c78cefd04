package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/fakenet"
	"casemate.dev/internal/server"
)

// inOwnNetwork runs a hidden command of this program in a process whose network namespace is its own, so that of the
// machine's network nothing is used. It reads in, which may be nil. each is called for each JSON value that the command
// prints, to decode it.
func (a *app) inOwnNetwork(ctx context.Context, in io.Reader, each func(*json.Decoder) error, args ...string) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Stdin, cmd.Stderr = in, a.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its sandboxes first
	cmd.WaitDelay = time.Minute
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	values := json.NewDecoder(out)
	for err == nil {
		err = each(values)
	}
	if waitErr := cmd.Wait(); waitErr != nil || !errors.Is(err, io.EOF) {
		return errs.Wrap(errors.Join(waitErr, err), errs.Unavailable, "%s could not be run to its end", args[0])
	}
	return nil
}

// fakePlace is a fake internet with a server in it.
type fakePlace struct {
	net *fakenet.Net
	// dir is the server's own: d, r and k in it are its directories for data, its run and keys.
	dir    string
	client *client.Client
}

// ownNetworkCmd returns a hidden command for inOwnNetwork: it opens a fake internet, starts a server in it, and runs f.
// Everything is gone when it ends.
func (a *app) ownNetworkCmd(verb, short string, f func(ctx context.Context, p fakePlace) error) *cobra.Command {
	return &cobra.Command{
		Use:    verb,
		Short:  short,
		Hidden: true,
		Args:   exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			// First of all: this starts the program again inside a mount namespace of its own.
			if err := server.Prepare(); err != nil {
				return cannot(err, "prepare a server")
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return cannot(a.inFakeInternet(ctx, f), "run %s", verb)
		},
	}
}

// fakePlaceBytes is how much the store of such a server may hold: an image, unpacked. What is not written takes no room.
const fakePlaceBytes = 4 << 30

func (a *app) inFakeInternet(ctx context.Context, f func(ctx context.Context, p fakePlace) error) (err error) {
	n, err := fakenet.Open()
	if err != nil {
		return fmt.Errorf("open a fake internet: %w", err)
	}
	defer n.Close()
	dir, err := os.MkdirTemp("", "casemate-f-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o711); err != nil { // a guest in its own range of ids reaches its socket
		return err
	}
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, n.CAPEM(), 0o644); err != nil {
		return err
	}
	return a.withServer(ctx, server.Config{
		Version: a.version, DataDir: dir + "/d", RunDir: dir + "/r", KeysDir: dir + "/k", NetworkSets: dir + "/n", Listen: []string{},
		StoreBytes: fakePlaceBytes, Nameservers: []string{fakenet.Resolver + ":53"}, ExtraCAs: []string{ca},
		Log: slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, func(c *client.Client) error { return f(ctx, fakePlace{n, dir, c}) })
}

// withServer runs a server while f uses it. Its sandboxes end with it.
func (a *app) withServer(ctx context.Context, cfg server.Config, f func(*client.Client) error) (err error) {
	s, err := server.New(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it ends its sandboxes also where ctx has ended
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-ended)
	}()
	c, err := client.New("unix://"+s.UnixSocket(), "")
	if err != nil {
		return err
	}
	defer c.Close()
	defer func() { err = errors.Join(err, deleteAll(ctx, c)) }()
	return f(c)
}

func deleteAll(ctx context.Context, c *client.Client) error {
	list, err := c.Sandboxes.All(ctx, &client.ListRequest{})
	for _, sb := range list {
		_, derr := c.Sandboxes.Delete(ctx, sb.GetId())
		err = errors.Join(err, derr)
	}
	return err
}
