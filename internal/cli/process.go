package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// processFlags say how to run a command; run, exec and shell share them.
type processFlags struct {
	interactive bool
	tty         bool
	timeout     time.Duration
}

func (f *processFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVarP(&f.interactive, "interactive", "i", false, "pass standard input on")
	fl.BoolVarP(&f.tty, "tty", "t", false, "give it a terminal")
	fl.DurationVar(&f.timeout, "timeout", 0, "end it, with all that it started, after this time, as 10s (default never)")
	// What follows the command's name is the command's own: run ls -la, not run -- ls -la.
	fl.SetInterspersed(false)
}

// spec completes s with what the flags say.
func (f *processFlags) spec(a *app, s *client.ProcessSpec) (*client.ProcessSpec, error) {
	if f.timeout < 0 {
		return nil, usageError("--timeout can't be negative")
	}
	if f.timeout > 0 {
		s.Timeout = durationpb.New(f.timeout)
	}
	if f.tty {
		s.Terminal = a.terminalSize()
		if v := a.getenv("TERM"); v != "" && s.Env["TERM"] == "" {
			if s.Env == nil {
				s.Env = map[string]string{}
			}
			s.Env["TERM"] = v
		}
	}
	return s, nil
}

// session is one process in the foreground of this terminal.
type session struct {
	app     *app
	client  *client.Client
	sandbox string
	flags   processFlags
	signals *forwarder
}

// run starts spec, passes streams and signals through and returns how it ended.
func (s *session) run(ctx context.Context, spec *client.ProcessSpec) (*client.Process, error) {
	o := client.RunOptions{
		Stdout: s.app.processWriter(s.app.stdout, s.flags.tty),
		Stderr: s.app.processWriter(s.app.stderr, s.flags.tty),
		// A person or a pipe that reads slowly slows the process down, as it would without a sandbox.
		Hold: true,
		Gap: func(g *client.Gap) {
			s.app.warn("%s of output were dropped", formatSize(g.GetTo()-g.GetFrom()))
		},
		Started: func(p *client.Process) { s.signals.target(s.client, s.sandbox, p.GetId()) },
	}
	if s.flags.interactive {
		o.Stdin = s.app.stdin
	}
	if s.flags.tty {
		restore, resize, err := s.app.rawTerminal(s.flags.interactive)
		if err != nil {
			return nil, err
		}
		defer restore()
		o.Resize = resize
	}
	p, err := s.client.Processes.Run(ctx, s.sandbox, spec, o)
	if errors.Is(err, syscall.EPIPE) {
		// Whoever read our output has left; a process outside a sandbox would get SIGPIPE now.
		if id := s.signals.process(); id != "" {
			_ = s.client.Processes.Kill(context.WithoutCancel(ctx), s.sandbox, id)
		}
	}
	return p, err
}

// processWriter returns where a process's output goes: as it is, but on a terminal that is not the
// process's own without the sequences that steer it.
func (a *app) processWriter(w io.Writer, own bool) io.Writer {
	if _, tty := terminal(w); tty && !own {
		return &screen{w: w}
	}
	return w
}

// terminalSize is the size of the terminal that the person looks at, or a usual one.
func (a *app) terminalSize() *client.Terminal {
	for _, f := range []any{a.stdout, a.stdin} {
		if fd, ok := terminal(f); ok {
			if cols, rows, err := term.GetSize(fd); err == nil && cols > 0 && rows > 0 {
				return &client.Terminal{Rows: uint32(rows), Cols: uint32(cols)}
			}
		}
	}
	return &client.Terminal{Rows: 24, Cols: 80}
}

// rawTerminal hands the terminal over: with input in raw mode, so that Ctrl-C and all else travel as
// bytes to the terminal inside. restore takes it back.
func (a *app) rawTerminal(input bool) (restore func(), sizes <-chan *client.Terminal, err error) {
	restore = func() {}
	if fd, ok := terminal(a.stdin); ok && input {
		old, err := term.MakeRaw(fd)
		if err != nil {
			return nil, nil, fmt.Errorf("raw terminal: %w", err)
		}
		restore = func() { _ = term.Restore(fd, old) }
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, syscall.SIGWINCH)
	out := make(chan *client.Terminal, 1)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-winch:
				select {
				case out <- a.terminalSize():
				case <-done:
					return
				}
			}
		}
	}()
	undo := restore
	return func() { signal.Stop(winch); close(done); undo() }, out, nil
}

// forwarder takes this program's signals: before the process runs they cancel, afterwards they go
// to the process and all that descends from it.
type forwarder struct {
	cancel context.CancelFunc
	ch     chan os.Signal
	done   chan struct{}

	mu      sync.Mutex // guards the fields below
	client  *client.Client
	sandbox string
	id      string
	count   int
}

// impatience is how many interrupts end a process that ignores them.
const impatience = 3

// forwardSignals starts to take signals; call stop when done.
func forwardSignals(ctx context.Context) (context.Context, *forwarder) {
	ctx, cancel := context.WithCancel(ctx)
	f := &forwarder{cancel: cancel, ch: make(chan os.Signal, 4), done: make(chan struct{})}
	signal.Notify(f.ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go f.loop(ctx)
	return ctx, f
}

func (f *forwarder) stop() {
	signal.Stop(f.ch)
	close(f.done)
	f.cancel()
}

// target names the process that gets signals from now on.
func (f *forwarder) target(c *client.Client, sandbox, process string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.client, f.sandbox, f.id = c, sandbox, process
}

func (f *forwarder) process() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.id
}

func (f *forwarder) loop(ctx context.Context) {
	for {
		select {
		case <-f.done:
			return
		case sig := <-f.ch:
			f.forward(ctx, sig)
		}
	}
}

func (f *forwarder) forward(ctx context.Context, sig os.Signal) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
	if f.id == "" {
		f.cancel()
		return
	}
	name := map[os.Signal]string{
		syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP", syscall.SIGQUIT: "QUIT",
	}[sig]
	if f.count >= impatience {
		name = "KILL"
	}
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	if err := f.client.Processes.Signal(ctx, f.sandbox, f.id, name, true); err != nil && f.count >= impatience {
		f.cancel() // neither the process nor the server listens: leave
	}
}

// exitOf turns a process's end into this program's.
func (a *app) exitOf(p *client.Process) error {
	a.warnRefused(p)
	code, text, hint := processExit(p)
	if code == 0 {
		return nil
	}
	return &exitError{code: code, text: text, hint: hint}
}

// processExit maps a process's end to an exit code, and to a text where the code alone would
// mislead.
func processExit(p *client.Process) (code int, text, hint string) {
	switch p.GetEnd() {
	case "exited":
		return int(p.GetCode()), "", ""
	case "signaled":
		return 128 + int(p.GetSignal()), "", ""
	case "timed_out":
		return exitTimeout, "the process ran into its time limit", ""
	case "oom_killed":
		return exitKilled, "the process ran out of memory", "give the sandbox more with --memory"
	case "canceled":
		return exitKilled, "", ""
	case "failed":
		return exitCasemate, "cannot start the process: " + p.GetError(), ""
	case "sandbox_stopped":
		return exitCasemate, "the sandbox ended while the process ran", "casemate journal " + p.GetSandbox() + " tells why"
	case "lost":
		return exitCasemate, "the process ended and nobody saw how", "casemate journal " + p.GetSandbox() + " tells what is known"
	}
	return exitCasemate, fmt.Sprintf("the process's end is unknown (%s)", p.GetEnd()), ""
}
