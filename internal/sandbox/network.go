package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/journal/content"
)

// These names let packages above speak of the network without importing what lies below.
type (
	// NetworkRule is a rule as people write it: "allow RULE" or "deny RULE".
	NetworkRule = rules.Text
	// NetworkLimits bound what a sandbox may have open and move.
	NetworkLimits = egress.Limits
	// NetworkVerdict is an answer of the rules, with its reason.
	NetworkVerdict = rules.Verdict
	// Refusal is something that was refused to a sandbox.
	Refusal = egress.Refusal
	// NetworkUsage is what a sandbox has moved and has open.
	NetworkUsage = egress.Usage
	// NetworkStats are figures of the gateway process.
	NetworkStats = egress.Stats
)

// Network is a sandbox's way out. A Spec without one has no device, and never gets one; an empty one has a
// device and may reach nothing.
type Network struct {
	// Rules are judged in order; the first that matches decides, and none denies.
	Rules  []NetworkRule
	Limits NetworkLimits
	// Template is what it is the default of, where the create named no network. It makes the rules an administrator's
	// word, so nothing that a caller says may set it.
	Template string `json:",omitempty"`
	// Proxy is a proxy (SOCKS5, host:port) of this sandbox alone, which its TCP connections leave through. Whoever sets it has
	// given the vault what is needed to use it. A sandbox that gets a copy of the Network without that reaches nothing.
	Proxy string `json:",omitempty"`
	// Recorded says that nothing leaves: what the sandbox asks for is answered from a record, as far as SetAnswers gave it, and
	// all else is refused. Rules refuse what they refuse. It is set when a sandbox is made, and never changes.
	Recorded bool `json:",omitempty"`
}

// Gateway is what the Manager needs of package egress/control; *control.Gateway implements it.
type Gateway interface {
	// Attach gives the gateway a sandbox's device and policy.
	Attach(ctx context.Context, s egress.Member) error
	// Configure replaces a policy; what it no longer allows is cut when it returns.
	Configure(ctx context.Context, id string, p egress.Policy) error
	// Detach ends everything of a sandbox. Idempotent.
	Detach(ctx context.Context, id string) error
	// Refused returns what was refused at or after since.
	Refused(ctx context.Context, id string, since time.Time) ([]egress.Refusal, error)
	// SetAnswers gives a sandbox that is answered from a record its answers, in place of those before, or with more behind them.
	SetAnswers(ctx context.Context, id string, list []egress.RecordedAnswer, more bool) error
	// Settle returns once everything is recorded (RecordNetwork) that the gateway has seen of a sandbox so far.
	Settle(ctx context.Context, id string) error
	// Usage returns what a sandbox has moved and has open.
	Usage(ctx context.Context, id string) (egress.Usage, error)
	// Stats returns the gateway process's figures; ok is false where none runs.
	Stats() (s egress.Stats, ok bool)
	// Adopt brings the gateway of an earlier server in line with the sandboxes that live.
	Adopt(ctx context.Context, list []egress.Member) map[string]error
}

// HasNetworks reports whether sandboxes of this Manager can have a network.
func (m *Manager) HasNetworks() bool { return m.cfg.Gateway != nil }

// checkNetwork refuses rules that can't be, and those that the principal may not give.
func (m *Manager) checkNetwork(p Principal, n *Network) error {
	if n == nil {
		return nil
	}
	if m.cfg.Gateway == nil {
		return errs.New(errs.Unsupported, "this server has no gateway, so its sandboxes have no network")
	}
	if _, err := m.expand(n); err != nil {
		return err
	}
	// What stands in a named set is the administrator's word already.
	own, err := rules.Expand(n.Rules, func(string) ([]string, error) { return nil, nil })
	if err != nil {
		return err
	}
	l := n.Limits
	if l.Connections < 0 || l.Pending < 0 || l.Bytes < 0 || l.Rate < 0 || l.Idle < 0 {
		return invalid("a limit of the network is negative").WithHint("leave it out for the default")
	}
	if special := slices.IndexFunc(own, rules.Rule.Special); special >= 0 && !p.admin() && !n.Recorded {
		return errs.New(errs.PermissionDenied, "only an administrator may open addresses that are private or the host's, as the rule %q does", own[special].Text()).
			WithHint("use an admin key, or leave the rule out")
	}
	if p.Sandbox == "" {
		return nil
	}
	return m.withinParentNetwork(p, n)
}

