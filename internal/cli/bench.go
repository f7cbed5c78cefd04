package cli

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"casemate.dev/bench"
	"casemate.dev/client"
)

func (a *app) benchCmd() *cobra.Command {
	var o bench.Options
	cmd := &cobra.Command{
		Use:   "bench [flags]",
		Short: "Measure this server beside fork and exec, bubblewrap and runc",
		Long: `Measure the server through its API, beside what else starts a program on this machine in the same run:
plain fork and exec, bubblewrap, runc, and docker and runsc where they are there. Each row has its budget,
and the table says whether it held. Contexts are measured beside jupyter_client driving an ipykernel, where
--jupyter has installed them. A machine that does other work meanwhile makes every number worse.

Of row gateway, HTTPS with and without a credential put on is measured in a fake internet, in network
namespaces that are gone afterwards, with a server of its own: that part needs root.

Exit codes: 0 when every budget held, 1 when one was missed, 125 when it could not be measured.`,
		Example: `  casemate bench
  casemate bench --only create-cold,process-true --json`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			bar, done := a.newProgress(), 0
			rows := len(o.Only)
			if rows == 0 {
				rows = len(bench.RowIDs())
			}
			o.Client = c
			if os.Geteuid() == 0 {
				o.HTTPS = func(ctx context.Context) (bench.Row, error) { return a.benchHTTPS(ctx, o) }
			}
			o.Progress = func(row string) {
				bar.update("measuring "+row, float64(done)/float64(rows), "")
				done++
			}
			report, err := bench.Run(ctx, o)
			bar.done()
			if err != nil {
				return cannot(err, "measure")
			}
			if a.json {
				err = a.printJSON(report)
			} else {
				err = report.Table(a.stdout)
			}
			if err == nil && !report.OK() {
				err = &exitError{code: 1}
			}
			return err
		}),
	}
	cmd.AddCommand(benchBareCmd())
	fl := cmd.Flags()
	fl.StringSliceVar(&o.Only, "only", nil, "only these `ROWS`, as create-cold,process-true")
	fl.BoolVar(&o.Quick, "quick", false, "few rounds, to see that it works")
	fl.BoolVar(&o.Jupyter, "jupyter", false, "install jupyter_client and ipykernel into your cache, to compare contexts with them")
	fl.StringVar(&o.Isolation, "isolation", "", "the isolation to measure (default the server's)")
	fl.StringVar(&o.Template, "template", "", "the template to measure (default the server's)")
	fl.StringVar(&o.Profile, "profile", "", "the profile to measure (default the template's)")
	_ = cmd.RegisterFlagCompletionFunc("only", cobra.FixedCompletions(bench.RowIDs(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// benchBareCmd is the server of a peer, which bench starts.
func benchBareCmd() *cobra.Command {
	return &cobra.Command{
		Use:    "bare SOCKET PROGRAM",
		Short:  "Serve as bench's bare HTTP",
		Hidden: true,
		Args:   cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return bench.ServeBare(cmd.Context(), args[0], args[1], cmd.OutOrStdout())
		},
	}
}
