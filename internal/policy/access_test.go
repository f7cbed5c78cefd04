package policy

import (
	"testing"

	"casemate.dev/internal/sandbox"
)

func TestAllow(t *testing.T) {
	nobody := sandbox.Principal{}
	user := sandbox.Principal{ID: "key_a"}
	admin := sandbox.Principal{ID: "key_b", Admin: true}
	inside := sandbox.Principal{ID: "sandbox:abc", Sandbox: "abc"}
	forged := sandbox.Principal{ID: "sandbox:abc", Sandbox: "abc", Admin: true}
	all := []Access{Open, SandboxCreate, SandboxRead, SandboxWrite, Process, Files, Admin}
	for _, c := range []struct {
		name  string
		p     sandbox.Principal
		owner string
		want  string // one letter for each access: y or n
	}{
		{"nobody", nobody, "", "ynnnnnn"},
		{"nobody on somebody's", nobody, "key_a", "ynnnnnn"},
		{"user", user, "", "yyyyyyn"},
		{"user on its own", user, "key_a", "yyyyyyn"},
		{"user on another's", user, "key_c", "yynnnnn"},
		{"admin", admin, "", "yyyyyyy"},
		{"admin on another's", admin, "key_a", "yyyyyyy"},
		{"the socket", Local(), "key_a", "yyyyyyy"},
		{"sandbox", inside, "", "yyyyyyn"},
		{"sandbox on another's", inside, "key_a", "yynnnnn"},
		{"sandbox that says it is admin", forged, "key_a", "yynnnnn"},
	} {
		for i, a := range all {
			if got := Allow(c.p, a, c.owner); got != (c.want[i] == 'y') {
				t.Errorf("%s: access %d is %v", c.name, a, got)
			}
		}
		for _, unknown := range []Access{0, -1, 8, 1000} {
			if Allow(c.p, unknown, c.owner) {
				t.Errorf("%s: unknown access %d is allowed", c.name, unknown)
			}
		}
	}
}
