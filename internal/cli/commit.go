package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) commitCmd() *cobra.Command {
	var message, tag string
	var memory bool
	cmd := &cobra.Command{
		Use:   "commit [flags] SANDBOX",
		Short: "Save the files of a sandbox",
		Long: `Save the files of a sandbox as they are now, those of its workspaces included, and print the commit's id.
One that runs stands still for a few milliseconds; one that is paused stays so.

With --memory its processes are saved as well, which takes as long as writing out their memory: what starts
from the commit goes on where they were. Only isolation gvisor can.

A commit never changes. New sandboxes start from it ("casemate create --template COMMIT"), and a sandbox goes
back to it ("casemate checkout"). "casemate log" lists commits.

Exit codes: 0, or 125 when it could not be saved.`,
		Example: `  casemate commit web -m 'packages installed' --tag web/ready
  casemate create --template web/ready`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			made, err := c.Commits.Create(ctx, &client.CommitRequest{Sandbox: args[0], Message: message, Tag: tag, Memory: memory})
			if err != nil {
				return cannot(err, "commit sandbox %s", args[0])
			}
			if a.json {
				return a.printJSON(made)
			}
			fmt.Fprintln(a.stdout, made.GetId())
			if _, tty := terminal(a.stderr); tty {
				a.note("%s more kept, stood still for %s", formatSize(made.GetBytes()), formatDuration(made.GetFrozen().AsDuration()))
			}
			return nil
		}),
	}
	cmd.Flags().StringVarP(&message, "message", "m", "", "what it is, for people")
	cmd.Flags().BoolVar(&memory, "memory", false, "save its processes as well")
	cmd.Flags().StringVarP(&tag, "tag", "t", "", "a name for it; the commit that has it loses it")
	return cmd
}
