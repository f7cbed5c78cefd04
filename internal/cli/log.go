package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) logCmd() *cobra.Command {
	var tagged, all, tree bool
	var limit int
	cmd := &cobra.Command{
		Use:   "log [flags] [SANDBOX]",
		Short: "List commits, the newest first",
		Long: `List commits, the newest first: those of one sandbox, which may be gone, or all that you may see. Those that
were made on the way to something else (a fork, a checkout) show with --all, and always with --graph, which
draws how commits come from each other: lines part where a fork was made and join where one was merged. Of
one sandbox it also shows what its commits come from, and what came of them elsewhere.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate log web
  casemate log --graph
  casemate log --tagged --json`,
		Args:              between(0, 1, "at most one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req := &client.ListCommitsRequest{Tagged: tagged, Automatic: all || tree}
			if len(args) > 0 {
				req.Sandbox = args[0]
			}
			list, err := commits(ctx, c, req, limit)
			if err != nil {
				return cannot(err, "list commits")
			}
			if tree && req.GetSandbox() != "" {
				everything, err := commits(ctx, c, &client.ListCommitsRequest{Automatic: true}, maxGraph)
				if err != nil {
					return cannot(err, "list commits")
				}
				list = family(everything, list)
			}
			if a.json {
				return printList(a, "commits", list)
			}
			if tree {
				return a.writeGraph(list)
			}
			a.table(commitTable(list))
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&tree, "graph", "g", false, "as a tree, with forks and merges")
	cmd.Flags().BoolVar(&tagged, "tagged", false, "only those with a tag")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that were made on the way to something else")
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "at most so many")
	return cmd
}

// maxGraph is how many commits are looked at to find the relatives of a sandbox's.
const maxGraph = 10_000

// family returns those commits of all, the newest first, that some come from, or that come from one of them.
func family(all, some []*client.Commit) []*client.Commit {
	up, down := map[string]bool{}, map[string]bool{}
	for _, c := range some {
		up[c.GetId()], down[c.GetId()] = true, true
	}
	for _, c := range all { // children come before their parents
		if up[c.GetId()] {
			up[c.GetParent()], up[c.GetMerged()] = true, true
		}
	}
	delete(down, "")
	for _, c := range slices.Backward(all) {
		if down[c.GetParent()] || down[c.GetMerged()] {
			down[c.GetId()] = true
		}
	}
	var out []*client.Commit
	for _, c := range all {
		if up[c.GetId()] || down[c.GetId()] {
			out = append(out, c)
		}
	}
	return out
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
		parent := "-"
		if c.GetParent() != "" {
			parent = c.GetParent()[:min(len(c.GetParent()), 12)]
		}
		t.add(cell{c.GetId(), yellow}, cell{joined(c.GetTags()), green}, ago(when(c.GetCreatedAt()), now),
			formatSize(c.GetBytes()), c.GetName(), parent, firstLine(c.GetMessage()))
	}
	return t
}
