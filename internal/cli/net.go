package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/server"
)

// The words of --net beside names of sets.
const (
	netNone   = "none"
	netClosed = "closed"
)

// netFlags say what a sandbox may reach.
type netFlags struct {
	net         string
	allow, deny []string
	connections int32
	bytes       size
	rate        size
	idle        time.Duration
}

func (f *netFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.net, "net", "", "what it may reach: none, closed (nothing yet), registries (this host's package registries), open (the internet), or a `SET` of rules (default the template's, else none; with --allow only that)")
	fl.StringArrayVar(&f.allow, "allow", nil, "let it reach `HOST[:PORT]`, as example.com, *.example.com, 10.1.0.0/16:5432 or https://example.com/api/* (repeatable)")
	fl.StringArrayVar(&f.deny, "deny", nil, "never let it reach `HOST[:PORT]`, whatever else is allowed (repeatable)")
	fl.Int32Var(&f.connections, "net-connections", 0, "limit on its connections at once")
	fl.Var(&f.bytes, "net-bytes", "limit on the bytes it moves in its life, as 500m or 10g")
	fl.Var(&f.rate, "net-rate", "limit on the bytes it moves a second, each way, as 1m")
	fl.DurationVar(&f.idle, "net-idle", 0, "end connections over which nothing passes for this long")
	_ = cmd.RegisterFlagCompletionFunc("net", cobra.FixedCompletions([]string{netNone, netClosed, "registries", "open"}, cobra.ShellCompDirectiveNoFileComp))
}

// rules turns the flags into a network; nil is none.
func (f *netFlags) rules() (*client.NetworkRules, error) {
	limits := f.connections != 0 || f.bytes != 0 || f.rate != 0 || f.idle != 0
	if f.net == netNone || f.net == "" && len(f.allow)+len(f.deny) == 0 {
		if limits || len(f.allow)+len(f.deny) > 0 {
			return nil, errs.New(errs.InvalidArgument, "network rules and limits need a network, and there is none").
				WithHint("leave --net none out, or give --net closed")
		}
		return nil, nil
	}
	if f.connections < 0 || f.idle < 0 {
		return nil, usageError("a limit can't be negative")
	}
	n := &client.NetworkRules{}
	for _, d := range f.deny {
		n.Rules = append(n.Rules, "deny "+d)
	}
	for _, w := range f.allow {
		n.Rules = append(n.Rules, "allow "+w)
	}
	if f.net != "" && f.net != netClosed {
		n.Rules = append(n.Rules, "allow @"+f.net)
	}
	if limits {
		n.Limits = &client.NetworkLimits{Connections: f.connections, Bytes: int64(f.bytes), Rate: int64(f.rate)}
		if f.idle > 0 {
			n.Limits.Idle = durationpb.New(f.idle)
		}
	}
	return n, nil
}

func (a *app) netCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "net",
		Short: "What sandboxes may reach",
		Long: `Show, change and explain what a sandbox may reach.

A sandbox has no network unless it is made with one: casemate create --allow HOST, --net registries, --net
open, or --net closed to give it rules later.

Exit codes: 0, or 125 when it could not be done.`,
	}
	return group(cmd, a.netShowCmd(), a.netSetCmd(), a.netExplainCmd(), a.netTemplateCmd(), a.netSetsCmd())
}

func (a *app) netTemplateCmd() *cobra.Command {
	var f netFlags
	cmd := &cobra.Command{
		Use:   "template [flags] TEMPLATE",
		Short: "Show or set what sandboxes of a template reach by default",
		Long: `Show what sandboxes that start from a template, or from a commit or its tag, may reach where their create
says nothing of it; with flags, set it. Sandboxes that are there keep their rules. --net none takes the
default away. Only an administrator sets it.

Exit codes: 0, or 125 when it could not be done.`,
		Example: `  casemate net template code-interpreter --net registries --allow api.example.com
  casemate net template code-interpreter
  casemate net template code-interpreter --net none`,
		Args: exactly(1, "a template"),
	}
	cmd.RunE = a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
		changes := false
		cmd.Flags().Visit(func(g *pflag.Flag) { changes = changes || cmd.LocalNonPersistentFlags().Lookup(g.Name) != nil })
		if !changes {
			t, err := c.Network.Template(ctx, args[0])
			if err != nil {
				return cannot(err, "show the default network of %s", args[0])
			}
			return a.showTemplateNetwork(t)
		}
		n, err := f.rules()
		if err != nil {
			return err
		}
		t, err := c.Network.SetTemplate(ctx, args[0], n)
		if err != nil {
			return cannot(err, "set the default network of %s", args[0])
		}
		return a.showTemplateNetwork(t)
	})
	f.register(cmd)
	return cmd
}

