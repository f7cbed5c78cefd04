package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/replay"
)

// Exit codes of replay.
const (
	exitNotReproduced = 1
	exitNotKnown      = 2
)

// The values of --network.
const (
	networkOff    = "off"
	networkRecord = "record"
)

// replayFlags say what to run again, and with what the record lacks.
type replayFlags struct {
	env, workspaces []string
	network         string
	save            string
	key             string
	heads           []string
}

func (a *app) replayCmd() *cobra.Command {
	var f replayFlags
	cmd := &cobra.Command{
		Use:   "replay [flags] SANDBOX|BUNDLE [PROCESS|RUN…]",
		Short: "Run a sandbox's processes again, and compare",
		Long: `Run the processes of a sandbox again, and code that ran in interpreters, all or those named, in fresh
sandboxes from the state that the recorded one began with, and compare how each ended, what it said, and
which files it changed. It is done twice: the second time with another host name, time zone and number of
CPUs, and later, which tells a program that is different each time from a record that does not hold.

Nothing leaves this machine. There is no network, or with --network record one that answers what is asked
for as it was answered then: the same method, URL and body, each time with the next answer that the record
has. What is not in the record is refused, and the verdict names it. What the gateway did not look into is
not recorded (docs/network.md says when it does).

  reproduced                       the outcome is the recorded one, byte for byte
  reproduced after normalising …   it is, but for times, process ids and the like, which are named
  diverged at …                    both runs had another outcome, and the same: the first difference
  unstable                         the runs differ from each other where they differ from the record
  not attempted because …          what would be needed is not in the record, or not kept

The sandbox may run, or have ended; what has a dot or a slash in its name is a bundle of "casemate journal
export", which is verified first. Arguments, input and output have to be in the record (--record content, the
default), files' contents written through the API too (--record all); which files changed is compared where
that was recorded (--file-changes full). Values of environment variables never are: --env gives them.

With --save the records of the runs are kept as bundles; "casemate verify BUNDLE --replay" finds the same
verdicts from them, offline. What is compared and how: docs/replay.md.

Exit codes: 0 when all were reproduced, also after normalising; 1 when one diverged; 2 when none did, and one
is unstable or was not attempted; 125 when there is no such sandbox or bundle, or it can't be asked.`,
		Example: `  casemate replay web
  casemate replay web prc_a1b2c3 --env TOKEN
  casemate replay web --network record
  casemate journal export web -o web.bundle
  casemate replay web.bundle --save runs && casemate verify web.bundle --replay runs`,
		Args:              atLeast(1, "a sandbox or a bundle"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r, err := a.newRerun(ctx, c, f, args)
			if err != nil {
				return err
			}
			results, err := r.run(ctx)
			if err != nil {
				return cannot(err, "run the processes of %s again", args[0])
			}
			return a.tellReplayed(r, results)
		}),
	}
	fl := cmd.Flags()
	fl.StringArrayVarP(&f.env, "env", "e", nil, "value of a variable that the record only names, `NAME=VALUE`; NAME alone takes it from here (repeatable)")
	fl.StringArrayVar(&f.workspaces, "workspace", nil, "host folder `DIR[:TARGET]` that the sandbox had as a workspace, as it is now (repeatable)")
	fl.StringVar(&f.network, "network", networkOff, "what processes reach: `off`, or record for answers from the record")
	fl.StringVar(&f.save, "save", "", "keep the records of the runs as bundles in this `DIR`")
	fl.StringVar(&f.key, "key", "", "of a bundle: the public `KEY` of the log, or a file with it")
	fl.StringArrayVar(&f.heads, "head", nil, "of a bundle: a `FILE` or URL with checkpoints that were given out before (repeatable)")
	return cmd
}

