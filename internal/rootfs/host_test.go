package rootfs

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/testenv"
)

// mounted mounts a plan with its binds, as the backend does but without walls.
func mounted(t *testing.T, p Plan) string {
	t.Helper()
	root := overlay(t, p)
	for _, b := range append(p.Binds, Bind{Source: "/dev", Target: "/dev"}) {
		dst := filepath.Join(root, b.Target)
		if err := syscall.Mount(b.Source, dst, "", syscall.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unmount(dst); err != nil {
				t.Error(err)
			}
		})
	}
	return root
}

// inside runs a command in a root as the default user.
func inside(root string, env map[string]string, argv ...string) (string, error) {
	cmd := exec.Command("/usr/bin/env", append([]string{"-i"}, argv...)...)
	for k, v := range env {
		cmd.Args = append(cmd.Args[:2], append([]string{k + "=" + v}, cmd.Args[2:]...)...)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot: root, Credential: &syscall.Credential{Uid: defaultUID, Gid: defaultUID},
	}
	cmd.Dir = "/home/user"
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func TestHostProgramsWork(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: light(t)})
	_, p := plan(t, s, Request{})
	if p.User != "user" || p.Dir != "/home/user" || len(p.Binds) == 0 || p.Binds[0] != (Bind{Source: "/usr", Target: "/usr"}) {
		t.Errorf("%+v", p)
	}
	root := mounted(t, p)
	for command, want := range map[string]string{
		"echo $((6*7))": "42",
		"/usr/bin/python3 -c 'import ssl, json, sqlite3, ctypes; print(6*7)'": "42",
		"command -v python3": "/usr/bin/python3",
		"whoami":             "user",
		"pwd":                "/home/user",
		"echo x > f && cat f && sort f | uniq -c | awk '{print $2}'": "x\nx",
		"getent hosts localhost | awk '{print $1}'":                  "::1",
		"ls /usr/local":                    "",
		"date -d @0 +%Z":                   "UTC",
		"git --version | cut -d' ' -f1":    "git",
		"perl -e 'print 42'":               "42",
		"touch /tmp/a /var/tmp/a; echo ok": "ok",
		"touch /etc/x /usr/x 2>/dev/null; ls /etc/x /usr/x 2>/dev/null; echo ok": "ok",
		"ls -d /root/* 2>/dev/null; echo ok":                                     "ok",
	} {
		if out, err := inside(root, p.Env, "/bin/bash", "-l", "-c", command); err != nil || out != want {
			t.Errorf("%s: %q %v, want %q", command, out, err, want)
		}
	}
}

// Nothing of this machine's own settings, users or keys shows.
func TestHostExposesNothing(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	_, p := plan(t, s, Request{})
	root := p.Lowers[0]
	for _, name := range []string{
		"etc/shadow", "etc/gshadow", "etc/ssh", "etc/ssl/private", "etc/sudoers", "etc/fstab.d", "etc/apt", "etc/environment.d",
		"usr/bin", "root/.ssh",
	} {
		if _, err := os.Lstat(filepath.Join(root, name)); err == nil {
			t.Errorf("/%s shows", name)
		}
	}
	for _, name := range []string{"passwd", "hosts", "resolv.conf", "hostname", "environment", "profile"} {
		host, err := os.ReadFile("/etc/" + name)
		if err != nil || len(host) == 0 {
			continue
		}
		if made, err := os.ReadFile(filepath.Join(root, "etc", name)); err != nil || string(made) == string(host) {
			t.Errorf("/etc/%s is the host's (%v)", name, err)
		}
	}
	must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		if st.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeDevice|fs.ModeSocket|fs.ModeNamedPipe) != 0 {
			t.Errorf("%s is %v", path, st.Mode())
		}
		return nil
	}))
	covered := map[string]bool{}
	for _, b := range p.Binds[1:] {
		names, err := os.ReadDir(b.Source)
		covered[b.Target] = err == nil && len(names) == 0
	}
	for _, dir := range hostCovered() {
		if _, err := os.Stat(dir); err == nil && !covered[dir] {
			t.Errorf("%s is not covered", dir)
		}
	}
	// Twin: uncovered, the host's own programs would show.
	if names, err := os.ReadDir("/usr/local"); err != nil || len(names) == 0 {
		t.Errorf("twin: /usr/local of this machine: %v %v", names, err)
	}
}

// An update of the host makes another layer; running sandboxes keep theirs.
func TestHostLayerIsMadeOnce(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{DataDir: dir, Mechanism: light(t)})
	must(t, err)
	_, p := plan(t, s, Request{})
	must(t, s.Close())
	// Another one, as an older server would have left, and one that a sandbox still uses.
	for _, name := range []string{"host-old", "host-used", "tmp-host-killed"} {
		mkdirs(t, s.templateDir()+"/"+name)
	}
	must(t, os.Symlink("host-used", s.useDir()+"/"+strings.Repeat("a", 20)))
	again := open(t, Config{DataDir: dir})
	if got := again.templates.host.dir + "/root"; got != p.Lowers[0] {
		t.Errorf("made again: %s, was %s", got, p.Lowers[0])
	}
	left, err := filepath.Glob(s.templateDir() + "/*host-*")
	must(t, err)
	if len(left) != 2 {
		t.Errorf("left %v", left)
	}
	must(t, again.unuse(strings.Repeat("a", 20)))
}

func TestTemplates(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	all, err := s.Templates(t.Context())
	must(t, err)
	if len(all) != 3 || all[0].Name != "host" || !all[0].Ready || all[0].SizeBytes == 0 || all[1].Name != "base" || all[1].Ready || all[2].Name != "code-interpreter" || all[2].Ready {
		t.Errorf("%+v", all)
	}
	if p := all[0].Profiles; len(p) != 1 || p[0] != "locked" {
		t.Errorf("host allows %v", p)
	}
}

// A login shell starts no process of its own: clients run "bash -l -c" for every command.
func TestProfileForksNothing(t *testing.T) {
	dir := t.TempDir()
	text(t, dir+"/profile", profile)
	// With no PATH at all and job numbers counted: $! is unset and no child was reaped.
	out, err := exec.Command("/bin/bash", "-c", `PATH=/none; . `+dir+`/profile && echo "children: $(( ${!:-0} ))"`).CombinedOutput()
	if err != nil || string(out) != "children: 0\n" {
		t.Errorf("%q %v", out, err)
	}
	for _, bad := range []string{"`", "$(", "|", "/etc/profile.d"} {
		if strings.Contains(profile, bad) {
			t.Errorf("the profile contains %q", bad)
		}
	}
}
