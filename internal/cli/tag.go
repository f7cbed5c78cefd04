package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) tagCmd() *cobra.Command {
	var remove bool
	cmd := &cobra.Command{
		Use:   "tag [flags] COMMIT NAME",
		Short: "Name a commit",
		Long: `Give a commit a name, which the commit that has it loses; with --delete take it away. A name stands
wherever a commit or a template is asked for, and keeps its commit from "casemate gc".

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate tag cmt_3f9a web/ready
  casemate tag --delete web/ready web/ready`,
		Args: exactly(2, "a commit and a name"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			change := c.Commits.Tag
			if remove {
				change = c.Commits.Untag
			}
			got, err := change(ctx, args[0], args[1])
			if err != nil {
				return cannot(err, "tag commit %s", args[0])
			}
			if a.json {
				return a.printJSON(got)
			}
			fmt.Fprintln(a.stdout, got.GetId())
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&remove, "delete", "d", false, "take the name away")
	return cmd
}
