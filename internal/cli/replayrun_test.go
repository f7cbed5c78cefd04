package cli

import (
	"slices"
	"testing"

	"casemate.dev/internal/replay"
)

// TestReplaySandboxIsSealed: whatever the recorded sandbox reached, nothing leaves those in which its processes are run again, and
// they get placeholders of no secret.
func TestReplaySandboxIsSealed(t *testing.T) {
	rules := []string{"allow https://api.test"}
	for _, tt := range []struct {
		name    string
		was     *replay.Network
		answers bool
		none    bool // no network
		rules   []string
	}{
		{"no network", nil, false, true, nil},
		{"no network, with answers", nil, true, true, nil},
		{"a network", &replay.Network{Rules: rules}, false, false, nil},
		{"a network, with answers", &replay.Network{Rules: rules}, true, false, rules},
	} {
		r := &rerun{record: &replay.Record{Settings: replay.Settings{Network: tt.was, Placeholders: []string{"TOKEN"}}}, network: tt.answers}
		req := r.request(1, replay.Segment{})
		n := req.GetNetwork()
		if req.GetNoNetwork() != tt.none || (n == nil) != tt.none || n != nil && !n.GetRecorded() || !slices.Equal(n.GetRules(), tt.rules) {
			t.Errorf("%s: %v, %v", tt.name, req.GetNoNetwork(), n)
		}
		if got := req.GetEnv()["TOKEN"]; (got == standIn) == tt.none {
			t.Errorf("%s: TOKEN=%q", tt.name, got)
		}
	}
}
