package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) pauseCmd() *cobra.Command {
	var filesOnly, onDisk bool
	cmd := &cobra.Command{
		Use:   "pause [flags] SANDBOX",
		Short: "Freeze every process of a sandbox, or keep its files only",
		Long: `Freeze every process of a sandbox. It uses no CPU until "casemate resume"; memory and files are kept.

With --on-disk its processes are saved with their memory beside the files, and the machine's memory is given
back: it costs disk and nothing else, and survives a restart of the server and of the machine. "casemate
resume" goes on where they were; connections to and from outside have ended. Only isolation gvisor can do
that, and what one runsc has saved, another version can't restore.

With --files-only its processes end, and everything but its files and settings is given back: it costs
disk and nothing else, and survives a restart of the machine. "casemate resume" starts it anew on its
files, as if it had been booted, with the same id, name, environment and limits.

Exit codes: 0, or 125 when it could not be paused.`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			pause := c.Sandboxes.Pause
			if filesOnly {
				pause = c.Sandboxes.PauseFiles
			}
			if onDisk {
				pause = c.Sandboxes.PauseToDisk
			}
			sb, err := pause(ctx, args[0])
			return a.printState(sb, cannot(err, "pause sandbox %s", args[0]))
		}),
	}
	cmd.Flags().BoolVar(&onDisk, "on-disk", false, "save its processes on disk, and give back the memory")
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "end its processes and keep the files")
	cmd.MarkFlagsMutuallyExclusive("on-disk", "files-only")
	return cmd
}

func (a *app) resumeCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "resume SANDBOX",
		Short: "Let a paused sandbox go on",
		Long: `Let the processes of a paused sandbox go on where they were, also those that lie on disk, or start it anew on
its files where it was paused with --files-only.

Exit codes: 0, or 125 when it could not be resumed.`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			sb, err := c.Sandboxes.Resume(ctx, args[0])
			return a.printState(sb, cannot(err, "resume sandbox %s", args[0]))
		}),
	}
}

// printState prints what a change of state led to.
func (a *app) printState(sb *client.Sandbox, err error) error {
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	fmt.Fprintln(a.stdout, sb.GetId(), sb.GetState())
	return nil
}
