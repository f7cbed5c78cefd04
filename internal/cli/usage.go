package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/client"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/meter"
)

// usageQuery says of what the use is asked for.
type usageQuery struct {
	by, since, until string
	key              string
	heads            []string

	period meter.Period // what since and until stand for
}

// usedRow is the use of one sandbox, or the sum of several, as programs get it.
type usedRow struct {
	Sandbox   string `json:"sandbox,omitempty"`
	Name      string `json:"name,omitempty"`
	Template  string `json:"template,omitempty"`
	Principal string `json:"principal,omitempty"`
	Ended     bool   `json:"ended"` // of one: nothing more will come
	meter.Usage
}

// usageReport is what usage says to programs.
type usageReport struct {
	Usage []usedRow   `json:"usage"`
	Total meter.Usage `json:"total"`
	// KeyGiven says, of a bundle, that the key was given which vouches for it.
	KeyGiven *bool `json:"key_given,omitempty"`
	// Missing says, of a bundle, which events it does not hold.
	Missing []string `json:"missing,omitempty"`
}

func (a *app) usageCmd() *cobra.Command {
	var q usageQuery
	cmd := &cobra.Command{
		Use:   "usage [flags] [SANDBOX|BUNDLE]",
		Short: "Tell what sandboxes used: execution, processors, memory, network",
		Long: `Tell what sandboxes used, those that have ended included, from the events of the journal alone:

  EXECUTED   for how long at least one process or run of code was executing; not the sandbox's life
  CPU        the processor time that the kernel counted for it
  MEMORY     the memory that it held, by for how long: 1 GiB for a minute is 60 GiB·s
  SENT       bytes that left it through the gateway, and RECEIVED, that came into it

Sums are by --by template or principal (the key that made the sandbox). A key sees what is its own, an admin
key and root all. Without --since and --until it is of all times; otherwise times are cut at the period's
ends, and what was measured counts when it was recorded, so that periods add up.

What has a dot or a slash in its name is a bundle of "casemate journal export", which is verified first (--key
and --head as in "casemate verify"): the same figures, without a server. docs/usage.md says how each is
measured, and what is open while a sandbox goes on.

Exit codes: 0; 2 when a bundle was changed or is not whole; 125 when there is no such sandbox, or
the server can't be asked.`,
		Example: `  casemate usage web
  casemate usage --by principal --since 2026-11-01 --until 2026-12-01 --json
  casemate journal export web -o web.bundle && casemate usage ./web.bundle`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return exactly(1, "one sandbox or bundle, or none")(cmd, args)
			}
			return nil
		},
		ValidArgsFunction: a.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := q.check(args, time.Now()); err != nil {
				return err
			}
			if len(args) == 1 && isBundle(args[0]) {
				return a.usageOfBundle(cmd.Context(), args[0], q)
			}
			return a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
				return a.usageOfServer(ctx, c, args, q)
			})(cmd, args)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&q.by, "by", "", "sum up by sandbox (default), template or principal")
	fl.StringVar(&q.since, "since", "", "only from this `TIME` on: 24h ago, 15:04, 2006-01-02 or 2006-01-02T15:04:05Z")
	fl.StringVar(&q.until, "until", "", "only up to this `TIME`")
	fl.StringVar(&q.key, "key", "", "of a bundle: the public `KEY` of the log, or a file with it")
	fl.StringArrayVar(&q.heads, "head", nil, "of a bundle: a `FILE` or URL with checkpoints that were given out before (repeatable)")
	_ = cmd.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"sandbox", "template", "principal"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// check completes the query.
