package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) lineageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lineage [flags] COMMIT [OTHER]",
		Short: "Show what a commit comes from, and what came of it",
		Long: `Show what a commit comes from, which commits came of it, and the sandboxes whose files come from it. With
another commit, print their nearest common ancestor instead, which is where "casemate merge" begins: one id
a line, where there are several; none where they have only their template in common.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate lineage web/ready
  casemate lineage web/ready try/best`,
		Args: between(1, 2, "a commit, and perhaps another one"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 2 {
				return a.commonAncestors(ctx, c, args[0], args[1])
			}
			got, err := c.History.Lineage(ctx, args[0])
			if err != nil {
				return cannot(err, "show the lineage of %s", args[0])
			}
			if a.json {
				return a.printJSON(got)
			}
			a.writeLineage(got)
			return nil
		}),
	}
	return cmd
}

func (a *app) commonAncestors(ctx context.Context, c *client.Client, left, right string) error {
	all, err := c.History.CommonAncestors(ctx, left, right)
	if err != nil {
		return cannot(err, "find what %s and %s have in common", left, right)
	}
	if a.json {
		return printList(a, "ancestors", all)
	}
	for _, r := range all {
		fmt.Fprintln(a.stdout, r.GetId())
		if r.GetCommit() == nil {
			a.note("%s was removed", r.GetId())
		}
	}
	if len(all) == 0 {
		a.note("they have only their template in common")
	}
	return nil
}

func (a *app) writeLineage(l *client.Lineage) {
	now := time.Now()
	t := &table{head: []string{"", "COMMIT", "TAGS", "AGE", "SANDBOX", "MESSAGE"}}
	add := func(what string, all []*client.Relative) {
		for _, r := range all {
			c := r.GetCommit()
			if c == nil {
				t.add(what, cell{r.GetId(), faint}, "", "", "", cell{"removed", faint})
				continue
			}
			t.add(what, cell{c.GetId(), yellow}, cell{joined(c.GetTags()), green}, ago(when(c.GetCreatedAt()), now), c.GetName(), firstLine(c.GetMessage()))
		}
	}
	add("descendant", l.GetDescendants())
	c := l.GetCommit()
	t.add(cell{"this", bold}, cell{c.GetId(), yellow}, cell{joined(c.GetTags()), green}, ago(when(c.GetCreatedAt()), now), c.GetName(), firstLine(c.GetMessage()))
	add("ancestor", l.GetAncestors())
	a.table(t)
	if len(l.GetSandboxes()) == 0 {
		return
	}
	fmt.Fprintln(a.stdout)
	t = &table{head: []string{"SANDBOX", "NAME", "STATE", "LAST AT"}}
	for _, s := range l.GetSandboxes() {
		t.add(s.GetId(), s.GetName(), s.GetState(), cell{s.GetHead(), yellow})
	}
	a.table(t)
}
