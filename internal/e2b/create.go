package e2b

import (
	"encoding/json"
	"maps"
	"math"
	"net/http"
	"time"

	"casemate.dev/internal/e2b/interpreter"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// The lifetimes of sandboxes whose creator names none.
const (
	timeoutV2 = 300
	timeoutV1 = 15
)

// newSandbox is the request of both versions of create.
type newSandbox struct {
	TemplateID          string            `json:"templateID"`
	Timeout             *int64            `json:"timeout"`
	Metadata            map[string]string `json:"metadata"`
	EnvVars             map[string]string `json:"envVars"`
	AllowInternetAccess *bool             `json:"allow_internet_access"`
	Network             *networkConfig    `json:"network"`
	AutoPause           bool              `json:"autoPause"`
	AutoPauseMemory     *bool             `json:"autoPauseMemory"`
	AutoResume          *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
	IAM *struct {
		Tokens map[string]json.RawMessage `json:"tokens"`
	} `json:"iam"`
	VolumeMounts []json.RawMessage `json:"volumeMounts"`
	// "mcp" is not read: the SDK itself starts the gateway, from the template that has it.

	// Secure is of version 1. Sandboxes are secured here whatever it says: the SDKs use the token that
	// they are given.
	Secure bool `json:"secure"`
}

func (a *API) createV2(c call) error {
	req := newSandbox{Secure: true}
	if err := c.decode(&req); err != nil {
		return err
	}
	return a.create(c, req, timeoutV2)
}

func (a *API) createV1(c call) error {
	var req newSandbox
	if err := c.decode(&req); err != nil {
		return err
	}
	if n := req.Network; n != nil && n.AllowPublicTraffic != nil && !*n.AllowPublicTraffic && !req.Secure {
		return fail(http.StatusBadRequest, "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.")
	}
	return a.create(c, req, timeoutV1)
}

// network is what a sandbox may reach: what the caller says, and where that is nothing what the template has by default,
// else the internet.
func (a *API) network(c call, req newSandbox, template string) (*sandbox.Network, error) {
	if n := req.Network; req.AllowInternetAccess == nil && (n == nil || len(n.AllowOut)+len(n.DenyOut) == 0) {
		n, err := a.cfg.Manager.TemplateNetwork(c.r.Context(), template)
		if n != nil || err != nil {
			return n, err
		}
	}
	return req.Network.wayOut(req.AllowInternetAccess), nil
}

func (a *API) create(c call, req newSandbox, timeout int64) error {
	if req.Timeout != nil {
		timeout = *req.Timeout
	}
	life, err := lifetime(timeout, 1)
	if err != nil {
		return err
	}
	if req.TemplateID == "" {
		return fail(http.StatusBadRequest, "Error when parsing request: templateID is missing")
	}
	if err := req.check(); err != nil {
		return err
	}
	t, err := a.resolveTemplate(c, req.TemplateID)
	if err != nil {
		return err
	}
	headers, err := req.Network.transforms()
	if err != nil {
		return err
	}
	address, proxy, err := a.proxy(c, req.Network)
	if err != nil {
		return err
	}
	labels, rest := labelled(req.Metadata)
	k := kept{
		Template: t.asked, AutoResume: req.AutoResume != nil && req.AutoResume.Enabled, Metadata: rest,
		Internet: req.AllowInternetAccess, Network: req.Network,
	}
	var network *sandbox.Network
	if a.cfg.Manager.HasNetworks() {
		if network, err = a.network(c, req, t.name); err != nil {
			return err
		}
		network.Proxy = address
	} else if err := a.withoutNetwork(req.Network); err != nil {
		return err
	}
	sandboxID := id.Sandbox()
	if err := a.putTransforms(c, sandboxID, network != nil, headers, proxy); err != nil {
		return err
	}
	s, err := a.cfg.Manager.Create(c.r.Context(), c.p, sandbox.Spec{
		Template: t.name, Profile: t.profile, Labels: labels, Env: environment(req.EnvVars, sandboxID, t.asked),
		Lifetime: life, RestPaused: true, PauseAtEnd: req.AutoPause, PauseFilesOnly: req.AutoPauseMemory != nil && !*req.AutoPauseMemory,
		PauseOnDisk: true, Extra: k.put(nil), Network: network, Contexts: interpreter.Warm(t.asked, t.profile),
	}, sandbox.CreateOptions{ID: sandboxID})
	if err != nil && (len(headers) > 0 || !proxy.Empty()) {
		a.dropTransforms(c, sandboxID)
	}
	if errs.Is(err, errs.FailedPrecondition) {
		return fail(http.StatusBadRequest, "%s", publicText(err)) // a template that can't be used; 409 means another thing here
	}
	if err != nil {
		return err
	}
	if text := t.notice(); text != "" {
		c.w.Header().Set(headerNotice, text)
	}
	return c.json(http.StatusCreated, a.created(s))
}

// check refuses what contradicts itself and what is not there yet.
func (req newSandbox) check() error {
	keepsMemory := req.AutoPauseMemory == nil || *req.AutoPauseMemory
	switch {
	case !keepsMemory && !req.AutoPause:
		return fail(http.StatusBadRequest, "autoPauseMemory=false only applies when autoPause is true.")
	case !keepsMemory && req.AutoResume != nil && req.AutoResume.Enabled:
		return fail(http.StatusBadRequest, "autoPauseMemory=false (filesystem-only auto-pause) cannot be combined with autoResume: such a sandbox is resumed explicitly")
	}
	if err := req.Network.check(); err != nil {
		return err
	}
	switch {
	case req.IAM != nil && len(req.IAM.Tokens) > 0:
		return notYet("iam tokens")
	case len(req.VolumeMounts) > 0:
		return notYet("volumeMounts")
	}
	return nil
}

// environment is what every process of an E2B sandbox finds set.
func environment(asked map[string]string, sandboxID, template string) map[string]string {
	env := map[string]string{"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandboxID, "E2B_TEMPLATE_ID": template}
	maps.Copy(env, asked)
	return env
}

// lifetime turns a timeout into a duration; it must be least at least.
func lifetime(seconds, least int64) (time.Duration, error) {
	switch {
	case seconds < 0 && least == 0:
		return 0, fail(http.StatusBadRequest, "Timeout must not be negative")
	case seconds < least:
		return 0, fail(http.StatusBadRequest, "Timeout must be greater than %d", least-1)
	}
	const most = math.MaxInt64 / int64(time.Second)
	if seconds > most {
		return 0, fail(http.StatusBadRequest, "Timeout cannot be greater than %d hours", most/3600)
	}
	return max(time.Duration(seconds)*time.Second, time.Second), nil // the shortest that there is
}
