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
	"casemate.dev/internal/selftest"
	"casemate.dev/internal/server"
)

// selftestNetVerb is the program's hidden command that runs section F of the battery.
const selftestNetVerb = "selftest-network"

// selftestNet runs section F of the battery in a process of its own, whose network namespace is its own. Of the
// machine's network nothing is used.
func (a *app) selftestNet(ctx context.Context, o selftest.Options) error {
	args := []string{selftestNetVerb, "--isolation=" + o.Isolation}
	for _, only := range o.Only {
		args = append(args, "--only="+only)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Stderr = a.stderr
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
	verdicts := json.NewDecoder(out)
	for {
		var v selftest.Verdict
		if err := verdicts.Decode(&v); err != nil {
			if waitErr := cmd.Wait(); waitErr != nil || !errors.Is(err, io.EOF) {
				return errs.Wrap(errors.Join(waitErr, err), errs.Unavailable, "section F of the battery could not be run to its end")
			}
			return nil
		}
		o.Each(v)
	}
}

// selftestNetCmd is the process that selftestNet starts: a fake internet, a server in it that is gone afterwards, and
// the cases of section F, whose verdicts it prints as JSON, one a line.
func (a *app) selftestNetCmd() *cobra.Command {
	var o selftest.Options
	cmd := &cobra.Command{
		Use:    selftestNetVerb,
		Short:  "Attack the way out of sandboxes in a fake internet",
		Hidden: true,
		Args:   exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			// First of all: this starts the program again inside a mount namespace of its own.
			if err := server.Prepare(); err != nil {
				return cannot(err, "prepare a server")
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			lines := json.NewEncoder(a.stdout)
			o.Each = func(v selftest.Verdict) { _ = lines.Encode(v) } // whoever reads it has gone, and ends this
			o.Profiles = []string{"locked"}                           // the template of the other is not there: it takes minutes to build
			return cannot(a.inFakeInternet(ctx, o), "run section F")
		},
	}
	cmd.Flags().StringVar(&o.Isolation, "isolation", "", "")
	cmd.Flags().StringSliceVar(&o.Only, "only", nil, "")
	return cmd
}

func (a *app) inFakeInternet(ctx context.Context, o selftest.Options) (err error) {
	n, err := fakenet.Open()
	if err != nil {
		return fmt.Errorf("open a fake internet: %w", err)
	}
	defer n.Close()
	if o.Internet, err = selftest.OpenInternet(n); err != nil {
		return err
	}
	defer o.Internet.Close()
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
		StoreBytes: 1 << 30, Nameservers: []string{fakenet.Resolver + ":53"}, ExtraCAs: []string{ca},
		Log: slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, func(c *client.Client) error {
		if err := o.Internet.Provide(ctx, c); err != nil {
			return err
		}
		o.Target = selftest.NewServer(c)
		_, err := selftest.Run(ctx, o)
		return err
	})
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
