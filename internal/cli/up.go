package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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
	// pollEvery is how often up and down ask whether it is so far.
	pollEvery = 20 * time.Millisecond
	// tellEvery is how often up tells a person what the server is doing meanwhile; most starts are over before.
	tellEvery = time.Second
	// upLock is held, in the run directory, by the one who starts a server there.
	upLock = "up.lock"
)

func (a *app) upCmd() *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "up [flags]",
		Short: "Start a server in the background, unless one is up",
		Long: `Start a server in the background and return when it answers; at a terminal, what it is doing shows while that
takes long, as where many sandboxes of an earlier server are adopted. When one with the same run directory
is up already, tell so and do nothing. Needs root.

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
	w := &startWatch{progress: a.newProgress(), log: filepath.Join(cfg.RunDir, logFile)}
	unlock, err := lockUp(ctx, cfg.RunDir, w.tell)
	w.done()
	if err != nil {
		return cannot(err, "start a server")
	}
	defer unlock()
	if answers(ctx, cfg.UnixSocket) { // somebody else has started it meanwhile
		return a.printUp(cfg, true)
	}
	log, err := openLog(cfg.RunDir)
	if err != nil {
		return cannot(err, "start a server")
	}
	defer log.Close()
	if w.begin, err = log.Seek(0, io.SeekEnd); err != nil {
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
	err = awaitServer(ctx, cfg.UnixSocket, exited, w.tell)
	w.done()
	if err != nil {
		end(child.Process, exited, endGrace)
		return a.whyNot(err, w.log, w.begin)
	}
	return a.printUp(cfg, false)
}

// lockUp waits until nobody else starts a server in a run directory: of two that start at once, the second finds the
// first one's, and does not leave one behind that would begin when that ends.
func lockUp(ctx context.Context, dir string, meanwhile func()) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, upLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, meanwhile, func() (bool, error) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return false, nil
		}
		return true, os.NewSyscallError("flock", err)
	})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}

// poll asks every pollEvery until ask says yes or fails, and calls meanwhile every tellEvery.
func poll(ctx context.Context, meanwhile func(), ask func() (bool, error)) error {
	tick, tell := time.NewTicker(pollEvery), time.NewTicker(tellEvery)
	defer tick.Stop()
	defer tell.Stop()
	for {
		if ok, err := ask(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tell.C:
			meanwhile()
		case <-tick.C:
		}
	}
}

// startWatch shows at a terminal what a server that does not answer yet does, as its log tells; elsewhere nothing.
type startWatch struct {
	progress *progress
	log      string
	begin    int64 // where this start's lines begin; 0: it is another's, who began before
	shown    bool
}

// tell shows the newest line.
func (w *startWatch) tell() {
	if !w.progress.tty {
		return
	}
	doing := ""
	if lines, err := logSince(w.log, w.begin); err == nil {
		doing = newest(lines)
	}
	w.progress.update("starting a server", -1, doing)
	w.shown = true
}

// done removes what is shown.
func (w *startWatch) done() {
	if w.shown {
		w.progress.done()
		w.shown = false
	}
}

// newest is the last line of a log that tells of something, without when and how important it is.
func newest(lines []string) string {
	for _, l := range slices.Backward(lines) {
		if _, msg, ok := strings.Cut(l, " msg="); ok {
			if quoted, err := strconv.QuotedPrefix(msg); err == nil {
				text, _ := strconv.Unquote(quoted) // it is quoted
				msg = text + msg[len(quoted):]
			}
			return msg
		}
	}
	return ""
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

// awaitServer waits until a server answers, and calls meanwhile now and then.
func awaitServer(ctx context.Context, socket string, exited <-chan struct{}, meanwhile func()) error {
	ctx, stop := context.WithTimeout(ctx, startTimeout)
	defer stop()
	err := poll(ctx, meanwhile, func() (bool, error) {
		if answers(ctx, socket) {
			return true, nil
		}
		select {
		case <-exited:
			return false, errs.New(errs.Internal, "cannot start a server: it ended at once")
		default:
			return false, nil
		}
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return errs.New(errs.Internal, "cannot start a server: it does not answer after %s", startTimeout)
	}
	return err
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
	lines, lerr := logSince(name, begin)
	if lerr != nil {
		return err
	}
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

// logSince returns the last lines of a log, of those from begin on.
func logSince(name string, begin int64) ([]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	const most = 64 << 10
	raw, err := io.ReadAll(io.NewSectionReader(f, max(begin, st.Size()-most), most))
	return strings.Split(strings.TrimSpace(string(raw)), "\n"), err
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
