package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// buildFlags say what to build, and how.
type buildFlags struct {
	file, name, target   string
	tags, args           []string
	start, ready         string
	within               time.Duration
	serve                bool
	noCache              bool
	locked, noLock       bool
	lock, requirements   string
	timeout, stepTimeout time.Duration
	memory, buildMemory  size
	cpus, buildCPUs      float64
	force                bool
	net                  netFlags
}

func (f *buildFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVarP(&f.file, "file", "f", "", "the Dockerfile (default DIR/Dockerfile)")
	fl.StringVarP(&f.name, "name", "t", "", "the template's `NAME`, perhaps with a tag: web or web:v2 (default: the directory's name)")
	fl.StringArrayVar(&f.tags, "tag", nil, "a further tag of the result (repeatable)")
	fl.StringArrayVar(&f.args, "build-arg", nil, "give an ARG its value: `NAME=VALUE`, or NAME to take it from the environment (repeatable)")
	fl.StringVar(&f.target, "target", "", "the stage to build (default the last)")
	fl.StringVar(&f.start, "start", "", "a command line that every sandbox of the template runs from its start on")
	fl.StringVar(&f.ready, "ready", "", "a command line that exits with 0 as soon as that can be used; creates wait for it")
	fl.DurationVar(&f.within, "ready-within", 0, "how long that may take (default 30s)")
	fl.BoolVar(&f.serve, "serve", false, "take --start from ENTRYPOINT and CMD, and --ready from HEALTHCHECK")
	fl.BoolVar(&f.noCache, "no-cache", false, "run every step, whatever is kept of earlier builds")
	fl.StringVar(&f.lock, "lock-file", "", "the lock file (default casemate.lock beside the Dockerfile)")
	fl.StringVar(&f.requirements, "requirements", "", "also write what steps installed from a Python package index to `FILE`, as pip reads it, with digests; with --locked check that it is what the lock file says")
	fl.BoolVar(&f.locked, "locked", false, "take the versions of the lock file, fail unless the result is what it says, and say what moved")
	fl.BoolVar(&f.noLock, "no-lock", false, "write no lock file")
	fl.DurationVar(&f.timeout, "timeout", 0, "end the build after this long (default 1h)")
	fl.DurationVar(&f.stepTimeout, "step-timeout", 0, "end a step after this long (default none)")
	fl.Var(&f.memory, "memory", "memory limit of the template's sandboxes, as 512m or 2g")
	fl.Float64Var(&f.cpus, "cpus", 0, "CPU limit of the template's sandboxes, in cores")
	fl.Var(&f.buildMemory, "build-memory", "memory limit of the steps")
	fl.Float64Var(&f.buildCPUs, "build-cpus", 0, "CPU limit of the steps, in cores")
	fl.BoolVar(&f.force, "force", false, "of a template that comes with the server: build it again although it is there")
	f.net.register(cmd)
}

func (a *app) templateBuildCmd() *cobra.Command {
	var f buildFlags
	cmd := &cobra.Command{
		Use:   "build [flags] DIR | NAME",
		Short: "Build a template from a Dockerfile, or one that comes with the server",
		Long: `Build a template from the Dockerfile in DIR. Each step runs in a sandbox of its own, with what
--net and --allow let it reach (default nothing), and is kept for the next build. Sandboxes start
from the template by its name: casemate create --template NAME.

FROM takes a template (base), a commit or a tag, or an image. What .dockerignore leaves out is not
sent. A lock file, casemate.lock, says what came of it: the base, each step's digest, the version of
every package. With --locked pip and apt get the versions that they got then, and a build fails whose
result is another all the same, and says what moved.

A template that comes with the server is built by its NAME: base takes a few minutes and downloads
packages with debootstrap; code-interpreter builds base too where it is missing, and adds Python
packages and Node.js from this machine's Python package index, at fixed versions with checked
hashes. One that is there is left alone, unless you --force.

Exit codes: 0, or 125 when it could not be built.`,
		Example: `  casemate template build base
  casemate template build -t web --net registries .
  casemate template build -t web --locked --net registries .
  casemate template build -t api --start 'python3 -m http.server 8000' --ready 'curl -sf localhost:8000' .`,
		Args: exactly(1, "a directory, or the name of a template that comes with the server"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if builtIn(args[0]) && f.name == "" && f.file == "" {
				return a.buildBuiltIn(ctx, c, args[0], f.force)
			}
			return a.buildTemplate(ctx, c, args[0], &f)
		}),
	}
	f.register(cmd)
	cmd.ValidArgs = []string{"base", "code-interpreter"}
	return cmd
}