// newRerun reads the record and plans what is done.
func (a *app) newRerun(ctx context.Context, c *client.Client, f replayFlags, args []string) (*rerun, error) {
	r := &rerun{app: a, client: c, save: f.save, network: f.network == networkRecord}
	var err error
	if !r.network && f.network != networkOff {
		return nil, usageError("--network is %s or %s, not %q", networkOff, networkRecord, f.network)
	}
	if r.env, err = parseEnv(f.env, a.getenv); err != nil {
		return nil, err
	}
	if r.workspaces, err = parseWorkspaces(f.workspaces); err != nil {
		return nil, err
	}
	choice := replay.Choice{Processes: args[1:], Env: slices.Sorted(maps.Keys(r.env)), Network: r.network}
	for _, w := range r.workspaces {
		if w.Target == "" {
			w.Target = defaultTarget
		}
		choice.Workspaces = append(choice.Workspaces, w.Target)
	}
	if isBundle(args[0]) {
		o, err := verifyOptions(ctx, f.key, f.heads)
		if err != nil {
			return nil, err
		}
		in, err := a.openInput(args[0])
		if err != nil {
			return nil, err
		}
		defer func() { _ = in.Close() }()
		r.record, err = readReplayable(in, o, args[0], false)
		if err != nil {
			return nil, err
		}
	} else if f.key != "" || len(f.heads) > 0 {
		return nil, usageError("--key and --head are for bundles")
	} else if r.record, err = a.recordOf(ctx, c, args[0]); err != nil {
		return nil, err
	}
	for _, id := range args[1:] {
		if r.record.Process(id) == nil {
			return nil, errs.New(errs.NotFound, "there is no process %s in the record", clean(id)).WithHint("casemate journal %s shows them", args[0])
		}
	}
	r.plan = r.record.Plan(choice)
	return r, nil
}

// recordOf reads what a server has recorded of a sandbox.
func (a *app) recordOf(ctx context.Context, c *client.Client, name string) (*replay.Record, error) {
	id, err := a.recordedID(ctx, c, name)
	if err != nil {
		return nil, err
	}
	f, err := spoolFile()
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if err := c.Journal.Export(ctx, id, nil, f); err != nil {
		return nil, cannot(err, "read the record of %s", name)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read a temporary file: %w", err)
	}
	return readReplayable(f, bundle.Options{}, name, false)
}

// spoolFile makes a file without a name: a bundle may be large, and content may be secret.
func spoolFile() (*os.File, error) {
	f, err := os.CreateTemp("", "casemate-export-")
	if err != nil {
		return nil, fmt.Errorf("make a temporary file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("unlink a temporary file: %w", err), f.Close())
	}
	return f, nil
}

// readReplayable reads a bundle, which must be what its key signed, and with whole all of it: else what is missing is known
// to be.
func readReplayable(in io.Reader, o bundle.Options, name string, whole bool) (*replay.Record, error) {
	var r replay.Record
	o.Each = r.Add
	report, err := bundle.Verify(in, o)
	if err != nil {
		return nil, errs.New(errs.InvalidArgument, "cannot verify %s: %v", name, err)
	}
	must := []bundle.Verdict{report.Integrity, report.Anchored.Verdict}
	if whole {
		must = append(must, report.Completeness)
	}
	for _, v := range must {
		if !v.OK {
			return nil, errs.New(errs.FailedPrecondition, "%s is no record to rely on: %s", name, v.Problems[0].What)
		}
	}
	return &r, nil
}

// readReplays reads the bundles of runs: files, or all bundles of directories.
func readReplays(paths []string, o bundle.Options) ([]*replay.Record, error) {
	var out []*replay.Record
	for _, path := range paths {
		files := []string{path}
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			if files, err = filepath.Glob(filepath.Join(path, "*.bundle")); err != nil || len(files) == 0 {
				return nil, errs.New(errs.NotFound, "there is no bundle in %s", path)
			}
		}
		for _, name := range files {
			f, err := os.Open(name)
			if err != nil {
				return nil, errs.New(errs.NotFound, "cannot read %s: %v", name, unwrapped(err))
			}
			// What was cut off its end could be the difference.
			r, err := readReplayable(f, bundle.Options{Key: o.Key}, name, true)
			_ = f.Close()
			if err != nil {
				return nil, err
			}
			out = append(out, r)
		}
	}
	return out, nil
}

// replayReport is what replay says to programs.
type replayReport struct {
	Sandbox      string          `json:"sandbox"`
	Template     string          `json:"template"`
	Commit       string          `json:"commit,omitempty"`
	Reproduced   int             `json:"reproduced"` // byte for byte
	Normalised   int             `json:"normalised"`
	Diverged     int             `json:"diverged"`
	Unstable     int             `json:"unstable"`
	NotAttempted int             `json:"not_attempted"`
	Network      string          `json:"network"`  // off or record
	Answered     int             `json:"answered"` // requests, from the record, in the first run
	Runs         []replayedRun   `json:"runs"`
	Notes        []string        `json:"notes,omitempty"`
	Processes    []replay.Result `json:"processes"`
}

