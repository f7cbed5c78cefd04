package walls

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/selftest"
)

const nobody = 65534

// asNobody runs a program of the host as an unprivileged user of it.
func asNobody(ctx context.Context, path string) (string, error) {
	cmd := exec.CommandContext(ctx, path, "-u")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// TestSetuidStaysInside makes a set-user-id program of root inside and runs it as an unprivileged user
// of the host. Files are stored with the ids inside, so only the store's mode and mount flags keep it
// from being one of the host's root.
func TestSetuidStaysInside(t *testing.T) {
	h := newHost(t)
	b := h.start(t, isolation.Standard)
	r, err := b.Run(t.Context(), selftest.Command{Argv: []string{"sh", "-c", "cp /usr/bin/id /tmp/made && chmod 4755 /tmp/made && stat -c %a%u /tmp/made"}, User: "root"})
	if err != nil || r.Output != "47550\n" {
		t.Fatalf("make the program: %q, %v", r.Output, err)
	}
	// A commit keeps the program as it is, in the same store.
	still := func() error { return nil }
	layer, err := h.store.Commit(t.Context(), b.ID(), b.plan, still, still)
	if err != nil {
		t.Fatal(err)
	}
	again, err := h.store.Plan(t.Context(), rootfs.Request{ID: id.Sandbox(), Layer: layer.ID, DiskBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	committed := filepath.Join(again.Lowers[0], "tmp/made")
	checkSetuid(t, committed)
	made := filepath.Join(b.plan.Upper, "tmp/made")
	checkSetuid(t, made)

	// The twin: the same program in an open directory that is mounted without these flags.
	open := t.TempDir()
	for d := open; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	twin := filepath.Join(open, "made")
	program, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(twin, program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(twin, 0o755|fs.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.Remove(twin) }()
	if out, err := asNobody(t.Context(), twin); err != nil || out != "0" {
		t.Errorf("the attack does not work where nothing is in its way: %q, %v", out, err)
	}
}

// checkSetuid checks that a set-user-id program of root inside is there, and gives nobody of the host
// anything.
func checkSetuid(t *testing.T, made string) {
	t.Helper()
	info, err := os.Stat(made)
	if err != nil || info.Mode()&fs.ModeSetuid == 0 || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Fatalf("the program does not lie in the layer as it was made: %v, %v", info, err)
	}
	if out, err := asNobody(t.Context(), made); err == nil {
		t.Errorf("an unprivileged user of the host ran it and became %s", out)
	}
	// Root of the host gets past the mode, not past the mount's flags.
	if err := exec.CommandContext(t.Context(), made).Run(); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("it can be executed on the host: %v", err)
	}
	for _, flag := range []string{"nosuid", "nodev", "noexec"} {
		if flags := mountFlags(t, made); !slices.Contains(flags, flag) {
			t.Errorf("the store is mounted %v, without %s", flags, flag)
		}
	}
}

// mountFlags returns the flags of the mount that holds a path, in this mount namespace.
func mountFlags(t *testing.T, path string) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	longest, flags := "", ""
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if (path == f[4] || strings.HasPrefix(path, strings.TrimSuffix(f[4], "/")+"/")) && len(f[4]) >= len(longest) {
			longest, flags = f[4], f[5]
		}
	}
	return strings.Split(flags, ",")
}

// TestLayersBelowStay changes every file that it can as root inside; the template's own stay as they
// are, and another sandbox sees none of it.
func TestLayersBelowStay(t *testing.T) {
	h := newHost(t)
	a, b := h.start(t, isolation.Standard), h.start(t, isolation.Standard)
	before := digest(t, a.plan.Lowers)
	const vandal = `for f in /etc/* /home/user /usr/bin/env; do echo x >> $f; chmod 777 $f; rm -rf $f; done 2>/dev/null; touch /etc/planted; ls /etc`
	r, err := a.Run(t.Context(), selftest.Command{Argv: []string{"sh", "-c", vandal}, User: "root"})
	if err != nil || !strings.Contains(r.Output, "planted") {
		t.Fatalf("nothing could be changed inside: %q, %v", r.Output, err)
	}
	if after := digest(t, a.plan.Lowers); after != before {
		t.Error("a layer of the template changed")
	}
	r, err = b.Run(t.Context(), selftest.Command{Argv: []string{"sh", "-c", "ls /etc/planted /etc/passwd"}, User: "root"})
	if err != nil || !strings.Contains(r.Output, "/etc/passwd") || strings.Contains(r.Output, "/etc/planted\n/") {
		t.Errorf("a neighbour sees %q, %v", r.Output, err)
	}
}

// digest sums up names, modes and contents below some directories.
func digest(t *testing.T, dirs []string) [32]byte {
	t.Helper()
	sum := sha256.New()
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			sum.Write([]byte(path + info.Mode().String()))
			if info.Mode().IsRegular() {
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				sum.Write(text)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return [32]byte(sum.Sum(nil))
}