func (q *usageQuery) check(args []string, now time.Time) (err error) {
	switch q.by {
	case "", "sandbox", "template", "principal":
	default:
		return usageError("--by %s is none of sandbox, template, principal", clean(q.by))
	}
	if len(args) == 1 && q.by != "" && q.by != "sandbox" {
		return usageError("the use of one sandbox is no sum: leave out --by or the sandbox")
	}
	if (q.key != "" || len(q.heads) > 0) && (len(args) == 0 || !isBundle(args[0])) {
		return usageError("--key and --head are for bundles")
	}
	if q.period.Since, err = parseMoment("--since", q.since, now); err != nil {
		return err
	}
	if q.period.Until, err = parseMoment("--until", q.until, now); err != nil {
		return err
	}
	if p := q.period; !p.Until.IsZero() && !p.Since.Before(p.Until) {
		return usageError("--until is not after --since")
	}
	return nil
}

func (a *app) usageOfServer(ctx context.Context, c *client.Client, args []string, q usageQuery) error {
	req := &client.UsageRequest{By: q.by}
	if len(args) == 1 {
		req.Sandbox = args[0]
	}
	if t := q.period.Since; !t.IsZero() {
		req.Since = timestamppb.New(t)
	}
	if t := q.period.Until; !t.IsZero() {
		req.Until = timestamppb.New(t)
	}
	list, err := c.Meter.All(ctx, req)
	if err != nil {
		return cannot(err, "tell what was used")
	}
	r := usageReport{Usage: []usedRow{}}
	for _, m := range list {
		r.Usage = append(r.Usage, rowOf(m))
	}
	return a.tellUsage(r, req.GetSandbox() != "", q.by)
}

func rowOf(m *client.MeteredUsage) usedRow {
	row := usedRow{
		Sandbox: m.GetSandbox(), Name: m.GetName(), Template: m.GetTemplate(), Principal: m.GetPrincipal(), Ended: m.GetEnded(),
		Usage: meter.Usage{
			Sandboxes: m.GetSandboxes(), ExecutionUS: m.GetExecutionUs(), RunningUS: m.GetRunningUs(), PausedUS: m.GetPausedUs(),
			CPUUS: m.GetCpuUs(), MemoryByteSeconds: m.GetMemoryByteSeconds(), SentBytes: m.GetSentBytes(),
			ReceivedBytes: m.GetReceivedBytes(), Processes: m.GetProcesses(), Runs: m.GetRuns(), Open: m.GetOpen(),
			OpenConnections: m.GetOpenConnections(), Gaps: m.GetGaps(), UnmeteredUS: m.GetUnmeteredUs(),
		},
	}
	if m.GetMeteredUntil() != nil {
		t := m.GetMeteredUntil().AsTime()
		row.MeteredUntil = &t
	}
	return row
}

// usageOfBundle tells what a bundle's sandbox used.
func (a *app) usageOfBundle(ctx context.Context, path string, q usageQuery) error {
	record := meter.NewRecord(q.period)
	report, err := reliedOn(ctx, path, q.key, q.heads, func(event json.RawMessage, _ []bundle.Body) {
		var e meter.Event
		if json.Unmarshal(event, &e) == nil { // else its integrity does not hold
			record.Add(e)
		}
	})
	if err != nil {
		return err
	}
	r := usageReport{KeyGiven: &report.KeyGiven}
	for _, p := range report.Completeness.Problems {
		r.Missing = append(r.Missing, p.What)
	}
	r.Usage = []usedRow{{
		Sandbox: report.Sandbox, Name: record.Name, Template: record.Template, Principal: record.Principal, Ended: record.Ended, Usage: record.Usage(),
	}}
	if err := a.tellUsage(r, true, ""); err != nil {
		return err
	}
	if len(r.Missing) > 0 {
		return &exitError{code: exitUnanswered, text: "events are missing in the bundle: " + r.Missing[0], hint: "see: casemate verify " + path}
	}
	return nil
}

// tellUsage shows figures; one says that they are of one sandbox that was asked for.
func (a *app) tellUsage(r usageReport, one bool, by string) error {
	for _, row := range r.Usage {
		r.Total.Add(row.Usage)
	}
	switch {
	case a.json:
		return a.printJSON(r)
	case one && len(r.Usage) == 1:
		a.tellUsageOf(r)
	default:
		a.table(usageTable(r, by))
		a.tellOpen(r.Total)
	}
	return nil
}

