package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) templateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "template",
		Aliases: []string{"templates"},
		Short:   "List and build what sandboxes start from",
		Long: `List and build templates, what sandboxes start from.

  host   this machine's /usr, read-only, with an /etc made up: nothing to download; profile locked only
  base   a Debian with bash, python3, git, curl and a user with sudo; built once
  code-interpreter
         base with IPython, numpy, pandas, matplotlib and Node.js; built once

Exit codes: 0, or 125 on failure.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error { return a.listTemplates(cmd, args) },
	}
	list := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List templates",
		Long:    "List templates, and whether each can be used.\n\nExit codes: 0, or 125 on failure.",
		Args:    exactly(0, "no arguments"),
		RunE:    func(cmd *cobra.Command, args []string) error { return a.listTemplates(cmd, args) },
	}
	cmd.AddCommand(list, a.templateBuildCmd())
	return cmd
}

func (a *app) listTemplates(cmd *cobra.Command, args []string) error {
	return a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
		list, err := c.System.Templates(ctx)
		if err != nil {
			return cannot(err, "list templates")
		}
		if a.json {
			return printList(a, "templates", list)
		}
		now := time.Now()
		t := &table{head: []string{"NAME", "STATE", "PROFILES", "SIZE", "BUILT", "WHAT"}}
		for _, tm := range list {
			state := cell{"ready", green}
			if !tm.GetReady() {
				state = cell{"not built", yellow}
			}
			size, built := "-", "-"
			if tm.GetSizeBytes() > 0 {
				size = formatSize(tm.GetSizeBytes())
			}
			if tm.GetBuiltAt() != nil {
				built = ago(when(tm.GetBuiltAt()), now)
			}
			t.add(tm.GetName(), state, strings.Join(tm.GetProfiles(), ", "), size, built, tm.GetDescription())
		}
		a.table(t)
		return nil
	})(cmd, args)
}

func (a *app) templateBuildCmd() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "build NAME",
		Short: "Build a built-in template",
		Long: `Build a built-in template; base takes a few minutes and downloads packages with debootstrap.
code-interpreter builds base too where it is missing, and adds Python packages and Node.js from this
machine's Python package index, at fixed versions with checked hashes. A template that is there is left
alone, unless you --force.

Exit codes: 0, or 125 when it could not be built.`,
		Example: "  casemate template build base\n  casemate template build code-interpreter",
		Args:    exactly(1, "one template"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			start := time.Now()
			bar := a.newProgress()
			t, err := c.System.BuildTemplate(ctx, args[0], force, func(p *client.BuildProgress) {
				bar.update(p.GetStep(), p.GetFraction(), p.GetLine())
			})
			bar.done()
			if err != nil {
				bar.tail()
				return cannot(err, "build template %s", args[0])
			}
			if a.json {
				return a.printJSON(t)
			}
			fmt.Fprintf(a.stdout, "template %s is ready: %s, in %s\n", clean(t.GetName()), formatSize(t.GetSizeBytes()), formatDuration(time.Since(start)))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&force, "force", false, "build it again although it is there")
	cmd.ValidArgs = []string{"base", "code-interpreter"}
	return cmd
}
