package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/replay"
)

const (
	// variedAfter is how much later than the first run the second begins, so that its times are others.
	variedAfter = 1100 * time.Millisecond
	// orphanedAfter ends the sandbox of a replay that was killed.
	orphanedAfter = 10 * time.Minute
	// leastLimit bounds a process that had no time limit and may wait now for what it got then; one that took long
	// gets ten times as long.
	leastLimit = 2 * time.Minute
)

// rerun is a replay under way.
type rerun struct {
	app        *app
	client     *client.Client
	record     *replay.Record
	plan       replay.Plan
	env        map[string]string
	workspaces []*client.Workspace
	save       string
	network    bool // answered from the record

	runs     []replayedRun
	contexts map[string]int // of the present sandbox, and how often each was started anew
	begun    time.Time      // of the first run
}

// replayedRun tells of one sandbox in which processes were run again.
type replayedRun struct {
	Run     int     `json:"run"`
	Sandbox string  `json:"sandbox"`
	From    string  `json:"from"` // a commit, or a template
	CPUs    float64 `json:"cpus,omitempty"`
	Zone    string  `json:"zone,omitempty"` // that TZ was set to
	Bundle  string  `json:"bundle,omitempty"`
}

// run does all runs of the plan, and judges.
func (r *rerun) run(ctx context.Context) ([]replay.Result, error) {
	if r.save != "" {
		if err := os.MkdirAll(r.save, 0o700); err != nil {
			return nil, err
		}
	}
	var runs []replay.Run
	if len(r.plan.Segments) > 0 {
		for n := range replay.Runs {
			one, err := r.once(ctx, n+1)
			if err != nil {
				return nil, err
			}
			runs = append(runs, one)
		}
	}
	return r.record.Judge(r.plan, runs...), nil
}