func usageTable(r usageReport, by string) *table {
	t := &table{head: []string{"SANDBOX", "NAME", "TEMPLATE", "EXECUTED", "CPU", "MEMORY", "SENT", "RECEIVED", "PROCESSES"}}
	switch by {
	case "template", "principal":
		t.head = append([]string{map[string]string{"template": "TEMPLATE", "principal": "PRINCIPAL"}[by], "SANDBOXES"}, t.head[3:]...)
	}
	figures := func(u meter.Usage) []any {
		return []any{
			micros(u.ExecutionUS), micros(u.CPUUS), byteSeconds(u.MemoryByteSeconds), formatSize(u.SentBytes), formatSize(u.ReceivedBytes),
			u.Processes + u.Runs,
		}
	}
	for _, row := range r.Usage {
		var who []any
		switch by {
		case "template":
			who = []any{cmp.Or(row.Template, "-"), row.Sandboxes}
		case "principal":
			who = []any{cmp.Or(row.Principal, "-"), row.Sandboxes}
		default:
			name := row.Name
			if name == row.Sandbox || name == "" {
				name = "-"
			}
			who = []any{row.Sandbox, shorten(name, 32), row.Template}
		}
		t.add(append(who, figures(row.Usage)...)...)
	}
	if len(r.Usage) > 1 {
		who := []any{cell{"total", bold}, fmt.Sprint(r.Total.Sandboxes)}
		if len(t.head) == 9 {
			who = append(who, "")
		}
		t.add(append(who, figures(r.Total)...)...)
	}
	return t
}

// tellUsageOf shows the figures of one sandbox.
func (a *app) tellUsageOf(r usageReport) {
	row := r.Usage[0]
	t := &table{}
	of := row.Sandbox
	if row.Name != "" && row.Name != row.Sandbox {
		of += " (" + row.Name + ")"
	}
	t.add("sandbox", of)
	t.add("template", row.Template)
	t.add("principal", row.Principal)
	t.add("executed", fmt.Sprintf("%s, %s, %s", micros(row.ExecutionUS), plural(row.Processes, "process", "processes"),
		plural(row.Runs, "run of code", "runs of code")))
	t.add("life", fmt.Sprintf("%s running, %s paused", micros(row.RunningUS), micros(row.PausedUS)))
	t.add("cpu", micros(row.CPUUS))
	t.add("memory", byteSeconds(row.MemoryByteSeconds))
	t.add("network", fmt.Sprintf("%s sent, %s received", formatSize(row.SentBytes), formatSize(row.ReceivedBytes)))
	a.table(t)
	a.tellOpen(row.Usage)
	if r.KeyGiven != nil && !*r.KeyGiven {
		a.note("the bundle's own key vouches for it: --key names the server's")
	}
}

// tellOpen says what the figures do not hold.
func (a *app) tellOpen(u meter.Usage) {
	if u.Open > 0 || u.OpenConnections > 0 {
		a.note("open: %s, and %s, whose bytes count once they end", plural(u.Open, "process or run", "processes and runs"),
			plural(u.OpenConnections, "connection", "connections"))
	}
	if u.MeteredUntil != nil {
		a.note("cpu and memory are counted until %s; more is to come", u.MeteredUntil.Local().Format(time.DateTime))
	}
	if u.UnmeteredUS > 0 {
		a.note("for %s nobody read what was used: the server was down, or the sandbox was lost", micros(u.UnmeteredUS))
	}
	if u.Gaps > 0 {
		a.note("%s in the record may hide more", plural(u.Gaps, "gap", "gaps"))
	}
}

// micros writes microseconds for people.
func micros(us int64) string { return formatDuration(time.Duration(us) * time.Microsecond) }

// byteSeconds writes byte-seconds for people.
func byteSeconds(n int64) string { return formatSize(n) + "·s" }
