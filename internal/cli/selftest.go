package cli

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

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

Section F, the network, is run in a fake internet, in network namespaces that are gone afterwards, against
sandboxes of a server of its own: it needs root, and nothing of it reaches the machine's network.

Exit codes: 0 when every case came out right, 1 when one did not, 125 when the battery could not be run.`,
		Example: `  casemate selftest
  casemate selftest --profile locked --only C,D02
  casemate selftest --only F`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return a.selftest(ctx, selftest.Options{Isolation: isolation, Profiles: profiles, Only: only})
		},
	}
	cmd.Flags().StringVar(&isolation, "isolation", "", "the isolation to attack (default the server's)")
	cmd.Flags().StringSliceVar(&profiles, "profile", nil, "the profiles to attack: locked, standard (default both)")
	cmd.Flags().StringSliceVar(&only, "only", nil, "only cases whose `ID` begins so, as C or D02 (repeatable)")
	return cmd
}

// selftest runs the battery, its network part in a fake internet, and shows what came of it.
func (a *app) selftest(ctx context.Context, o selftest.Options) error {
	here, network := 0, 0
	for _, c := range selftest.Cases() {
		switch {
		case !selftest.Selected(c.ID, o.Only):
		case c.Flow != nil:
			network++
		default:
			here++
		}
	}
	if here+network == 0 {
		return errs.New(errs.InvalidArgument, "no case is called %s", strings.Join(o.Only, ", ")).WithHint("casemate selftest lists them")
	}
	if why := noFakeInternet(o.Profiles); network > 0 && why != "" {
		if here == 0 {
			return errs.New(errs.FailedPrecondition, "cannot run section F: %s", why)
		}
		a.note("section F, the network, is left out: %s", why)
		network = 0
	}
	report := selftest.Report{Isolation: o.Isolation, Started: time.Now().UTC()}
	total := network
	if here > 0 {
		c, err := a.connect()
		if err != nil {
			return err
		}
		defer c.Close()
		if o.Profiles, err = a.selftestProfiles(ctx, c, o.Profiles); err != nil {
			return err
		}
		o.Target, total = selftest.NewServer(c), total+here*len(o.Profiles)
	}
	bar := a.newProgress()
	o.Each = func(v selftest.Verdict) {
		report.Verdicts = append(report.Verdicts, v)
		if bar.tty {
			bar.update(fmt.Sprintf("%s %s %s", v.Profile, v.ID, v.Title), float64(len(report.Verdicts))/float64(total), "")
		}
	}
	var err error
	if here > 0 {
		_, err = selftest.Run(ctx, o)
	}
	if err == nil && network > 0 {
		err = a.selftestNet(ctx, o)
	}
	bar.done()
	if err != nil {
		return cannot(err, "run the battery")
	}
	report.Took = time.Since(report.Started)
	return a.showReport(report)
}

// noFakeInternet says why section F can't be run, "" where it can.
func noFakeInternet(profiles []string) string {
	switch {
	case len(profiles) > 0 && !slices.Contains(profiles, "locked"):
		return "it attacks sandboxes of profile locked"
	case os.Geteuid() != 0:
		return "it starts a server of its own in a fake internet, which only root can"
	}
	return ""
}

func (a *app) showReport(report selftest.Report) error {
	if a.json {
		if err := a.printJSON(report); err != nil {
			return err
		}
	} else {
		a.printVerdicts(report)
	}
	if !report.OK() {
		return &exitError{code: 1}
	}
	return nil
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
