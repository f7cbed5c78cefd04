package cli

import (
	"github.com/spf13/cobra"
)

func (a *app) shellCmd() *cobra.Command {
	f := execFlags{processFlags: processFlags{interactive: true, tty: true}}
	cmd := &cobra.Command{
		Use:   "shell SANDBOX",
		Short: "Open a shell in a sandbox",
		Long: `Open a login shell in a sandbox, at this terminal: bash where the sandbox has it, else sh.

What the shell prints reaches your terminal as it is: see docs/security.md, "What is not a boundary".

Exit codes: the shell's own; 125 when Casemate itself failed.`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			login := "[ -x /bin/bash ] && exec /bin/bash -l; exec /bin/sh -l"
			return a.exec(cmd.Context(), f, args[0], []string{"/bin/sh", "-c", login})
		},
	}
	cmd.Flags().StringVarP(&f.dir, "workdir", "w", "", "where it starts (default the sandbox's)")
	cmd.Flags().StringVar(&f.user, "user", "", "who it runs as (default the sandbox's)")
	cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment `NAME=VALUE`; NAME alone takes the value from here (repeatable)")
	return cmd
}
