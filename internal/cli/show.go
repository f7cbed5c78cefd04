package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) showCmd() *cobra.Command {
	var v diffView
	var verify bool
	cmd := &cobra.Command{
		Use:   "show [flags] COMMIT [PATH…]",
		Short: "Show a commit and what it changed",
		Long: `Show a commit: what it is, and what it changed since its parent, as unified diffs for text. With --verify,
read all its files instead and tell their digest. The first one is recorded, with the commit and in the
journal, and held against each later one: commits with the same files have the same digest, whatever they
were made of.

Exit codes: 0, 1 when the files are not those of the recorded digest, 125 on failure.`,
		Example: `  casemate show web/ready
  casemate show --stat cmt_3f9a
  casemate show --verify web/ready`,
		Args: atLeast(1, "a commit"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if verify {
				return a.verifyCommit(ctx, c, args[0])
			}
			got, err := c.Commits.Get(ctx, args[0])
			if err != nil {
				return cannot(err, "show commit %s", args[0])
			}
			return a.showCommit(ctx, c, got, v, args[1:])
		}),
	}
	v.flags(cmd)
	cmd.Flags().BoolVar(&verify, "verify", false, "read all files, and tell their digest")
	return cmd
}

func (a *app) verifyCommit(ctx context.Context, c *client.Client, ref string) error {
	got, err := c.History.Verify(ctx, ref)
	if err != nil {
		return cannot(err, "verify commit %s", ref)
	}
	if a.json {
		if err := a.printJSON(got); err != nil {
			return err
		}
	} else {
		fmt.Fprintln(a.stdout, got.GetDigest())
		what := "recorded"
		if got.GetRecorded() != "" {
			what = "as recorded"
		}
		if got.GetIntact() {
			a.note("%s: %s, %s", what, plural(got.GetFiles(), "file", "files"), formatSize(got.GetBytes()))
		}
	}
	if !got.GetIntact() {
		return &exitError{code: 1, text: fmt.Sprintf("commit %s has changed: its digest was %s", got.GetCommit().GetId(), got.GetRecorded())}
	}
	return nil
}

func (a *app) showCommit(ctx context.Context, c *client.Client, commit *client.Commit, v diffView, paths []string) error {
	d, err := c.History.Diff(ctx, &client.DiffRequest{To: commit.GetId(), Paths: insidePaths(paths), Patches: v.patches(), Part: v.part()})
	if err != nil && client.KindOf(err) != client.FailedPrecondition {
		return cannot(err, "show commit %s", commit.GetId())
	}
	if a.json {
		return a.printJSON(map[string]any{"commit": rawJSON(commit), "files": rawList(d.GetFiles())})
	}
	a.writeCommit(commit)
	if err != nil { // its parent is gone
		text, _, _ := strings.Cut(err.Error(), "\n")
		a.note("no changes to show: %s", text)
		return nil
	}
	return a.writeFileDiffs(d.GetFiles(), v)
}

// writeCommit prints what a commit is.
func (a *app) writeCommit(c *client.Commit) {
	color := a.color(a.stdout)
	fmt.Fprintf(a.stdout, "%s", paint("commit "+c.GetId(), yellow, color))
	if len(c.GetTags()) > 0 {
		fmt.Fprintf(a.stdout, " (%s)", paint(clean(strings.Join(c.GetTags(), ", ")), green, color))
	}
	fmt.Fprintln(a.stdout)
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(a.stdout, "%-10s%s\n", name, clean(value))
		}
	}
	line("parent", c.GetParent())
	line("merged", c.GetMerged())
	line("sandbox", strings.TrimSpace(c.GetSandbox()+" "+c.GetName()))
	line("template", c.GetTemplate())
	line("author", c.GetAuthor())
	line("date", when(c.GetCreatedAt()).Format(time.RFC3339))
	line("size", formatSize(c.GetBytes())+" more kept")
	line("digest", c.GetDigest())
	if c.GetMessage() != "" {
		fmt.Fprintf(a.stdout, "\n    %s\n", strings.ReplaceAll(cleanLines(c.GetMessage()), "\n", "\n    "))
	}
	fmt.Fprintln(a.stdout)
}
