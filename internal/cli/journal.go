package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) journalCmd() *cobra.Command {
	var follow, facts bool
	var after uint64
	cmd := &cobra.Command{
		Use:   "journal [flags] SANDBOX",
		Short: "Tell what happened in a sandbox",
		Long: `Tell the story of a sandbox from the journal, which the server keeps outside it: who did what, when, and
how it ended. Also for sandboxes that are gone.

For administrators, @server in the place of a sandbox tells what happened to the server's own: its secrets.

With --facts every recorded fact shows, with who observed it: the kernel, the server, or the guest. What
only the guest saw, such as an exit code, is the word of a program inside the sandbox, and proves nothing.

Exit codes: 0, or 125 when there is no such sandbox.`,
		Example: `  casemate journal web
  casemate journal web --follow
  casemate journal web --json | jq .type`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			id := args[0]
			if id != serverStream {
				sb, err := c.Sandboxes.Get(ctx, id)
				if err != nil {
					return cannot(err, "read the journal of %s", args[0])
				}
				id = sb.GetId()
			}
			t := &teller{app: a, facts: facts}
			if follow {
				err := c.Journal.Follow(ctx, id, after, t.tell)
				if ctx.Err() != nil {
					return nil // Ctrl-C is how following ends
				}
				return cannot(err, "follow the journal of %s", args[0])
			}
			const page = 1000
			for {
				events, err := c.Journal.Events(ctx, id, after, page)
				if err != nil {
					return cannot(err, "read the journal of %s", args[0])
				}
				for _, e := range events {
					after = e.GetSeq()
					if err := t.tell(e); err != nil {
						return err
					}
				}
				if len(events) < page {
					return nil
				}
			}
		}),
	}
	cmd.AddCommand(a.journalExportCmd(), a.journalCheckpointCmd())
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on")
	cmd.Flags().BoolVar(&facts, "facts", false, "also every recorded fact")
	cmd.Flags().Uint64Var(&after, "after", 0, "only events after this `NUMBER`")
	return cmd
}

// serverStream stands for the server in the place of a sandbox.
const serverStream = "@server"

// teller prints events, one a line.
type teller struct {
	app   *app
	facts bool
	day   string
	maker string // who made the sandbox, once that was told
}

func (t *teller) tell(e *client.Event) error {
	if t.app.json {
		return t.app.printJSON(e)
	}
	color := t.app.color(t.app.stdout)
	at := when(e.GetTime()).Local()
	if day := at.Format(time.DateOnly); day != t.day {
		t.day = day
		fmt.Fprintln(t.app.stdout, paint(day, faint, color))
	}
	s := tellEvent(e, t.maker)
	if e.GetType() == "sandbox.created" {
		t.maker = e.GetActor()
	}
	line := fmt.Sprintf("%s %s  %s", paint(at.Format("15:04:05.000"), faint, color), paint(fmt.Sprintf("%4d", e.GetSeq()), faint, color),
		paint(clean(s.text), s.style, color))
	if _, err := fmt.Fprintln(t.app.stdout, line); err != nil {
		return err
	}
	if t.facts {
		for _, f := range factLines(e) {
			fmt.Fprintln(t.app.stdout, "                    ", paint(f, faint, color))
		}
	}
	return nil
}