// buildTemplate builds from a directory.
func (a *app) buildTemplate(ctx context.Context, c *client.Client, dir string, f *buildFlags) error {
	req, err := f.request(dir, a.getenv)
	if err != nil {
		return err
	}
	lockFile := f.lockFile(dir)
	if f.locked {
		text, err := os.ReadFile(lockFile)
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "there is no lock file %s", lockFile).WithHint("build once without --locked: that writes it")
		}
		req.Lock = string(text)
		if f.requirements != "" {
			if err := checkRequirements(f.requirements, req.GetLock()); err != nil {
				return err
			}
		}
	}
	if takesFiles(req.GetDockerfile().GetText()) {
		if req.Files, err = a.sendFiles(ctx, c, dir, f); err != nil {
			return cannot(err, "send the files of %s", dir)
		}
	}
	b, err := c.Builds.Create(ctx, req)
	if err != nil {
		return cannot(err, "build template %s", req.GetName())
	}
	b, err = a.watchBuild(ctx, c, b)
	if err != nil {
		return cannot(err, "build template %s", req.GetName())
	}
	if !f.locked {
		if err := a.writeLocks(b, f, lockFile); err != nil {
			return cannot(err, "write the lock file")
		}
	}
	if a.json {
		return a.printJSON(b)
	}
	kept := 0
	for _, s := range b.GetSteps() {
		if s.GetCached() {
			kept++
		}
	}
	fmt.Fprintf(a.stdout, "template %s is ready: %s of %d kept, %s more, in %s\n", clean(b.GetName()), plural(int64(kept), "step", "steps"),
		b.GetOf(), formatSize(b.GetBytes()), formatDuration(when(b.GetEndedAt()).Sub(when(b.GetStartedAt()))))
	return nil
}

// writeLocks writes what a build is made of.
func (a *app) writeLocks(b *client.Build, f *buildFlags, lockFile string) error {
	if !f.noLock {
		if err := os.WriteFile(lockFile, []byte(b.GetLock()), 0o644); err != nil {
			return err
		}
	}
	if f.requirements == "" {
		return nil
	}
	text, unknown, err := requirementsOf(b.GetLock())
	if err != nil {
		return err
	}
	a.noteUnknown(unknown)
	return os.WriteFile(f.requirements, []byte(text), 0o644)
}

// noteUnknown says why requirements are without digests.
func (a *app) noteUnknown(unknown []string) {
	if len(unknown) > 0 {
		a.note("without digests of archives: pip did not report that of %s", clean(strings.Join(unknown, ", ")))
	}
}

func (f *buildFlags) dockerfile(dir string) string {
	if f.file != "" {
		return f.file
	}
	return filepath.Join(dir, "Dockerfile")
}

func (f *buildFlags) lockFile(dir string) string {
	if f.lock != "" {
		return f.lock
	}
	return filepath.Join(filepath.Dir(f.dockerfile(dir)), "casemate.lock")
}

