package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/check"
)

// How much evidence of a verdict is shown to people, and how wide: in columns, before anything is escaped.
const (
	shownEvidence  = 5
	widestEvidence = 160
)

// Exit codes of check.
const (
	exitRuleFailed = 1
	exitUnanswered = 2
)

func (a *app) checkCmd() *cobra.Command {
	var key string
	var heads []string
	cmd := &cobra.Command{
		Use:   "check [flags] SANDBOX|BUNDLE RULES",
		Short: "Hold what happened in a sandbox against rules",
		Long: `Hold the record of a sandbox against rules, a file of YAML: which paths may have been changed and which
not, which hosts reached, which commands run and how they ended, whether tests passed, whether anything was
refused. Each rule passes, fails, or is undecided, and names the events that say so.

The sandbox may run, or have ended; what has a dot or a slash in its name is a bundle of "casemate journal
export", which is verified first (--key and --head as in "casemate verify") and needs no server.

A rule passes only where the record can answer. Without --file-changes no rule about files does; where
something is missing in the record, none does that says what did not happen; what a process changes is
recorded at its end. The kinds of rules are in docs/check.md.

Exit codes: 0 when all rules pass; 1 when one failed; 2 when the rules can't be read, the bundle is not whole,
or a rule is undecided and none failed; 125 when there is no such sandbox, or the server can't be asked.`,
		Example: `  casemate check web rules.yaml
  casemate check web.bundle rules.yaml --key journal.pub --json`,
		Args:              exactly(2, "a sandbox or a bundle, and a file of rules"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			rules, err := a.readRules(args[1])
			if err != nil {
				return err
			}
			var s checked
			if isBundle(args[0]) {
				err = a.checkBundle(cmd.Context(), args[0], key, heads, &s)
			} else if key != "" || len(heads) > 0 {
				err = usageError("--key and --head are for bundles")
			} else {
				err = a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
					return readRecord(ctx, c, args[0], &s)
				})(cmd, args)
			}
			if err != nil {
				return err
			}
			return a.tellChecked(s, s.record.Judge(rules))
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "of a bundle: the public `KEY` of the log, or a file with it")
	cmd.Flags().StringArrayVar(&heads, "head", nil, "of a bundle: a `FILE` or URL with checkpoints that were given out before (repeatable)")
	return cmd
}

// readRules reads a file of rules; what is wrong with it is told with its lines.
func (a *app) readRules(path string) ([]check.Rule, error) {
	in, err := a.openInput(path)
	if err != nil {
		return nil, &exitError{code: exitUnanswered, text: err.Error()}
	}
	defer func() { _ = in.Close() }()
	rules, err := check.Parse(in)
	var wrong *check.RulesError
	if !errors.As(err, &wrong) {
		return rules, err
	}
	var lines []string
	for _, p := range wrong.Problems {
		where := path
		if p.Line > 0 {
			where = fmt.Sprintf("%s:%d", path, p.Line)
		}
		lines = append(lines, where+": "+p.What)
	}
	return nil, &exitError{code: exitUnanswered, text: strings.Join(lines, "\n"), hint: "the kinds of rules are in docs/check.md"}
}

// checked is a record, and where it is from.
type checked struct {
	record  check.Record
	sandbox string
	state   string         // of a sandbox on a server
	bundle  *bundle.Report // of a bundle
}

// readRecord reads all that a server has recorded of a sandbox.
func readRecord(ctx context.Context, c *client.Client, name string, s *checked) error {
	sb, err := c.Sandboxes.Get(ctx, name)
	if err != nil {
		return cannot(err, "check sandbox %s", name)
	}
	s.sandbox, s.state = sb.GetId(), sb.GetState()
	const page = 1000
	for {
		events, err := c.Journal.Events(ctx, s.sandbox, s.record.Last, page)
		if err != nil {
			return cannot(err, "read the journal of %s", name)
		}
		for _, e := range events {
			one := check.Event{Seq: e.GetSeq(), Type: e.GetType(), Process: e.GetProcess(), Facts: map[string]json.RawMessage{}}
			for observer, facts := range e.GetFacts() {
				if one.Facts[observer], err = facts.MarshalJSON(); err != nil {
					return err
				}
			}
			if list := fact(e, "argv").GetListValue(); list != nil {
				if one.Argv, err = list.MarshalJSON(); err != nil {
					return err
				}
			}
			s.record.Add(one)
		}
		if len(events) < page {
			return nil
		}
	}
}

// checkBundle reads a bundle and verifies it.
func (a *app) checkBundle(ctx context.Context, path, key string, heads []string, s *checked) error {
	r, err := reliedOn(ctx, path, key, heads, func(event json.RawMessage, bodies []bundle.Body) {
		var e check.Event
		if json.Unmarshal(event, &e) != nil {
			return // its integrity does not hold
		}
		for _, b := range bodies {
			if b.Name == "server.argv" || b.Name == "guest.argv" {
				e.Argv = b.Data
			}
		}
		s.record.Add(e)
	})
	if err != nil {
		return err
	}
	s.sandbox, s.bundle = r.Sandbox, &r
	for _, p := range r.Completeness.Problems {
		s.record.Incomplete(p.What)
	}
	return nil
}

