package guestbin

import (
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

// A server without a guest must say what to do; one with a guest must hold a program.
func TestBytes(t *testing.T) {
	b, err := Bytes()
	if err != nil {
		if !errs.Is(err, errs.FailedPrecondition) {
			t.Fatalf("Bytes() = %v, want FailedPrecondition", err)
		}
		if _, hint := errs.PublicText(err); !strings.Contains(hint, "make build") {
			t.Errorf("hint %q does not name make build", hint)
		}
		return
	}
	if !strings.HasPrefix(string(b), "\x7fELF") {
		t.Errorf("%s is not a program: begins with %q", Name(), b[:min(4, len(b))])
	}
}
