package template

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

const arch = runtime.GOARCH

func TestMain(m *testing.M) { os.Exit(stage.Main(m)) }

// TestTemplates builds templates on one server, upon template "small".
func TestTemplates(t *testing.T) {
	s := stage.Start(t, "--listen=127.0.0.1:0", "--insecure-registry="+world.Web+":5000")
	image := filepath.Join(t.TempDir(), "image.tar")
	smallDebian(t, image, "small:1")
	if out, err := s.CLI("", "import", image, "--name", "small"); err != nil {
		t.Fatalf("import: %v\n%s", err, out)
	}
	t.Run("trees", func(t *testing.T) { testTrees(t, s) })
	t.Run("scratch", func(t *testing.T) { testScratch(t, s) })
	t.Run("registry", func(t *testing.T) { testRegistry(t, s, image) })
	t.Run("locked", func(t *testing.T) { testLocked(t, s) })
}

// A build with a lock file gives the same tree again from a registry that has moved on, and is refused, with the name of
// the package, where the registry no longer has what the file says.
func testLocked(t *testing.T, s *stage.Stage) {
	web := &upstream{files: map[string][]byte{}}
	s.Serve(world.Web, web, "deb.test", "pypi.test", "npm.test")
	// As it comes, in an archive, it would compile itself at each start.
	pip := t.TempDir()
	if err := os.WriteFile(pip+"/Dockerfile", []byte("FROM host\nRUN python3 -m zipfile -e /usr/share/python-wheels/pip-*.whl /home/user/pip && python3 -m compileall -q /home/user/pip\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := s.CLI("", "template", "build", "-t", "tools", pip); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for _, m := range []struct {
		name, host, dockerfile string
		offer                  func(*testing.T, ...release) map[string][]byte
		// pins says that the manager is asked for the versions of the lock file.
		pins bool
		// changed and gone are what is said of another archive of a version, and of a version that is not there.
		changed, gone string
	}{
		{
			name: "apt", host: "deb.test", offer: debian, pins: true, dockerfile: "FROM small\nRUN apt-get update && apt-get install -y top\n",
			changed: "dpkg demo 1.0.0 has other files than it had in this version", gone: "dpkg demo is 2.0.0, was 1.0.0",
		},
		{
			name: "pip", host: "pypi.test", offer: index, pins: true, dockerfile: "FROM tools\nRUN python3 /home/user/pip/pip " +
				"install --prefix /home/user/py --index-url http://pypi.test/simple --trusted-host pypi.test top\n",
			changed: "pip demo 1.0.0 has other files than it had in this version", gone: "pip demo is 2.0.0, was 1.0.0",
		},
		{
			name: "npm", host: "npm.test", offer: registry, dockerfile: "FROM host\nRUN npm install --prefix /home/user/app --registry http://npm.test demo\n",
			changed: "npm demo 1.0.0 has other files than it had in this version", gone: "npm demo is 2.0.0, was 1.0.0",
		},
	} {
		t.Run(m.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(dir+"/Dockerfile", []byte(m.dockerfile), 0o600); err != nil {
				t.Fatal(err)
			}
			one, other, two := release{"1.0.0", "one"}, release{"1.0.0", "planted"}, release{"2.0.0", "two"}
			requirements := filepath.Join(dir, "requirements.lock")
			build := func(flags ...string) (string, error) {
				return s.CLI("", append([]string{
					"template", "build", "-t", m.name, "--no-cache", "--allow", m.host, "--requirements", requirements, dir,
				}, flags...)...)
			}
			for _, c := range []struct {
				what   string
				offer  []release
				locked bool
				want   string // "": the build is ready, and with a lock the same as before
			}{
				{"first", []release{one}, false, ""},
				{"a newer one beside it", []release{one, two}, true, map[bool]string{true: "", false: m.gone}[m.pins]},
				{"another archive of the version", []release{other}, true, m.changed},
				{"the version is gone", []release{two}, true, m.gone},
				{"without the lock", []release{one, two}, false, ""},
			} {
				web.put(m.host, m.offer(t, c.offer...))
				flags := map[bool][]string{true: {"--locked"}}[c.locked]
				out, err := build(flags...)
				said := out[strings.LastIndex(out, "#finalize")+1:]
				if (err == nil) != (c.want == "") || !strings.Contains(said, c.want) {
					t.Fatalf("%s: %v, want %q:\n%s", c.what, err, c.want, out)
				}
				if c.want == "" && c.locked && !strings.Contains(out, "the result is what the lock file says") {
					t.Errorf("%s: the lock file was not looked at:\n%s", c.what, out)
				}
			}
			lock, err := os.ReadFile(filepath.Join(dir, "casemate.lock"))
			if err != nil || !strings.Contains(string(lock), `"name":"demo","version":"2.0.0"`) {
				t.Errorf("the lock file without --locked is %v\n%s", err, lock)
			}
			text, err := os.ReadFile(requirements)
			if want := strings.Contains(string(text), "demo==2.0.0 \\\n    --hash=sha256:"); err != nil || want != (m.name == "pip") {
				t.Errorf("requirements are %v %q", err, text)
			}
		})
	}
}
