package cli

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/cobra"
)

func (a *app) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Tell the versions of this program and of the server",
		Long: `Tell the version of this program, and of the server where one answers.

Exit codes: 0 whether or not a server answers.`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			own := map[string]string{"version": a.version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH}
			out := map[string]any{"client": own}
			c, err := a.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, stop := context.WithTimeout(cmd.Context(), 2*time.Second)
			defer stop()
			server, err := c.System.Version(ctx)
			if err == nil {
				out["server"] = map[string]string{
					"version": server.GetVersion(), "go": server.GetGo(), "os": server.GetOs(),
					"arch": server.GetArch(), "id": server.GetServerId(), "url": c.URL(),
				}
			}
			if a.json {
				return a.printJSON(out)
			}
			fmt.Fprintf(a.stdout, "casemate %s (%s, %s/%s)\n", a.version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			if err != nil {
				fmt.Fprintln(a.stdout, "server   none at", clean(c.URL()))
				return nil
			}
			fmt.Fprintf(a.stdout, "server   %s (%s, %s/%s) at %s\n", clean(server.GetVersion()), clean(server.GetGo()),
				clean(server.GetOs()), clean(server.GetArch()), clean(c.URL()))
			if server.GetVersion() != a.version {
				a.warn("server and command line differ in version; restart the server: casemate down && casemate up")
			}
			return nil
		},
	}
}
