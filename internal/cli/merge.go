package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) mergeCmd() *cobra.Command {
	var ours, theirs []string
	req := &client.MergeRequest{}
	cmd := &cobra.Command{
		Use:   "merge [flags] INTO FROM",
		Short: "Take what one state changed into another one",
		Long: `Take what FROM changed since a common ancestor into INTO. Each is a sandbox or a commit; the result is a
commit with both as parents. A sandbox that is merged into has its files committed first, and starts anew
with the merged ones, as by "casemate checkout"; one that is paused stays so.

Files are merged as wholes: contents, owner, mode, each attribute and the names of hard links by themselves.
Where both sides changed the same in different ways, nothing is guessed: the conflicts are listed and
nothing changes, until --ours or --theirs settles each. --text merges text files that both changed line by
line, where the changes don't touch.

Exit codes: 0 when it was merged or there was nothing to merge, 1 on conflicts, 125 on failure.`,
		Example: `  casemate merge web try-1
  casemate merge web try-2 --dry-run
  casemate merge web try-2 --theirs /home/user/app --ours /
  casemate merge web/ready cmt_3f9a --text --tag web/both`,
		Args:              exactly(2, "what to merge into, and what to merge"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req.Into, req.From = args[0], args[1]
			for side, paths := range map[string][]string{"ours": ours, "theirs": theirs} {
				for _, p := range paths {
					req.Choices = append(req.Choices, &client.MergeChoice{Path: p, Side: side})
				}
			}
			got, err := c.History.Merge(ctx, req)
			if err != nil {
				return cannot(err, "merge %s into %s", args[1], args[0])
			}
			return a.printMerge(req, got)
		}),
	}
	f := cmd.Flags()
	f.StringArrayVar(&ours, "ours", nil, "settle conflicts at and below this path by keeping what INTO has; / is everything")
	f.StringArrayVar(&theirs, "theirs", nil, "settle them by taking what FROM has")
	f.StringVar(&req.Base, "base", "", "the commit that both come from, instead of their nearest common ancestor")
	f.BoolVar(&req.Text, "text", false, "merge text files line by line")
	f.BoolVarP(&req.DryRun, "dry-run", "n", false, "tell what would come of it, and change nothing")
	f.StringVarP(&req.Message, "message", "m", "", "what it is, for people")
	f.StringVarP(&req.Tag, "tag", "t", "", "a name for the result; the commit that has it loses it")
	return cmd
}

func (a *app) printMerge(req *client.MergeRequest, got *client.Merged) error {
	failed := error(nil)
	if got.GetOutcome() == client.MergeConflicts {
		failed = &exitError{code: 1, text: fmt.Sprintf("%s; settle each with --ours PATH or --theirs PATH",
			plural(int64(len(got.GetConflicts())), "conflict", "conflicts"))}
	}
	if a.json {
		if err := a.printJSON(got); err != nil {
			return err
		}
		return failed
	}
	switch got.GetOutcome() {
	case client.MergeConflicts:
		a.table(conflictTable(got.GetConflicts()))
	case client.MergeUpToDate:
		a.note("nothing to merge: %s has it already", req.GetInto())
	case client.MergeForward:
		fmt.Fprintln(a.stdout, got.GetCommit().GetId())
		a.note("%s comes from %s, so it is the result", req.GetFrom(), req.GetInto())
	default:
		if req.GetDryRun() {
			return a.printChanges(got.GetChanges(), nil)
		}
		fmt.Fprintln(a.stdout, got.GetCommit().GetId())
		a.note("%s changed", plural(int64(got.GetChanged()), "file", "files"))
		if saved := got.GetSaved(); saved != nil {
			a.note("what it had before is %s", saved.GetId())
		}
	}
	return failed
}

func conflictTable(conflicts []*client.MergeConflict) *table {
	t := &table{head: []string{"CONFLICT", "PATH", "WHAT", "OURS", "THEIRS"}}
	for _, c := range conflicts {
		t.add(cell{c.GetKind(), red}, c.GetPath(), strings.Join(c.GetWhat(), ", "), describeFile(c.GetOurs()), describeFile(c.GetTheirs()))
	}
	return t
}

// describeFile tells in a few words what a state has at a path.
func describeFile(s *client.FileState) string {
	switch {
	case s == nil:
		return "-"
	case s.GetType() == "file":
		return fmt.Sprintf("%04o %d:%d %s", s.GetMode(), s.GetUid(), s.GetGid(), formatSize(s.GetSize()))
	}
	return fmt.Sprintf("%s %04o %d:%d", s.GetType(), s.GetMode(), s.GetUid(), s.GetGid())
}
