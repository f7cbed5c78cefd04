package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

func (a *app) secretsBindCmd() *cobra.Command {
	var sel selectorFlags
	b := &client.SecretBinding{}
	cmd := &cobra.Command{
		Use:   "bind NAME",
		Short: "Say for which sandboxes and hosts a secret is, and where in a request it stands",
		Long: `Say for which sandboxes and hosts a secret is, and where in a request it stands. There, and nowhere else,
the real value takes the place of the placeholder; with --always it is put on every request that the
binding covers.

Binding a secret opens no way out: the sandbox's network rules must allow the host as well.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate secrets bind github --host api.github.com --all --env GITHUB_TOKEN
  casemate secrets bind github --host github.com --scheme basic --label team=web --always
  casemate secrets bind search --host api.search.example --scheme header --header X-API-Key --sandbox web --env SEARCH_KEY`,
		Args: exactly(1, "one secret's name"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			s, err := sel.selector()
			if err != nil {
				return err
			}
			b.For = s
			secret, err := c.Secrets.Bind(ctx, args[0], b)
			if err != nil {
				return cannot(err, "bind secret %s", args[0])
			}
			if a.json {
				return a.printJSON(secret)
			}
			made := secret.GetBindings()[len(secret.GetBindings())-1]
			fmt.Fprintln(a.stdout, made.GetId(), boundTo([]*client.SecretBinding{made}))
			return nil
		}),
	}
	sel.register(cmd)
	fl := cmd.Flags()
	fl.StringArrayVar(&b.Hosts, "host", nil, "`HOST` that it is for: api.example.com, *.example.com, with :PORT where it is not 443 (repeatable)")
	fl.StringVar(&b.Scheme, "scheme", "bearer", "bearer, basic, header or query")
	fl.StringVar(&b.Header, "header", "", "name of the header or parameter, for the schemes header and query")
	fl.StringVar(&b.Env, "env", "", "`VARIABLE` that holds the placeholder inside")
	fl.StringArrayVar(&b.Methods, "method", nil, "only requests with this `METHOD` (repeatable)")
	fl.StringArrayVar(&b.Paths, "path", nil, "only this `PATH`, * at the end for all that begin so (repeatable)")
	fl.BoolVar(&b.Always, "always", false, "put it on every request, whether or not the placeholder is there")
	fl.StringVar(&b.User, "user", "", "the user that --always sends with the scheme basic (default x-access-token)")
	fl.StringVar(&b.Format, "format", "", "the header's whole value for --always with the scheme header, as \"token {}\"")
	fl.BoolVar(&b.Plain, "plain", false, "also on requests without TLS, which anybody on the way can read")
	_ = cmd.RegisterFlagCompletionFunc("scheme", cobra.FixedCompletions([]string{"bearer", "basic", "header", "query"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) secretsUnbindCmd() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "unbind NAME [BINDING-ID]",
		Short: "Remove a binding of a secret, or all",
		Long: `Remove a binding of a secret, named by its id as bind prints it and ls --json shows it; or all with
--all.

Exit codes: 0, or 125 on failure.`,
		Args: between(1, 2, "a secret, and perhaps a binding"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			id := "all"
			if all == (len(args) == 2) {
				return usageError("name a binding, or say --all")
			}
			if len(args) == 2 {
				id = args[1]
			}
			s, err := c.Secrets.Unbind(ctx, args[0], id)
			if err != nil {
				return cannot(err, "unbind secret %s", args[0])
			}
			if a.json {
				return a.printJSON(s)
			}
			fmt.Fprintln(a.stdout, clean(s.GetName()), boundTo(s.GetBindings()))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "all bindings of the secret")
	return cmd
}

func (a *app) secretsPolicyCmd() *cobra.Command {
	p := &client.ClassPolicy{}
	cmd := &cobra.Command{
		Use:   "policy [CLASS]",
		Short: "Limit what secrets of a class may be bound to, or show the limits",
		Long: `Limit what secrets of a class (model, tool or other) may be bound to. The flags replace what was there;
without any, the class has no limits. It holds at once, also for bindings that are there. Without CLASS,
show the limits.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate secrets policy model --routes-only
  casemate secrets policy tool --host '*.github.com' --host api.search.example`,
		Args: between(0, 1, "at most one class"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 0 {
				return a.listPolicies(ctx, c)
			}
			p.Class = args[0]
			set, err := c.Secrets.SetClassPolicy(ctx, p)
			if err != nil {
				return cannot(err, "set the policy of class %s", args[0])
			}
			if a.json {
				return a.printJSON(set)
			}
			fmt.Fprintln(a.stdout, clean(policyText(set)))
			return nil
		}),
	}
	fl := cmd.Flags()
	fl.StringArrayVar(&p.Hosts, "host", nil, "the only `HOST` that bindings may name (repeatable)")
	fl.StringArrayVar(&p.Templates, "template", nil, "the only `TEMPLATE` whose sandboxes get them (repeatable)")
	fl.BoolVar(&p.RoutesOnly, "routes-only", false, "only model routes may use them")
	return cmd
}

