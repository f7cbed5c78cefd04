package e2b

import (
	"net"
	"net/http"
	"net/netip"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// DebugPorts are the ports of localhost that SDKs talk to in their debug mode (E2B_DEBUG=true), in which
// they make no sandbox and show no key: the agent's, and the code interpreter's.
func DebugPorts() []int { return []int{envdPort, interpreterPort} }

// debugOwner owns the sandbox that the debug mode talks to.
const debugOwner = "e2b-debug"

// debugIdle ends a debug sandbox that nobody uses.
const debugIdle = time.Hour

// Debug returns what answers on one of the DebugPorts: one sandbox for all, made when it is first asked for.
// There is no key and no token, so that whoever reaches the port may run commands in that sandbox. It is for
// loopback addresses only, and for programs: requests that a page could make are refused.
func (a *API) Debug(port int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != "" || !local(r.Host) {
			writeError(w, http.StatusForbidden, "the debug mode serves programs of this machine, under localhost, and no pages")
			return
		}
		s, err := a.debugSandbox(r)
		if err != nil {
			a.answerError(w, r, err)
			return
		}
		counts(a.dataMethod(r, port), w, r, func(w http.ResponseWriter, r *http.Request) {
			a.serveAdmitted(w, r, destination{sandbox: s.ID, port: port}, s)
		})
	})
}

// local reports whether a Host names this machine by what no page's own name can resolve to.
func local(host string) bool {
	name := hostname(host)
	if ip, err := netip.ParseAddr(name); err == nil {
		return ip.IsLoopback()
	}
	return name == "localhost"
}

// debugSandbox returns the debug mode's sandbox, resumed or made where it must be.
func (a *API) debugSandbox(r *http.Request) (sandbox.Sandbox, error) {
	ctx, p := r.Context(), sandbox.Principal{ID: debugOwner}
	a.debug.Lock()
	defer a.debug.Unlock()
	all, _, err := a.cfg.Manager.List(ctx, p, sandbox.Query{States: []sandbox.State{sandbox.Running, sandbox.Paused}, PageSize: 1})
	switch {
	case err != nil:
		return sandbox.Sandbox{}, err
	case len(all) == 1 && all[0].State == sandbox.Paused:
		return a.cfg.Manager.Resume(ctx, p, all[0].ID)
	case len(all) == 1:
		return all[0], nil
	}
	t, err := a.resolveTemplate(call{r: r, p: p}, "code-interpreter-v1")
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	var network *sandbox.Network
	if a.cfg.Manager.HasNetworks() {
		network = (*networkConfig)(nil).wayOut(nil)
	}
	sandboxID := id.Sandbox()
	return a.cfg.Manager.Create(ctx, p, sandbox.Spec{
		Template: t.name, Profile: t.profile, Env: environment(nil, sandboxID, t.asked), Lifetime: -1, Idle: debugIdle,
		Extra: kept{Template: t.asked}.put(nil), Network: network,
	}, sandbox.CreateOptions{ID: sandboxID})
}

// ListenDebug opens the address for one of the DebugPorts.
func ListenDebug(port int) (net.Listener, error) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(port)))) //nolint:gosec // a port
	if err != nil {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "cannot listen on 127.0.0.1:%d for E2B's debug mode", port).
			WithHint("stop what uses the port, or leave the debug mode out")
	}
	return l, nil
}