// withinParentNetwork holds a child to what its parent may reach.
func (m *Manager) withinParentNetwork(p Principal, n *Network) error {
	parent := m.find(p.Sandbox)
	if parent == nil {
		return errs.New(errs.FailedPrecondition, "sandbox %s has ended and can have no children", p.Sandbox)
	}
	above := parent.snapshot().Spec.Network
	if above == nil {
		return errs.New(errs.PermissionDenied, "a child can't have a network where its parent has none")
	}
	if above.Recorded {
		return errs.New(errs.PermissionDenied, "a child can't have a network where its parent is answered from a record: nothing leaves there")
	}
	if above.Proxy != "" {
		return errs.New(errs.PermissionDenied, "a child can't have a network where its parent leaves through a proxy of its own")
	}
	if !slices.Equal(above.Rules, n.Rules) {
		return errs.New(errs.PermissionDenied, "a child has its parent's network rules, no others").
			WithHint("leave the network out, or give the rules that the parent has")
	}
	return nil
}

func (m *Manager) expand(n *Network) ([]rules.Rule, error) {
	return rules.Expand(n.Rules, m.cfg.NetworkSet)
}

func (m *Manager) policyOf(level Recording, n *Network) (egress.Policy, error) {
	list, err := m.expand(n)
	return egress.Policy{Rules: list, Limits: n.Limits, Via: n.Proxy, Keep: level.keeps(RecordContent), Recorded: n.Recorded}, err
}

// Granted is what a sandbox with a network gets beside it.
type Granted struct {
	// Env is beneath what the spec says. Placeholders names those of its variables that hold placeholders of secrets.
	Env          map[string]string
	Placeholders []string
	// Files are shown read-only, by their paths inside.
	Files map[string][]byte
}

// granted asks what a starting sandbox gets, adds its files to the instance's spec, and returns its environment.
func (m *Manager) granted(ctx context.Context, b *box, s Spec, spec *isolation.Spec) map[string]string {
	if s.Network == nil || m.cfg.Grants == nil {
		return s.Env
	}
	g := m.cfg.Grants(ctx, b.snapshot())
	b.placeholders = slices.DeleteFunc(slices.Sorted(slices.Values(g.Placeholders)), func(name string) bool {
		_, own := s.Env[name]
		return own
	})
	for _, path := range slices.Sorted(maps.Keys(g.Files)) {
		spec.Files = append(spec.Files, isolation.File{Path: path, Content: g.Files[path]})
	}
	env := maps.Clone(g.Env)
	if env == nil {
		return s.Env
	}
	maps.Copy(env, s.Env)
	return env
}

// withoutGranted takes out of an environment what the sandbox was granted: whatever starts from its files gets
// its own, and a placeholder means nothing in another sandbox.
func (m *Manager) withoutGranted(ctx context.Context, b *box, env map[string]string) {
	s := b.snapshot()
	if s.Spec.Network == nil || m.cfg.Grants == nil {
		return
	}
	for k, v := range m.cfg.Grants(ctx, s).Env {
		if env[k] == v {
			delete(env, k)
		}
	}
}

// networkOf adds a device, and what a program needs to use it, to an instance's spec.
func networkOf(n *Network, s *isolation.Spec) {
	if n == nil {
		return
	}
	a, g := address.Sandbox(), address.Gateway()
	s.Network = &isolation.Network{
		Device: address.Device, MTU: address.MTU, MAC: address.MAC(), PeerMAC: address.GatewayMAC(),
		Addrs: a[:], Gateways: g[:],
	}
	s.Files = append(s.Files, isolation.File{Path: "/etc/resolv.conf", Content: []byte(address.ResolvConf())})
}

// member describes a sandbox with a network for the gateway.
func (m *Manager) member(b *box, inst isolation.Instance, n *Network) (egress.Member, error) {
	p, err := m.policyOf(b.snapshot().Spec.Record, n)
	return egress.Member{ID: b.id, Policy: p, Open: func(ctx context.Context) (*os.File, error) { return inst.Device(ctx) }}, err
}

