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
	all := []Access{Open, SandboxCreate, SandboxRead, SandboxWrite, Process, Files, Admin, Secrets, State}
	for _, c := range []struct {
		name  string
		p     sandbox.Principal
		owner string
		want  string // one letter for each access: y or n
	}{
		{"nobody", nobody, "", "ynnnnnnnn"},
		{"nobody on somebody's", nobody, "key_a", "ynnnnnnnn"},
		{"user", user, "", "yyyyyynyy"},
		{"user on its own", user, "key_a", "yyyyyynyy"},
		{"user on another's", user, "key_c", "yynnnnnnn"},
		{"admin", admin, "", "yyyyyyyyy"},
		{"admin on another's", admin, "key_a", "yyyyyyyyy"},
		{"the socket", Local(), "key_a", "yyyyyyyyy"},
		{"sandbox", inside, "", "yyyyyynnn"},
		{"sandbox on another's", inside, "key_a", "yynnnnnnn"},
		{"sandbox that says it is admin", forged, "key_a", "yynnnnnnn"},
	} {
		for i, a := range all {
			if got := Allow(c.p, a, c.owner); got != (c.want[i] == 'y') {
				t.Errorf("%s: access %d is %v", c.name, a, got)
			}
		}
		for _, unknown := range []Access{0, -1, 10, 1000} {
			if Allow(c.p, unknown, c.owner) {
				t.Errorf("%s: unknown access %d is allowed", c.name, unknown)
			}
		}
	}
}
