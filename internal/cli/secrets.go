package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// maxSecretInput is more than a server takes; what is longer need not be sent to learn that.
const maxSecretInput = 64 << 10

func (a *app) secretsCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secrets",
		Short: "Keep keys that sandboxes may use and never see",
		Long: `Keep keys that sandboxes may use and never see. A sandbox gets a placeholder; the server puts the real
value on its requests on the way out, only for the hosts and in the header that a binding names.

  casemate secrets set github --class tool < token      keep it, encrypted
  casemate secrets bind github --host api.github.com --all --env GITHUB_TOKEN
  casemate secrets ls                                    no command shows a value

Values come from standard input, a file or a hidden prompt, never from the command line, which every user
of the machine can read.

Exit codes: 0, or 125 on failure.`,
	}
	return group(cmd, a.secretsSetCmd(), a.secretsListCmd(), a.secretsRotateCmd(), a.secretsRemoveCmd(),
		a.secretsBindCmd(), a.secretsUnbindCmd(), a.secretsPolicyCmd(), a.secretsModelCmd())
}

// readSecret reads a value from a file, a hidden prompt, or standard input.
func (a *app) readSecret(file, prompt string) (string, error) {
	if file != "" && file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", usageError("cannot read the value: %s", err)
		}
		defer f.Close()
		return readValue(f)
	}
	if fd, tty := terminal(a.stdin); tty && file == "" {
		fmt.Fprintf(a.stderr, "%s (hidden): ", prompt)
		b, err := term.ReadPassword(fd)
		fmt.Fprintln(a.stderr)
		if err != nil {
			return "", fmt.Errorf("read from the terminal: %w", err)
		}
		defer clear(b)
		return string(b), nil
	}
	return readValue(a.stdin)
}

// readValue reads a value and cuts the line end that editors and echo put behind it.
func readValue(r io.Reader) (string, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxSecretInput+1))
	defer clear(b)
	if err != nil {
		return "", fmt.Errorf("read the value: %w", err)
	}
	if len(b) > maxSecretInput {
		return "", usageError("the value is longer than %d bytes", maxSecretInput)
	}
	return strings.TrimRight(string(b), "\r\n"), nil
}

// secretSet is what `secrets set` is told.
type secretSet struct {
	class, from, prefix              string
	length                           int32
	sourceFile, sourceEnv            string
	sourceCommand                    []string
	sourceTimeout, sourceRefreshTime time.Duration
}

