package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) createCmd() *cobra.Command {
	var f sandboxFlags
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Make a sandbox that stays",
		Long: `Make a sandbox, and print its id when it is running.

It stays until "casemate rm", or until --lifetime or --idle ends it. Limits that are not given are the
server's defaults.

Exit codes: 0, or 125 when it could not be made.`,
		Example: `  casemate create --name web --memory 512m --cpus 1
  casemate create --template base --profile standard --workspace ~/src/app`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			req, err := f.request(a.getenv)
			if err != nil {
				return err
			}
			start := time.Now()
			sb, err := c.Sandboxes.Create(ctx, req)
			if err != nil {
				return cannot(err, "create a sandbox")
			}
			if a.json {
				return a.printJSON(sb)
			}
			fmt.Fprintln(a.stdout, sb.GetId())
			a.warnMissing(sb)
			if _, tty := terminal(a.stderr); tty {
				a.note("%s, profile %s, in %s; next: casemate shell %s", sb.GetTemplate(), sb.GetProfile(),
					formatDuration(time.Since(start)), handle(sb))
			}
			return nil
		}),
	}
	f.register(cmd)
	return cmd
}

// handle is what a person calls a sandbox: its name where it has one.
func handle(sb *client.Sandbox) string {
	if sb.GetName() != "" && sb.GetName() != sb.GetId() {
		return sb.GetName()
	}
	return sb.GetId()
}

// warnMissing tells which layers of isolation a sandbox lacks.
func (a *app) warnMissing(sb *client.Sandbox) {
	for _, m := range sb.GetApplied().GetMissing() {
		a.warn("sandbox %s runs without a layer of isolation: %s", handle(sb), m)
	}
}
