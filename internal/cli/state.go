package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// maxDocument is what a server takes; what is longer need not be sent to learn that.
const maxDocument = 8 << 20

func (a *app) stateCmd() *cobra.Command {
	var owner string
	cmd := &cobra.Command{
		Use:   "state",
		Short: "Keep agents' documents, outside every sandbox",
		Long: `Keep what agents must not lose with a sandbox: documents, JSON or bytes, each with all its versions. A
document is named AGENT/NAME, where AGENT is any name of yours and NAME is like a path.

  casemate state set helper/plan.json < plan.json          version 1
  casemate state set helper/plan.json plan.json --expect 1   only if nobody has written since
  casemate state get helper/plan.json                      its newest version
  casemate state watch helper                              every write as it happens

A version may belong to a commit (--commit): the files and the document together are where an agent was, and
a new sandbox from that commit goes on from there. The commit is kept as long as the version is.

Exit codes: 0, or 125 on failure.`,
	}
	cmd.PersistentFlags().StringVar(&owner, "owner", "", "the `KEY` whose agents it is about, for administrators (default your own)")
	return group(cmd, a.stateSetCmd(&owner), a.stateGetCmd(&owner), a.statePatchCmd(&owner), a.stateListCmd(&owner),
		a.stateHistoryCmd(&owner), a.stateWatchCmd(&owner), a.stateRemoveCmd(&owner), a.stateKeepCmd(&owner))
}

// parseDocument splits AGENT/NAME.
func parseDocument(s string) (agent, name string, err error) {
	agent, name, ok := strings.Cut(s, "/")
	if !ok || agent == "" || name == "" {
		return "", "", usageError("%q is no document: write AGENT/NAME", clean(s))
	}
	return agent, name, nil
}

// readDocument reads what a document shall hold, from a file or standard input.
func (a *app) readDocument(args []string) ([]byte, error) {
	in := a.stdin
	if len(args) > 0 && args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return nil, usageError("cannot read the content: %s", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxDocument+1))
	if err != nil {
		return nil, fmt.Errorf("read the content: %w", err)
	}
	if len(b) > maxDocument {
		return nil, usageError("the content is longer than %s, the limit of a document", formatSize(maxDocument))
	}
	return b, nil
}

// expectation is the flag of what a write replaces.
type expectation struct {
	version uint64
	cmd     *cobra.Command
}

func (e *expectation) register(cmd *cobra.Command, usage string) {
	e.cmd = cmd
	cmd.Flags().Uint64Var(&e.version, "expect", 0, usage)
}

// wanted returns the expected version; nil where none was named.
func (e *expectation) wanted() *uint64 {
	if !e.cmd.Flags().Changed("expect") {
		return nil
	}
	return &e.version
}

func (a *app) stateSetCmd(owner *string) *cobra.Command {
	var kind, sandbox, commit string
	var expect expectation
	cmd := &cobra.Command{
		Use:   "set [flags] AGENT/NAME [FILE]",
		Short: "Write a new version of a document",
		Long: `Write a new version of a document, of at most 8 MiB, from a file or standard input, and print its number.

With --expect nothing is written unless that version is the newest; 0 means that there must be no such
document. So of several writers one wins, and the others read again.

Exit codes: 0, or 125 when nothing was written.`,
		Example: `  echo '{"step": 1}' | casemate state set helper/plan --expect 0
  casemate state set helper/plan plan.json --commit "$(casemate commit web)" --sandbox web`,
		Args: between(1, 2, "a document, and perhaps a file"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			agent, name, err := parseDocument(args[0])
			if err != nil {
				return err
			}
			content, err := a.readDocument(args[1:])
			if err != nil {
				return err
			}
			d, err := c.State.Set(ctx, &client.SetDocumentRequest{
				Owner: *owner, Agent: agent, Name: name, Content: content, ContentType: kind, ExpectedVersion: expect.wanted(),
				Sandbox: sandbox, Commit: commit,
			})
			if err != nil {
				return cannot(err, "set %s", args[0])
			}
			return a.printVersion(d)
		}),
	}
	cmd.Flags().StringVar(&kind, "type", "", "content type (default as it was, else JSON where it is JSON)")
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "the `SANDBOX` that it is written for; its journal tells of it")
	cmd.Flags().StringVar(&commit, "commit", "", "the `COMMIT` that it belongs to")
	expect.register(cmd, "the `VERSION` that must be the newest; 0: there must be none")
	return cmd
}

// printVersion tells which version was written.
func (a *app) printVersion(d *client.Document) error {
	if a.json {
		return a.printJSON(d)
	}
	_, err := fmt.Fprintln(a.stdout, d.GetVersion())
	return err
}

