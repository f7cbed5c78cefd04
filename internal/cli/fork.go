package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) forkCmd() *cobra.Command {
	var count int32
	var name string
	var live bool
	cmd := &cobra.Command{
		Use:   "fork [flags] SANDBOX",
		Short: "Make sandboxes with the files that another one has now",
		Long: `Make new sandboxes with the files, settings, environment and labels that a sandbox has now, and print their
ids. Each goes its own way from there, and the sandbox itself goes on. No process comes along, unless --live
is given: then each goes on with all processes that the sandbox has, but for their connections to and from
outside. Only isolation gvisor can do that.

Exit codes: 0 when all were made, 1 when some were not, 125 when none was.`,
		Example: `  casemate fork web
  casemate fork web --count 10 --name try
  casemate fork web --live`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if count < 1 {
				return usageError("--count is %d: at least one fork is made", count)
			}
			forks, err := c.Commits.Fork(ctx, &client.ForkRequest{Sandbox: args[0], Count: count, Name: name, Live: live})
			if err != nil {
				return cannot(err, "fork sandbox %s", args[0])
			}
			return a.printForks(forks)
		}),
	}
	cmd.Flags().Int32VarP(&count, "count", "n", 1, "how many, up to 100")
	cmd.Flags().BoolVar(&live, "live", false, "go on with its processes")
	cmd.Flags().StringVar(&name, "name", "", "their name, with -1, -2, … where they are several")
	return cmd
}

func (a *app) printForks(forks *client.Forks) error {
	failed := 0
	for _, f := range forks.GetForks() {
		if f.GetSandbox() == nil {
			failed++
		}
	}
	if a.json {
		if err := a.printJSON(forks); err != nil {
			return err
		}
	} else {
		for _, f := range forks.GetForks() {
			if f.GetSandbox() == nil {
				a.warn("a fork could not be made: %s", f.GetError())
				continue
			}
			fmt.Fprintln(a.stdout, f.GetSandbox().GetId())
			a.warnMissing(f.GetSandbox())
		}
	}
	switch {
	case failed == 0:
		return nil
	case failed < len(forks.GetForks()):
		return &exitError{code: 1, text: fmt.Sprintf("%d of %d forks could not be made", failed, len(forks.GetForks()))}
	}
	return &exitError{code: 125, text: "no fork could be made"}
}
