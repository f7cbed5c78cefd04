package probe

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

// Conclusive answers are remembered; others are asked for again.
func TestSet(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer error
		calls  int
		kind   errs.Kind
	}{
		{"works", nil, 1, 0},
		{"missing", fmt.Errorf("%w: no such call", ErrNotSupported), 1, errs.Unsupported},
		{"unclear", errors.New("out of memory"), 2, errs.Internal},
	} {
		calls := 0
		f := Feature{Name: tt.name, MinKernel: "9.9", Remedy: "buy another one", Probe: func() error { calls++; return tt.answer }}
		s := NewSet()
		for range 2 {
			err := s.Check(f)
			if (err == nil) != (tt.answer == nil) || err != nil && errs.KindOf(err) != tt.kind {
				t.Errorf("%s: %v", tt.name, err)
			}
			if !errs.Is(err, errs.Unsupported) {
				continue
			}
			var u *UnsupportedError
			if _, hint := errs.PublicText(err); !errors.As(err, &u) || u.MinKernel != "9.9" || hint != "buy another one" {
				t.Errorf("%s: %#v, hint %q", tt.name, u, hint)
			}
		}
		if calls != tt.calls {
			t.Errorf("%s: probed %d times, want %d", tt.name, calls, tt.calls)
		}
	}
}

// This host has all of them: the tests of the backend need them.
func TestFeatures(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	for _, f := range []Feature{
		Kernel(6, 1), UserNamespaces(), IdmappedMounts("/"), FileSystem("overlay", "5.11"), SeccompFilters(), VisibleProc(),
	} {
		if err := NewSet().Check(f); err != nil {
			t.Error(err)
		}
		if f.Remedy == "" || f.MinKernel == "" {
			t.Errorf("%s has no remedy or kernel", f.Name)
		}
	}
	for _, f := range []Feature{Kernel(99, 0), FileSystem("nosuchfs", "1.0"), IdmappedMounts("/proc")} {
		if err := NewSet().Check(f); !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %v", f.Name, err)
		}
	}
}

func TestOlder(t *testing.T) {
	for release, want := range map[string]bool{
		"6.1.0-13-amd64": false, "6.0.9": true, "5.19": true, "6.18.44-fc": false, "7.0": false, "": true, "x": true,
	} {
		if got := older(release, 6, 1); got != want {
			t.Errorf("%q: %v", release, got)
		}
	}
}

func TestCoveredProc(t *testing.T) {
	const plain = "20 1 0:19 / /proc rw - proc none rw\n"
	for info, want := range map[string]string{
		plain: "",
		plain + "21 20 0:20 / /proc/sys/fs/binfmt_misc rw - binfmt_misc none rw\n": "",
		plain + "21 20 0:20 /null /proc/kcore rw - devtmpfs none rw\n":             "/proc/kcore",
		plain + "21 20 0:20 /sys /proc/sys ro - proc none rw\n":                    "/proc/sys",
		"broken\n": "",
	} {
		if got := coveredProc([]byte(info)); got != want {
			t.Errorf("%q: %q", strings.TrimSpace(info), got)
		}
	}
}
