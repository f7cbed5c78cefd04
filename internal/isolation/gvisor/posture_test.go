package gvisor_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/testenv"
)

// What the host's kernel shows of a sandbox: no process of runsc is root of the host, each has a system call filter, and
// Applied says so.
func TestHostProcesses(t *testing.T) {
	h := newHost(t)
	i, err := h.backend().Start(t.Context(), conformance.Spec(t, isolation.Standard))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := i.Destroy(context.Background()); err != nil {
			t.Errorf("destroy: %v", err)
		}
	}()
	a := i.Applied()
	var names []string
	for _, p := range a.HostProcesses {
		names = append(names, p.Name)
	}
	for _, want := range []string{"runsc-sandbox", "runsc-gofer"} {
		if !slices.Contains(names, want) {
			t.Errorf("applied names no %s: %v", want, names)
		}
	}
	all := processes(t, i)
	if len(all) == 0 {
		t.Error("the cell has no process")
	}
	for _, p := range all {
		if p.UID < a.HostUID || p.UID >= a.HostUID+a.UIDCount || p.UID == 0 || p.GID == 0 {
			t.Errorf("%q runs as %d:%d on the host, outside of %d+%d", p.Name, p.UID, p.GID, a.HostUID, a.UIDCount)
		}
		if p.Name == "runsc-sandbox" && p.Seccomp != 2 {
			t.Errorf("the Sentry has seccomp mode %d", p.Seccomp)
		}
	}
	if !strings.Contains(a.Runtime, "gVisor") || a.Backend != "gvisor" {
		t.Errorf("applied says %q, %q", a.Backend, a.Runtime)
	}
}

// Without a runsc that will do nothing starts, and both the error and the capability say how to get one.
func TestWithoutRunsc(t *testing.T) {
	h := newHost(t)
	write := func(name, script string) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for what, program := range map[string]string{
		"none":         "",
		"missing":      "/nowhere/runsc",
		"another":      write("other", "echo hello"),
		"failing":      write("failing", "exit 1"),
		"old":          write("old", "echo runsc version release-20220425.0"),
		"without date": write("dateless", "echo runsc version VERSION_MISSING"),
	} {
		b := h.with(program)
		_, err := b.Start(t.Context(), conformance.Spec(t, isolation.Locked))
		if !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: start gives %v", what, err)
			continue
		}
		if text, hint := errs.PublicText(err); !strings.Contains(text, "runsc") || !strings.Contains(hint, "make runsc") {
			t.Errorf("%s: %q, %q", what, text, hint)
		}
		c := b.Capabilities(t.Context())[0]
		if c.Name != "runsc" || c.OK || c.Detail == "" || !strings.Contains(c.Remedy, "make runsc") {
			t.Errorf("%s: %+v", what, c)
		}
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Where everybody may open KVM's device a sandbox starts, whatever KVM is good for there, on the platform that is told of then.
func TestStartWhereKVMIsOpen(t *testing.T) {
	h := newHost(t)
	dev := t.TempDir()
	kvm := filepath.Join(dev, "kvm")
	if err := errors.Join(unix.Mknod(kvm, unix.S_IFCHR, int(unix.Mkdev(10, 232))), os.Chmod(kvm, 0o666)); err != nil {
		t.Fatal(err)
	}
	b := h.on(testenv.Runsc(t), dev)
	spec := conformance.Spec(t, isolation.Locked)
	x := started(t, b, spec)
	if said := x.run("echo", "on"); said != "on" {
		t.Errorf("it says %q", said)
	}
	_, name, _ := strings.Cut(x.inst.Applied().Runtime, ", ")
	c := b.Capabilities(t.Context())[0]
	_, shown, _ := strings.Cut(c.Detail, ", platform ")
	if name == "" || shown != name && !strings.HasPrefix(shown, name+" (") || strings.Contains(shown, "(") != (name == gvisor.Systrap) {
		t.Errorf("it runs on %q, and shown is %q", name, c.Detail)
	}
}

// ATTACK: the server asks runsc for its version as root, so a program that others can change would be theirs to run as
// root. Twin: the same program, changed by root alone, is run.
func TestOnlyRootMayChangeRunsc(t *testing.T) {
	h := newHost(t)
	dir := t.TempDir()
	path, ran := filepath.Join(dir, "runsc"), filepath.Join(dir, "ran")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n: >"+ran+"\necho runsc version release-20990101.0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		uid  int
		mode os.FileMode
		runs bool
	}{{1000, 0o755, false}, {0, 0o775, false}, {0, 0o757, false}, {0, 0o755, true}} {
		if err := errors.Join(os.Chown(path, tt.uid, 0), os.Chmod(path, tt.mode)); err != nil {
			t.Fatal(err)
		}
		c := h.with(path).Capabilities(t.Context())[0]
		if _, err := os.Stat(ran); c.OK != tt.runs || (err == nil) != tt.runs {
			t.Errorf("of user %d, mode %o: %+v, looked at: %v", tt.uid, tt.mode, c, err)
		}
	}
}

