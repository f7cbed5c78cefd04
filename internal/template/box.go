package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/sandbox"
)

// box is the sandbox of one step.
type box struct {
	x     *execution
	id    string
	files *sandbox.Files
	// root is the user that may change everything; "" is the only one that there is, in profile locked.
	root string
	// pins are what the step's package managers are asked for.
	pins pins
	// archives are the digests of what pip says to have installed, by name and version.
	archives map[[2]string]string
}

// openBox creates the sandbox of a step. The caller closes it.
func (x *execution) openBox(ctx context.Context, s *state, spec sandbox.Spec) (*box, error) {
	made, err := x.b.m.Create(ctx, x.p, spec, sandbox.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create the step's sandbox: %w", err)
	}
	b := &box{x: x, id: made.ID}
	if made.Spec.Profile == sandbox.Standard {
		b.root = "0" // an image may have no file of users
	}
	if b.files, err = x.b.m.Files(ctx, x.p, made.ID); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// close deletes the sandbox, also where the build was canceled. One that does not go at once is found by the
// build's end.
func (b *box) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := b.x.b.m.Delete(ctx, b.x.p, b.id); err != nil {
		b.x.b.log.Warn("cannot delete a step's sandbox yet", "build", b.x.req.ID, "sandbox", b.id, "error", err)
	}
}

// asRoot asks for files as root, where there is one.
func (b *box) asRoot(path string) sandbox.PathRequest {
	return sandbox.PathRequest{Path: path, Asker: sandbox.Asker{User: b.root, Privileged: true}}
}

// makeDir makes a directory with those above it. A new one belongs to owner; "": root.
func (b *box) makeDir(ctx context.Context, dir, owner string) error {
	r := b.asRoot(dir)
	r.User = or(owner, b.root)
	if dir == "/" {
		return nil
	}
	_, err := b.files.MakeDir(ctx, sandbox.MakeDirRequest{PathRequest: r, Parents: true})
	return err
}

// isDir reports whether a path is a directory, or leads to one.
func (b *box) isDir(ctx context.Context, path string) (bool, error) {
	r := b.asRoot(path)
	r.Follow = true
	info, err := b.files.Stat(ctx, r)
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}
	return err == nil && info.Type == "dir", err
}

// followed returns where a path leads to through symbolic links, whose last may lead to nothing.
func (b *box) followed(ctx context.Context, p string) (string, error) {
	for range maxLinks {
		info, err := b.files.Stat(ctx, b.asRoot(p))
		if errs.Is(err, errs.NotFound) || err == nil && info.Type != guestwire.TypeSymlink {
			return p, nil
		}
		if err != nil {
			return "", err
		}
		target := info.Target
		if !path.IsAbs(target) {
			target = path.Dir(p) + "/" + target
		}
		p = path.Clean(target)
	}
	return "", errs.New(errs.InvalidArgument, "too many symbolic links: %s", p)
}

// unpack puts a tree below a directory. write gives the tree.
func (b *box) unpack(ctx context.Context, dir, owner string, write func(io.Writer) error) error {
	in, out := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		err := write(out)
		_ = out.CloseWithError(err)
		wrote <- err
	}()
	_, err := b.files.Unpack(ctx, sandbox.UnpackRequest{PathRequest: b.asRoot(dir), Owner: owner}, in)
	_ = in.CloseWithError(io.ErrClosedPipe) // a guest that refused leaves the writer waiting
	if werr := <-wrote; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return werr // the guest only saw that it broke off
	}
	return err
}

// command is a process of a step.
type command struct {
	argv []string
	env  map[string]string
	user string
	dir  string
	// shown is what errors call it.
	shown string
}

// exitError says that a command ended with another code than 0.
type exitError struct {
	shown string
	code  int // -1: it has none
	how   string
	last  string // what it said last
}

// Error implements error.
func (e *exitError) Error() string { return e.shown + ": " + e.how }

func asExit(err error) (int, bool) {
	var e *exitError
	if errors.As(err, &e) {
		return e.code, true
	}
	return 0, false
}

// run runs a command to its end, with its output in the build's log.
func (b *box) run(ctx context.Context, c command) error {
	sink := newLogSink(b.x)
	end, err := b.x.b.m.Run(ctx, b.x.p, b.id, sandbox.ProcessSpec{
		Argv: c.argv, Env: c.env, User: c.user, Dir: c.dir, Timeout: b.x.req.StepTimeout,
	}, sandbox.RunOptions{Hold: true}, sink)
	sink.flush()
	if err != nil {
		return err
	}
	for _, r := range end.Refused {
		b.x.say(Warning, "refused: %s %s: %s", r.Proto, r.Target, r.Verdict.Reason)
		if r.Verdict.Hint != "" {
			b.x.say(Warning, "to allow it: --allow '%s'", r.Verdict.Hint)
		}
	}
	return ended(c, end, sink, b.x.req.StepTimeout)
}

