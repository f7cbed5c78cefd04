package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) templateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "template",
		Aliases: []string{"templates"},
		Short:   "List, build and compare what sandboxes start from",
		Long: `List, build and compare templates, what sandboxes start from.

  host   this machine's /usr, read-only, with an /etc made up: nothing to download; profile locked only
  base   a Debian with bash, python3, git, curl and a user with sudo; built once
  code-interpreter
         base with IPython, numpy, pandas, matplotlib and Node.js; built once

Others are built from a Dockerfile, without a container engine: casemate template build -t NAME DIR.

Exit codes: 0, or 125 on failure.`,
		Args: noneButCommands,
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
	cmd.AddCommand(list, a.templateBuildCmd(), a.templateShowCmd(), a.templateHistoryCmd(), a.templateLogsCmd(),
		a.templateDiffCmd(), a.templateCancelCmd(), a.templateShareCmd(), a.templateRmCmd())
	return cmd
}

func (a *app) listTemplates(cmd *cobra.Command, args []string) error {
	return a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
		list, err := c.System.Templates(ctx)
		if err != nil {
			return cannot(err, "list templates")
		}
		built, err := c.Builds.List(ctx, &client.ListBuildsRequest{Latest: true})
		if err != nil {
			return cannot(err, "list templates")
		}
		for _, b := range built {
			what := "built from " + b.GetFrom()
			if b.GetShared() {
				what += ", shared"
			}
			list = append(list, &client.Template{
				Name: b.GetName(), Description: what, Ready: b.GetState() == client.BuildReady,
				Profiles: []string{"-"}, SizeBytes: b.GetBytes(), BuiltAt: b.GetEndedAt(),
			})
		}
		if a.json {
			for _, t := range list {
				if slices.Equal(t.GetProfiles(), []string{"-"}) {
					t.Profiles = nil // those of what it is built from
				}
			}
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

// builtIn are the templates that come with the server and are built by their name.
func builtIn(name string) bool { return name == "base" || name == "code-interpreter" }

// buildBuiltIn builds a template that comes with the server.
func (a *app) buildBuiltIn(ctx context.Context, c *client.Client, name string, force bool) error {
	start := time.Now()
	bar := a.newProgress()
	t, err := c.System.BuildTemplate(ctx, name, force, func(p *client.BuildProgress) {
		bar.update(p.GetStep(), p.GetFraction(), p.GetLine())
	})
	bar.done()
	if err != nil {
		bar.tail()
		return cannot(err, "build template %s", name)
	}
	if a.json {
		return a.printJSON(t)
	}
	fmt.Fprintf(a.stdout, "template %s is ready: %s, in %s\n", clean(t.GetName()), formatSize(t.GetSizeBytes()), formatDuration(time.Since(start)))
	return nil
}

func (a *app) templateShowCmd() *cobra.Command {
	var lock, requirements bool
	cmd := &cobra.Command{
		Use:   "show [flags] TEMPLATE",
		Short: "Show a template that was built, or one build of it",
		Long: `Show what a template is made of: the newest build that is ready, or the build whose id is given. With --lock
its lock file is printed as it is, with --requirements what its steps installed from a Python package
index, as pip reads it: pip install -r requirements.lock.

Exit codes: 0, or 125 when there is none.`,
		Example: "  casemate template show web\n  casemate template show web --lock > casemate.lock\n" +
			"  casemate template show web --requirements > requirements.lock",
		Args: exactly(1, "one template, or a build's id"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			b, err := c.Builds.Get(ctx, args[0])
			if err != nil {
				return cannot(err, "show template %s", args[0])
			}
			switch {
			case lock:
				fmt.Fprint(a.stdout, b.GetLock())
				return nil
			case requirements:
				text, unknown, err := requirementsOf(b.GetLock())
				if err != nil {
					return cannot(err, "show what template %s has of pip's", args[0])
				}
				a.noteUnknown(unknown)
				fmt.Fprint(a.stdout, text)
				return nil
			case a.json:
				return a.printJSON(b)
			}
			a.showBuild(b)
			return nil
		}),
	}
	cmd.Flags().BoolVar(&lock, "lock", false, "print the lock file alone")
	cmd.Flags().BoolVar(&requirements, "requirements", false, "print the versions of pip's packages alone, as a requirements file")
	cmd.MarkFlagsMutuallyExclusive("lock", "requirements")
	return cmd
}

func (a *app) showBuild(b *client.Build) {
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(a.stdout, "%-11s %s\n", name, clean(value))
		}
	}
	row("name", b.GetName())
	row("build", b.GetId())
	row("state", b.GetState())
	row("commit", b.GetCommit())
	row("from", b.GetFrom())
	row("digest", b.GetDigest())
	row("user", b.GetUser())
	row("directory", b.GetDir())
	for _, kv := range b.GetEnv() {
		row("env", kv)
	}
	row("entrypoint", quoted(b.GetEntrypoint()))
	row("cmd", quoted(b.GetCmd()))
	row("exposed", strings.Join(b.GetExposed(), " "))
	row("start", b.GetStart())
	row("ready", b.GetReady())
	if b.GetShared() {
		row("shared", "with every key")
	}
	if f := b.GetFailure(); f != nil {
		row("failure", f.GetMessage())
		row("", f.GetHint())
	}
	t := &table{head: []string{"STEP", "TOOK", "KEPT", "DIGEST", "WHAT"}}
	for _, s := range b.GetSteps() {
		kept := "-"
		if s.GetCached() {
			kept = "yes"
		}
		digest := strings.TrimPrefix(s.GetDigest(), "sha256:")
		t.add(s.GetStep(), formatDuration(s.GetTook().AsDuration()), kept, digest[:min(12, len(digest))], s.GetText())
	}
	a.table(t)
}

