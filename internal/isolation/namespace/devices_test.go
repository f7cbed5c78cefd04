package namespace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/conformance"
)

// VULNERABILITY: devices and terminals are put where an image has links (CVE-2025-31133, -52565).
// ATTACK: an image whose /dev/null, console, terminals and shared memory are symbolic links, one to a file that the kernel runs
// programs by; then a terminal is asked for, and everything is written to.
// VERIFIES: the sandbox has devices of its own, and nothing was written where a link leads.
func TestLinksInThePlaceOfDevices(t *testing.T) {
	const pattern = "/proc/sys/kernel/core_pattern"
	before, err := os.ReadFile(pattern)
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		spec := conformance.Spec(t, p)
		lower := spec.Root.Lowers[0]
		victim := filepath.Join(lower, "tmp/victim")
		if err := os.MkdirAll(victim, 0o777); err != nil {
			t.Fatal(err)
		}
		for name, to := range map[string]string{
			"null": "/tmp/victim/null", "full": "../tmp/victim/full", "console": pattern, "pts": "/tmp/victim", "ptmx": "/tmp/victim/ptmx", "shm": "/tmp/victim",
		} {
			link := filepath.Join(lower, "dev", name)
			_ = os.RemoveAll(link)
			if err := os.Symlink(to, link); err != nil {
				t.Fatal(err)
			}
		}
		x := start(t, b, spec)
		const use = `echo x > /dev/null; echo x > /dev/console; echo x > /dev/tty; echo x > /dev/shm/x; : > /dev/ptmx
for f in null zero full random urandom tty; do [ -c /dev/$f ] && [ ! -L /dev/$f ] || echo no device $f; done
for d in pts shm; do [ -d /dev/$d ] && [ ! -L /dev/$d ] || echo no directory $d; done
[ -e /dev/console ] && echo there is a console; ls /tmp/victim; echo used`
		if _, err := x.client.Start(t.Context(), guestwire.StartProcess{ID: "prc_t", Argv: []string{"sh", "-c", use}, TTY: true, Rows: 24, Cols: 80}, nil); err != nil {
			t.Fatal(err)
		}
		if info, err := x.client.Wait(t.Context(), "prc_t"); err != nil || info.Code != 0 {
			t.Errorf("%s: with a terminal it ended as %+v, %v", p, info, err)
		}
		wants(t, string(p)+": what it finds", x.sh("exec 2>/dev/null\n"+use), "used")
		for _, dir := range []string{victim, filepath.Join(spec.Root.Upper, "tmp/victim")} {
			if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
				t.Errorf("%s: something was written behind a link: %v", p, entries)
			}
		}
	}
	if after, err := os.ReadFile(pattern); err != nil || string(after) != string(before) {
		t.Errorf("the host's core_pattern is %q, %v", after, err)
	}
	// Twin: mount(2) by path puts a device where the link leads.
	inPrivateMounts(t, func(dir string) error {
		victim, link := filepath.Join(dir, "victim"), filepath.Join(dir, "null")
		if err := os.WriteFile(victim, nil, 0o600); err != nil {
			return err
		}
		if err := os.Symlink("victim", link); err != nil {
			return err
		}
		if err := unix.Mount("/dev/null", link, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		b, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err == nil && !strings.Contains(string(b), victim) {
			t.Error("twin: mount(2) did not follow the link")
		}
		return err
	})
}
