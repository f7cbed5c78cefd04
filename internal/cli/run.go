package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// runIdle ends the sandbox of a run whose command line was killed before it could delete it; while
// the command runs it is in use.
const runIdle = 10 * time.Minute

func (a *app) runCmd() *cobra.Command {
	var sf sandboxFlags
	var pf processFlags
	var keep bool
	cmd := &cobra.Command{
		Use:   "run [flags] [--] COMMAND [ARG…]",
		Short: "Run one command in a sandbox of its own",
		Long: `Make a sandbox, run a command in it, and delete the sandbox when the command has ended, also when it
failed. Ctrl-C goes to the command; the third one kills it.

Nothing of this host shows inside but what the template gives and --workspace names, and nothing that
the command writes stays, unless you --keep the sandbox.

` + exitCodes,
		Example: `  casemate run -- python3 -c 'print(6*7)'
  casemate run --timeout 10s --memory 256m -- ./untrusted.sh
  casemate run --workspace . --keep --name fix -- sh -c 'sed -i s/old/new/ README'
  casemate run -it bash`,
		Args: atLeast(1, "a command"),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := sf.request(a.getenv)
			if err != nil {
				return err
			}
			if req.GetIdle() == nil && !keep {
				req.Idle = durationpb.New(runIdle)
			}
			return a.run(cmd.Context(), req, pf, keep, args)
		},
	}
	sf.register(cmd)
	pf.register(cmd)
	cmd.Flags().BoolVar(&keep, "keep", false, "do not delete the sandbox; its id is printed on stderr")
	return cmd
}

// run makes a sandbox, runs command and deletes the sandbox whatever happened.
func (a *app) run(ctx context.Context, req *client.CreateRequest, pf processFlags, keep bool, command []string) (err error) {
	spec, err := pf.spec(a, &client.ProcessSpec{Argv: command})
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
	sb, err := c.Sandboxes.Create(ctx, req)
	if err != nil {
		return cannot(err, "create a sandbox")
	}
	defer func() {
		if keep {
			a.note("sandbox %s stays; delete it with: casemate rm %s", sb.GetId(), handle(sb))
			return
		}
		// Also when the caller pressed Ctrl-C: the sandbox must not outlive the run.
		dctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
		defer stop()
		_, derr := c.Sandboxes.Delete(dctx, sb.GetId())
		switch {
		case derr == nil:
		case err == nil:
			err = cannot(derr, "delete sandbox %s", sb.GetId())
		default: // how the command ended matters more
			text, _ := reason(derr)
			a.warn("sandbox %s may be left: %s", sb.GetId(), text)
		}
	}()
	a.warnMissing(sb)
	s := &session{app: a, client: c, sandbox: sb.GetId(), flags: pf, signals: signals}
	if a.json {
		return a.execJSON(ctx, s, spec)
	}
	p, err := s.run(ctx, spec)
	if err != nil {
		return cannot(err, "run %s", quoteArgv(command[:1]))
	}
	return a.exitOf(p)
}