func quoted(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return fmt.Sprintf("%q", list)
}

func (a *app) templateHistoryCmd() *cobra.Command {
	var limit int32
	cmd := &cobra.Command{
		Use:     "history [flags] [TEMPLATE]",
		Aliases: []string{"builds"},
		Short:   "List builds, the newest first",
		Long:    "List the builds of a template, or all, the newest first.\n\nExit codes: 0, or 125 on failure.",
		Example: "  casemate template history web",
		Args:    between(0, 1, "at most one template"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req := &client.ListBuildsRequest{Limit: limit}
			if len(args) > 0 {
				req.Name = args[0]
			}
			all, err := c.Builds.List(ctx, req)
			if err != nil {
				return cannot(err, "list builds")
			}
			if a.json {
				return printList(a, "builds", all)
			}
			a.table(buildTable(all))
			return nil
		}),
	}
	cmd.Flags().Int32VarP(&limit, "limit", "n", 50, "at most so many")
	return cmd
}

func buildTable(all []*client.Build) *table {
	now := time.Now()
	t := &table{head: []string{"BUILD", "TEMPLATE", "STATE", "STEPS", "BEGUN", "TOOK", "COMMIT"}}
	for _, b := range all {
		color := yellow
		switch b.GetState() {
		case client.BuildReady:
			color = green
		case client.BuildFailed:
			color = red
		}
		took := "-"
		if b.GetEndedAt() != nil && b.GetStartedAt() != nil {
			took = formatDuration(when(b.GetEndedAt()).Sub(when(b.GetStartedAt())))
		}
		commit := b.GetCommit()
		if commit == "" {
			commit = "-"
		}
		t.add(b.GetId(), b.GetName(), cell{b.GetState(), color}, fmt.Sprintf("%d/%d", b.GetDone(), b.GetOf()),
			ago(when(b.GetCreatedAt()), now), took, commit)
	}
	return t
}

func (a *app) templateLogsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:     "logs [flags] BUILD | TEMPLATE",
		Short:   "Print a build's log",
		Long:    "Print the log of a build. With --follow it stays until the build is over.\n\nExit codes: 0, or 125 on failure.",
		Example: "  casemate template logs bld_0123456789abcdefghij",
		Args:    exactly(1, "one build's id, or a template"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			show := func(e *client.BuildLogEntry) error {
				if a.json {
					return a.printJSON(e)
				}
				_, err := fmt.Fprintln(a.stdout, logLine(e))
				return err
			}
			if follow {
				_, err := c.Builds.Follow(ctx, args[0], 0, show)
				return cannot(err, "follow build %s", args[0])
			}
			for offset := int32(0); ; {
				page, err := c.Builds.Logs(ctx, args[0], offset, 0)
				if err != nil {
					return cannot(err, "read the log of build %s", args[0])
				}
				if len(page) == 0 {
					return nil
				}
				for _, e := range page {
					if err := show(e); err != nil {
						return err
					}
				}
				offset = page[len(page)-1].GetOffset() + 1
			}
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "stay until the build is over")
	return cmd
}

// logLine is an entry of a build's log for people.
func logLine(e *client.BuildLogEntry) string {
	mark := ""
	if e.GetStream() != "" {
		mark = "| "
	}
	return fmt.Sprintf("#%-8s %s%s", clean(e.GetStep()), mark, clean(e.GetText()))
}

