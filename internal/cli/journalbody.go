package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// maxSaid bounds the lines of one output that are shown under an event.
const maxSaid = 20

// bodiesOf names the content that an event speaks of, observer and fact.
func bodiesOf(e *client.Event) []string {
	var out []string
	for _, o := range observers() {
		fields := e.GetFacts()[o].GetFields()
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if fields[name].GetStructValue().GetFields()["body"].GetStringValue() != "" {
				out = append(out, o+"."+name)
			}
		}
	}
	return out
}

// saidWhere tells which content of an event was said: by a program or code, under its end, and in a request and its answer.
func saidWhere(e *client.Event, name string) bool {
	switch e.GetType() {
	case "network.request", "model.used":
		return strings.HasSuffix(name, "_body")
	}
	return strings.HasSuffix(e.GetType(), ".ended") && strings.HasPrefix(name, "guest.")
}

// said shows what was said, under the event that tells of it.
func (t *teller) said(ctx context.Context, e *client.Event) error {
	color := t.app.color(t.app.stdout)
	for _, name := range bodiesOf(e) {
		if !saidWhere(e, name) {
			continue
		}
		b, err := t.client.Journal.Body(ctx, t.id, e.GetSeq(), name)
		mark, st := "│ ", faint
		switch name {
		case "guest.stderr":
			st = yellow
		case "server.request_body":
			mark = "│→ "
		case "server.answer_body":
			mark = "│← "
		}
		if client.KindOf(err) == client.NotFound {
			_, short, _ := strings.Cut(name, ".")
			fmt.Fprintln(t.app.stdout, indent, paint(mark+short+" is not kept any more, or never was", faint, color))
			continue
		}
		if err != nil {
			return err
		}
		lines := strings.Split(cleanLines(string(b.GetData())), "\n")
		more := len(lines) - maxSaid
		if more > 0 {
			lines = lines[:maxSaid]
		}
		for _, l := range lines {
			fmt.Fprintln(t.app.stdout, indent, paint(mark+l, st, color))
		}
		if more > 0 || int64(len(b.GetData())) < b.GetBytes() {
			fmt.Fprintln(t.app.stdout, indent, paint(fmt.Sprintf("… %s in all: casemate journal show %s %d --body %s",
				formatSize(b.GetBytes()), t.id, e.GetSeq(), name), faint, color))
		}
	}
	return nil
}

// parseEventNumber reads an event's counter.
func parseEventNumber(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n == 0 {
		return 0, usageError("%s is no event's number; casemate journal shows them", clean(s))
	}
	return n, nil
}

// oneEvent reads one event.
func oneEvent(ctx context.Context, c *client.Client, id string, number uint64) (*client.Event, error) {
	events, err := c.Journal.Events(ctx, id, number-1, 1)
	if err != nil {
		return nil, err
	}
	if len(events) == 0 || events[0].GetSeq() != number {
		return nil, errs.New(errs.NotFound, "there is no event %d", number).WithHint("casemate journal shows their numbers")
	}
	return events[0], nil
}

func (a *app) journalShowCmd() *cobra.Command {
	var body string
	cmd := &cobra.Command{
		Use:   "show [flags] SANDBOX EVENT",
		Short: "Show one event with all its facts, or content that it speaks of",
		Long: `Show one event of the journal, by its number: every fact with who observed it, and the names of the content
that it speaks of: arguments, input, output, code. With --body that content itself is written, byte for byte,
as far as it is kept; of long content that is the beginning and the end.

Exit codes: 0, or 125 when there is no such event or its content is not kept.`,
		Example: `  casemate journal show web 12
  casemate journal show web 12 --body guest.stdout`,
		Args: exactly(2, "a sandbox and the number of an event"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			number, err := parseEventNumber(args[1])
			if err != nil {
				return err
			}
			id, err := a.recordedID(ctx, c, args[0])
			if err != nil {
				return err
			}
			if body != "" {
				b, err := c.Journal.Body(ctx, id, number, body)
				if err != nil {
					return cannot(err, "read %s of event %d", body, number)
				}
				if left := b.GetBytes() - int64(len(b.GetData())); left > 0 {
					a.warn("%s of %s are not kept, before the last %s", formatSize(left), formatSize(b.GetBytes()), formatSize(b.GetTail()))
				}
				_, err = a.stdout.Write(b.GetData())
				return err
			}
			e, err := oneEvent(ctx, c, id, number)
			if err != nil {
				return cannot(err, "read event %d", number)
			}
			t := &teller{app: a, client: c, id: id, facts: true}
			return t.tell(ctx, e)
		}),
	}
	cmd.Flags().StringVar(&body, "body", "", "write the content of this `NAME`, as guest.stdout")
	return cmd
}

func (a *app) journalRedactCmd() *cobra.Command {
	var event uint64
	var bodies []string
	var reason string
	cmd := &cobra.Command{
		Use:   "redact [flags] SANDBOX",
		Short: "Erase content that an event speaks of",
		Long: `Erase content from the journal: arguments, input, output, code or a file's content that an event speaks of,
for instance because it holds a password. It goes from the server's disk for good.

The event stays, with a salted hash of the content, so that every proof holds; the salt is erased too, so that
nobody can try out what the content was. That it was erased, by whom and why is recorded as an event.

Bundles that were exported before still hold the content: lines that begin with {"body" may be taken out.

Exit codes: 0, or 125 when there is no such event or nothing to erase.`,
		Example: `  casemate journal redact web --event 12 --reason "a password on the command line"
  casemate journal redact web --event 12 --body guest.stdout`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if event == 0 {
				return usageError("name the event with --event; casemate journal shows their numbers")
			}
			id, err := a.recordedID(ctx, c, args[0])
			if err != nil {
				return err
			}
			e, err := c.Journal.Redact(ctx, id, event, bodies, reason)
			if err != nil {
				return cannot(err, "redact event %d of %s", event, args[0])
			}
			if a.json {
				return a.printJSON(e)
			}
			_, err = fmt.Fprintf(a.stdout, "erased %s of event %d; event %d records it\n", strings.ReplaceAll(said(e, "names"), " ", ", "), event, e.GetSeq())
			return err
		}),
	}
	cmd.Flags().Uint64Var(&event, "event", 0, "the `NUMBER` of the event")
	cmd.Flags().StringSliceVar(&bodies, "body", nil, "only the content of this `NAME`, as guest.stdout (repeatable; default all)")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}
