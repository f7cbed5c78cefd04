package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) journalCmd() *cobra.Command {
	var follow bool
	t := &teller{app: a}
	cmd := &cobra.Command{
		Use:   "journal [flags] SANDBOX",
		Short: "Tell what happened in a sandbox",
		Long: `Tell the story of a sandbox from the journal, which the server keeps outside it: who did what, when, and
how it ended. Also for sandboxes that are gone.

For administrators, @server in the place of a sandbox tells what happened to the server's own: its secrets.

Filters leave out what does not fit; several of one kind widen, different kinds narrow:

  --type process          all events of processes; --type process.ended only their ends
  --process prc_abc       events of a process, by its id or the beginning of it
  --since 10m             of the last ten minutes, or since a time: 15:04 or 2006-01-02T15:04:05Z
  --actor key_abc         what this principal asked for
  --path /home/user       events about this file, or what lies below this directory
  --host example.com      connections to this host, or to those below it

With --output what programs and code said shows under their ends, as far as it is kept. With --facts every
recorded fact shows, with who observed it: the kernel, the server, or the guest. What only the guest saw,
such as an exit code, is the word of a program inside the sandbox, and proves nothing.

Exit codes: 0, or 125 when there is no such sandbox.`,
		Example: `  casemate journal web
  casemate journal web --output --since 10m
  casemate journal web --type network --host example.com
  casemate journal web --follow
  casemate journal web --json | jq .type`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if err := t.keep.check(time.Now()); err != nil {
				return err
			}
			if t.last < 0 {
				return usageError("--last can't be negative")
			}
			id, err := a.recordedID(ctx, c, args[0])
			if err != nil {
				return err
			}
			t.client, t.id = c, id
			if t.last > 0 || !follow {
				if err := t.all(ctx); err != nil {
					return cannot(err, "read the journal of %s", args[0])
				}
			}
			if follow {
				err := c.Journal.Follow(ctx, id, t.after, func(e *client.Event) error { return t.tell(ctx, e) })
				if ctx.Err() != nil {
					return nil // Ctrl-C is how following ends
				}
				return cannot(err, "follow the journal of %s", args[0])
			}
			return nil
		}),
	}
	cmd.AddCommand(a.journalExportCmd(), a.journalCheckpointCmd(), a.journalShowCmd(), a.journalRedactCmd())
	fl := cmd.Flags()
	fl.BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on")
	fl.BoolVar(&t.facts, "facts", false, "also every recorded fact")
	fl.BoolVar(&t.output, "output", false, "also what programs and code said")
	fl.Uint64Var(&t.after, "after", 0, "only events after this `NUMBER`")
	fl.IntVarP(&t.last, "last", "n", 0, "only the last `COUNT` events that fit")
	t.keep.register(fl)
	return cmd
}

// serverStream stands for the server in the place of a sandbox.
const serverStream = "@server"

// recordedID finds the id of a sandbox, or of the server's own events.
func (a *app) recordedID(ctx context.Context, c *client.Client, ref string) (string, error) {
	if ref == serverStream {
		return ref, nil
	}
	sb, err := c.Sandboxes.Get(ctx, ref)
	if err != nil {
		return "", cannot(err, "read the journal of %s", ref)
	}
	return sb.GetId(), nil
}

// teller prints events, one a line.
type teller struct {
	app           *app
	client        *client.Client
	id            string
	facts, output bool
	after         uint64
	last          int
	keep          eventFilter
	day           string
	maker         string // who made the sandbox, once that was told
}

// all tells what there is.
func (t *teller) all(ctx context.Context) error {
	const page = 1000
	var newest []*client.Event
	for {
		events, err := t.client.Journal.Events(ctx, t.id, t.after, page)
		if err != nil {
			return err
		}
		for _, e := range events {
			t.after = e.GetSeq()
			if t.last == 0 {
				err = t.tell(ctx, e)
			} else if t.knows(e) {
				if newest = append(newest, e); len(newest) > t.last {
					newest = newest[1:]
				}
			}
			if err != nil {
				return err
			}
		}
		if len(events) < page {
			break
		}
	}
	for _, e := range newest {
		if err := t.tell(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// knows reports whether an event is to be told, and learns from it in any case.
func (t *teller) knows(e *client.Event) bool {
	if e.GetType() == "sandbox.created" && t.maker == "" {
		t.maker = e.GetActor()
	}
	return t.keep.fits(e)
}

func (t *teller) tell(ctx context.Context, e *client.Event) error {
	maker := t.maker // before this event, so that the one who made the sandbox is told
	if !t.knows(e) {
		return nil
	}
	if t.app.json {
		return t.app.printJSON(e)
	}
	out, color := t.app.stdout, t.app.color(t.app.stdout)
	at := when(e.GetTime()).Local()
	if day := at.Format(time.DateOnly); day != t.day {
		t.day = day
		fmt.Fprintln(out, paint(day, faint, color))
	}
	s := tellEvent(e, maker)
	line := fmt.Sprintf("%s %s  %s", paint(at.Format("15:04:05.000"), faint, color), paint(fmt.Sprintf("%4d", e.GetSeq()), faint, color),
		paint(clean(s.text), s.style, color))
	if _, err := fmt.Fprintln(out, line); err != nil {
		return err
	}
	for _, l := range fileLines(e) {
		fmt.Fprintln(out, indent, paint(clean(l), faint, color))
	}
	if t.output {
		if err := t.said(ctx, e); err != nil {
			return err
		}
	}
	if t.facts {
		for _, f := range factLines(e) {
			fmt.Fprintln(out, indent, paint(f, faint, color))
		}
	}
	return nil
}

// indent stands in front of what belongs to the event above.
const indent = "                    "
