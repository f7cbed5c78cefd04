package cli

import (
	"context"
	"fmt"
	"math"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

const rootLong = `Casemate runs AI agents, and the code they write, in sandboxes on this machine.

  casemate up                                     start the server, once
  casemate run -- python3 -c 'print(6*7)'         one command in a sandbox of its own
  casemate create --name web                      a sandbox that stays
  casemate exec web -- sh -c 'echo hi > note'     a command in it
  casemate journal web                            what happened in it
  casemate rm web                                 and it is gone

The server is found by --url, then CASEMATE_URL, then the socket of "casemate up". Over TCP it asks for
the API key in CASEMATE_API_KEY.

` + exitCodes

// Groups of commands, in the order of the help.
const (
	groupServer  = "server"
	groupSandbox = "sandbox"
	groupUse     = "use"
	groupState   = "state"
	groupAbout   = "about"
)

// root builds the whole command tree.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "casemate",
		Version:       a.version,
		Short:         "Run AI agents' code in sandboxes on your own machine",
		Long:          rootLong,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownCommand(cmd, args[0])
		},
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetIn(a.stdin)
	root.PersistentFlags().StringVar(&a.url, "url", "", "server: http://HOST:PORT, https://HOST or unix:///PATH (default CASEMATE_URL, else the local socket)")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print JSON for programs")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		text, _, _ := strings.Cut(err.Error(), ": strconv.") // what Go's parser says of a number is not for people
		return errs.New(errs.InvalidArgument, "%s", text).WithHint("see: %s --help", cmd.CommandPath())
	})
	root.AddGroup(
		&cobra.Group{ID: groupUse, Title: "Run things:"},
		&cobra.Group{ID: groupSandbox, Title: "Sandboxes:"},
		&cobra.Group{ID: groupState, Title: "Saved states:"},
		&cobra.Group{ID: groupServer, Title: "The server:"},
		&cobra.Group{ID: groupAbout, Title: "About this host:"},
	)
	root.SetHelpCommandGroupID(groupAbout)
	root.SetCompletionCommandGroupID(groupAbout)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add(groupUse, a.runCmd(), a.execCmd(), a.shellCmd(), a.replCmd(), a.cpCmd(), a.diffCmd(), a.applyCmd(), a.mcpCmd())
	add(groupSandbox, a.createCmd(), a.lsCmd(), a.inspectCmd(), a.journalCmd(), a.checkCmd(), a.verifyCmd(), a.usageCmd(), a.replayCmd(), a.pauseCmd(), a.resumeCmd(), a.forkCmd(), a.netCmd(), a.callsCmd(), a.rmCmd())
	add(groupState, a.commitCmd(), a.logCmd(), a.showCmd(), a.lineageCmd(), a.tagCmd(), a.checkoutCmd(), a.mergeCmd(), a.gcCmd(), a.stateCmd(),
		a.pullCmd(), a.pushCmd(), a.importCmd(), a.exportCmd(), a.imagesCmd())
	add(groupServer, a.upCmd(), a.downCmd(), a.serveCmd(), a.keysCmd(), a.secretsCmd(), a.caCmd(), a.templateCmd())
	add(groupAbout, a.doctorCmd(), a.selftestCmd(), a.benchCmd(), a.versionCmd())
	root.AddCommand(a.docsCmd(), a.gatewayCmd(), a.keeperCmd(), a.unpackCmd(), a.selftestNetCmd(), a.benchNetCmd())
	return root
}

// strict makes the commands that cobra adds refuse what they don't know, for which its own show a help and no error.
func strict(root *cobra.Command) {
	root.SetVersionTemplate("casemate {{.Version}}\n")
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd("") // any argument: the program's own are not known here
	for _, c := range root.Commands() {
		switch c.Name() {
		case "completion":
			group(c)
		case "help":
			c.Run = nil
			c.RunE = func(_ *cobra.Command, args []string) error {
				found, rest, err := root.Find(args)
				if err != nil || len(rest) > 0 {
					return unknownCommand(found, rest[0])
				}
				return found.Help()
			}
		}
	}
}

func unknownCommand(cmd *cobra.Command, name string) error {
	cmd.SuggestionsMinimumDistance = 2
	e := errs.New(errs.InvalidArgument, "%q is no command", clean(name))
	if near := cmd.SuggestionsFor(name); len(near) > 0 {
		return e.WithHint("did you mean: %s", strings.Join(near, ", "))
	}
	return e.WithHint("see: %s --help", cmd.CommandPath())
}

// group makes cmd one that only holds others: it shows its help, and refuses what is none of them.
func group(cmd *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	cmd.Use += " COMMAND"
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return unknownCommand(cmd, args[0])
	}
	cmd.AddCommand(subs...)
	return cmd
}

// noneButCommands refuses arguments of a command that holds others and does something itself.
func noneButCommands(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return unknownCommand(cmd, args[0])
	}
	return nil
}

// between is cobra.RangeArgs with an error that tells what is missing, or too much.
func between(least, most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return errs.New(errs.InvalidArgument, "%s takes %s", cmd.Name(), what).WithHint("see: %s --help", cmd.CommandPath())
		}
		return nil
	}
}

// exactly is between where there is one right number.
func exactly(n int, what string) cobra.PositionalArgs { return between(n, n, what) }

// atLeast is between without an upper bound.
func atLeast(n int, what string) cobra.PositionalArgs { return between(n, math.MaxInt, what) }

// connect returns a client of the server that the caller means.
func (a *app) connect() (*client.Client, error) {
	url := a.url
	if url == "" {
		url = a.getenv(client.EnvURL)
	}
	return client.New(url, "", client.WithUserAgent("casemate/"+a.version))
}

// interruptible returns a context that SIGINT, SIGTERM and SIGHUP cancel, once: the second signal
// finds the default action, so that nobody is stuck with a command that doesn't stop.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// withClient is the RunE of a verb that makes calls: it connects, and Ctrl-C cancels.
func (a *app) withClient(f func(ctx context.Context, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.connect()
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, stop := interruptible(cmd.Context())
		defer stop()
		return f(ctx, c, args)
	}
}

// completeSandboxes completes the first argument with the names and ids of sandboxes.
func (a *app) completeSandboxes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	c, err := a.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer c.Close()
	all, err := c.Sandboxes.All(cmd.Context(), &client.ListRequest{})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var out []string
	for _, s := range all {
		name := s.GetName()
		if name == "" {
			name = s.GetId()
		}
		out = append(out, fmt.Sprintf("%s\t%s, %s", clean(name), s.GetTemplate(), s.GetState()))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
