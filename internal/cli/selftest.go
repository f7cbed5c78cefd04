package cli

import (
	"context"
	"fmt"
	"maps"
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
	var o selftest.Options
	cmd := &cobra.Command{
		Use:   "selftest [flags]",
		Short: "Attack this machine's sandboxes from inside, and tell what held",
		Long: `Try the attack battery from inside real sandboxes, and tell for each case whether what came of it is right
for the profile. The cases are safe: a wall that does not hold is seen, not used. Profile standard needs
template base, and is left out while that is not built.

Section F, the network, is run in a fake internet, in network namespaces that are gone afterwards, against
sandboxes of a server of its own: it needs root, and nothing of it reaches the machine's network. For profile
standard that server gets a copy of template base.

Exit codes: 0 when every case came out right, 1 when one did not, 125 when the battery could not be run.`,
		Example: `  casemate selftest
  casemate selftest --profile locked --only C,D02
  casemate selftest --only F --profile standard`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return a.selftest(ctx, o)
		},
	}
	cmd.Flags().StringVar(&o.Isolation, "isolation", "", "the isolation to attack (default the server's)")
	cmd.Flags().StringSliceVar(&o.Profiles, "profile", nil, "the profiles to attack: locked, standard (default both)")
	cmd.Flags().StringSliceVar(&o.Only, "only", nil, "only cases whose `ID` begins so, as C or D02 (repeatable)")
	cmd.Flags().DurationVar(&o.Patience, "patience", 0, "how much slower another sandbox may become while a case takes what it can (default 3s)")
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
	if o.Patience < 0 {
		return errs.New(errs.InvalidArgument, "patience is a time, not %v", o.Patience)
	}
	for _, p := range o.Profiles {
		if profileTemplates()[p] == "" {
			return errs.New(errs.InvalidArgument, "there is no profile %q", p).WithHint("locked or standard")
		}
	}
	if network > 0 && os.Geteuid() != 0 {
		const why = "it starts a server of its own in a fake internet, which only root can"
		if here == 0 {
			return errs.New(errs.FailedPrecondition, "cannot run section F: %s", why)
		}
		a.note("section F, the network, is left out: %s", why)
		network = 0
	}
	c, err := a.selftestClient(ctx, &o, here == 0)
	if err != nil {
		return err
	}
	if c != nil {
		defer c.Close()
	}
	report := selftest.Report{Isolation: o.Isolation, Started: time.Now().UTC()}
	total := (here + network) * len(o.Profiles)
	bar := a.newProgress()
	o.Each = func(v selftest.Verdict) {
		report.Verdicts = append(report.Verdicts, v)
		if bar.tty {
			bar.update(fmt.Sprintf("%s %s %s", v.Profile, v.ID, v.Title), float64(len(report.Verdicts))/float64(total), "")
		}
	}
	if here > 0 {
		o.Target = selftest.NewServer(c)
		_, err = selftest.Run(ctx, o)
	}
	if err == nil && network > 0 {
		err = a.selftestNet(ctx, c, o)
	}
	bar.done()
	if err != nil {
		return cannot(err, "run the battery")
	}
	report.Took = time.Since(report.Started)
	return a.showReport(report)
}

// selftestClient connects to this machine's server, and sets the profiles to attack: those asked for, or those that a
// template is there for. alone says that only section F is run, which in profile locked needs no server: then there
// may be none, and the client is nil.
func (a *app) selftestClient(ctx context.Context, o *selftest.Options, alone bool) (*client.Client, error) {
	c, err := a.connect()
	if err == nil {
		var ready []string
		if ready, err = a.readyProfiles(ctx, c); err == nil {
			for _, p := range o.Profiles {
				if alone && !slices.Contains(ready, p) { // elsewhere the create says so
					return nil, errs.New(errs.FailedPrecondition, "cannot run section F in profile %s: no template for it is built", p).
						WithHint("casemate template build %s", selftest.StandardTemplate)
				}
			}
			if len(o.Profiles) == 0 {
				a.noteMissing(ready)
				o.Profiles = ready
			}
			return c, nil
		}
		c.Close()
	}
	switch {
	case !alone:
		return nil, cannot(err, "run the battery")
	case slices.Contains(o.Profiles, "standard"):
		return nil, errs.Wrap(err, errs.FailedPrecondition, "cannot run section F in profile standard: its template is the server's").
			WithHint("start a server with casemate up, and build the template: casemate template build %s", selftest.StandardTemplate)
	case len(o.Profiles) == 0:
		a.note("profile standard is left out: its template is the server's, and none answers; casemate up")
	}
	o.Profiles = []string{"locked"}
	return nil, nil
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

// profileTemplates are the built-in templates that the battery attacks sandboxes of, by profile.
func profileTemplates() map[string]string {
	return map[string]string{"locked": "host", "standard": selftest.StandardTemplate}
}

// readyProfiles returns the profiles that a template is there for.
func (a *app) readyProfiles(ctx context.Context, c *client.Client) ([]string, error) {
	list, err := c.System.Templates(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for profile, template := range profileTemplates() {
		if slices.ContainsFunc(list, func(t *client.Template) bool { return t.GetName() == template && t.GetReady() }) {
			out = append(out, profile)
		}
	}
	slices.Sort(out)
	return out, nil
}

// noteMissing tells which profiles are not attacked.
func (a *app) noteMissing(ready []string) {
	for _, profile := range slices.Sorted(maps.Keys(profileTemplates())) {
		if !slices.Contains(ready, profile) {
			a.note("profile %s is left out: no template for it is built; casemate template build %s", profile, selftest.StandardTemplate)
		}
	}
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
