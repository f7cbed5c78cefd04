package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// execFlags are the flags of exec beside those of every process.
type execFlags struct {
	processFlags
	env       []string
	dir, user string
	id        string
	detach    bool
}

func (a *app) execCmd() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND [ARG…]",
		Short: "Run a command in a sandbox that is there",
		Long: `Run a command in a sandbox, with its output here. Ctrl-C goes to the command; the third one kills it.

With --json nothing is passed through: the command's output comes as JSON when it has ended, as far as
the server's buffer holds it. With --detach the command goes on by itself, and its id is printed.

` + exitCodes,
		Example: `  casemate exec web -- sh -c 'echo $HOSTNAME'
  casemate exec -it web bash
  echo 'print(6*7)' | casemate exec -i web python3 -`,
		Args:              atLeast(2, "a sandbox and a command"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			command := args[1:]
			if command[0] == "--" {
				command = command[1:]
			}
			if len(command) == 0 {
				return usageError("exec takes a sandbox and a command")
			}
			if args[1] != "--" && strings.HasPrefix(args[1], "-") {
				return errs.New(errs.InvalidArgument, "%s stands behind the sandbox, where the command is", args[1]).
					WithHint("flags go first: casemate exec %s … %s COMMAND", args[1], args[0])
			}
			return a.exec(cmd.Context(), f, args[0], command)
		},
	}
	f.register(cmd)
	fl := cmd.Flags()
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment `NAME=VALUE`; NAME alone takes the value from here (repeatable)")
	fl.StringVarP(&f.dir, "workdir", "w", "", "where it starts (default the sandbox's)")
	fl.StringVar(&f.user, "user", "", "who it runs as (default the sandbox's)")
	fl.StringVar(&f.id, "id", "", "an id of your choice; an id that exists is attached to")
	fl.BoolVarP(&f.detach, "detach", "d", false, "start it and print its id")
	return cmd
}

// exec runs command in a sandbox as the flags say.
func (a *app) exec(ctx context.Context, f execFlags, sandbox string, command []string) error {
	env, err := parseEnv(f.env, a.getenv)
	if err != nil {
		return err
	}
	if f.detach && f.interactive {
		return usageError("--detach does not stay to pass standard input on, as --interactive asks")
	}
	spec, err := f.spec(a, &client.ProcessSpec{Id: f.id, Argv: command, Env: env, Dir: f.dir, User: f.user})
	if err != nil {
		return err
	}
	c, err := a.connect()
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, signals := forwardSignals(ctx)
	defer signals.stop()
	if f.detach {
		p, err := c.Processes.Start(ctx, sandbox, spec)
		if err != nil {
			return cannot(err, "start %s", quoteArgv(command[:1]))
		}
		if a.json {
			return a.printJSON(p)
		}
		fmt.Fprintln(a.stdout, p.GetId())
		return nil
	}
	// One short question first: Run itself waits for a server that is being restarted.
	sb, err := c.Sandboxes.Get(ctx, sandbox)
	if err != nil {
		return cannot(err, "run %s", quoteArgv(command[:1]))
	}
	s := &session{app: a, client: c, sandbox: sb.GetId(), flags: f.processFlags, signals: signals}
	if a.json {
		return a.execJSON(ctx, s, spec)
	}
	p, err := s.run(ctx, spec)
	if err != nil {
		return cannot(err, "run %s", quoteArgv(command[:1]))
	}
	return a.exitOf(p)
}