// ended turns the end of a command into an error; nil: it went well.
func ended(c command, end sandbox.Process, sink *logSink, limit time.Duration) error {
	e := &exitError{shown: c.shown, code: -1, last: sink.last.text}
	hint := ""
	switch {
	case end.End == sandbox.EndExited && end.Code == 0:
		return nil
	case end.End == sandbox.EndExited:
		e.code, e.how = end.Code, fmt.Sprintf("exit code %d", end.Code)
	case end.End == sandbox.EndOOMKilled:
		e.how, hint = "it needed more memory than the build has", "give the steps more: --build-memory"
	case end.End == sandbox.EndTimedOut:
		e.how, hint = fmt.Sprintf("it took longer than %s (step timeout)", limit), "give it more time: --step-timeout"
	case end.End == sandbox.EndSignaled:
		e.how = fmt.Sprintf("ended by signal %d", end.Signal)
	default:
		e.how = strings.TrimSpace(string(end.End) + " " + end.Error)
	}
	if len(end.Refused) > 0 && hint == "" {
		r := end.Refused[len(end.Refused)-1]
		hint = fmt.Sprintf("%s was refused: the build reaches only what --net and --allow name", r.Target)
	}
	text := e.how
	if e.last != "" {
		text += ": " + e.last
	}
	out := errs.Wrap(e, errs.FailedPrecondition, "%s", text)
	if hint != "" {
		out = out.WithHint("%s", hint)
	}
	return out
}

// logSink takes a command's output into the log.
type logSink struct {
	streams map[sandbox.Stream]*lines
	// last is what it printed last.
	last lastWords
	x    *execution
}

// lastWords are the last line that a command printed, with those of before that it only goes on with.
type lastWords struct{ text string }

// maxLastWords bounds them, in bytes.
const maxLastWords = 500

func (l *lastWords) add(line string) {
	trimmed := strings.TrimSpace(line)
	switch {
	case trimmed == "":
	case l.text == "" || line[0] != ' ' && line[0] != '\t':
		l.text = trimmed
	case len(l.text)+len(trimmed) < maxLastWords:
		l.text += " " + trimmed
	}
}

func newLogSink(x *execution) *logSink {
	s := &logSink{x: x, streams: map[sandbox.Stream]*lines{}}
	for stream, name := range map[sandbox.Stream]string{sandbox.Stdout: "stdout", sandbox.Stderr: "stderr"} {
		s.streams[stream] = &lines{emit: func(text string) {
			s.last.add(text)
			x.log.add(Info, x.step, name, text)
		}}
	}
	return s
}

// Started implements sandbox.RunSink.
func (s *logSink) Started(sandbox.Process) error { return nil }

// Output implements sandbox.OutputSink.
func (s *logSink) Output(stream sandbox.Stream, _ int64, data []byte) error {
	if l := s.streams[stream]; l != nil {
		l.write(data)
	}
	return nil
}

// Gap implements sandbox.OutputSink.
func (s *logSink) Gap(g sandbox.Gap) error {
	s.x.say(Warning, "%d bytes of output were lost", g.To-g.From)
	return nil
}

func (s *logSink) flush() {
	for _, stream := range []sandbox.Stream{sandbox.Stdout, sandbox.Stderr} {
		s.streams[stream].flush()
	}
}

// exists reports whether there is something at a path.
func (b *box) exists(ctx context.Context, path string) (bool, error) {
	_, err := b.files.Stat(ctx, b.asRoot(path))
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// firstMissing returns the topmost directory on the way to dir that is not there; "": all are.
func (b *box) firstMissing(ctx context.Context, dir string) (string, error) {
	missing := ""
	for ; dir != "/"; dir = path.Dir(dir) {
		there, err := b.exists(ctx, dir)
		if err != nil {
			return "", err
		}
		if there {
			break
		}
		missing = dir
	}
	return missing, nil
}

// remove removes a tree; one that is not there is removed.
func (b *box) remove(ctx context.Context, path string) error {
	err := b.files.Remove(ctx, sandbox.RemoveRequest{PathRequest: b.asRoot(path), Recursive: true})
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// removeEmpty removes directories that were made on the way to something, as long as they hold nothing else.
func (b *box) removeEmpty(ctx context.Context, dir string) error {
	empty := true
	err := b.files.List(ctx, sandbox.ListRequest{PathRequest: b.asRoot(dir)}, func(i sandbox.FileInfo) error {
		if i.Type != "dir" {
			empty = false
			return nil
		}
		if err := b.removeEmpty(ctx, i.Path); err != nil {
			return err
		}
		there, err := b.exists(ctx, i.Path)
		empty = empty && !there
		return err
	})
	if err != nil || !empty {
		return err
	}
	return b.remove(ctx, dir)
}