func (a *app) templateDiffCmd() *cobra.Command {
	var files bool
	cmd := &cobra.Command{
		Use:   "diff [flags] FROM TO",
		Short: "Tell what two builds differ in",
		Long: `Tell which packages, files and settings differ between two builds. Each is a build's id, or a template's name
for its newest build that is ready.

Exit codes: 0 when nothing differs, 1 when something does, or 125 on failure.`,
		Example: "  casemate template diff bld_0123456789abcdefghij web",
		Args:    exactly(2, "two templates or builds"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			d, err := c.Builds.Compare(ctx, args[0], args[1])
			if err != nil {
				return cannot(err, "compare %s and %s", args[0], args[1])
			}
			if a.json {
				err = a.printJSON(d)
			} else {
				err = a.showDifference(d, files)
			}
			if err == nil && len(d.GetPackages())+len(d.GetFiles())+len(d.GetSettings()) > 0 {
				err = &exitError{code: 1}
			}
			return err
		}),
	}
	cmd.Flags().BoolVar(&files, "files", false, "list all files; else only how many differ")
	return cmd
}

func (a *app) showDifference(d *client.BuildDifference, files bool) error {
	color := a.color(a.stdout)
	line := func(name, place, from, to string) {
		text := clean(name)
		if place != "" {
			text += paint(" in "+clean(place), faint, color)
		}
		switch {
		case from == "":
			fmt.Fprintf(a.stdout, "%s %s: %s\n", paint("+", green, color), text, clean(to))
		case to == "":
			fmt.Fprintf(a.stdout, "%s %s: %s\n", paint("-", red, color), text, clean(from))
		case from == to:
			fmt.Fprintf(a.stdout, "%s %s: %s, with other files\n", paint("~", yellow, color), text, clean(to))
		default:
			fmt.Fprintf(a.stdout, "%s %s: %s -> %s\n", paint("~", yellow, color), text, clean(from), clean(to))
		}
	}
	for _, p := range d.GetPackages() {
		line(p.GetManager()+" "+p.GetName(), p.GetPlace(), p.GetFrom(), p.GetTo())
	}
	for _, s := range d.GetSettings() {
		line(s.GetName(), "", s.GetFrom(), s.GetTo())
	}
	if files {
		if err := a.printChanges(d.GetFiles(), nil); err != nil {
			return err
		}
	} else if n := len(d.GetFiles()); n > 0 {
		fmt.Fprintf(a.stdout, "%s differ (--files lists them)\n", plural(int64(n), "file", "files"))
	}
	if d.GetMoreFiles() {
		a.note("there are more files than are listed")
	}
	if len(d.GetPackages())+len(d.GetFiles())+len(d.GetSettings()) == 0 {
		fmt.Fprintln(a.stdout, "nothing differs")
	}
	return nil
}

func (a *app) templateCancelCmd() *cobra.Command {
	return &cobra.Command{
		Use:     "cancel BUILD",
		Short:   "End a build",
		Long:    "End a build. One that is over stays as it is.\n\nExit codes: 0, or 125 on failure.",
		Example: "  casemate template cancel bld_0123456789abcdefghij",
		Args:    exactly(1, "one build's id"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			b, err := c.Builds.Cancel(ctx, args[0])
			if err != nil {
				return cannot(err, "cancel build %s", args[0])
			}
			if a.json {
				return a.printJSON(b)
			}
			fmt.Fprintln(a.stdout, b.GetState())
			return nil
		}),
	}
}

func (a *app) templateShareCmd() *cobra.Command {
	var stop bool
	cmd := &cobra.Command{
		Use:   "share [flags] TEMPLATE...",
		Short: "Let every key start from templates that were built",
		Long: `Let every key start sandboxes from templates that were built here, by their names and tags, and build upon
them; with --stop no longer. A template is its key's alone until then. What a key built itself goes before
what others share. Sandboxes that are there keep what they have. This needs an admin key.

Exit codes: 0, or 125 when one could not be shared.`,
		Example: "  casemate template share web\n  casemate template share --stop web",
		Args:    atLeast(1, "the templates to share"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, name := range args {
				if err := c.Builds.Share(ctx, name, stop); err != nil {
					return cannot(err, "share template %s", name)
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&stop, "stop", false, "they are shared no longer")
	return cmd
}

func (a *app) templateRmCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "rm TEMPLATE...",
		Short: "Remove templates that were built",
		Long: `Remove templates with all their builds. Sandboxes that were started from them keep what they need.
Templates that come with the server stay.

Exit codes: 0, or 125 when one could not be removed.`,
		Example: "  casemate template rm web",
		Args:    atLeast(1, "the templates to remove"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, name := range args {
				if err := c.Builds.Delete(ctx, name); err != nil {
					return cannot(err, "remove template %s", name)
				}
			}
			return nil
		}),
	}
}