func (a *app) listPolicies(ctx context.Context, c *client.Client) error {
	all, err := c.Secrets.ClassPolicies(ctx)
	if err != nil {
		return cannot(err, "list policies")
	}
	if a.json {
		return printList(a, "policies", all)
	}
	for _, p := range all {
		fmt.Fprintln(a.stdout, clean(policyText(p)))
	}
	return nil
}

func policyText(p *client.ClassPolicy) string {
	parts := []string{"class " + p.GetClass() + ":"}
	if p.GetRoutesOnly() {
		parts = append(parts, "model routes only;")
	}
	if len(p.GetHosts()) > 0 {
		parts = append(parts, "hosts "+strings.Join(p.GetHosts(), ", ")+";")
	}
	if len(p.GetTemplates()) > 0 {
		parts = append(parts, "templates "+strings.Join(p.GetTemplates(), ", ")+";")
	}
	if len(parts) == 1 {
		parts = append(parts, "no limits")
	}
	return strings.TrimSuffix(strings.Join(parts, " "), ";")
}

func (a *app) secretsModelCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "model",
		Short: "Ways for sandboxes to model providers, with the key added outside",
		Long: `Ways for sandboxes to model providers. Inside, http://casemate.internal/models/PROVIDER is the provider's
API; the sandbox shows a token that works from nowhere else, and the server adds the key. Nothing of TLS
need be opened for it.

Exit codes: 0, or 125 on failure.`,
	}
	return group(cmd, a.modelSetCmd(), a.modelListCmd(), a.modelRemoveCmd())
}