// isBundle reports whether an argument that may be a sandbox names a bundle.
func isBundle(arg string) bool { return strings.ContainsAny(arg, "./") }

// reliedOn reads a bundle whose integrity must hold, with every event told to each. It may have holes, as the report says.
func reliedOn(ctx context.Context, path, key string, heads []string, each func(json.RawMessage, []bundle.Body)) (bundle.Report, error) {
	o, err := verifyOptions(ctx, key, heads)
	if err != nil {
		return bundle.Report{}, err
	}
	in, err := os.Open(path)
	if err != nil {
		return bundle.Report{}, errs.New(errs.NotFound, "cannot read %s: %v", path, unwrapped(err)).
			WithHint("a sandbox is named by its id or name, which have no dot and no slash")
	}
	defer func() { _ = in.Close() }()
	o.Each = each
	r, err := bundle.Verify(in, o)
	if err != nil {
		return bundle.Report{}, errs.New(errs.InvalidArgument, "cannot verify %s: %v", path, err)
	}
	if !r.Integrity.OK || !r.Anchored.OK {
		problems := append(r.Integrity.Problems, r.Anchored.Problems...)
		return bundle.Report{}, &exitError{code: exitUnanswered, text: fmt.Sprintf("%s is no record to rely on: %s", path, problems[0].What), hint: "see: casemate verify " + path}
	}
	return r, nil
}

// checkReport is what check says to programs.
type checkReport struct {
	Sandbox string `json:"sandbox"`
	// State is that of a sandbox on a server; KeyGiven says, of a bundle, that its key was.
	State     string         `json:"state,omitempty"`
	Bundle    bool           `json:"bundle,omitempty"`
	KeyGiven  bool           `json:"key_given,omitempty"`
	Events    int            `json:"events"`
	Ended     bool           `json:"ended"`
	Passed    int            `json:"passed"`
	Failed    int            `json:"failed"`
	Undecided int            `json:"undecided"`
	Rules     []check.Result `json:"rules"`
}

// tellChecked shows the verdicts, and returns the exit code as an error.
func (a *app) tellChecked(s checked, results []check.Result) error {
	r := checkReport{Sandbox: s.sandbox, State: s.state, Events: s.record.Events, Ended: s.record.Ended, Rules: results}
	if s.bundle != nil {
		r.Bundle, r.KeyGiven = true, s.bundle.KeyGiven
	}
	for _, one := range results {
		switch one.Verdict {
		case check.Pass:
			r.Passed++
		case check.Fail:
			r.Failed++
		case check.Undecided:
			r.Undecided++
		}
	}
	if a.json {
		if err := a.printJSON(r); err != nil {
			return err
		}
	} else {
		a.showChecked(r)
	}
	switch {
	case r.Failed > 0:
		return &exitError{code: exitRuleFailed}
	case r.Undecided > 0:
		return &exitError{code: exitUnanswered}
	}
	return nil
}

func (a *app) showChecked(r checkReport) {
	out, color := a.stdout, a.color(a.stdout)
	for _, one := range r.Rules {
		mark, st := "pass      ", green
		switch one.Verdict {
		case check.Fail:
			mark, st = "FAIL      ", red
		case check.Undecided:
			mark, st = "undecided ", yellow
		case check.Pass:
		}
		title := string(one.Rule)
		title += ": " + strings.Join(one.Of, ", ")
		if len(one.Of) == 0 {
			title += "nothing"
		}
		if one.Name != "" {
			title = one.Name + " (" + title + ")"
		}
		fmt.Fprintf(out, "%s%s\n", paint(mark, st, color), clean(title))
		if one.Why != "" {
			fmt.Fprintf(out, "          %s\n", clean(one.Why))
		}
		for i, e := range one.Evidence {
			if i == shownEvidence {
				one.More += len(one.Evidence) - i
				break
			}
			line := shorten(fmt.Sprintf("event %d: %s", e.Event, e.What), widestEvidence)
			if e.Observer == "guest" {
				line += " (the guest's word)"
			}
			fmt.Fprintf(out, "          %s\n", paint(clean(line), faint, color))
		}
		if one.More > 0 {
			fmt.Fprintf(out, "          %s\n", paint(fmt.Sprintf("… and %d more", one.More), faint, color))
		}
	}
	of := "sandbox " + r.Sandbox
	switch {
	case r.Bundle && !r.KeyGiven:
		of += ", a bundle that its own key vouches for"
	case r.Bundle:
		of += ", a bundle"
	case !r.Ended:
		of += ", which is " + r.State
	}
	fmt.Fprintf(out, "\n%d passed, %d failed, %d undecided: %s, %s\n", r.Passed, r.Failed, r.Undecided, plural(int64(r.Events), "event", "events"), clean(of))
}
