package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) gcCmd() *cobra.Command {
	var dry bool
	var older time.Duration
	cmd := &cobra.Command{
		Use:   "gc [flags]",
		Short: "Remove commits and layers that nobody needs",
		Long: `Remove layers that no commit and no sandbox needs, commits that were made on the way to something else
(a fork, a checkout) a day ago or more, and with --older-than all commits of that age that have no tag. What a
sandbox was started from, or was last committed to, stays. Needs an admin key.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate gc --dry-run
  casemate gc --older-than 168h`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			got, err := c.Commits.Collect(ctx, older, dry)
			if err != nil {
				return cannot(err, "clean up the store")
			}
			if a.json {
				return a.printJSON(got)
			}
			if len(got.GetCommits()) > 0 {
				a.table(commitTable(got.GetCommits()))
			}
			verb := "removed"
			if dry {
				verb = "would remove"
			}
			fmt.Fprintf(a.stdout, "%s %s and %s, %s\n", verb, plural(int64(len(got.GetCommits())), "commit", "commits"),
				plural(int64(got.GetLayers()), "layer", "layers"), formatSize(got.GetBytes()))
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&dry, "dry-run", "n", false, "tell what would be removed, and remove nothing")
	cmd.Flags().DurationVar(&older, "older-than", 0, "also commits of this age that have no tag, as in 168h")
	return cmd
}
