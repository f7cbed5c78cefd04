package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// replFlags are the flags of repl.
type replFlags struct {
	language, context string
	timeout           time.Duration
}

func (a *app) replCmd() *cobra.Command {
	var f replFlags
	cmd := &cobra.Command{
		Use:   "repl [flags] SANDBOX",
		Short: "Run code in a sandbox, line by line, with variables that last",
		Long: `Run code in one of a sandbox's contexts: an interpreter whose variables last between runs. Without
--context it is the sandbox's own one for the language, which programs that use the API share: so you
see what an agent has made so far.

An input that is not complete goes on in the next line; in Python an empty line ends a block. The arrow
keys bring earlier lines back. Ctrl-C interrupts what runs, and keeps the variables; Ctrl-D leaves, and
the context stays. Pictures are saved to a file, whose name is shown.

Where standard input is no terminal, all of it is run as one piece of code.

Exit codes: 0 when the code came to its end, 1 when it raised an error; 124 at the time limit; 130
when it was interrupted; 128+N where signal N ended the interpreter; 137 where it was killed or ran
out of memory; 125 when Casemate itself failed.`,
		Example: `  casemate repl web
  casemate repl web --language bash
  echo 'print(6*7)' | casemate repl web --timeout 10s`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.repl(cmd.Context(), f, args[0])
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&f.language, "language", "l", "", "python, javascript, typescript or bash (default python)")
	fl.StringVar(&f.context, "context", "", "the `ID` of a context (default the sandbox's own one for the language)")
	fl.DurationVar(&f.timeout, "timeout", 0, "interrupt each piece of code after this time, as 10s (default never)")
	return cmd
}

func (a *app) repl(ctx context.Context, f replFlags, sandbox string) error {
	if f.timeout < 0 {
		return usageError("--timeout can't be negative")
	}
	c, err := a.connect()
	if err != nil {
		return err
	}
	defer c.Close()
	if f.language == "" && f.context == "" {
		f.language = "python"
	}
	r := &repl{app: a, client: c, sandbox: sandbox, flags: f}
	defer r.farewell()
	fd, tty := terminal(a.stdin)
	if !tty {
		code, err := io.ReadAll(a.stdin)
		if err != nil {
			return err
		}
		return r.once(ctx, string(code))
	}
	if a.json {
		return usageError("--json needs the code on standard input")
	}
	return r.converse(ctx, fd)
}

// repl is one conversation with a context.
type repl struct {
	app     *app
	client  *client.Client
	sandbox string
	flags   replFlags
	saved   pictures
}

func (r *repl) farewell() {
	if r.saved.dir != "" {
		r.app.note("pictures are in %s", r.saved.dir)
	}
}

// once runs all of a pipe's code.
func (r *repl) once(ctx context.Context, code string) error {
	outcome := &client.CodeOutcome{}
	var o client.CodeOptions
	if r.app.json {
		o = collectOutcome(outcome)
	} else {
		o = r.printing()
	}
	run, err := r.run(ctx, code, o)
	if err != nil {
		return err
	}
	if r.app.json {
		outcome.Run = run
		if err := r.app.printJSON(outcome); err != nil {
			return err
		}
	}
	exit, text := runExit(run)
	if exit == 0 {
		return nil
	}
	return &exitError{code: exit, text: text}
}

// collectOutcome keeps what code says for one answer.
func collectOutcome(out *client.CodeOutcome) client.CodeOptions {
	return client.CodeOptions{
		Stdout: textInto{&out.Stdout}, Stderr: textInto{&out.Stderr},
		Result: func(x *client.CodeResult) { out.Results = append(out.Results, x) },
		Error:  func(x *client.CodeError) { out.Error = x },
		Gap:    func(g *client.Gap) { out.Gaps = append(out.Gaps, g) },
	}
}

// textInto is a writer into a string field.
type textInto struct{ to *string }

// Write implements io.Writer.
func (t textInto) Write(p []byte) (int, error) {
	*t.to += string(bytes.ToValidUTF8(p, []byte("\uFFFD")))
	return len(p), nil
}

