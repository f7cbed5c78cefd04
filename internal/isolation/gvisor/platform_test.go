package gvisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// The choice, on hosts that have KVM, have it for some only, have something else by that name, and have none.
func TestChoosePlatform(t *testing.T) {
	testenv.Root(t)
	kvm, null := int(unix.Mkdev(10, 232)), int(unix.Mkdev(1, 3))
	for name, host := range map[string]struct {
		device int // 0: none
		mode   uint32
		usable bool
		why    string
	}{
		"with KVM":          {kvm, 0o666, true, ""},
		"with KVM for some": {kvm, 0o660, false, "not open to everybody"},
		"another device":    {null, 0o666, false, "not the device of KVM"},
		"without KVM":       {0, 0, false, "has no"},
	} {
		t.Run(name, func(t *testing.T) {
			dev := t.TempDir()
			if host.device != 0 {
				path := filepath.Join(dev, "kvm")
				if err := errors.Join(unix.Mknod(path, unix.S_IFCHR, host.device), os.Chmod(path, os.FileMode(host.mode))); err != nil {
					t.Fatal(err)
				}
			}
			for _, want := range []string{"", Auto} {
				p, err := choosePlatform(want, dev)
				if err != nil || (p.name == KVM) != host.usable || !strings.Contains(p.why, host.why) || (p.device != "") != host.usable {
					t.Errorf("%q gives %+v, %v", want, p, err)
				}
				if slices.Contains(p.args(), "--platform=kvm") != host.usable || len(p.args()) > 1 != host.usable {
					t.Errorf("%q: runsc is given %q", want, p.args())
				}
			}
			p, err := choosePlatform(KVM, dev)
			if host.usable != (err == nil && p.name == KVM) {
				t.Errorf("kvm gives %+v, %v", p, err)
			}
			if text, hint := errs.PublicText(err); err != nil && (!errs.Is(err, errs.Unsupported) || !strings.Contains(text, host.why) || hint == "") {
				t.Errorf("kvm is refused with %q, %q", text, hint)
			}
			if p, err := choosePlatform(Systrap, dev); err != nil || p.name != Systrap || p.device != "" {
				t.Errorf("systrap gives %+v, %v", p, err)
			}
		})
	}
	if _, err := choosePlatform("ptrace", t.TempDir()); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("an unknown one gives %v", err)
	}
}

// A start that fails with KVM says how to do without; others say nothing of it.
func TestPlatformToBlame(t *testing.T) {
	failed := errs.New(errs.Internal, "the first process ended")
	if _, hint := errs.PublicText(platform{name: KVM}.explain(failed)); !strings.Contains(hint, "--runsc-platform systrap") {
		t.Errorf("the hint is %q", hint)
	}
	if err := (platform{name: Systrap}).explain(failed); !errors.Is(err, failed) {
		t.Errorf("with systrap it is %v", err)
	}
	full := errs.New(errs.ResourceExhausted, "no memory")
	if err := (platform{name: KVM}).explain(full); !errors.Is(err, full) {
		t.Errorf("want of memory becomes %v", err)
	}
}