// once runs every segment in a fresh sandbox.
func (r *rerun) once(ctx context.Context, n int) (replay.Run, error) {
	if n == 1 {
		r.begun = time.Now()
	} else if err := pause(ctx, variedAfter-time.Since(r.begun)); err != nil {
		return nil, err
	}
	var out replay.Run
	for i, s := range r.plan.Segments {
		one, err := r.segment(ctx, n, i+1, s)
		if err != nil {
			return nil, err
		}
		if one != nil {
			out = append(out, one)
		}
	}
	return out, nil
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// segment runs one segment, and returns the record that the server made of it; nil where its state is gone.
func (r *rerun) segment(ctx context.Context, n, i int, s replay.Segment) (_ *replay.Record, err error) {
	req := r.request(n, s)
	about := replayedRun{Run: n, From: req.GetTemplate()}
	sb, err := r.client.Sandboxes.Create(ctx, req)
	if err != nil {
		if client.KindOf(err) != client.NotFound {
			return nil, err
		}
		r.gone(s, req.GetTemplate())
		return nil, nil
	}
	defer func() {
		_, derr := r.client.Sandboxes.Delete(context.WithoutCancel(ctx), sb.GetId())
		err = errors.Join(err, derr)
	}()
	about.Sandbox, about.CPUs = sb.GetId(), sb.GetLimits().GetCpus()
	r.contexts = map[string]int{}
	for _, step := range s.Steps {
		if err := r.step(ctx, sb.GetId(), n, step, &about); err != nil {
			return nil, err
		}
	}
	out, err := r.collect(ctx, sb.GetId(), fmt.Sprintf("run%d-%d.bundle", n, i), &about)
	r.runs = append(r.runs, about)
	return out, err
}

// gone notes that the state that a segment begins with is not there any more.
func (r *rerun) gone(s replay.Segment, from string) {
	what := "template " + from + ", which it began with, is not on this server"
	if s.Commit != "" || r.record.Settings.Commit != "" {
		what = "commit " + from + ", which it began with, is not kept any more (casemate tag keeps one)"
	}
	for _, step := range s.Steps {
		if step.Process != nil && r.plan.Not[step.Process.ID] == "" {
			r.plan.Not[step.Process.ID] = what
		}
	}
}

// request makes a sandbox like the recorded one, in the second run with fewer CPUs.
func (r *rerun) request(n int, s replay.Segment) *client.CreateRequest {
	was := r.record.Settings
	from := was.Template
	for _, commit := range []string{was.Commit, s.Commit} {
		if commit != "" {
			from = commit
		}
	}
	env := map[string]string{}
	for _, name := range was.Env {
		env[name] = r.env[name]
	}
	l := was.Limits
	if n > 1 && l.CPUs > 1 {
		l.CPUs = 1
	}
	req := &client.CreateRequest{
		Template: from, Isolation: was.Isolation, Profile: was.Profile, User: was.User, Dir: was.Dir, Env: env,
		Limits: &client.Limits{
			MemoryBytes: l.MemoryBytes, Cpus: l.CPUs, Pids: l.Pids, OpenFiles: l.OpenFiles, DiskBytes: l.DiskBytes, Inodes: l.Inodes,
		},
		Lifetime: durationpb.New(0), Idle: durationpb.New(orphanedAfter),
		AllowMissing: was.AllowMissing, Record: was.Record, FileChanges: was.Changes(),
		Labels: map[string]string{replay.LabelOf: r.record.Sandbox, replay.LabelRun: strconv.Itoa(n)},
	}
	for _, w := range r.workspaces {
		if slices.Contains(was.Workspaces, w.Target) {
			req.Workspaces = append(req.Workspaces, w)
		}
	}
	if was.Network == nil {
		req.NoNetwork = true
		return req
	}
	// Without rules it refuses everything; recorded, it has no way to models either.
	req.Network = &client.NetworkRules{Recorded: true}
	if r.network {
		req.Network.Rules = was.Network.Rules
	}
	for _, name := range was.Placeholders {
		env[name] = cmp.Or(r.env[name], standIn)
	}
	return req
}

// standIn is what a variable holds that held a placeholder: nothing of a replay leaves that a secret could be put on.
const standIn = "csm-placeholder-of-a-replay-000000000000000000000000"

// answers gives a sandbox what a process was answered then, and nothing else.
func (r *rerun) answers(ctx context.Context, sandbox string, p *replay.Process) error {
	if !r.network || r.record.Settings.Network == nil {
		return nil
	}
	var list []*client.RecordedAnswer
	for _, a := range p.Answers() {
		m := &client.RecordedAnswer{
			Method: a.Method, Url: a.URL, BodyBytes: a.Size, BodySalt: a.Salt, BodyHash: a.Hash, Status: int32(a.Status), Data: a.Data, //nolint:gosec // a status
		}
		for _, name := range slices.Sorted(maps.Keys(a.Header)) {
			m.Header = append(m.Header, &client.RecordedHeader{Name: name, Values: a.Header[name]})
		}
		list = append(list, m)
	}
	return r.client.Replays.SetAnswers(ctx, sandbox, list)
}

func (r *rerun) step(ctx context.Context, sandbox string, n int, s replay.Step, about *replayedRun) error {
	if s.Call != nil {
		return r.call(ctx, sandbox, s.Call)
	}
	p := s.Process
	if err := r.answers(ctx, sandbox, p); err != nil {
		return err
	}
	if p.Code != nil {
		return r.code(ctx, sandbox, p)
	}
	spec := &client.ProcessSpec{
		Id: p.ID, Argv: p.Argv, Dir: p.Dir, User: p.User, Env: map[string]string{},
		Timeout: limitOf(p),
	}
	for _, name := range p.Env {
		spec.Env[name] = r.env[name]
	}
	if n > 1 && !slices.Contains(p.Env, replay.VariedEnv) && !slices.Contains(r.record.Settings.Env, replay.VariedEnv) {
		spec.Env[replay.VariedEnv], about.Zone = replay.VariedZone, replay.VariedZone
	}
	o := client.RunOptions{Hold: true}
	if len(p.Stdin) > 0 {
		o.Stdin = bytes.NewReader(p.Stdin)
	}
	_, err := r.client.Processes.Run(ctx, sandbox, spec, o)
	return unlessRefused(err)
}

// limitOf is a process's time limit, or one for a process that had none.
func limitOf(p *replay.Process) *durationpb.Duration {
	if p.Timeout > 0 {
		return durationpb.New(p.Timeout)
	}
	return durationpb.New(max(leastLimit, 10*p.Ended.Sub(p.Began)))
}

// unlessRefused drops that something could not be started: that is recorded, and compared.
func unlessRefused(err error) error {
	switch client.KindOf(err) {
	case client.NotFound, client.InvalidArgument, client.PermissionDenied, client.FailedPrecondition:
		return nil
	}
	return err
}

// code runs code, in a context that is made for its first run and started anew where that was done then.
func (r *rerun) code(ctx context.Context, sandbox string, p *replay.Process) error {
	spec := &client.CodeSpec{Id: p.ID, Language: p.Code.Language, Code: p.Code.Text, Env: map[string]string{}, Timeout: limitOf(p), Hold: true}
	for _, name := range p.Env {
		spec.Env[name] = r.env[name]
	}
	if c := p.Code.Context; c != nil {
		spec.Context = c.ID
		if err := r.context(ctx, sandbox, c, p.Code.Starts); err != nil {
			return unlessRefused(err)
		}
	} else {
		spec.Fresh = true
	}
	_, err := r.client.Contexts.Run(ctx, sandbox, spec, client.CodeOptions{})
	return unlessRefused(err)
}

// context sees to it that a context is there, and has been started anew as often as it had been then.
func (r *rerun) context(ctx context.Context, sandbox string, c *replay.Context, starts int) error {
	began, there := r.contexts[c.ID]
	if !there {
		env := map[string]string{}
		for _, name := range c.Env {
			env[name] = r.env[name]
		}
		spec := &client.ContextSpec{Id: c.ID, Language: c.Language, Dir: c.Dir, User: c.User, Env: env}
		if _, err := r.client.Contexts.Create(ctx, sandbox, spec); err != nil {
			return err
		}
	}
	for ; began < starts; began++ {
		if _, err := r.client.Contexts.Restart(ctx, sandbox, c.ID); err != nil {
			return err
		}
	}
	r.contexts[c.ID] = began
	return nil
}

// call changes files through the API as it was done then.
func (r *rerun) call(ctx context.Context, sandbox string, c *replay.Call) (err error) {
	files := r.client.Files
	switch c.Type {
	case "file.written":
		_, err = files.Write(ctx, sandbox, c.Path, bytes.NewReader(c.Data), client.WriteOptions{User: c.User, Mode: c.Mode, Parents: true})
	case "file.removed":
		err = files.Remove(ctx, sandbox, c.Path, c.User, true)
	case "file.moved":
		_, err = files.Move(ctx, sandbox, c.Path, c.To, c.User, true)
	case "file.mode":
		_, err = files.Chmod(ctx, sandbox, c.Path, c.User, c.Mode)
	case "directory.made":
		_, err = files.MakeDir(ctx, sandbox, c.Path, c.User, c.Mode, true)
	}
	return err
}

// collect reads the record of a run, and keeps it where that was asked for.
func (r *rerun) collect(ctx context.Context, sandbox, name string, about *replayedRun) (*replay.Record, error) {
	f, err := spoolFile()
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if err := r.client.Journal.Export(ctx, sandbox, nil, f); err != nil {
		return nil, err
	}
	rewind := func() error {
		_, err := f.Seek(0, io.SeekStart)
		return err
	}
	if err := rewind(); err != nil {
		return nil, fmt.Errorf("read a temporary file: %w", err)
	}
	out, err := readReplayable(f, bundle.Options{}, "the record of "+sandbox, false)
	if err != nil || r.save == "" {
		return out, err
	}
	if err := rewind(); err != nil {
		return nil, fmt.Errorf("read a temporary file: %w", err)
	}
	about.Bundle = filepath.Join(r.save, name)
	return out, saveWhole(about.Bundle, 0o600, func(w io.Writer) error {
		_, err := io.Copy(w, f)
		return err
	})
}

// notes tell what the verdicts don't cover.
func (r *rerun) notes(results []replay.Result) []string {
	var out []string
	without, partly, ran, answered := 0, 0, 0, 0
	for _, one := range results {
		if one.Verdict == replay.NotAttempted {
			continue
		}
		ran++
		answered += one.Answered
		if !one.Files {
			without++
		}
		if one.Partly {
			partly++
		}
	}
	if answered > 0 {
		out = append(out, plural(int64(answered), "request", "requests")+" of the first run answered from the record; nothing left this machine")
	}
	if without > 0 {
		out = append(out, fmt.Sprintf("which files changed was not compared for %d of %d: it is recorded with --file-changes full", without, ran))
	}
	if partly > 0 {
		out = append(out, fmt.Sprintf("of %d only the beginning and the end of the output is kept, and was compared", partly))
	}
	if r.record.Settings.Template == "host" && ran > 0 {
		out = append(out, "template host is the files of this machine as they are now")
	}
	if len(r.record.Settings.Workspaces) > 0 && ran > 0 {
		out = append(out, "the workspaces' folders were taken as they are now")
	}
	return out
}