// printing shows what code says to a person.
func (r *repl) printing() client.CodeOptions {
	a := r.app
	return client.CodeOptions{
		Stdout: a.processWriter(a.stdout, false), Stderr: a.processWriter(a.stderr, false),
		Result: func(x *client.CodeResult) { r.show(x) },
		Error: func(x *client.CodeError) {
			text := x.GetTraceback()
			if text == "" {
				text = x.GetName() + ": " + x.GetValue()
			}
			fmt.Fprintln(a.stderr, paint(r.safe(text), red, a.color(a.stderr)))
		},
		Gap: func(g *client.Gap) { a.warn("%d pieces of output were dropped", g.GetTo()-g.GetFrom()) },
	}
}

// safe is what code says, as a terminal can stand it.
func (r *repl) safe(text string) string {
	if _, tty := terminal(r.app.stdout); tty {
		return cleanLines(text)
	}
	return text
}

// show prints a result: its text, or what else can be read, and where its picture is.
func (r *repl) show(x *client.CodeResult) {
	data := x.GetData()
	path, err := r.saved.save(data)
	if err != nil {
		r.app.warn("cannot save a picture: %v", err)
	}
	for _, mime := range []string{"text/plain", "text/markdown", "text/latex", "application/json", "text/html"} {
		if text := data[mime]; text != "" && (path == "" || mime == "text/plain") {
			fmt.Fprintln(r.app.stdout, r.safe(text))
			break
		}
	}
	if path != "" {
		fmt.Fprintln(r.app.stdout, path)
	}
}

// impatient is how many interrupts restart a context whose code takes no notice.
const impatient = 4