// request turns the flags into a request, without its files.
func (f *buildFlags) request(dir string, getenv func(string) string) (*client.BuildRequest, error) {
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return nil, errs.New(errs.InvalidArgument, "%s is no directory", dir).
			WithHint("give the directory with the Dockerfile, or the name of a template that comes with the server: base, code-interpreter")
	}
	if f.locked && f.noLock {
		return nil, usageError("--locked needs the lock file that --no-lock leaves out")
	}
	file := f.dockerfile(dir)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.NotFound, "there is no %s", file).WithHint("name the Dockerfile: -f FILE")
	}
	if err != nil {
		return nil, err
	}
	args, err := buildArgs(f.args, getenv)
	if err != nil {
		return nil, err
	}
	req := &client.BuildRequest{
		Dockerfile: &client.Dockerfile{Name: filepath.Base(file), Text: string(text), Target: f.target, Args: args},
		Tags:       f.tags, Start: f.start, Ready: f.ready, Serve: f.serve, NoCache: f.noCache,
		Limits:      &client.Limits{MemoryBytes: int64(f.memory), Cpus: f.cpus},
		BuildLimits: &client.Limits{MemoryBytes: int64(f.buildMemory), Cpus: f.buildCPUs},
		Timeout:     durationpb.New(f.timeout), StepTimeout: durationpb.New(f.stepTimeout), ReadyWithin: durationpb.New(f.within),
	}
	name := f.name
	if name == "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		name = strings.ToLower(filepath.Base(abs))
	}
	var tag string
	if req.Name, tag, _ = strings.Cut(name, ":"); tag != "" {
		req.Tags = append(req.Tags, tag)
	}
	if epoch := getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		var seconds int64
		if _, err := fmt.Sscan(epoch, &seconds); err != nil {
			return nil, errs.New(errs.InvalidArgument, "SOURCE_DATE_EPOCH is %q, which is no number of seconds", epoch)
		}
		req.Epoch = timestamppb.New(time.Unix(seconds, 0))
	}
	req.Network, err = f.net.rules()
	return req, err
}

// buildArgs reads --build-arg.
func buildArgs(list []string, getenv func(string) string) (map[string]string, error) {
	out := map[string]string{}
	for _, arg := range list {
		name, value, given := strings.Cut(arg, "=")
		if name == "" {
			return nil, usageError("--build-arg %q names no ARG", arg)
		}
		if !given {
			value = getenv(name)
		}
		out[name] = value
	}
	return out, nil
}

// takesFiles reports whether a Dockerfile may copy files from its directory. Where it only looks so, they are
// sent for nothing.
func takesFiles(text string) bool {
	upper := strings.ToUpper(text)
	return strings.Contains(upper, "COPY") || strings.Contains(upper, "ADD") || strings.Contains(upper, "--MOUNT")
}

// sendFiles sends a directory's files, and returns the name that they are kept by.
func (a *app) sendFiles(ctx context.Context, c *client.Client, dir string, f *buildFlags) (string, error) {
	in, out := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := a.packDir(ctx, dir, f, out)
		_ = out.CloseWithError(err)
		packed <- err
	}()
	bar := a.newProgress()
	name, err := c.Builds.Upload(ctx, "", &shownReader{r: in, bar: bar, step: "send files", after: "check files"})
	bar.done()
	_ = in.CloseWithError(io.ErrClosedPipe)
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return "", perr
	}
	return name, err
}

// watchBuild shows a build until it is over. Ctrl-C cancels it.
func (a *app) watchBuild(ctx context.Context, c *client.Client, b *client.Build) (*client.Build, error) {
	bar := a.newProgress()
	show := func(e *client.BuildLogEntry) { fmt.Fprintln(a.stderr, logLine(e)) }
	view := &buildView{bar: bar, of: b.GetOf()}
	if bar.tty {
		show = view.show
	}
	end, err := c.Builds.Follow(ctx, b.GetId(), 0, func(e *client.BuildLogEntry) error {
		show(e)
		return nil
	})
	view.end(end.GetState() == client.BuildReady)
	bar.done()
	if ctx.Err() != nil {
		return nil, a.cancelBuild(ctx, c, b.GetId())
	}
	if err != nil {
		return nil, err
	}
	switch end.GetState() {
	case client.BuildReady:
		return end, nil
	case client.BuildCanceled:
		return nil, errs.New(errs.FailedPrecondition, "the build was canceled")
	}
	if bar.tty {
		bar.tail()
	}
	f := end.GetFailure()
	e := errs.New(errs.FailedPrecondition, "%s", f.GetMessage())
	if f.GetHint() != "" {
		e = e.WithHint("%s", f.GetHint())
	}
	return nil, e
}

// cancelBuild ends the build that the user no longer waits for.
func (a *app) cancelBuild(ctx context.Context, c *client.Client, id string) error {
	late, stop := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer stop()
	if _, err := c.Builds.Cancel(late, id); err != nil {
		a.note("the build goes on: casemate template cancel %s", id)
		return ctx.Err()
	}
	a.note("the build was canceled; the steps that were done are kept")
	return ctx.Err()
}
