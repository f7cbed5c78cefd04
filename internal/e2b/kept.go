package e2b

import (
	"encoding/json"
	"maps"
	"time"

	"casemate.dev/internal/sandbox"
)

// keptUnder is the name in a sandbox's Extra.
const keptUnder = "e2b"

// kept is what the Manager does not know of a sandbox and E2B's protocol asks for again.
type kept struct {
	// Template is the template as the caller named it.
	Template string `json:"template,omitempty"`
	// AutoResume wakes the sandbox when somebody calls one of its ports.
	AutoResume bool `json:"auto_resume,omitempty"`
	// Metadata holds those pairs that can't be labels.
	Metadata map[string]string `json:"metadata,omitempty"`
	// Internet is what the caller asked for; nil: nothing.
	Internet *bool          `json:"internet,omitempty"`
	Network  *networkConfig `json:"network,omitempty"`
}

func keptOf(s sandbox.Sandbox) kept {
	var k kept
	if text := s.Spec.Extra[keptUnder]; text != "" {
		_ = json.Unmarshal([]byte(text), &k) // written by put
	}
	return k
}

// put returns extra with k in it.
func (k kept) put(extra map[string]string) map[string]string {
	b, _ := json.Marshal(k) // plain data: can't fail
	out := maps.Clone(extra)
	if out == nil {
		out = make(map[string]string, 1)
	}
	out[keptUnder] = string(b)
	return out
}

// public reports whether the sandbox's ports may be called without a token.
func (k kept) public() bool {
	return k.Network == nil || k.Network.AllowPublicTraffic == nil || *k.Network.AllowPublicTraffic
}

// labelled divides metadata into what can be labels, which the native API shows and searches, and
// the rest: E2B's names and values may be any text.
func labelled(metadata map[string]string) (labels, rest map[string]string) {
	for k, v := range metadata {
		if len(labels) < sandbox.MaxLabels && sandbox.CheckLabel(k, v) == nil {
			if labels == nil {
				labels = make(map[string]string, len(metadata))
			}
			labels[k] = v
			continue
		}
		if rest == nil {
			rest = make(map[string]string)
		}
		rest[k] = v
	}
	return labels, rest
}

// metadata is the inverse of labelled.
func (k kept) metadata(labels map[string]string) map[string]string {
	if len(k.Metadata) == 0 {
		return labels
	}
	all := maps.Clone(k.Metadata)
	maps.Copy(all, labels)
	return all
}

// never stands for the end of a sandbox that has none: the protocol wants a time.
func never() time.Time { return time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC) }
