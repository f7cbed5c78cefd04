package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/anchor"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/replay"
)

// Exit codes of verify: the first verdict that is bad.
const (
	exitChanged    = 1
	exitIncomplete = 2
	exitUnanchored = 3
	exitDiverged   = 4
)

func (a *app) verifyCmd() *cobra.Command {
	var key string
	var heads, replays []string
	cmd := &cobra.Command{
		Use:   "verify [flags] BUNDLE",
		Short: "Check the exported record of a sandbox, offline",
		Long: `Check a bundle of "casemate journal export" without any server, and give four answers:

  integrity      nothing was changed: each event is in the log that the server signed
  completeness   nothing was left out, but for gaps that are told of
  anchored       the log still begins as checkpoints say that were given out before (--head)
  reproduced     how many processes had the same outcome when they were run again (--replay)

Without --key the bundle's own key is used: then somebody holds a key that made all of it, and whose it is
remains open. The server's lies in its keys directory (journal.pub), and "casemate journal checkpoint
--json" shows it. A head is a file of "casemate journal checkpoint", or the header Casemate-Checkpoint of
any answer, or several of these, as in the files that "casemate serve --anchor" writes; or the URL where
these are kept, which is then read.

A replay is the bundle of a sandbox in which "casemate replay --save" ran processes again, or the directory
with all of them. Each is verified as well, must be whole and of the same log, and must have begun as the
record did and done the same: then the verdicts are found anew from both.

What only the guest saw is the word of a program inside the sandbox: the bundle proves that it was said.

Exit codes: 0 when all is well; 1 changed; 2 incomplete; 3 not anchored; 4 some process diverged;
125 when the bundle, the key or a head can't be read. The first that holds counts.`,
		Example: `  casemate journal checkpoint > head
  casemate journal export web --head head > web.bundle
  casemate verify web.bundle --key journal.pub --head head
  casemate verify web.bundle --replay runs`,
		Args: exactly(1, "one bundle"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := verifyOptions(cmd.Context(), key, heads)
			if err != nil {
				return err
			}
			in, err := a.openInput(args[0])
			if err != nil {
				return err
			}
			defer func() { _ = in.Close() }()
			var record replay.Record
			if len(replays) > 0 {
				o.Each = record.Add
			}
			r, err := bundle.Verify(in, o)
			if err != nil {
				return errs.New(errs.InvalidArgument, "cannot verify %s: %v", args[0], err)
			}
			if len(replays) > 0 && r.Integrity.OK {
				again, err := readReplays(replays, bundle.Options{Key: r.Key})
				if err != nil {
					return err
				}
				if r.Reproduced, err = replayVerdict(&record, again); err != nil {
					return err
				}
			}
			if a.json {
				err = a.printJSON(r)
			} else {
				err = a.tellReport(r)
			}
			if code := verdictCode(r); err == nil && code != 0 {
				return &exitError{code: code}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "the public `KEY` of the log, or a file with it")
	cmd.Flags().StringArrayVar(&heads, "head", nil, "a `FILE` or URL with checkpoints that were given out before (repeatable)")
	cmd.Flags().StringArrayVar(&replays, "replay", nil, "a `PATH` of a replay's bundle, or of a directory of them (repeatable)")
	return cmd
}

// openInput opens a file, or the standard input for "-".
func (a *app) openInput(path string) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(a.stdin), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.New(errs.NotFound, "cannot read %s: %v", path, unwrapped(err))
	}
	return f, nil
}