// A guest that holds the sandbox to nothing, as one that was taken over, gets no further than the cell's limit, which ends
// the whole sandbox. One that does its work ends the process alone.
func TestOuterLimit(t *testing.T) {
	h := newHost(t)
	cells, err := namespace.New(h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := gvisor.New(gvisor.Config{Cells: unbound{cells}, Program: testenv.Runsc(t)})
	defer func() { _ = b.Close() }()
	l := conformance.Limits()
	for what, c := range map[string]struct {
		b     isolation.Backend
		bytes int64
		ends  bool
	}{
		"bound":      {h.backend(), l.MemoryBytes + 64<<20, false}, // less than the cell's
		"taken over": {b, 2 * gvisor.CellLimits(l).MemoryBytes, true},
	} {
		spec := conformance.Spec(t, isolation.Locked)
		i, err := c.b.Start(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := i.Destroy(context.Background()); err != nil {
				t.Errorf("destroy: %v", err)
			}
		}()
		guest := guestwire.NewClient(i.Dial)
		if err := guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box"}); err != nil {
			t.Fatal(err)
		}
		tooMuch := conformance.Allocate(c.bytes)
		tooMuch[2] += "\nimport time\ntime.sleep(1000)"
		if _, err := guest.Start(t.Context(), guestwire.StartProcess{ID: "p", Argv: tooMuch}, nil); err != nil {
			t.Fatal(err)
		}
		info, err := guest.Wait(t.Context(), "p")
		if c.ends {
			testenv.Receive(t, "it ends", i.Done())
			continue
		}
		if err != nil || info.Signal != int(unix.SIGKILL) {
			t.Errorf("%s: the process ended as %+v, %v", what, info, err)
		}
		if _, err := guest.Status(t.Context()); err != nil {
			t.Errorf("%s: the sandbox has ended: %v", what, err)
		}
	}
}

// unbound makes cells whose guest has no limits to hold.
type unbound struct{ isolation.Backend }

func (u unbound) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	s.Runtime.Inside.MemoryBytes = 1 << 50
	return u.Backend.Start(ctx, s)
}

// The release that make runsc builds is that of the module's graph.
func TestRunscVersion(t *testing.T) {
	h := newHost(t)
	c := h.backend().Capabilities(t.Context())[0]
	mod, err := os.ReadFile("../../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version, _, _ := strings.Cut(c.Detail, " ")
	if !c.OK || !strings.Contains(string(mod), "gvisor.dev/gvisor "+version) {
		t.Errorf("runsc is %+v, not what go.mod names: run make runsc", c)
	}
}

// In profile standard a program with the setuid bit runs as its owner, as sudo does; in profile locked it runs as who starts it.
func TestSetuid(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for profile, want := range map[isolation.Profile]string{isolation.Standard: "0", isolation.Locked: "1000"} {
		spec := conformance.Spec(t, profile)
		program := filepath.Join(spec.Root.Lowers[0], "become")
		data, err := os.ReadFile("/usr/bin/id")
		if err == nil {
			err = os.WriteFile(program, data, 0o755)
		}
		if err == nil {
			err = os.Chmod(program, 0o755|os.ModeSetuid)
		}
		if err != nil {
			t.Fatal(err)
		}
		box := started(t, b, spec)
		if got := box.run("/become", "-u"); got != want {
			t.Errorf("%s: a program of root's with the setuid bit runs as %q, want %s", profile, got, want)
		}
	}
}
