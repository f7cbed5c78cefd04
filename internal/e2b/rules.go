package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/secret"
)

// Transforms keeps headers that are put on the requests of sandboxes; *secret.Vault implements it.
type Transforms interface {
	// SetTransforms replaces those of a sandbox, which need not be there yet, and its proxy.
	SetTransforms(ctx context.Context, c secret.Caller, sandbox string, list []secret.Transform, proxy secret.Value) error
	// CopyTransforms gives a sandbox those of another, and its proxy.
	CopyTransforms(ctx context.Context, c secret.Caller, from, to string) error
}

// networkRule is one of the rules for a domain.
type networkRule struct {
	Transform *struct {
		Headers map[string]string `json:"headers"`
	} `json:"transform"`
}

// hidden stands for a header's value wherever it is kept or shown.
const hidden = "***"

// transforms reads the rules into headers to put on requests, and hides their values in n, which is kept and
// shown. What a rule may say beside is refused.
func (n *networkConfig) transforms() ([]secret.Transform, error) {
	if n == nil || len(n.Rules) == 0 {
		return nil, nil
	}
	var list []secret.Transform
	shown := make(map[string]json.RawMessage, len(n.Rules))
	for _, domain := range slices.Sorted(maps.Keys(n.Rules)) {
		if !isDomain(domain) || domain == "*" {
			return nil, fail(http.StatusBadRequest, "invalid network rule domain %s", domain)
		}
		var rules []networkRule
		d := json.NewDecoder(bytes.NewReader(n.Rules[domain]))
		d.DisallowUnknownFields()
		if d.Decode(&rules) != nil { // its text could quote a value
			return nil, fail(http.StatusBadRequest, "network.rules: the rules of %s are not a list of {transform: {headers}}", domain)
		}
		for _, r := range rules {
			if r.Transform == nil {
				continue
			}
			for _, name := range slices.Sorted(maps.Keys(r.Transform.Headers)) {
				value := r.Transform.Headers[name]
				if strings.Contains(value, secret.FillMark) {
					return nil, fail(http.StatusBadRequest, "network.rules: the header %s holds a NUL byte", name)
				}
				text, names, err := fills(value)
				if err != nil {
					return nil, err
				}
				list = append(list, secret.Transform{
					Host: domain, Except: n.closer(domain), Header: name, Value: secret.NewValue([]byte(text)), Fills: names,
				})
				r.Transform.Headers[name] = shownValue(value, text)
			}
		}
		text, err := json.Marshal(rules)
		if err != nil {
			return nil, err
		}
		shown[domain] = text
	}
	n.Rules = shown
	return list, nil
}

// closer returns the other domains of the rules that a wildcard stands for: of several, the closest holds alone.
func (n *networkConfig) closer(domain string) []string {
	suffix, ok := strings.CutPrefix(domain, "*")
	if !ok {
		return nil
	}
	var out []string
	for _, other := range slices.Sorted(maps.Keys(n.Rules)) {
		if other != domain && strings.HasSuffix(strings.ToLower(other), strings.ToLower(suffix)) {
			out = append(out, other)
		}
	}
	return out
}

// putTransforms keeps the headers and the proxy for a sandbox. It refuses them where nothing would use them.
func (a *API) putTransforms(c call, sandboxID string, networked bool, list []secret.Transform, proxy secret.Value) error {
	if a.cfg.Transforms == nil || !networked {
		switch {
		case len(list) > 0:
			return fail(http.StatusNotImplemented, "network.rules: the sandbox has no network, so that no header can be put on its requests")
		case !proxy.Empty():
			return fail(http.StatusConflict, "network.egressProxy: the sandbox was made without a network")
		}
		return nil
	}
	err := a.cfg.Transforms.SetTransforms(c.r.Context(), policy.SecretCaller(c.p), sandboxID, list, proxy)
	if errs.Is(err, errs.InvalidArgument) {
		return fail(http.StatusBadRequest, "network.rules: %s", publicText(err))
	}
	return err
}

// dropTransforms forgets the headers and the proxy of a sandbox that did not come to be.
func (a *API) dropTransforms(c call, sandboxID string) {
	if a.cfg.Transforms == nil {
		return
	}
	if err := a.cfg.Transforms.SetTransforms(context.WithoutCancel(c.r.Context()), policy.SecretCaller(c.p), sandboxID, nil, secret.Value{}); err != nil {
		a.log.Warn("cannot remove the headers and the proxy of a sandbox that did not start", "sandbox", sandboxID, "error", err)
	}
}

// copyTransforms gives a fork that is about to start what its origin has.
func (a *API) copyTransforms(c call, from, to string) error {
	if a.cfg.Transforms == nil {
		return nil
	}
	return a.cfg.Transforms.CopyTransforms(c.r.Context(), policy.SecretCaller(c.p), from, to)
}
