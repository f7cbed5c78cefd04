package secret

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

func testKey(fill byte) []byte { return bytes.Repeat([]byte{fill}, keySize) }

func testSealer(t testing.TB, fill byte) *sealer {
	t.Helper()
	s, err := newSealer(testKey(fill))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestEnvelopeKnownAnswer opens what an earlier build sealed: the format on disk does not change
// unnoticed.
func TestEnvelopeKnownAnswer(t *testing.T) {
	sealed, err := hex.DecodeString(knownSealed)
	if err != nil {
		t.Fatal(err)
	}
	got, err := testSealer(t, 7).open("sec_known", 3, sealed)
	if err != nil || string(got) != "known answer" {
		t.Fatalf("got %q, %v", got, err)
	}
	if p := testSealer(t, 7).placeholder(Shape{}, "sandbox", "sec_known"); p != knownPlaceholder {
		t.Errorf("the placeholder is %q: those that sandboxes hold would mean nothing any more", p)
	}
}

func TestEnvelopeDetectsEveryChange(t *testing.T) {
	s := testSealer(t, 1)
	sealed, err := s.seal("sec_a", 1, []byte(canary()))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(sealed, []byte(canary())) {
		t.Fatal("it is not sealed")
	}
	if got, err := s.open("sec_a", 1, sealed); err != nil || string(got) != canary() {
		t.Fatalf("got %q, %v", got, err)
	}
	for i := range sealed {
		for _, bit := range []byte{1, 0x80} {
			bad := bytes.Clone(sealed)
			bad[i] ^= bit
			if _, err := s.open("sec_a", 1, bad); err == nil {
				t.Errorf("byte %d changed and it opens", i)
			}
		}
	}
	for n := range sealed {
		if _, err := s.open("sec_a", 1, sealed[:n]); err == nil {
			t.Errorf("cut to %d bytes and it opens", n)
		}
	}
}

func TestEnvelopeIsBoundToItsPlace(t *testing.T) {
	s := testSealer(t, 1)
	sealed, _ := s.seal("sec_a", 1, []byte(canary()))
	for _, c := range []struct {
		id      string
		version uint64
	}{{"sec_b", 1}, {"sec_a", 2}, {"sec_a", 0}, {"sec_", 1}, {"sec_a\x00", 1}} {
		if _, err := s.open(c.id, c.version, sealed); err == nil {
			t.Errorf("it opens as %q version %d", c.id, c.version)
		}
	}
	// Half of one with half of another: the key of one value must not open the other.
	other, _ := s.seal("sec_a", 2, []byte(canary()))
	mixed := append(bytes.Clone(sealed[:sealedHead]), other[sealedHead:]...)
	if _, err := s.open("sec_a", 1, mixed); err == nil {
		t.Error("it opens with the wrapped key of one version and the value of another")
	}
}

func TestEnvelopeWrongKey(t *testing.T) {
	sealed, _ := testSealer(t, 1).seal("sec_a", 1, []byte(canary()))
	_, err := testSealer(t, 2).open("sec_a", 1, sealed)
	if text, hint := errs.PublicText(err); !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(text, "master key") || !strings.Contains(hint, KeyFile) {
		t.Errorf("%v (%s; %s)", err, text, hint)
	}
	if _, err := newSealer([]byte("short")); err == nil {
		t.Error("a short master key is taken")
	}
}

func TestSealingTwiceDiffers(t *testing.T) {
	s := testSealer(t, 1)
	a, _ := s.seal("sec_a", 1, []byte(canary()))
	b, _ := s.seal("sec_a", 1, []byte(canary()))
	if bytes.Equal(a[1+keyIDSize:], b[1+keyIDSize:]) {
		t.Error("the same value seals to the same bytes")
	}
}

func TestPlaceholders(t *testing.T) {
	s := testSealer(t, 1)
	p := s.placeholder(Shape{}, "box1", "sec_a")
	if !strings.HasPrefix(p, placeholderPrefix) || len(p) != placeholderLength {
		t.Errorf("placeholder %q", p)
	}
	if p != s.placeholder(Shape{}, "box1", "sec_a") {
		t.Error("it changes from call to call")
	}
	seen := map[string]bool{}
	for _, q := range []string{
		p, s.placeholder(Shape{}, "box2", "sec_a"), s.placeholder(Shape{}, "box1", "sec_b"), s.placeholder(Shape{}, "box1sec", "_a"),
		testSealer(t, 2).placeholder(Shape{}, "box1", "sec_a"),
	} {
		if seen[q] {
			t.Errorf("%q stands for two things", q)
		}
		seen[q] = true
	}
	long := s.placeholder(Shape{Prefix: "sk-ant-api03-", Length: maxPlaceholderLength}, "box1", "sec_a")
	if len(long) != maxPlaceholderLength || !strings.HasPrefix(long, "sk-ant-api03-") {
		t.Errorf("%d characters: %q", len(long), long)
	}
	for _, bad := range []Shape{{Prefix: "a b"}, {Prefix: "x\n"}, {Length: 10}, {Prefix: "sk-", Length: 20}, {Length: maxPlaceholderLength + 1}, {Length: -1}} {
		if bad.check() == nil {
			t.Errorf("shape %+v is taken", bad)
		}
	}
}