// attach connects a started instance to the gateway. One without network costs nothing.
func (m *Manager) attach(ctx context.Context, b *box, inst isolation.Instance, n *Network) error {
	if n == nil {
		return nil
	}
	member, err := m.member(b, inst, n)
	if err != nil {
		return err
	}
	return m.cfg.Gateway.Attach(ctx, member)
}

// detach ends everything that the gateway has of a sandbox.
func (m *Manager) detach(ctx context.Context, b *box) {
	if m.cfg.Gateway == nil {
		return
	}
	if err := m.cfg.Gateway.Detach(context.WithoutCancel(ctx), b.id); err != nil {
		// The gateway holds nothing but the end of a device that leads nowhere; the next server tells it again.
		m.log.Warn("cannot take a sandbox's device from the gateway", "sandbox", b.id, "error", err)
	}
}

// adoptNetworks tells the gateway which of its sandboxes live.
func (m *Manager) adoptNetworks(ctx context.Context) {
	if m.cfg.Gateway == nil {
		return
	}
	var list []egress.Member
	for _, b := range m.boxes() {
		b.mu.Lock()
		n, inst := b.sb.Spec.Network, b.inst
		b.mu.Unlock()
		if n == nil || inst.now() == nil {
			continue
		}
		member, err := m.member(b, inst, n)
		if err != nil {
			// A set that is gone: the sandbox lives on and reaches nothing.
			m.log.Error("cannot read a sandbox's network rules; it reaches nothing", "sandbox", b.id, "error", err)
		}
		list = append(list, member)
	}
	for id, err := range m.cfg.Gateway.Adopt(ctx, list) {
		m.NetworkFailed(id, err)
	}
}

// NetworkFailed is told that the gateway could not be given a sandbox's device. Such a sandbox reaches nothing; one whose
// device is not the one that was made ends, since nothing of its walls can be relied on.
func (m *Manager) NetworkFailed(id string, err error) {
	m.log.Error("cannot connect a sandbox to the gateway; it reaches nothing", "sandbox", id, "error", err)
	if b := m.find(id); b != nil && errors.Is(err, isolation.ErrDeviceGone) {
		m.beginEnd(b, "", EndLost, isolation.ErrDeviceGone.Error())
	}
}

// setNetwork changes the rules of a sandbox that has a device. Precondition: the caller holds the life token.
func (m *Manager) setNetwork(ctx context.Context, p Principal, b *box, n *Network) error {
	now := b.snapshot()
	if now.State != Running && now.State != Paused {
		return &TransitionError{ID: b.id, From: now.State}
	}
	if now.Spec.Network == nil {
		return errs.New(errs.FailedPrecondition, "sandbox %s was created without network, and can't get one any more", b.id).
			WithHint("commit it and start from the commit: casemate create --template COMMIT --allow HOST; with --net closed, rules can be given later")
	}
	if n.Recorded != now.Spec.Network.Recorded {
		return errs.New(errs.FailedPrecondition, "whether sandbox %s is answered from a record is said when it is made, and does not change", b.id)
	}
	if err := m.checkNetwork(p, n); err != nil {
		return err
	}
	policy, err := m.policyOf(now.Spec.Record, n)
	if err != nil {
		return err
	}
	return m.cfg.Gateway.Configure(ctx, b.id, policy)
}

// refusedMost bounds what the end of a process carries.
const refusedMost = 20

// refusedSince returns what was refused to a sandbox while a process ran. Other processes of the sandbox may
// have met it: packets do not say who sent them.
func (m *Manager) refusedSince(b *box, since time.Time) []Refusal {
	b.mu.Lock()
	n := b.sb.Spec.Network
	b.mu.Unlock()
	if n == nil || m.cfg.Gateway == nil {
		return nil
	}
	list, err := m.cfg.Gateway.Refused(m.ctx, b.id, since)
	if err != nil {
		m.log.Warn("cannot ask what the gateway refused", "sandbox", b.id, "error", err)
		return nil
	}
	return list[max(0, len(list)-refusedMost):]
}

