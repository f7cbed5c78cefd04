package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/server"
)

const (
	// logFile takes what a server in the background has to say, in its run directory.
	logFile = "casemate.log"
	// maxLog is the size from which a log is put aside at the next start.
	maxLog = 16 << 20
	// startTimeout is how long a server may take to answer: adoption of many sandboxes included.
	startTimeout = 3 * time.Minute
	// endGrace is how long a server that did not start may take to end: more than it gives open calls.
	endGrace = 15 * time.Second
	// pollEvery is how often up asks whether the server answers.
	pollEvery = 20 * time.Millisecond
)

func (a *app) upCmd() *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "up [flags]",
		Short: "Start a server in the background, unless one is up",
		Long: `Start a server in the background and return when it answers. When one with the same run directory is up
already, tell so and do nothing. Needs root.

The flags are those of "casemate serve". The log is casemate.log in the run directory.

Exit codes: 0 when a server is up, 125 when it could not be started.`,
		Example: `  casemate up
  casemate up --data-dir ~/cm/data --run-dir /run/cm --keys-dir ~/cm/keys --listen 127.0.0.1:0`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.config(a)
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return a.up(ctx, cfg, serveArgs(cmd))
		},
	}
	f.register(cmd.Flags())
	return cmd
}

// serveArgs repeats the flags that were given for serve.
func serveArgs(cmd *cobra.Command) []string {
	args := []string{"serve"}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if cmd.InheritedFlags().Lookup(f.Name) != nil {
			return
		}
		if values, ok := f.Value.(pflag.SliceValue); ok {
			for _, v := range values.GetSlice() {
				args = append(args, "--"+f.Name+"="+v)
			}
			return
		}
		args = append(args, "--"+f.Name+"="+f.Value.String())
	})
	return args
}

// up starts a server as the program's own child and waits until it answers.
func (a *app) up(ctx context.Context, cfg server.Config, args []string) error {
	if answers(ctx, cfg.UnixSocket) {
		return a.printUp(cfg, true)
	}
	if os.Geteuid() != 0 {
		return errs.New(errs.PermissionDenied, "cannot start a server: it needs root").WithHint("sudo casemate up")
	}
	if err := os.MkdirAll(cfg.RunDir, 0o711); err != nil {
		return cannot(err, "start a server")
	}
	log, err := openLog(cfg.RunDir)
	if err != nil {
		return cannot(err, "start a server")
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return cannot(err, "start a server")
	}
	self, err := os.Executable()
	if err != nil {
		return cannot(err, "start a server")
	}
	// It outlives this program: no context ends it, a session of its own keeps Ctrl-C away.
	child := exec.CommandContext(context.Background(), self, args...)
	child.Stdout, child.Stderr = log, log
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	child.Env = append(os.Environ(), "NO_COLOR=1")
	// Paths in the flags are relative to here.
	if child.Dir, err = os.Getwd(); err != nil {
		return cannot(err, "start a server")
	}
	if err := child.Start(); err != nil {
		return cannot(err, "start a server")
	}
	exited := make(chan struct{})
	go func() {
		_ = child.Wait() // the log tells why
		close(exited)
	}()
	if err := awaitServer(ctx, cfg.UnixSocket, exited); err != nil {
		end(child.Process, exited, endGrace)
		return a.whyNot(err, filepath.Join(cfg.RunDir, logFile), begin)
	}
	return a.printUp(cfg, false)
}

// end ends a server that nobody waits for any longer: what is told to have failed does not go on.
func end(p *os.Process, exited <-chan struct{}, grace time.Duration) {
	_ = p.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-exited:
	case <-time.After(grace):
		_ = p.Kill()
		<-exited
	}
}

// answers reports whether a server answers on a socket.
func answers(ctx context.Context, socket string) bool {
	c, err := client.New("unix://"+socket, "")
	if err != nil {
		return false
	}
	defer c.Close()
	ctx, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	_, err = c.System.Version(ctx)
	return err == nil
}

func awaitServer(ctx context.Context, socket string, exited <-chan struct{}) error {
	ctx, stop := context.WithTimeout(ctx, startTimeout)
	defer stop()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if answers(ctx, socket) {
			return nil
		}
		select {
		case <-exited:
			return errs.New(errs.Internal, "cannot start a server: it ended at once")
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return errs.New(errs.Internal, "cannot start a server: it does not answer after %s", startTimeout)
			}
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// openLog opens the log for appending, and puts a large one aside first.
func openLog(dir string) (*os.File, error) {
	name := filepath.Join(dir, logFile)
	if st, err := os.Stat(name); err == nil && st.Size() > maxLog {
		if err := os.Rename(name, name+".1"); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

// whyNot turns the failure of a server in the background into what the server said in its log since
// begin; where it said nothing of its own, the log's end is shown.
func (a *app) whyNot(err error, name string, begin int64) error {
	f, ferr := os.Open(name)
	if ferr != nil {
		return err
	}
	defer f.Close()
	raw, ferr := io.ReadAll(io.NewSectionReader(f, begin, 64<<10))
	if ferr != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	if said := lastWords(lines); said != nil {
		return said
	}
	for _, l := range lines[max(0, len(lines)-kept):] {
		if l != "" {
			fmt.Fprintln(a.stderr, paint("  | "+clean(l), faint, a.color(a.stderr)))
		}
	}
	return err
}

// lastWords finds the error and the hints that a server ended with; see report.
func lastWords(lines []string) error {
	for i := len(lines) - 1; i >= 0; i-- {
		text, ok := strings.CutPrefix(lines[i], "casemate: ")
		if !ok {
			continue
		}
		var hints []string
		for _, l := range lines[i+1:] {
			if h, ok := strings.CutPrefix(l, "hint: "); ok {
				hints = append(hints, h)
			}
		}
		return &errs.Error{Kind: errs.Internal, Public: text, Hint: strings.Join(hints, "\n")}
	}
	return nil
}

// printUp tells where the server is.
func (a *app) printUp(cfg server.Config, already bool) error {
	st, err := readStatus(cfg.RunDir)
	if err != nil {
		return cannot(err, "tell about the server")
	}
	if a.json {
		return a.printJSON(st)
	}
	word := "is up"
	if already {
		word = "is up already"
	}
	fmt.Fprintf(a.stdout, "casemate %s %s (pid %d)\n", clean(st.Version), word, st.PID)
	t := &table{indent: "  "}
	t.add("socket", st.Socket)
	for _, u := range st.URLs {
		t.add("http", u)
	}
	if st.Domain != "" {
		t.add("ports", "https://PORT-SANDBOX."+st.Domain)
	}
	if len(st.URLs) > 0 {
		t.add("key", st.KeyFile)
	}
	t.add("data", st.DataDir)
	t.add("log", filepath.Join(cfg.RunDir, logFile))
	a.table(t)
	if st.Socket != client.DefaultURL && a.getenv(client.EnvURL) != st.Socket {
		a.note("next: export %s=%s", client.EnvURL, st.Socket)
	}
	return nil
}
