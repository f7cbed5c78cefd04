package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/selftest"
)

func (a *app) selftestCmd() *cobra.Command {
	var isolation string
	var profiles, only []string
	cmd := &cobra.Command{
		Use:   "selftest [flags]",
		Short: "Attack this machine's sandboxes from inside, and tell what held",
		Long: `Try the attack battery from inside real sandboxes, and tell for each case whether what came of it is right
for the profile. The cases are safe: a wall that does not hold is seen, not used. Profile standard needs
template base, and is left out while that is not built.

Exit codes: 0 when every case came out right, 1 when one did not, 125 when the battery could not be run.`,
		Example: `  casemate selftest
  casemate selftest --profile locked --only C,D02`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			chosen, err := a.selftestProfiles(ctx, c, profiles)
			if err != nil {
				return err
			}
			bar, total, done := a.newProgress(), 0, 0
			for _, k := range selftest.Cases() {
				if matches(k.ID, only) {
					total += len(chosen)
				}
			}
			if total == 0 {
				return errs.New(errs.InvalidArgument, "no case is called %s", strings.Join(only, ", ")).WithHint("casemate selftest lists them")
			}
			report, err := selftest.Run(ctx, selftest.Options{
				Target: selftest.NewServer(c), Isolation: isolation, Profiles: chosen, Only: only,
				Each: func(v selftest.Verdict) {
					done++
					if bar.tty {
						bar.update(fmt.Sprintf("%s %s %s", v.Profile, v.ID, v.Title), float64(done)/float64(total), "")
					}
				},
			})
			bar.done()
			if err != nil {
				return cannot(err, "run the battery")
			}
			if a.json {
				err = a.printJSON(report)
			} else {
				a.printVerdicts(report)
			}
			if err == nil && !report.OK() {
				err = &exitError{code: 1}
			}
			return err
		}),
	}
	cmd.Flags().StringVar(&isolation, "isolation", "", "the isolation to attack (default the server's)")
	cmd.Flags().StringSliceVar(&profiles, "profile", nil, "the profiles to attack: locked, standard (default both)")
	cmd.Flags().StringSliceVar(&only, "only", nil, "only cases whose `ID` begins so, as C or D02 (repeatable)")
	return cmd
}

func matches(id string, only []string) bool {
	for _, o := range only {
		if strings.HasPrefix(id, strings.ToUpper(o)) {
			return true
		}
	}
	return len(only) == 0
}

// selftestProfiles returns the profiles to attack: those asked for, or those that a template is there
// for.
func (a *app) selftestProfiles(ctx context.Context, c *client.Client, asked []string) ([]string, error) {
	if len(asked) > 0 {
		return asked, nil
	}
	list, err := c.System.Templates(ctx)
	if err != nil {
		return nil, cannot(err, "run the battery")
	}
	have := map[string]bool{}
	for _, t := range list {
		if t.GetReady() {
			for _, p := range t.GetProfiles() {
				have[p] = true
			}
		}
	}
	var out []string
	for _, p := range []string{"locked", "standard"} {
		if have[p] {
			out = append(out, p)
			continue
		}
		a.note("profile %s is left out: no template for it is built; casemate template build base", p)
	}
	return out, nil
}

func (a *app) printVerdicts(r selftest.Report) {
	t := &table{head: []string{"CASE", "PROFILE", "CLASS", "WHAT IS TRIED", "OUTCOME", "DETAIL"}}
	for _, v := range r.Verdicts {
		detail := v.Detail
		st := green
		switch v.Outcome {
		case selftest.Right:
			detail = shorten(detail, 60)
		case selftest.NotApplicable:
			st = faint
		case selftest.Wrong, selftest.Broken:
			st = red
		}
		t.add(v.ID, v.Profile, string(v.Class), v.Title, cell{string(v.Outcome), st}, cell{detail, faint})
	}
	a.table(t)
	st := green
	if !r.OK() {
		st = red
	}
	fmt.Fprintln(a.stdout, "\n"+paint(clean(r.Summary()), st, a.color(a.stdout)))
}
