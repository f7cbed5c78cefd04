package secret

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"net/url"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
)

// Family is which provider's API a model route speaks.
type Family string

// The families.
const (
	Anthropic Family = "anthropic" // x-api-key; usage in message_start and message_delta
	OpenAI    Family = "openai"    // Authorization: Bearer; usage in the answer or the last chunk
)

// maxRoutes bounds the model routes of a server.
const maxRoutes = 64

// Budget bounds what one sandbox may use of a route over its life; 0: no bound.
type Budget struct {
	Requests int64 `json:"requests,omitempty"`
	Tokens   int64 `json:"tokens,omitempty"` // input and output together
	// Cost is money, in millionths of the unit that the prices are in.
	Cost int64 `json:"cost,omitempty"`
	// PriceIn and PriceOut are what a million tokens of input and of output cost, in millionths of a unit of money.
	PriceIn  int64 `json:"price_in,omitempty"`
	PriceOut int64 `json:"price_out,omitempty"`
}

// perPrice is how many tokens a price is for.
const perPrice = 1_000_000

// Price returns what tokens cost, in millionths of a unit of money, rounded up. What is too much to be said is the most
// that can be said.
func (b Budget) Price(in, out int64) int64 {
	sum, carry := bits.Add64(price(in, b.PriceIn), price(out, b.PriceOut), 0)
	if carry > 0 || sum > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(sum)
}

func price(tokens, each int64) uint64 {
	hi, lo := bits.Mul64(uint64(max(tokens, 0)), uint64(max(each, 0))) //nolint:gosec // not negative
	lo, carry := bits.Add64(lo, perPrice-1, 0)
	if hi += carry; hi >= perPrice {
		return math.MaxUint64
	}
	q, _ := bits.Div64(hi, lo, perPrice)
	return q
}

func (b Budget) check() error {
	for _, n := range []int64{b.Requests, b.Tokens, b.Cost, b.PriceIn, b.PriceOut} {
		if n < 0 {
			return invalid("a budget and its prices can't be negative")
		}
	}
	if b.Cost > 0 && b.PriceIn == 0 && b.PriceOut == 0 {
		return invalid("a budget in money needs what a million tokens cost").WithHint("give the provider's prices: --price-in and --price-out")
	}
	return nil
}

// Route is a way for sandboxes to a model provider: a plain base URL inside, behind which the gateway
// adds the key.
type Route struct {
	ID       string `json:"id"`
	Provider string `json:"provider"` // in the route's path
	Family   Family `json:"family"`
	// BaseURL is where requests go, such as https://api.anthropic.com; its path comes before theirs.
	BaseURL string   `json:"base_url"`
	Secret  string   `json:"secret"` // id
	For     Selector `json:"for"`
	// Models are the only ones that may be asked for, * at the end for all that begin so; empty: any.
	Models []string `json:"models,omitempty"`
	Budget Budget   `json:"budget"`
	// TokenTTL ends a sandbox's token that long after the sandbox's creation; 0: with the sandbox.
	TokenTTL  time.Duration `json:"token_ttl,omitempty"`
	CreatedAt time.Time     `json:"created_at"`
}

// RouteGrant is a route as one sandbox may use it.
type RouteGrant struct {
	Route
	// Token is what the sandbox sends instead of a key. It opens this route for this sandbox, nothing
	// else, and only from inside it.
	Token string
	// Key is the provider's key; empty where it could not be read. Previous is the one before.
	Key, Previous Value
	KeyVersion    uint64
}

// Spent is what a sandbox has used of a route so far.
type Spent struct {
	Requests  int64 `json:"requests"`
	TokensIn  int64 `json:"tokens_in"`
	TokensOut int64 `json:"tokens_out"`
}

// SpentBy returns what a sandbox has used of each provider, as far as it is told.
func (v *Vault) SpentBy(ctx context.Context, sandbox string) (map[string]Spent, error) {
	if err := v.cfg.DB.Flush(); err != nil { // what was used is queued, and must count
		return nil, err
	}
	rows, err := v.cfg.DB.ModelUsages(ctx, sandbox)
	if err != nil {
		return nil, fmt.Errorf("read what was used: %w", err)
	}
	out := make(map[string]Spent, len(rows))
	for provider, u := range rows {
		out[provider] = Spent{Requests: u.Requests, TokensIn: u.TokensIn, TokensOut: u.TokensOut}
	}
	return out, nil
}

// PutRoute makes a route, or replaces the one of that provider. Kinds: InvalidArgument, NotFound (the
// secret), PermissionDenied (not an admin), ResourceExhausted.
func (v *Vault) PutRoute(_ context.Context, c Caller, r Route) (Route, error) {
	if err := c.admin(); err != nil {
		return Route{}, err
	}
	if err := r.check(); err != nil {
		return Route{}, err
	}
	s, err := v.Get(c, r.Secret)
	if err != nil {
		return Route{}, err
	}
	if s.Owner != "" {
		return Route{}, invalid("secret %s belongs to a key's holder: a route needs one of the server's own", s.Name)
	}
	r.Secret = s.ID
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.Lock()
	next := maps.Clone(v.routes)
	v.mu.Unlock()
	if old, ok := next[r.Provider]; ok {
		r.ID, r.CreatedAt = old.ID, old.CreatedAt // tokens stay valid
	} else {
		r.ID, r.CreatedAt = id.New(id.Route), v.now()
	}
	next[r.Provider] = r
	if len(next) > maxRoutes {
		return Route{}, errs.New(errs.ResourceExhausted, "there are %d model routes already", maxRoutes)
	}
	return r, v.setRoutes(next, routeEvent(c, r, false))
}

