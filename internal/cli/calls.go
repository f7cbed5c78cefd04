package cli

import (
	"cmp"
	"context"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

// callFlags say which system calls are to be observed.
type callFlags struct {
	kinds     []string
	onAttempt string
}

func (f *callFlags) register(cmd *cobra.Command, otherwise string) {
	fl := cmd.Flags()
	fl.StringSliceVar(&f.kinds, "calls", nil, "system calls to record: attempts (that tell of getting out), exec, connect, open, or none (default "+otherwise+")")
	fl.StringVar(&f.onAttempt, "on-attempt", "", "what an attempt brings about: record, pause or kill (default record)")
	_ = cmd.RegisterFlagCompletionFunc("calls", cobra.FixedCompletions([]string{"attempts", "exec", "connect", "open", "none"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("on-attempt", cobra.FixedCompletions([]string{"record", "pause", "kill"}, cobra.ShellCompDirectiveNoFileComp))
}

// message reads the flags; nil: nothing is said. Whoever names a reaction observes attempts, too.
func (f *callFlags) message() (*client.Calls, error) {
	if len(f.kinds) == 0 && f.onAttempt == "" {
		return nil, nil
	}
	c := &client.Calls{OnAttempt: f.onAttempt, Attempts: f.onAttempt != ""}
	for _, kind := range f.kinds {
		switch kind {
		case "attempts":
			c.Attempts = true
		case "exec":
			c.Exec = true
		case "connect":
			c.Connect = true
		case "open":
			c.Open = true
		case "none":
			if len(f.kinds) > 1 || f.onAttempt != "" {
				return nil, usageError("--calls none stands alone")
			}
		default:
			return nil, usageError("--calls %s is unknown; use attempts, exec, connect, open or none", clean(kind))
		}
	}
	return c, nil
}

func (a *app) callsCmd() *cobra.Command {
	var f callFlags
	var template, profile string
	var unset bool
	cmd := &cobra.Command{
		Use:   "calls [flags]",
		Short: "Show or set which system calls are recorded by default",
		Long: `Show which system calls of sandboxes are observed and recorded in the journal where their create does
not say; with flags, set it for a template (or a commit or its tag) or for a profile. The first line that fits
a sandbox decides. Sandboxes that are there keep what they have. Only an administrator sets it, and without
an administrator's key a create can only ask for more.

Exit codes: 0, or 125 when it could not be done.`,
		Example: `  casemate calls
  casemate calls --profile locked --calls attempts,exec --on-attempt pause
  casemate calls --template code-interpreter --calls none
  casemate calls --template code-interpreter --unset`,
		Args: exactly(0, "no arguments"),
	}
	cmd.RunE = a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
		calls, err := f.message()
		if err != nil {
			return err
		}
		of := template != "" || profile != ""
		switch {
		case of && unset == (calls != nil):
			return usageError("with --template or --profile goes --calls, --on-attempt or --unset")
		case !of && (unset || calls != nil):
			return usageError("--calls, --on-attempt and --unset go with --template or --profile")
		case !of:
			list, err := c.Calls.List(ctx)
			if err != nil {
				return cannot(err, "show which system calls are recorded")
			}
			return a.showCallDefaults(list)
		}
		list, err := c.Calls.Set(ctx, &client.CallDefault{Template: template, Profile: profile, Calls: calls})
		if err != nil {
			return cannot(err, "set which system calls are recorded")
		}
		return a.showCallDefaults(list)
	})
	f.register(cmd, "nothing is changed")
	cmd.Flags().StringVar(&template, "template", "", "of sandboxes that start from `TEMPLATE`")
	cmd.Flags().StringVar(&profile, "profile", "", "of sandboxes of this profile: locked or standard")
	cmd.Flags().BoolVar(&unset, "unset", false, "take the default of the template or profile away")
	_ = cmd.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions([]string{"locked", "standard"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) showCallDefaults(list []*client.CallDefault) error {
	if a.json {
		return printList(a, "defaults", list)
	}
	t := &table{head: []string{"SANDBOXES OF", "RECORDED", "AN ATTEMPT"}}
	for _, d := range list {
		of := "all others"
		switch {
		case d.GetTemplate() != "":
			of = "template " + d.GetTemplate()
		case d.GetProfile() != "":
			of = "profile " + d.GetProfile()
		}
		t.add(of, kindsOf(d.GetCalls()), cmp.Or(d.GetCalls().GetOnAttempt(), "-"))
	}
	a.table(t)
	return nil
}

// kindsOf names the system calls that are observed.
func kindsOf(c *client.Calls) string {
	var kinds []string
	add := func(on bool, kind string) {
		if on {
			kinds = append(kinds, kind)
		}
	}
	add(c.GetAttempts(), "attempts")
	add(c.GetExec(), "exec")
	add(c.GetConnect(), "connect")
	add(c.GetOpen(), "open")
	if len(kinds) == 0 {
		return "none"
	}
	return strings.Join(kinds, ", ")
}