// unwrapped leaves out the path, which the caller names.
func unwrapped(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

func verifyOptions(ctx context.Context, key string, heads []string) (o bundle.Options, err error) {
	if o.Key = key; key != "" && !strings.Contains(key, "+") {
		b, err := os.ReadFile(key)
		if err != nil {
			return o, errs.New(errs.NotFound, "cannot read the key %s: %v", key, unwrapped(err))
		}
		o.Key = strings.TrimSpace(string(b))
	}
	o.Heads, err = readHeads(ctx, heads)
	return o, err
}

// readHeads reads checkpoints from files and URLs.
func readHeads(ctx context.Context, places []string) ([][]byte, error) {
	var out [][]byte
	for _, place := range places {
		heads, err := anchor.Read(ctx, place)
		if err != nil {
			return nil, err
		}
		out = append(out, heads...)
	}
	return out, nil
}

func verdictCode(r bundle.Report) int {
	switch {
	case !r.Integrity.OK:
		return exitChanged
	case !r.Completeness.OK:
		return exitIncomplete
	case !r.Anchored.OK:
		return exitUnanchored
	case !r.Reproduced.OK:
		return exitDiverged
	}
	return 0
}

// maxShown bounds the problems of one verdict that are shown to eyes.
const maxShown = 5

// tellReport shows a report to eyes.
func (a *app) tellReport(r bundle.Report) error {
	out, color := a.stdout, a.color(a.stdout)
	whose := "given"
	if !r.KeyGiven {
		whose = "the bundle's own, vouched for by nobody"
	}
	fmt.Fprintf(out, "sandbox   %s\nlog       %s, %d entries\nkey       %s\n", clean(r.Sandbox), clean(r.Origin), r.Size, whose)
	gone := fmt.Sprintf("%d erased or left out", r.Erased)
	if r.Redacted > 0 {
		gone += fmt.Sprintf(", %d of them on record", r.Redacted)
	}
	fmt.Fprintf(out, "record    %d events, %d gaps, %d bodies (%s), %d events with facts of the guest alone\n",
		r.Events, r.Gaps, r.Bodies, gone, r.GuestOnly)
	if r.Imported > 0 {
		fmt.Fprintf(out, "          %d events are older than the log, which proves them since it was begun\n", r.Imported)
	}
	fmt.Fprintln(out)
	show := func(name string, v bundle.Verdict, good string) {
		answer, st := good, green
		if !v.OK {
			answer, st = "NO", red
		}
		fmt.Fprintf(out, "%-13s %s\n", name, paint(answer, st, color))
		for i, p := range v.Problems {
			if i == maxShown {
				fmt.Fprintf(out, "              … and %d more\n", len(v.Problems)-i)
				break
			}
			where := ""
			if p.Event >= 0 {
				where = fmt.Sprintf("at event %d: ", p.Event+1)
			}
			fmt.Fprintf(out, "              %s%s\n", where, clean(p.What))
		}
	}
	complete := "yes"
	if r.Gaps > 0 {
		complete = fmt.Sprintf("yes, but for %d recorded gaps", r.Gaps)
	}
	anchored := "not asked: no --head was given"
	if r.Anchored.Heads > 0 {
		anchored = fmt.Sprintf("until entry %d: %d of %d events", r.Anchored.Until, r.Anchored.Events, r.Events)
	}
	show("integrity", r.Integrity, "yes")
	show("completeness", r.Completeness, complete)
	show("anchored", r.Anchored.Verdict, anchored)
	p := r.Reproduced
	again := fmt.Sprintf("not asked: no --replay was given for %s", plural(int64(p.Processes), "process", "processes"))
	if p.Runs > 0 {
		again = fmt.Sprintf("%d of %d processes, %d after normalising; %d unstable, %d not attempted", p.Reproduced+p.Normalised, p.Processes, p.Normalised, p.Unstable, p.NotAttempted)
		if p.Answered > 0 {
			again += fmt.Sprintf("; %s answered from the record", plural(int64(p.Answered), "request", "requests"))
		}
	}
	show("reproduced", p.Verdict, again)
	return nil
}

func (a *app) journalCheckpointCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "checkpoint",
		Short: "Show the journal's newest signed checkpoint",
		Long: `Print the signed head of the journal as it is now: how long the log is, and what it holds. Keep it where the
server can't reach. A bundle that is exported later is held against it, and shows whether what happened
until now was changed, removed or cut off. With --json the public key too.

Exit codes: 0, or 125 when the server can't tell.`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			head, err := c.Journal.Checkpoint(ctx)
			if err != nil {
				return cannot(err, "read the journal's checkpoint")
			}
			if a.json {
				return a.printJSON(head)
			}
			_, err = fmt.Fprint(a.stdout, head.GetNote())
			return err
		}),
	}
}