// tellReplayed shows the verdicts, and returns the exit code as an error.
func (a *app) tellReplayed(r *rerun, results []replay.Result) error {
	n := countVerdicts(results)
	rep := replayReport{
		Sandbox: r.record.Sandbox, Template: r.record.Settings.Template, Commit: r.record.Settings.Commit,
		Reproduced: n[replay.Reproduced], Normalised: n[replay.Normalised], Diverged: n[replay.Diverged],
		Unstable: n[replay.Unstable], NotAttempted: n[replay.NotAttempted],
		Network: networkOff, Runs: r.runs, Notes: r.notes(results), Processes: results,
	}
	if r.network {
		rep.Network = networkRecord
	}
	for _, one := range results {
		rep.Answered += one.Answered
	}
	if a.json {
		if err := a.printJSON(rep); err != nil {
			return err
		}
	} else {
		a.showReplayed(rep)
	}
	switch {
	case rep.Diverged > 0:
		return &exitError{code: exitNotReproduced}
	case rep.Unstable+rep.NotAttempted > 0:
		return &exitError{code: exitNotKnown}
	}
	return nil
}

func countVerdicts(results []replay.Result) map[replay.Verdict]int {
	n := map[replay.Verdict]int{}
	for _, one := range results {
		n[one.Verdict]++
	}
	return n
}

// widestCommand is how much of a command is shown, in columns.
const widestCommand = 100

func (a *app) showReplayed(rep replayReport) {
	out, color := a.stdout, a.color(a.stdout)
	tell := func(format string, args ...any) {
		fmt.Fprintf(out, "               %s\n", paint(clean(fmt.Sprintf(format, args...)), faint, color))
	}
	for _, one := range rep.Processes {
		mark, st := string(one.Verdict), green
		switch one.Verdict {
		case replay.Diverged:
			mark, st = "DIVERGED", red
		case replay.Unstable, replay.NotAttempted:
			st = yellow
		case replay.Reproduced, replay.Normalised:
		}
		what := one.Process
		if len(one.Argv) > 0 {
			what = shorten(quoteArgv(one.Argv), widestCommand)
		} else if one.Code != "" {
			first, _, _ := strings.Cut(one.Code, "\n")
			what = shorten("code: "+first, widestCommand)
		}
		fmt.Fprintf(out, "%s%s\n", paint(fmt.Sprintf("%-15s", mark), st, color), clean(what))
		if one.Verdict != replay.Reproduced {
			tell("%s: %s", one.Process, one.Text())
		}
		if d := one.Difference; d != nil {
			tell("recorded: %s", d.Recorded)
			tell("replayed: %s", d.Replayed)
		}
		for _, what := range one.Unanswered {
			tell("asked for %s, which is not in the record", what)
		}
		if d := one.Sensitive; d != nil {
			tell("the second, varied run differs at %s: %s", d.Where(), d.Replayed)
		}
	}
	fmt.Fprintf(out, "\n%s reproduced, %d of them after normalising; %d diverged, %d unstable, %d not attempted: sandbox %s\n",
		plural(int64(rep.Reproduced+rep.Normalised), "process", "processes"), rep.Normalised, rep.Diverged, rep.Unstable, rep.NotAttempted, clean(rep.Sandbox))
	for _, n := range rep.Notes {
		fmt.Fprintf(out, "%s\n", clean(n))
	}
}

// replayVerdict is the verdict of verify on what was run again.
func replayVerdict(record *replay.Record, replays []*replay.Record) (bundle.Replays, error) {
	p, runs, err := record.Accept(replays)
	if err != nil {
		return bundle.Replays{}, errs.New(errs.FailedPrecondition, "the replay is none of this record: %v", err)
	}
	results := record.Judge(p, runs...)
	n := countVerdicts(results)
	v := bundle.Replays{
		Runs: len(runs), Processes: len(results), Reproduced: n[replay.Reproduced], Normalised: n[replay.Normalised],
		Diverged: n[replay.Diverged], Unstable: n[replay.Unstable], NotAttempted: n[replay.NotAttempted],
	}
	v.OK = v.Diverged == 0
	for _, one := range results {
		v.Answered += one.Answered
		if one.Verdict == replay.Diverged {
			v.Problems = append(v.Problems, bundle.Problem{Event: int(one.Event) - 1, What: one.Process + " " + one.Text()})
		}
	}
	return v, nil
}
