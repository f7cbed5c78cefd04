package e2b

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"casemate.dev/internal/sandbox"
)

// networkConfig is what a caller asks of a sandbox's network.
type networkConfig struct {
	AllowOut           []string                   `json:"allowOut,omitempty"`
	DenyOut            []string                   `json:"denyOut,omitempty"`
	AllowPublicTraffic *bool                      `json:"allowPublicTraffic,omitempty"`
	MaskRequestHost    string                     `json:"maskRequestHost,omitempty"`
	HTTPSPorts         []int                      `json:"httpsPorts,omitempty"`
	EgressProxy        *egressProxy               `json:"egressProxy,omitempty"`
	Rules              map[string]json.RawMessage `json:"rules,omitempty"`
}

// networkUpdate replaces the rules for what goes out; what is left out is cleared.
type networkUpdate struct {
	AllowInternetAccess *bool                      `json:"allow_internet_access"`
	AllowOut            []string                   `json:"allowOut"`
	DenyOut             []string                   `json:"denyOut"`
	EgressProxy         *egressProxy               `json:"egressProxy"`
	Rules               map[string]json.RawMessage `json:"rules"`
}

// allTraffic is every address.
const allTraffic = "0.0.0.0/0"

// wayOut is what a sandbox may reach, as rules of ours: what is allowed goes before what is denied, and
// what neither names is open as at E2B, but for private addresses and those of the host, which only an
// administrator's rule opens. internet false, and a denial of everything, leave what is allowed alone.
func (n *networkConfig) wayOut(internet *bool) *sandbox.Network {
	out := &sandbox.Network{}
	add := func(text string) { out.Rules = append(out.Rules, sandbox.NetworkRule(text)) }
	closed := internet != nil && !*internet
	if n != nil {
		for _, to := range n.AllowOut {
			switch {
			case to == allTraffic:
				add(openInternet)
			case isAddress(to): // any port, by any protocol; a name's are the web's
				add("allow " + bracketed(to) + ":*")
				add("allow udp://" + bracketed(to) + ":*")
			default:
				add("allow " + to)
			}
		}
		closed = closed || contains(n.DenyOut, allTraffic)
		for _, to := range n.DenyOut {
			if to != allTraffic {
				add("deny " + to)
			}
		}
	}
	if !closed {
		add(openInternet)
	}
	return out
}

// openInternet allows whatever has a public address.
const openInternet = "allow @open"

// bracketed is an address as it stands before a port.
func bracketed(to string) string {
	if strings.Contains(to, ":") {
		return "[" + to + "]"
	}
	return to
}

// check refuses what is malformed, and then what is not there yet.
func (n *networkConfig) check() error {
	if n == nil {
		return nil
	}
	for _, d := range n.DenyOut {
		if !isAddress(d) {
			return fail(http.StatusBadRequest, "invalid denied CIDR %s", d)
		}
	}
	domains := false
	for _, d := range n.AllowOut {
		if isAddress(d) {
			continue
		}
		if !isDomain(d) {
			return fail(http.StatusBadRequest, "invalid allowed address %s", d)
		}
		domains = true
	}
	if domains && !contains(n.DenyOut, allTraffic) {
		return fail(http.StatusBadRequest, "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic.")
	}
	if n.MaskRequestHost != "" && !isHost(strings.ReplaceAll(n.MaskRequestHost, "${PORT}", "80")) {
		return fail(http.StatusBadRequest, "mask request host is not valid: %s", n.MaskRequestHost)
	}
	for _, p := range n.HTTPSPorts {
		if p < 1 || p > 65535 {
			return fail(http.StatusBadRequest, "invalid HTTPS port %d", p)
		}
	}
	if len(n.Rules) > 10 {
		return fail(http.StatusBadRequest, "Network rules can have at most 10 domains.")
	}
	return n.EgressProxy.check()
}

// host is what the application on a port sees as Host.
func (n *networkConfig) host(asked string, port int) string {
	if n == nil || n.MaskRequestHost == "" {
		return asked
	}
	return strings.ReplaceAll(n.MaskRequestHost, "${PORT}", strconv.Itoa(port))
}

// speaksTLS reports whether a port is said to speak TLS.
func (n *networkConfig) speaksTLS(port int) bool {
	if n == nil {
		return false
	}
	for _, p := range n.HTTPSPorts {
		if p == port {
			return true
		}
	}
	return false
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

func isAddress(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	_, err := netip.ParsePrefix(s)
	return err == nil
}

func isDomain(s string) bool {
	s = strings.TrimPrefix(s, "*.")
	if s == "*" {
		return true
	}
	return isHost(s) && !strings.Contains(s, ":")
}

// isHost reports whether s can stand in a Host header: a name or an address, perhaps with a port.
func isHost(s string) bool {
	host := s
	if h, port, err := net.SplitHostPort(s); err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return false
		}
		host = h
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	if host == "" || len(host) > 253 {
		return false
	}
	for _, label := range strings.Split(host, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			c := label[i]
			if (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return false
			}
		}
	}
	return true
}

// setNetwork replaces the rules for what goes out of a sandbox.
func (a *API) setNetwork(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	var u networkUpdate
	if err := c.decode(&u); err != nil {
		return err
	}
	k := keptOf(s)
	n := networkConfig{}
	if k.Network != nil {
		n = *k.Network
	}
	n.AllowOut, n.DenyOut, n.EgressProxy, n.Rules = u.AllowOut, u.DenyOut, u.EgressProxy, u.Rules
	if err := n.check(); err != nil {
		return err
	}
	list, err := n.transforms()
	if err != nil {
		return err
	}
	if s.State != sandbox.Running {
		return fail(http.StatusConflict, "Sandbox '%s' cannot be updated while in '%s' state", s.ID, s.State)
	}
	address, proxy, err := a.proxy(c, &n)
	if err != nil {
		return err
	}
	k.Network, k.Internet = &n, u.AllowInternetAccess
	extra := k.put(s.Spec.Extra)
	change := sandbox.Update{Extra: &extra}
	if s.Spec.Network != nil {
		change.Network = n.wayOut(u.AllowInternetAccess)
		change.Network.Limits = s.Spec.Network.Limits
		change.Proxy = &address
	} else if err := a.withoutNetwork(&n); err != nil {
		return err
	}
	// The headers and the proxy first: the update tells the gateway of all.
	if err := a.putTransforms(c, s.ID, s.Spec.Network != nil, list, proxy); err != nil {
		return err
	}
	if _, err := a.cfg.Manager.Update(c.r.Context(), c.p, s.ID, change); err != nil {
		return err
	}
	return c.done()
}

// withoutNetwork refuses what a sandbox that has no network can't keep: every denial holds there, and no
// permission does.
func (a *API) withoutNetwork(n *networkConfig) error {
	switch {
	case n == nil || len(n.AllowOut) == 0:
		return nil
	case a.cfg.Manager.HasNetworks():
		return fail(http.StatusConflict, "network.allowOut: the sandbox was made without a network")
	}
	return fail(http.StatusNotImplemented, "network.allowOut: this server has no gateway, so its sandboxes reach nothing")
}