// RemoveRoute removes a provider's route; tokens for it are worth nothing from then on. NotFound.
func (v *Vault) RemoveRoute(_ context.Context, c Caller, provider string) (Route, error) {
	if err := c.admin(); err != nil {
		return Route{}, err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.Lock()
	next := maps.Clone(v.routes)
	v.mu.Unlock()
	r, ok := next[provider]
	if !ok {
		return Route{}, errs.New(errs.NotFound, "no model route %.80q", provider).WithHint("casemate secrets model ls shows them")
	}
	delete(next, provider)
	return r, v.setRoutes(next, routeEvent(c, r, true))
}

func (v *Vault) setRoutes(next map[string]Route, e journal.Event) error {
	if err := v.writeSetting(settingRoutes, next, e); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.routes = next
	v.tellLocked()
	return nil
}

func routeEvent(c Caller, r Route, removed bool) journal.Event {
	//casemate:fact server model.route route object
	//casemate:fact server model.route removed yes_or_no
	return journal.Event{Sandbox: journal.ServerStream, Type: journal.ModelRoute, Actor: c.ID}.
		With(journal.Server, map[string]any{"route": r, "removed": removed})
}

// Routes returns the model routes, by provider.
func (v *Vault) Routes(c Caller) ([]Route, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sortedRoutesLocked(), nil
}

func (v *Vault) sortedRoutesLocked() []Route {
	return slices.SortedFunc(maps.Values(v.routes), func(a, b Route) int { return cmp.Compare(a.Provider, b.Provider) })
}

// RouteGrants returns the model routes that the sandbox may use, by provider.
func (v *Vault) RouteGrants(ctx context.Context, sub Subject) []RouteGrant {
	v.refresh(ctx, func(e *entry) bool {
		e.needed = e.needed || slices.ContainsFunc(v.sortedRoutesLocked(), func(r Route) bool { return r.Secret == e.ID && r.For.Matches(sub) })
		return !e.loaded && v.due(e)
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []RouteGrant
	for _, r := range v.sortedRoutesLocked() {
		e, ok := v.entries[r.Secret]
		if !ok || !r.For.Matches(sub) || !v.classes[e.Class].forTemplate(sub.Template) {
			continue
		}
		v.loadLocked(e)
		shape := Shape{Prefix: "sk-csm-", Length: 64}
		if r.Family == Anthropic {
			shape = Shape{Prefix: "sk-ant-csm-", Length: 64}
		}
		all = append(all, RouteGrant{
			Route: r, Token: v.sealer.placeholder(shape, sub.ID, r.ID), Key: e.value, Previous: e.previous, KeyVersion: e.Version,
		})
	}
	return all
}

func (r *Route) check() error {
	if !validSecretName(r.Provider) || r.Provider != strings.ToLower(r.Provider) {
		return invalid("provider %.80q: use lower-case letters, digits and -", r.Provider)
	}
	if r.Family != Anthropic && r.Family != OpenAI {
		return invalid("API family %.40q is unknown", r.Family).WithHint("use anthropic, or openai for it and everything like it")
	}
	u, err := url.Parse(r.BaseURL)
	if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return invalid("base URL %.200q: use https://HOST[:PORT][/PATH]", r.BaseURL)
	}
	r.BaseURL = strings.TrimRight(u.String(), "/")
	if err := r.Budget.check(); err != nil {
		return err
	}
	if r.TokenTTL < 0 {
		return invalid("a token's life can't be negative")
	}
	if len(r.Models) > maxSelect {
		return invalid("%d models, limit %d", len(r.Models), maxSelect)
	}
	return r.For.check()
}

// ModelHost is the name inside a sandbox under which model routes are found.
const ModelHost = "casemate.internal"

// modelsPath is where routes begin below it.
const modelsPath = "/models/"

// InsideURL is the route's base URL inside a sandbox.
func (r Route) InsideURL() string {
	u := "http://" + ModelHost + modelsPath + r.Provider
	if r.Family == OpenAI {
		u += "/v1" // clients of this family have the version in the base URL
	}
	return u
}

// ExpiresAt is when a token for the route ends in a sandbox that was created then; zero: with the sandbox.
func (r Route) ExpiresAt(created time.Time) time.Time {
	if r.TokenTTL == 0 {
		return time.Time{}
	}
	return created.Add(r.TokenTTL)
}

// RouteEnv returns the variables by which clients find the routes, named after the provider:
// ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY for anthropic.
func RouteEnv(all []RouteGrant) map[string]string {
	env := make(map[string]string)
	for _, r := range all {
		name := strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(r.Provider))
		env[name+"_BASE_URL"], env[name+"_API_KEY"] = r.InsideURL(), r.Token
	}
	return env
}