func (a *app) statePatchCmd(owner *string) *cobra.Command {
	var sandbox, commit string
	var expect expectation
	cmd := &cobra.Command{
		Use:   "patch [flags] AGENT/NAME [FILE]",
		Short: "Change a JSON document in one step",
		Long: `Change a document that holds JSON, in one step: nobody's write comes between. The patch is read from a
file or standard input: an object is merged into the document (RFC 7396), and a list of operations is
applied to it in order (RFC 6902), all or none. The number of the new version is printed.

Exit codes: 0, or 125 when nothing was written.`,
		Example: `  echo '{"step": 2, "note": null}' | casemate state patch helper/plan
  echo '[{"op":"add","path":"/messages/-","value":{"role":"user"}}]' | casemate state patch helper/history`,
		Args: between(1, 2, "a document, and perhaps a file"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			agent, name, err := parseDocument(args[0])
			if err != nil {
				return err
			}
			patch, err := a.readDocument(args[1:])
			if err != nil {
				return err
			}
			d, err := c.State.Patch(ctx, &client.PatchDocumentRequest{
				Owner: *owner, Agent: agent, Name: name, Patch: strings.ToValidUTF8(string(patch), "\ufffd"), ExpectedVersion: expect.wanted(),
				Sandbox: sandbox, Commit: commit,
			})
			if err != nil {
				return cannot(err, "patch %s", args[0])
			}
			return a.printVersion(d)
		}),
	}
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "the `SANDBOX` that it is written for; its journal tells of it")
	cmd.Flags().StringVar(&commit, "commit", "", "the `COMMIT` that it belongs to")
	expect.register(cmd, "the `VERSION` that must be the newest; 0: there must be none")
	return cmd
}

func (a *app) stateGetCmd(owner *string) *cobra.Command {
	var version uint64
	var commit bool
	cmd := &cobra.Command{
		Use:   "get [flags] AGENT/NAME",
		Short: "Print a document",
		Long: `Print what a document holds, as it is, at its newest version or another. With --json, print what is known of
that version, with the content in base64. With --commit, print the commit that it belongs to.

Exit codes: 0, or 125 where there is none.`,
		Example: `  casemate state get helper/plan --version 3
  casemate create --template "$(casemate state get helper/plan --commit)"`,
		Args: exactly(1, "one document, AGENT/NAME"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			agent, name, err := parseDocument(args[0])
			if err != nil {
				return err
			}
			d, err := c.State.Get(ctx, &client.GetDocumentRequest{Owner: *owner, Agent: agent, Name: name, Version: version})
			switch {
			case err != nil:
				return cannot(err, "get %s", args[0])
			case commit && d.GetCommit() == "":
				return usageError("version %d of %s belongs to no commit", d.GetVersion(), clean(args[0]))
			case commit:
				_, err = fmt.Fprintln(a.stdout, d.GetCommit())
				return err
			case a.json:
				return a.printJSON(d)
			}
			return a.printContent(d)
		}),
	}
	cmd.Flags().Uint64Var(&version, "version", 0, "this version (default the newest)")
	cmd.Flags().BoolVar(&commit, "commit", false, "print the commit that it belongs to")
	return cmd
}

// printContent prints a document: text only, where it goes to a terminal.
func (a *app) printContent(d *client.Document) error {
	text := d.GetContent()
	if _, tty := terminal(a.stdout); tty {
		_, err := fmt.Fprintln(a.stdout, cleanLines(string(text)))
		return err
	}
	_, err := a.stdout.Write(text)
	return err
}

func (a *app) stateRemoveCmd(owner *string) *cobra.Command {
	var forget bool
	var expect expectation
	cmd := &cobra.Command{
		Use:   "rm [flags] AGENT/NAME...",
		Short: "Delete documents",
		Long: `Delete documents. That makes a version, too, and those before it can be read for 30 days; with --forget
nothing stays, and a later document of that name begins at version 1.

Exit codes: 0, or 125 when one could not be deleted.`,
		Args: atLeast(1, "one document or more, AGENT/NAME"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, arg := range args {
				agent, name, err := parseDocument(arg)
				if err != nil {
					return err
				}
				d, err := c.State.Delete(ctx, &client.DeleteDocumentRequest{
					Owner: *owner, Agent: agent, Name: name, ExpectedVersion: expect.wanted(), Forget: forget,
				})
				if err != nil {
					return cannot(err, "delete %s", arg)
				}
				if a.json {
					err = a.printJSON(d)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&forget, "forget", false, "with their histories, for good")
	expect.register(cmd, "the `VERSION` that must be the newest")
	return cmd
}

func (a *app) stateKeepCmd(owner *string) *cobra.Command {
	var versions int32
	var age time.Duration
	cmd := &cobra.Command{
		Use:   "keep [flags] AGENT",
		Short: "Say how much of an agent's history is kept",
		Long: `Say how many versions of each of an agent's documents are kept, and how long those that others have
replaced. The newest version always is.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate state keep helper --versions 50 --for 720h
  casemate state keep helper --versions -1                 all, for ever`,
		Args: exactly(1, "one agent"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			keep := &client.Retention{Versions: versions}
			if age != 0 {
				keep.Age = durationpb.New(age)
			}
			s, err := c.State.SetRetention(ctx, &client.SetRetentionRequest{Owner: *owner, Agent: args[0], Retention: keep})
			if err != nil {
				return cannot(err, "set what is kept of %s", args[0])
			}
			if a.json {
				return a.printJSON(s)
			}
			a.table(agentTable([]*client.StateAgent{s}))
			return nil
		}),
	}
	cmd.Flags().Int32Var(&versions, "versions", 0, "how many of each document; -1: all (default 1000)")
	cmd.Flags().DurationVar(&age, "for", 0, "how long a version that another has replaced (default for ever)")
	return cmd
}