// RecordNetwork records what the gateway saw. It is called by the gateway's keeper, in order.
func (m *Manager) RecordNetwork(list []egress.Event) error {
	for _, e := range list {
		if !id.ValidSandbox(e.Sandbox) {
			m.log.Error("events of the gateway were lost", "count", e.Count, "note", e.Note)
			continue
		}
		t := journal.Type(e.Type)
		if !strings.Contains(string(t), ".") {
			t = "network." + t
		}
		if e.Type == egress.EventDropped {
			t = journal.Gap
		}
		m.counted.countNetwork(t, e)
		je, err := withBodies(event(t, "", networkFacts(e)), e.Bodies)
		if err != nil {
			m.log.Error("the gateway tells of content that can't be; it is left out", "sandbox", e.Sandbox, "error", err)
			e.NotKept = "what the gateway told of it can't be"
			je = event(t, "", networkFacts(e))
		}
		je.Sandbox, je.Time = e.Sandbox, e.Time
		m.journal.Post(je)
	}
	return nil
}

// withBodies adds a request and its answer to the event that tells of them.
//
//casemate:fact server network.request,model.used request body the request as the sandbox made it: method, url and header, as JSON
//casemate:fact server network.request,model.used request_body body
//casemate:fact server network.request,model.used answer body the answer as the sandbox got it: status and header, as JSON
//casemate:fact server network.request,model.used answer_body body
func withBodies(e journal.Event, bodies map[string]content.Kept) (journal.Event, error) {
	for _, name := range egress.BodyNames() {
		k, ok := bodies[name]
		if !ok {
			continue
		}
		if err := k.Check(); err != nil {
			return e, fmt.Errorf("%s: %w", name, err)
		}
		e = e.WithContent(journal.Server, name, k)
	}
	return e, nil
}

// networkFacts leaves out what the journal's event says already.
func networkFacts(e egress.Event) egress.Event {
	e.Sandbox, e.Time, e.Type, e.Bodies = "", time.Time{}, "", nil
	return e
}

// NetworkOf returns a sandbox's network rules, expanded, and what it has moved. Kind: FailedPrecondition where
// it has no network.
func (m *Manager) NetworkOf(ctx context.Context, p Principal, ref string) (Network, []rules.Rule, NetworkUsage, error) {
	b, s, err := m.networked(ctx, p, ref)
	if err != nil {
		return Network{}, nil, NetworkUsage{}, err
	}
	list, err := m.expand(s.Spec.Network)
	if err != nil {
		return Network{}, nil, NetworkUsage{}, err
	}
	usage, err := m.cfg.Gateway.Usage(ctx, b.id)
	return *s.Spec.Network, list, usage, err
}

func (m *Manager) networked(ctx context.Context, p Principal, ref string) (*box, Sandbox, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, Sandbox{}, err
	}
	if b == nil {
		return nil, Sandbox{}, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	s := b.snapshot()
	if s.Spec.Network == nil || m.cfg.Gateway == nil {
		return nil, s, errs.New(errs.FailedPrecondition, "sandbox %s has no network", b.id).
			WithHint("create one with --allow HOST, or with --net closed to set rules later")
	}
	return b, s, nil
}

// NetworkSet is a named set of rules, as NetworkRule uses it by @NAME.
type NetworkSet struct {
	Name  string
	Rules []string // without allow or deny
	Fault string   // why it can't be used; "": it can
}

// NetworkSets returns the sets that rules may name, open first.
func (m *Manager) NetworkSets() []NetworkSet {
	names := []string{rules.Open}
	if m.cfg.NetworkSets != nil {
		names = append(names, m.cfg.NetworkSets()...)
	}
	out := make([]NetworkSet, 0, len(names))
	for _, name := range names {
		s := NetworkSet{Name: name}
		list, err := rules.Expand([]rules.Text{rules.Text("allow @" + name)}, m.cfg.NetworkSet)
		if err != nil {
			s.Fault, _ = errs.PublicText(err)
		}
		for _, r := range list {
			s.Rules = append(s.Rules, r.Text())
		}
		out = append(out, s)
	}
	return out
}

// NetworkStats returns the gateway process's figures; ok is false where none runs.
func (m *Manager) NetworkStats() (s NetworkStats, ok bool) {
	if m.cfg.Gateway == nil {
		return s, false
	}
	return m.cfg.Gateway.Stats()
}
