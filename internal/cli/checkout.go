package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) checkoutCmd() *cobra.Command {
	var discard bool
	cmd := &cobra.Command{
		Use:   "checkout [flags] SANDBOX COMMIT",
		Short: "Take a sandbox to the files of a commit",
		Long: `Put the files of a commit in the place of a sandbox's. Its processes end, and it starts anew with the same
id, name, environment and limits; one that is paused starts with "casemate resume". What it has now is
committed first, so that you can go back, unless you --discard it.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate checkout web web/ready`,
		Args:    exactly(2, "a sandbox and a commit"), ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			got, err := c.Commits.Checkout(ctx, &client.CheckoutRequest{Sandbox: args[0], Commit: args[1], Discard: discard})
			if err != nil {
				return cannot(err, "check out %s in sandbox %s", args[1], args[0])
			}
			if a.json {
				return a.printJSON(got)
			}
			fmt.Fprintln(a.stdout, got.GetSandbox().GetId(), got.GetSandbox().GetState())
			if saved := got.GetSaved(); saved != nil {
				a.note("what it had before is %s", saved.GetId())
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&discard, "discard", false, "drop what the sandbox has now")
	return cmd
}