func (a *app) showTemplateNetwork(t *client.TemplateNetwork) error {
	if a.json {
		return a.printJSON(t)
	}
	switch n := t.GetNetwork(); {
	case n == nil:
		fmt.Fprintln(a.stdout, "no network")
	case len(n.GetRules()) == 0:
		fmt.Fprintln(a.stdout, "no rules: it reaches nothing")
	default:
		for _, r := range n.GetRules() {
			fmt.Fprintln(a.stdout, clean(r))
		}
	}
	return nil
}

func (a *app) netSetsCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "sets [SET]",
		Short: "List the named sets of rules, or show the rules of one",
		Long: `List the named sets of rules, which --net SET and the rule @SET use; or show the rules of one. open and
registries are always there; the server's administrator makes others as files (casemate serve --net-sets).

Exit codes: 0, or 125 when there is no such set, or the one named can't be used.`,
		Example: `  casemate net sets
  casemate net sets registries`,
		Args: between(0, 1, "at most one set"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			all, err := c.Network.Sets(ctx)
			if err != nil {
				return cannot(err, "list the sets of network rules")
			}
			if len(args) == 1 {
				return a.showNetSet(all, args[0])
			}
			if a.json {
				return printList(a, "sets", all)
			}
			t := &table{head: []string{"SET", "RULES"}}
			for _, s := range all {
				what := cell{text: fmt.Sprint(len(s.GetRules()))}
				if s.GetFault() != "" {
					what = cell{s.GetFault(), red}
				}
				t.add(s.GetName(), what)
			}
			a.table(t)
			return nil
		}),
	}
}

func (a *app) showNetSet(all []*client.NetworkSet, name string) error {
	i := slices.IndexFunc(all, func(s *client.NetworkSet) bool { return s.GetName() == name })
	if i < 0 {
		return errs.New(errs.NotFound, "there is no set of network rules called %q", name).WithHint("casemate net sets shows those that there are")
	}
	s := all[i]
	switch {
	case s.GetFault() != "":
		return errs.New(errs.FailedPrecondition, "%s", s.GetFault())
	case a.json:
		return a.printJSON(s)
	}
	for _, r := range s.GetRules() {
		fmt.Fprintln(a.stdout, clean(r))
	}
	return nil
}

func (a *app) netShowCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "show SANDBOX",
		Short: "Show a sandbox's network rules, and what it has moved",
		Long: `Show the network rules of a sandbox in the order in which they are judged, with those of named sets in
their place, its limits where they are not the defaults, a proxy of its own, and what it has moved.

Exit codes: 0, or 125 when that can't be said.`,
		Example: "  casemate net show web",
		Args:    exactly(1, "a sandbox"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			st, err := c.Network.Get(ctx, args[0])
			if err != nil {
				return cannot(err, "show the network of %s", args[0])
			}
			return a.showNetwork(st)
		}),
	}
}

func (a *app) showNetwork(st *client.NetworkStatus) error {
	if a.json {
		return a.printJSON(st)
	}
	for _, r := range st.GetExpanded() {
		fmt.Fprintln(a.stdout, clean(r))
	}
	if t := st.GetNetwork().GetTemplate(); t != "" {
		a.note("the default of template %s", clean(t))
	}
	if len(st.GetExpanded()) == 0 {
		fmt.Fprintln(a.stdout, "no rules: it reaches nothing")
	}
	if p := st.GetNetwork().GetProxy(); p != "" {
		a.note("TCP leaves through the sandbox's own proxy, %s", clean(p))
	}
	if text := netLimitsText(st.GetNetwork().GetLimits()); text != "" {
		a.note("limits: %s", text)
	}
	a.note("%d connections open, %s sent, %s received", st.GetConnections(), formatSize(st.GetSent()), formatSize(st.GetReceived()))
	return nil
}

// netLimitsText tells the limits that are not the defaults.
func netLimitsText(l *client.NetworkLimits) string {
	var parts []string
	if n := l.GetConnections(); n > 0 {
		parts = append(parts, fmt.Sprintf("%d connections", n))
	}
	if n := l.GetPending(); n > 0 {
		parts = append(parts, fmt.Sprintf("%d of them not established", n))
	}
	if n := l.GetBytes(); n > 0 {
		parts = append(parts, formatSize(n)+" in all")
	}
	if n := l.GetRate(); n > 0 {
		parts = append(parts, formatSize(n)+" a second each way")
	}
	if d := l.GetIdle().AsDuration(); d > 0 {
		parts = append(parts, "connections end when idle for "+formatDuration(d))
	}
	return strings.Join(parts, ", ")
}

