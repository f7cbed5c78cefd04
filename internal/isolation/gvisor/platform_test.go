package gvisor

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

// The choice, on hosts that have KVM, have it for some only, have it without a processor to go with it, have something else by that
// name, and have none.
func TestChoosePlatform(t *testing.T) {
	testenv.Root(t)
	kvm, null := int(unix.Mkdev(10, 232)), int(unix.Mkdev(1, 3))
	answers := func(string) error { return nil }
	never := func(path string) error {
		t.Errorf("%s is opened", path)
		return nil
	}
	for name, host := range map[string]struct {
		device int // 0: none
		mode   uint32
		ask    func(string) error
		usable bool
		why    string
	}{
		"with KVM":                {kvm, 0o666, answers, true, ""},
		"with KVM for some":       {kvm, 0o660, never, false, "not open to everybody"},
		"with KVM that is broken": {kvm, 0o666, func(string) error { return askKVM("/dev/null") }, false, "does not answer as KVM"},
		"another device":          {null, 0o666, never, false, "not the device of KVM"},
		"without KVM":             {0, 0, never, false, "has no"},
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
				p, err := choosePlatform(want, dev, host.ask)
				if err != nil || (p.name == KVM) != host.usable || !strings.Contains(p.why, host.why) || (p.device != "") != host.usable {
					t.Errorf("%q gives %+v, %v", want, p, err)
				}
				if slices.Contains(p.args(), "--platform=kvm") != host.usable || len(p.args()) > 1 != host.usable {
					t.Errorf("%q: runsc is given %q", want, p.args())
				}
			}
			p, err := choosePlatform(KVM, dev, host.ask)
			if host.usable != (err == nil && p.name == KVM) {
				t.Errorf("kvm gives %+v, %v", p, err)
			}
			if text, hint := errs.PublicText(err); err != nil && (!errs.Is(err, errs.Unsupported) || !strings.Contains(text, host.why) || hint == "") {
				t.Errorf("kvm is refused with %q, %q", text, hint)
			}
			if p, err := choosePlatform(Systrap, dev, host.ask); err != nil || p.name != Systrap || p.device != "" {
				t.Errorf("systrap gives %+v, %v", p, err)
			}
		})
	}
	if _, err := choosePlatform("ptrace", t.TempDir(), never); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("an unknown one gives %v", err)
	}
}

// What is no KVM is refused whatever its name is: by what it answers.
func TestAskKVM(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "kvm")
	for path, want := range map[string]string{"/dev/null": "does not answer as KVM", "/dev/zero": "does not answer as KVM", missing: "can't be opened"} {
		if err := askKVM(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// someone is an instance that a start returned.
type someone struct{ isolation.Instance }

// starts counts the starts on each platform, which fail as fails says.
type starts struct {
	fails map[string]error
	count map[string]int
}

func (s *starts) on(p platform) (isolation.Instance, error) {
	s.count[p.name]++
	if err := s.fails[p.name]; err != nil {
		return nil, err
	}
	return someone{}, nil
}

// KVM that was found, and answers, may not do for the Sentry. The first sandbox shows it, and no sandbox goes without a start for
// that; where KVM was asked for, or a sandbox has started on it, it stays.
func TestOnPlatform(t *testing.T) {
	crash, full := errs.New(errs.Internal, "the first process ended"), errs.New(errs.ResourceExhausted, "no memory")
	for name, tt := range map[string]struct {
		proven bool
		fails  map[string]error
		err    error
		count  map[string]int // after two starts
		after  string
		why    string
	}{
		"works":             {false, nil, nil, map[string]int{KVM: 2}, KVM, ""},
		"does not":          {false, map[string]error{KVM: crash}, nil, map[string]int{KVM: 1, Systrap: 2}, Systrap, "no sandbox starts with /dev/kvm"},
		"asked for, or ran": {true, map[string]error{KVM: crash}, crash, map[string]int{KVM: 2}, KVM, ""},
		"want of memory":    {false, map[string]error{KVM: full}, full, map[string]int{KVM: 2}, KVM, ""},
		"nothing starts":    {false, map[string]error{KVM: crash, Systrap: full}, full, map[string]int{KVM: 2, Systrap: 2}, KVM, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := &Backend{platform: platform{name: KVM, device: "/dev/kvm"}, proven: tt.proven}
			s := &starts{tt.fails, map[string]int{}}
			for range 2 {
				if inst, err := b.onPlatform(t.Context(), s.on); !errors.Is(err, tt.err) || (inst == nil) != (tt.err != nil) {
					t.Errorf("a start gives %v, %v", inst, err)
				}
			}
			if p, _ := b.chosen(); !maps.Equal(s.count, tt.count) || p.name != tt.after || p.why != tt.why {
				t.Errorf("after starts on %v it is %+v", s.count, p)
			}
		})
	}
}

// doctor says which platform it is, and why it is not KVM.
func TestPlatformShown(t *testing.T) {
	testenv.Root(t)
	path := filepath.Join(t.TempDir(), "runsc")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho runsc version release-20990101.0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	p, err := choosePlatform(Auto, "/nowhere", askKVM)
	if err != nil {
		t.Fatal(err)
	}
	b := &Backend{program: &program{path: path}, platform: p}
	if c := b.runsc(t.Context()); !c.OK || !strings.Contains(c.Detail, "platform systrap (the host has no /nowhere/kvm)") {
		t.Errorf("%+v", c)
	}
	b = New(Config{Program: path, Platform: KVM, Dev: "/nowhere"})
	if c := b.runsc(t.Context()); c.OK || !strings.Contains(c.Detail, "the host has no /nowhere/kvm") || !strings.Contains(c.Remedy, "--runsc-platform systrap") {
		t.Errorf("asked for by name: %+v", c)
	}
	if _, err := b.Start(t.Context(), isolation.Spec{}); !errs.Is(err, errs.Unsupported) {
		t.Errorf("a start gives %v", err)
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