func (a *app) secretsSetCmd() *cobra.Command {
	var f secretSet
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Keep a value under a name, or give it a new one",
		Long: `Keep a value under a name, encrypted; or give the secret of that name a new version. Its bindings stay.
The value is read from standard input, from --from-file, or at a terminal from a hidden prompt.

With --source-file, --source-env or --source-command nothing is kept: the server reads the value itself,
on its own machine and with its own rights, and again every --refresh. Only an admin may say so.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate secrets set anthropic --class model --placeholder-prefix sk-ant-api03-
  pass show github | casemate secrets set github --class tool
  casemate secrets set db --source-command /usr/local/bin/vault-read --source-command db --refresh 1m`,
		Args: exactly(1, "one name"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req, err := a.secretRequest(args[0], f)
			if err != nil {
				return err
			}
			s, err := c.Secrets.Set(ctx, req)
			if err != nil {
				return cannot(err, "set secret %s", args[0])
			}
			return a.printSecret(s, "set")
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&f.class, "class", "", "model, tool or other (default as it was, else other)")
	fl.StringVar(&f.from, "from-file", "", "read the value from this `FILE` here; - is standard input")
	fl.StringVar(&f.prefix, "placeholder-prefix", "", "what placeholders begin with, for clients that check a key's form")
	fl.Int32Var(&f.length, "placeholder-length", 0, "how long placeholders are")
	fl.StringVar(&f.sourceFile, "source-file", "", "the server reads it from this `FILE` of its own")
	fl.StringVar(&f.sourceEnv, "source-env", "", "the server reads it from this `VARIABLE` of its own")
	fl.StringArrayVar(&f.sourceCommand, "source-command", nil, "the server runs this program, by its absolute path; again for each argument")
	fl.DurationVar(&f.sourceTimeout, "source-timeout", 0, "how long the program may take (default 10s)")
	fl.DurationVar(&f.sourceRefreshTime, "refresh", 0, "how often the server reads it again (default 5m)")
	_ = cmd.RegisterFlagCompletionFunc("class", cobra.FixedCompletions([]string{"model", "tool", "other"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) secretRequest(name string, f secretSet) (*client.SetSecretRequest, error) {
	req := &client.SetSecretRequest{Name: name, Class: f.class}
	if f.prefix != "" || f.length != 0 {
		req.Placeholder = &client.PlaceholderShape{Prefix: f.prefix, Length: f.length}
	}
	src := &client.SecretSource{}
	kinds := 0
	for kind, set := range map[string]bool{"file": f.sourceFile != "", "env": f.sourceEnv != "", "command": len(f.sourceCommand) > 0} {
		if set {
			src.Kind, kinds = kind, kinds+1
		}
	}
	switch {
	case kinds > 1 || kinds == 1 && f.from != "":
		return nil, errs.New(errs.InvalidArgument, "a secret has one source").WithHint("use one of --from-file, --source-file, --source-env and --source-command")
	case kinds == 0 && (f.sourceTimeout != 0 || f.sourceRefreshTime != 0):
		return nil, usageError("--refresh and --source-timeout go with a source of the server's")
	case kinds == 1:
		src.Path, src.Name, src.Argv = f.sourceFile, f.sourceEnv, f.sourceCommand
		if f.sourceTimeout != 0 {
			src.Timeout = durationpb.New(f.sourceTimeout)
		}
		if f.sourceRefreshTime != 0 {
			src.Refresh = durationpb.New(f.sourceRefreshTime)
		}
		req.Source = src
		return req, nil
	}
	var err error
	req.Value, err = a.readSecret(f.from, "value of "+name)
	return req, err
}

func (a *app) printSecret(s *client.Secret, did string) error {
	if a.json {
		return a.printJSON(s)
	}
	fmt.Fprintf(a.stdout, "%s %s %s, version %d\n", s.GetId(), clean(s.GetName()), did, s.GetVersion())
	return nil
}

func (a *app) secretsRotateCmd() *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "rotate NAME",
		Short: "Give a secret a new value; running sandboxes use it from their next request on",
		Long: `Give a secret a new value. Placeholders stay, so nothing inside needs to change: running sandboxes use
the new value from their next request on. The value is read as by set. A secret with a source of the
server's is read again.

Exit codes: 0, or 125 on failure.`,
		Args: exactly(1, "one secret's name"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			s, err := c.Secrets.Get(ctx, args[0])
			if err != nil {
				return cannot(err, "rotate secret %s", args[0])
			}
			value := ""
			if s.GetSource().GetKind() == "stored" {
				if value, err = a.readSecret(from, "new value of "+s.GetName()); err != nil {
					return err
				}
			}
			if s, err = c.Secrets.Rotate(ctx, args[0], value); err != nil {
				return cannot(err, "rotate secret %s", args[0])
			}
			return a.printSecret(s, "rotated")
		}),
	}
	cmd.Flags().StringVar(&from, "from-file", "", "read the value from this `FILE` here; - is standard input")
	return cmd
}

func (a *app) secretsRemoveCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "rm NAME...",
		Short: "Remove secrets, at once",
		Long: `Remove secrets with all their versions and bindings. Requests that carry their placeholders go out as
they are from now on.

Exit codes: 0, or 125 on failure.`,
		Args: atLeast(1, "one secret's name or more"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, name := range args {
				s, err := c.Secrets.Delete(ctx, name)
				if err != nil {
					return cannot(err, "remove secret %s", name)
				}
				if err := a.printSecret(s, "removed"); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}

func (a *app) secretsListCmd() *cobra.Command {
	var sandbox string
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List secrets, without values; or what a sandbox may use",
		Long: `List secrets: their class, version, last use and bindings; no command shows a value. With --sandbox, list
what that sandbox may use, with the placeholders that it sees, and what it has used of model routes.

Exit codes: 0, or 125 on failure.`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			if sandbox != "" {
				return a.listGrants(ctx, c, sandbox)
			}
			all, err := c.Secrets.List(ctx)
			if err != nil {
				return cannot(err, "list secrets")
			}
			if a.json {
				return printList(a, "secrets", all)
			}
			now := time.Now()
			t := &table{head: []string{"NAME", "CLASS", "VERSION", "CHANGED", "USED", "SOURCE", "BOUND TO"}}
			for _, s := range all {
				used := "-"
				if s.GetUsedAt() != nil {
					used = formatAge(when(s.GetUsedAt()), now)
				}
				source := cell{text: s.GetSource().GetKind()}
				if s.GetFault() != "" {
					source = cell{s.GetFault(), red}
				}
				t.add(s.GetName(), s.GetClass(), s.GetVersion(), formatAge(when(s.GetChangedAt()), now), used, source, boundTo(s.GetBindings()))
			}
			a.table(t)
			return nil
		}),
	}
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "what this sandbox may use")
	return cmd
}