// run runs one piece of code; Ctrl-C interrupts it.
func (r *repl) run(ctx context.Context, code string, o client.CodeOptions) (*client.CodeRun, error) {
	spec := &client.CodeSpec{Context: r.flags.context, Language: r.flags.language, Code: code, Hold: true}
	if r.flags.timeout > 0 {
		spec.Timeout = durationpb.New(r.flags.timeout)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begun := make(chan *client.CodeRun, 1)
	o.Started = func(run *client.CodeRun) { begun <- run }
	keys := make(chan os.Signal, 4)
	signal.Notify(keys, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(keys)
	over := make(chan struct{})
	defer close(over)
	go r.interrupts(ctx, cancel, keys, begun, over)
	return r.client.Contexts.Run(ctx, r.sandbox, spec, o)
}

// interrupts passes signals on until the run is over: before it has begun they cancel it.
func (r *repl) interrupts(ctx context.Context, cancel context.CancelFunc, keys <-chan os.Signal, begun <-chan *client.CodeRun, over <-chan struct{}) {
	var run *client.CodeRun
	for count := 0; ; {
		select {
		case <-over:
			return
		case run = <-begun:
			continue
		case <-keys:
		}
		if run == nil {
			cancel()
			return
		}
		if count++; count >= impatient {
			_, _ = r.client.Contexts.Restart(ctx, r.sandbox, run.GetContext())
			continue
		}
		if count == impatient-1 {
			r.app.warn("the code takes no notice; Ctrl-C once more starts the context anew, and its variables are lost")
		}
		if _, err := r.client.Contexts.Interrupt(ctx, r.sandbox, run.GetContext(), run.GetId()); err != nil {
			cancel()
			return
		}
	}
}

// converse reads code from a terminal and runs it, until the person leaves.
func (r *repl) converse(ctx context.Context, fd int) error {
	in := &prompter{app: r.app, fd: fd}
	language := r.flags.language
	if r.flags.context != "" {
		c, err := r.client.Contexts.Get(ctx, r.sandbox, r.flags.context)
		if err != nil {
			return err
		}
		language = c.GetLanguage()
	}
	for {
		code, err := in.read(language)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		run, err := r.run(ctx, code, r.printing())
		switch {
		case errors.Is(err, context.Canceled):
		case client.KindOf(err) == client.FailedPrecondition:
			text, _ := reason(err)
			r.app.warn("%s", text)
			if err := r.restart(ctx, language); err != nil {
				return err
			}
		case err != nil:
			return err
		default:
			if _, text := runExit(run); text != "" {
				r.app.warn("%s", text)
			}
		}
	}
}

// restart gives the context a new interpreter, after its last one has ended.
func (r *repl) restart(ctx context.Context, language string) error {
	id := r.flags.context
	if id == "" {
		id = language
	}
	c, err := r.client.Contexts.Restart(ctx, r.sandbox, id)
	if err == nil {
		r.app.note("%s %s has started anew; its variables are lost", c.GetLanguage(), c.GetVersion())
	}
	return err
}

// runExit maps a run's end to an exit code, and to a text where nothing that the code said tells.
func runExit(run *client.CodeRun) (code int, text string) {
	switch run.GetEnd() {
	case "completed":
		return 0, ""
	case "failed":
		return 1, ""
	case "interrupted":
		return 128 + int(syscall.SIGINT), ""
	case "timed_out":
		return exitTimeout, "the code ran into its time limit"
	case "canceled":
		return exitKilled, "the context was restarted or deleted"
	case "sandbox_stopped":
		return exitCasemate, "the sandbox ended while the code ran"
	case "driver_ended":
		return driverExit(run)
	}
	return exitCasemate, "the run ended and nobody saw how"
}

func driverExit(run *client.CodeRun) (int, string) {
	switch run.GetDriverEnd() {
	case "oom_killed":
		return exitKilled, "the interpreter ran out of memory; its variables are lost"
	case "signaled":
		sig := syscall.Signal(run.GetDriverSignal())
		return 128 + int(sig), fmt.Sprintf("the interpreter was ended by a signal (%s); its variables are lost", sig)
	case "exited":
		return int(run.GetDriverCode()), fmt.Sprintf("the interpreter exited with code %d; its variables are lost", run.GetDriverCode())
	}
	return exitCasemate, "the interpreter is gone; its variables are lost"
}

// prompter reads code from a terminal.
type prompter struct {
	app   *app
	fd    int
	term  *term.Terminal
	keys  *keyWatch
	count int
}

// keyWatch notices Ctrl-C, which the line editor tells as an end of input.
type keyWatch struct {
	io.Reader
	io.Writer
	interrupted bool
}

// Read implements io.Reader.
func (k *keyWatch) Read(p []byte) (int, error) {
	n, err := k.Reader.Read(p)
	k.interrupted = k.interrupted || bytes.IndexByte(p[:n], 3) >= 0
	return n, err
}

// read returns one complete piece of code, and io.EOF when the person leaves.
func (p *prompter) read(language string) (string, error) {
	old, err := term.MakeRaw(p.fd)
	if err != nil {
		return "", fmt.Errorf("raw terminal: %w", err)
	}
	defer func() { _ = term.Restore(p.fd, old) }()
	if p.term == nil {
		p.open(nil)
	}
	size := p.app.terminalSize()
	_ = p.term.SetSize(int(size.GetCols()), int(size.GetRows()))
	p.count++
	var code string
	for {
		prompt := fmt.Sprintf("%s [%d]> ", language, p.count)
		if code != "" {
			prompt = fmt.Sprintf("%*s", len(prompt), "...> ")
		}
		p.term.SetPrompt(prompt)
		line, err := p.term.ReadLine()
		if err == io.EOF && p.keys.interrupted {
			fmt.Fprint(p.app.stdout, "^C\r\n")
			p.open(p.term.History)
			code = ""
			continue
		}
		if err != nil {
			fmt.Fprint(p.app.stdout, "\r\n")
			return "", err
		}
		if code == "" && line == "" {
			continue
		}
		code += line + "\n"
		if !incomplete(language, code) {
			return code, nil
		}
	}
}

// open begins a new line editor, with the lines of the one before.
func (p *prompter) open(history term.History) {
	p.keys = &keyWatch{Reader: p.app.stdin, Writer: p.app.stdout}
	p.term = term.NewTerminal(p.keys, "")
	if history != nil {
		p.term.History = history
	}
}
