package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) logCmd() *cobra.Command {
	var tagged, all bool
	var limit int
	cmd := &cobra.Command{
		Use:   "log [flags] [SANDBOX]",
		Short: "List commits, the newest first",
		Long: `List commits, the newest first: those of one sandbox, which may be gone, or all that you may see. Those
that were made on the way to something else (a fork, a checkout) show with --all.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate log web
  casemate log --tagged --json`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req := &client.ListCommitsRequest{Tagged: tagged, Automatic: all}
			if len(args) > 0 {
				req.Sandbox = args[0]
			}
			list, err := commits(ctx, c, req, limit)
			if err != nil {
				return cannot(err, "list commits")
			}
			if a.json {
				return printList(a, "commits", list)
			}
			a.table(commitTable(list))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&tagged, "tagged", false, "only those with a tag")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that were made on the way to something else")
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "at most so many")
	return cmd
}

// commits lists at most limit commits, over all pages.
func commits(ctx context.Context, c *client.Client, req *client.ListCommitsRequest, limit int) ([]*client.Commit, error) {
	var all []*client.Commit
	for len(all) < limit {
		req.PageSize = int32(min(limit-len(all), 1000)) //nolint:gosec // bounded in the same line
		page, next, err := c.Commits.List(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next == "" {
			break
		}
		req.PageToken = next
	}
	return all, nil
}

func commitTable(list []*client.Commit) *table {
	now := time.Now()
	t := &table{head: []string{"COMMIT", "TAGS", "AGE", "SIZE", "SANDBOX", "PARENT", "MESSAGE"}}
	for _, c := range list {
		message, _, _ := strings.Cut(c.GetMessage(), "\n")
		parent := "-"
		if c.GetParent() != "" {
			parent = c.GetParent()[:min(len(c.GetParent()), 12)]
		}
		t.add(cell{c.GetId(), yellow}, cell{strings.Join(c.GetTags(), ", "), green}, ago(when(c.GetCreatedAt()), now),
			formatSize(c.GetBytes()), c.GetName(), parent, message)
	}
	return t
}