func (a *app) netSetCmd() *cobra.Command {
	var f netFlags
	cmd := &cobra.Command{
		Use:   "set [flags] SANDBOX",
		Short: "Replace a sandbox's network rules",
		Long: `Replace the network rules and limits of a sandbox that was made with a network. They hold when the command
returns: open connections that they no longer allow are cut.

Without --allow and --net nothing may be reached.

Exit codes: 0, or 125 when they could not be set.`,
		Example: `  casemate net set web --allow api.example.com --allow '*.example.net:8443'
  casemate net set web --net closed`,
		Args: exactly(1, "a sandbox"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if f.net == netNone || f.net == "" && len(f.allow)+len(f.deny) == 0 {
				f.net = netClosed
			}
			n, err := f.rules()
			if err != nil {
				return err
			}
			st, err := c.Network.Set(ctx, args[0], n)
			if err != nil {
				return cannot(err, "set the network of %s", args[0])
			}
			return a.showNetwork(st)
		}),
	}
	f.register(cmd)
	return cmd
}

func (a *app) netExplainCmd() *cobra.Command {
	var method string
	cmd := &cobra.Command{
		Use:   "explain SANDBOX URL",
		Short: "Say what a sandbox's rules answer to a URL, and why",
		Long: `Say what a sandbox's network rules answer to a URL, or HOST[:PORT], and why. Names are looked up as the
gateway does it, and each address is judged. It also says which secrets would be put on, and what the gateway
answers itself. Nothing is connected to.

Exit codes: 0 when it would be allowed, 1 when not, 125 when that can't be said.`,
		Example: `  casemate net explain web https://example.com/
  casemate net explain web --method POST https://api.example.com/v1/items`,
		Args: exactly(2, "a sandbox and a URL"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			e, err := c.Network.Explain(ctx, args[0], args[1], method)
			if err != nil {
				return cannot(err, "explain %s", args[1])
			}
			if a.json {
				err = a.printJSON(e)
			} else {
				a.showExplanation(e)
			}
			if err == nil && !e.GetAllowed() {
				err = &exitError{code: 1}
			}
			return err
		}),
	}
	cmd.Flags().StringVar(&method, "method", "GET", "HTTP method")
	return cmd
}

func (a *app) showExplanation(e *client.NetworkExplanation) {
	word := map[bool]string{true: "allowed", false: "refused"}
	for _, x := range e.GetAnswers() {
		fmt.Fprintf(a.stdout, "%-12s %s: %s (%s)\n", clean(x.GetAbout()), word[x.GetAllowed()], clean(x.GetReason()), clean(x.GetCode()))
		if x.GetInspected() {
			fmt.Fprintf(a.stdout, "%-12s each request is looked at\n", "")
		}
		if x.GetHint() != "" {
			fmt.Fprintf(a.stdout, "%-12s would be allowed by: --allow '%s'\n", "", clean(x.GetHint()))
		}
	}
	if t := e.GetTemplate(); t != "" {
		a.note("the rules are the default of template %s", clean(t))
	}
	fmt.Fprintln(a.stdout, word[e.GetAllowed()])
}

// warnRefused tells what the gateway refused while a process ran, and what would allow it.
func (a *app) warnRefused(p *client.Process) {
	const most = 5
	list := p.GetRefused()
	for i, r := range list {
		if i == most {
			a.note("%d more were refused; casemate journal tells all", len(list)-most)
			return
		}
		a.note("refused %s %s: %s", clean(r.GetProto()), clean(r.GetTarget()), clean(r.GetReason()))
		if r.GetHint() != "" {
			a.note("  to allow it: --allow '%s'", clean(r.GetHint()))
		}
	}
}

// keeperCmd is the keeper process. It is hidden: only the server starts it.
func (a *app) keeperCmd() *cobra.Command {
	return &cobra.Command{
		Use:    server.KeeperVerb,
		Short:  "The process that observes sandboxes' system calls",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return server.RunKeeper() },
	}
}

// gatewayCmd is the gateway process. It is hidden: only the server starts it.
func (a *app) gatewayCmd() *cobra.Command {
	return &cobra.Command{
		Use:    server.GatewayVerb,
		Short:  "The process that carries sandboxes' packets",
		Hidden: true,
		RunE:   func(_ *cobra.Command, args []string) error { return server.RunGateway(args) },
	}
}