func (a *app) modelSetCmd() *cobra.Command {
	var sel selectorFlags
	var ttl time.Duration
	var cost, in, out money
	r := &client.ModelRoute{}
	cmd := &cobra.Command{
		Use:   "set PROVIDER",
		Short: "Make a way to a model provider, or change it",
		Long: `Make a way to a model provider, or change it; the flags replace all that was set before. Sandboxes find
it by the variables PROVIDER_BASE_URL and PROVIDER_API_KEY, as ANTHROPIC_BASE_URL.

--max-cost is in the money of --price-in and --price-out, which are what the provider asks for a million
tokens. No price comes with Casemate. Input that the provider has cached counts as the rest does.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate secrets model set anthropic --secret anthropic --all
  casemate secrets model set openai --secret openai --label team=web --max-tokens 2000000
  casemate secrets model set anthropic --secret anthropic --all --max-cost 2.50 --price-in 3 --price-out 15
  casemate secrets model set local --family openai --base-url http://models.example:8000/v1 --secret local --all`,
		Args: exactly(1, "one provider"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			s, err := sel.selector()
			if err != nil {
				return err
			}
			r.Provider, r.For = args[0], s
			r.MaxCost, r.PriceIn, r.PriceOut = int64(cost), int64(in), int64(out)
			if ttl != 0 {
				r.TokenTtl = durationpb.New(ttl)
			}
			knownProvider(r)
			set, err := c.Secrets.SetModelRoute(ctx, r)
			if err != nil {
				return cannot(err, "set model route %s", args[0])
			}
			if a.json {
				return a.printJSON(set)
			}
			fmt.Fprintf(a.stdout, "%s to %s, for %s\n", clean(set.GetProvider()), clean(set.GetBaseUrl()), clean(whichOf(set.GetFor())))
			return nil
		}),
	}
	sel.register(cmd)
	fl := cmd.Flags()
	fl.StringVar(&r.Family, "family", "", "whose API it speaks: anthropic, or openai and what is like it (default by the provider's name)")
	fl.StringVar(&r.BaseUrl, "base-url", "", "where requests go (default by the provider's name)")
	fl.StringVar(&r.Secret, "secret", "", "the `SECRET` with the provider's key")
	fl.StringArrayVar(&r.Models, "model", nil, "the only `MODEL` that may be asked for, * at the end for all that begin so (repeatable)")
	fl.Int64Var(&r.MaxRequests, "max-requests", 0, "how many requests a sandbox may make in its life")
	fl.Int64Var(&r.MaxTokens, "max-tokens", 0, "how many tokens a sandbox may use in its life, in and out")
	fl.Var(&cost, "max-cost", "how much money a sandbox may spend in its life, by these prices")
	fl.Var(&in, "price-in", "what a million tokens of input cost")
	fl.Var(&out, "price-out", "what a million tokens of output cost")
	fl.DurationVar(&ttl, "token-ttl", 0, "a sandbox's token ends that long after its start (default with the sandbox)")
	_ = cmd.MarkFlagRequired("secret")
	return cmd
}

// knownProvider fills what is left open for the providers that everybody knows.
func knownProvider(r *client.ModelRoute) {
	family, url := "", ""
	switch r.GetProvider() {
	case "anthropic":
		family, url = "anthropic", "https://api.anthropic.com"
	case "openai":
		family, url = "openai", "https://api.openai.com/v1"
	}
	if r.GetFamily() == "" {
		r.Family = family
	}
	if r.GetBaseUrl() == "" {
		r.BaseUrl = url
	}
}

func (a *app) modelListCmd() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the ways to model providers",
		Long:    "List the ways to model providers.\n\nExit codes: 0, or 125 on failure.",
		Args:    exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.Secrets.ModelRoutes(ctx)
			if err != nil {
				return cannot(err, "list model routes")
			}
			if a.json {
				return printList(a, "routes", all)
			}
			t := &table{head: []string{"PROVIDER", "FAMILY", "TO", "SECRET", "REQUESTS", "TOKENS", "MONEY", "FOR"}}
			for _, r := range all {
				t.add(r.GetProvider(), r.GetFamily(), r.GetBaseUrl(), r.GetSecret(), bound(r.GetMaxRequests()), bound(r.GetMaxTokens()), boundMoney(r.GetMaxCost()), whichOf(r.GetFor()))
			}
			a.table(t)
			return nil
		}),
	}
}

func bound(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func boundMoney(n int64) string {
	if n == 0 {
		return "-"
	}
	return formatMoney(n)
}

func (a *app) modelRemoveCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "rm PROVIDER",
		Short: "Remove a way to a model provider, at once",
		Long:  "Remove a way to a model provider. Tokens for it are worth nothing from now on.\n\nExit codes: 0, or 125 on failure.",
		Args:  exactly(1, "one provider"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r, err := c.Secrets.DeleteModelRoute(ctx, args[0])
			if err != nil {
				return cannot(err, "remove model route %s", args[0])
			}
			if a.json {
				return a.printJSON(r)
			}
			fmt.Fprintln(a.stdout, clean(r.GetProvider()), "removed")
			return nil
		}),
	}
}
