package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) rmCmd() *cobra.Command {
	var all bool
	var labels []string
	cmd := &cobra.Command{
		Use:     "rm SANDBOX… | --all | --label KEY=VALUE",
		Aliases: []string{"delete"},
		Short:   "End sandboxes, with their processes and files",
		Long: `End sandboxes with all their processes and files. What happened in them stays in the journal.

Exit codes: 0, or 125 when one of them could not be ended.`,
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if (len(args) > 0) == (all || len(labels) > 0) {
				return usageError("rm takes the sandboxes to end, or --all, or --label")
			}
			if len(args) == 0 {
				pairs, err := parsePairs("label", labels)
				if err != nil {
					return err
				}
				list, err := c.Sandboxes.All(ctx, &client.ListRequest{Labels: pairs})
				if err != nil {
					return cannot(err, "list sandboxes")
				}
				for _, s := range list {
					args = append(args, s.GetId())
				}
			}
			return a.remove(ctx, c, args)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "every sandbox that this principal may end")
	cmd.Flags().StringArrayVar(&labels, "label", nil, "every sandbox with label `KEY=VALUE` (repeatable)")
	return cmd
}

// remove ends each sandbox and goes on after a failure.
func (a *app) remove(ctx context.Context, c *client.Client, names []string) error {
	var failed []error
	var gone []*client.Sandbox
	for _, name := range names {
		sb, err := c.Sandboxes.Delete(ctx, name)
		if err != nil {
			err = cannot(err, "end sandbox %s", name)
			if len(names) == 1 {
				return err
			}
			failed = append(failed, err)
			report(a.stderr, err, a.color(a.stderr))
			continue
		}
		gone = append(gone, sb)
		forgetApplied(stateDir(a.getenv), sb.GetId())
		if !a.json {
			fmt.Fprintln(a.stdout, sb.GetId())
		}
	}
	if a.json {
		if err := printList(a, "sandboxes", gone); err != nil {
			return err
		}
	}
	if len(failed) > 0 {
		return &exitError{code: kindOf(errors.Join(failed...)).Map().Exit}
	}
	return nil
}