func (a *app) listGrants(ctx context.Context, c *client.Client, sandbox string) error {
	g, err := c.Secrets.Grants(ctx, sandbox)
	if err != nil {
		return cannot(err, "list what %s may use", sandbox)
	}
	if a.json {
		return a.printJSON(g)
	}
	t := &table{head: []string{"SECRET", "VARIABLE", "PLACEHOLDER", "BOUND TO", "USED"}}
	for _, s := range g.GetGrants() {
		env := "-"
		for _, b := range s.GetBindings() {
			if b.GetEnv() != "" {
				env = b.GetEnv()
			}
		}
		t.add(s.GetName(), env, s.GetPlaceholder(), boundTo(s.GetBindings()), "-")
	}
	for _, r := range g.GetRoutes() {
		t.add("model "+r.GetProvider(), "-", r.GetToken(), r.GetBaseUrl(), routeUse(r))
	}
	a.table(t)
	return nil
}

// routeUse tells in short what a sandbox has used of a model route.
func routeUse(r *client.RouteGrant) string {
	text := fmt.Sprintf("%d requests, %d tokens", r.GetRequests(), r.GetTokensIn()+r.GetTokensOut())
	if r.GetCost() > 0 {
		text += ", " + formatMoney(r.GetCost())
	}
	return text
}

// boundTo tells in short what bindings say.
func boundTo(all []*client.SecretBinding) string {
	var parts []string
	for _, b := range all {
		how := b.GetScheme()
		if how == "header" || how == "query" {
			how += " " + b.GetHeader()
		}
		parts = append(parts, fmt.Sprintf("%s (%s, %s)", strings.Join(b.GetHosts(), ","), how, whichOf(b.GetFor())))
	}
	return orDash(strings.Join(parts, "; "))
}

func whichOf(s *client.SandboxSelector) string {
	if s.GetAll() {
		return "all sandboxes"
	}
	var parts []string
	parts = append(parts, s.GetSandboxes()...)
	for _, t := range s.GetTemplates() {
		parts = append(parts, "template "+t)
	}
	for k, v := range s.GetLabels() {
		parts = append(parts, "label "+k+"="+v)
	}
	return strings.Join(parts, " ")
}

// selectorFlags say which sandboxes something is for.
type selectorFlags struct {
	all                          bool
	sandboxes, templates, labels []string
}

func (f *selectorFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVar(&f.all, "all", false, "for all sandboxes")
	fl.StringArrayVar(&f.sandboxes, "sandbox", nil, "for this `SANDBOX` (repeatable)")
	fl.StringArrayVar(&f.templates, "template", nil, "for sandboxes of this `TEMPLATE` (repeatable: one of them)")
	fl.StringArrayVar(&f.labels, "label", nil, "for sandboxes with this label, `KEY=VALUE` (repeatable: each of them)")
}

func (f *selectorFlags) selector() (*client.SandboxSelector, error) {
	labels, err := parsePairs("label", f.labels)
	if err != nil {
		return nil, err
	}
	s := &client.SandboxSelector{All: f.all, Sandboxes: f.sandboxes, Templates: f.templates, Labels: labels}
	if !s.All && len(s.Sandboxes)+len(s.Templates)+len(s.Labels) == 0 {
		return nil, errs.New(errs.InvalidArgument, "say which sandboxes it is for").WithHint("use --sandbox, --template, --label or --all")
	}
	return s, nil
}
