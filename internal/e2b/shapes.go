package e2b

import (
	"math"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/sandbox"
)

// clientID is a field that the protocol demands and nobody reads.
const clientID = "casemate"

// sandboxJSON is the answer to create and connect.
type sandboxJSON struct {
	TemplateID         string  `json:"templateID"`
	SandboxID          string  `json:"sandboxID"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	Alias              string  `json:"alias,omitempty"`
	EnvdAccessToken    string  `json:"envdAccessToken"`
	TrafficAccessToken *string `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

// listedJSON is a sandbox in a list.
type listedJSON struct {
	TemplateID  string            `json:"templateID"`
	Alias       string            `json:"alias,omitempty"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
}

// detailJSON is one sandbox with everything.
type detailJSON struct {
	listedJSON
	EnvdAccessToken     string         `json:"envdAccessToken"`
	Domain              *string        `json:"domain"`
	AllowInternetAccess *bool          `json:"allowInternetAccess,omitempty"`
	Network             *networkConfig `json:"network,omitempty"`
	Lifecycle           lifecycleJSON  `json:"lifecycle"`
}

type lifecycleJSON struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

// optional is s, or null.
func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func (a *API) created(s sandbox.Sandbox) sandboxJSON {
	k := keptOf(s)
	out := sandboxJSON{
		TemplateID: templateOf(s, k), SandboxID: s.ID, ClientID: clientID, EnvdVersion: envd.Version, Alias: templateOf(s, k),
		EnvdAccessToken: a.tokens.envd(s.ID), Domain: optional(a.cfg.Domain),
	}
	if !k.public() {
		out.TrafficAccessToken = optional(a.tokens.traffic(s.ID))
	}
	return out
}

// templateOf is the template as the caller knows it.
func templateOf(s sandbox.Sandbox, k kept) string {
	if k.Template != "" {
		return k.Template
	}
	return s.Spec.Template
}

func listed(s sandbox.Sandbox) listedJSON {
	k := keptOf(s)
	out := listedJSON{
		TemplateID: templateOf(s, k), Alias: templateOf(s, k), SandboxID: s.ID, ClientID: clientID,
		StartedAt: s.StartedAt, EndAt: s.ExpiresAt, CPUCount: cpus(s), MemoryMB: s.Spec.Limits.MemoryBytes >> 20,
		DiskSizeMB: s.Spec.Limits.DiskBytes >> 20, Metadata: k.metadata(s.Spec.Labels), State: "running", EnvdVersion: envd.Version,
	}
	switch {
	case s.State == sandbox.Paused:
		out.State = "paused"
		if out.EndAt.IsZero() {
			out.EndAt = s.LastActive // when it was paused: its time rests
		}
	case out.EndAt.IsZero():
		out.EndAt = never()
	}
	return out
}

func cpus(s sandbox.Sandbox) int { return max(1, int(math.Ceil(s.Spec.Limits.CPUs))) }

func (a *API) detailed(s sandbox.Sandbox) detailJSON {
	k := keptOf(s)
	out := detailJSON{
		listedJSON: listed(s), EnvdAccessToken: a.tokens.envd(s.ID), Domain: optional(a.cfg.Domain),
		AllowInternetAccess: k.Internet, Network: k.Network,
		Lifecycle: lifecycleJSON{AutoResume: k.AutoResume, OnTimeout: "kill"},
	}
	if s.Spec.PauseAtEnd {
		out.Lifecycle.OnTimeout = "pause"
	}
	return out
}
