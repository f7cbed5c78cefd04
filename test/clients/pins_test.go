package clients

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

// shelf is a Python package index whose packages change: a wheel's name leads to its bytes.
type shelf struct {
	mu     sync.Mutex // guards the field below
	wheels map[string][]byte
}

// offer makes a version of a package the only one there is, unless others are kept.
func (s *shelf) offer(t *testing.T, name, version, text, requires string, keep bool) {
	t.Helper()
	dist := strings.ReplaceAll(name, "-", "_") + "-" + version
	s.mu.Lock()
	defer s.mu.Unlock()
	for file := range s.wheels {
		if !keep && strings.HasPrefix(file, strings.ReplaceAll(name, "-", "_")+"-") {
			delete(s.wheels, file)
		}
	}
	s.wheels[dist+"-py3-none-any.whl"] = stage.Wheel(t, name, version, text, requires)
}

// ServeHTTP implements http.Handler: PEP 503.
func (s *shelf) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if file, ok := strings.CutPrefix(r.URL.Path, "/files/"); ok {
		_, _ = w.Write(s.wheels[file])
		return
	}
	name := strings.ReplaceAll(strings.Trim(strings.TrimPrefix(r.URL.Path, "/simple/"), "/"), "-", "_")
	w.Header().Set("Content-Type", "text/html")
	fmt.Fprint(w, "<!DOCTYPE html><html><body>\n")
	for file := range s.wheels {
		if strings.HasPrefix(file, name+"-") {
			fmt.Fprintf(w, "<a href=\"/files/%s\">%s</a>\n", file, file)
		}
	}
	fmt.Fprint(w, "</body></html>\n")
}

const (
	// withPip makes an environment with pip once, for the builds upon it.
	withPip = "FROM host\nRUN python3 -m venv /tmp/v && chmod -R a+rX /tmp/v\n"
	// pinnedFile asks for a package by its name alone, and for one that needs another.
	pinnedFile = "FROM with-pip\nRUN /tmp/v/bin/pip install --no-compile --index-url https://" + plain + "/simple greeting-lib speech\n"
)

// locked is a directory that a template is built from again and again.
type locked struct {
	*stage.Stage
	t   *testing.T
	dir string
}

// build builds without what is kept of earlier builds, unless flags say otherwise.
func (l *locked) build(flags ...string) (string, error) {
	args := append([]string{"template", "build", "-t", "pinned", "--allow", plain}, flags...)
	return l.CLI("", append(args, l.dir)...)
}

func (l *locked) ok(flags ...string) string {
	l.t.Helper()
	out, err := l.build(flags...)
	if err != nil {
		l.t.Fatalf("%v: %v\n%s", flags, err, out)
	}
	return out
}

// refused is a build that must fail, and say all of want.
func (l *locked) refused(flags []string, want ...string) {
	l.t.Helper()
	out, err := l.build(flags...)
	if err == nil {
		l.t.Fatalf("%v was built:\n%s", flags, out)
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			l.t.Errorf("%v does not say %q:\n%s", flags, w, out)
		}
	}
}

func (l *locked) lock() string {
	l.t.Helper()
	text, err := os.ReadFile(filepath.Join(l.dir, "casemate.lock"))
	if err != nil {
		l.t.Fatal(err)
	}
	return string(text)
}

// TestPinnedBuild: a Dockerfile whose pip step names no versions gives the same with its lock file while the index has
// the versions, whatever newer ones it has, and is refused by the package's name when it has them no longer.
func TestPinnedBuild(t *testing.T) {
	s := stage.Start(t)
	index := &shelf{wheels: map[string][]byte{}}
	s.Serve(world.Web, index, plain)
	index.offer(t, "greeting-lib", "1.0", "text = 'one'\n", "", false)
	index.offer(t, "speech", "3.1", "", "voice-box>=1", false)
	index.offer(t, "voice-box", "1.4", "", "", false)
	base := t.TempDir()
	l := &locked{Stage: s, t: t, dir: t.TempDir()}
	for dir, text := range map[string]string{base: withPip, l.dir: pinnedFile} {
		if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := s.CLI("", "template", "build", "-t", "with-pip", base); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	l.ok()
	first := l.lock()
	for _, want := range []string{`"name":"greeting-lib","version":"1.0"`, `"name":"voice-box","version":"1.4"`, `"brings":[`} {
		if !strings.Contains(first, want) {
			t.Errorf("the lock file lacks %s:\n%s", want, first)
		}
	}
	if out, err := s.CLI("", "template", "show", "pinned", "--requirements"); err != nil || !strings.HasSuffix(out, "\ngreeting-lib==1.0\nspeech==3.1\nvoice-box==1.4\n") {
		t.Errorf("the requirements are %q, %v", out, err)
	}
	l.ok("--locked") // nothing runs
	l.ok("--no-cache")
	if again := l.lock(); again != first {
		t.Errorf("built again, the lock file is\n%s\nwas\n%s", again, first)
	}

	// Newer versions do not matter to a locked build, and nothing of what pins is left in its files.
	index.offer(t, "greeting-lib", "2.0", "text = 'two'\n", "", true)
	index.offer(t, "voice-box", "1.5", "", "", true)
	if out := l.ok("--locked", "--no-cache"); !strings.Contains(out, "the result is what the lock file says") {
		t.Error(out)
	}
	out, err := s.CLI("", "run", "--template", "pinned", "--", "sh", "-c", `/tmp/v/bin/python -c 'import greeting_lib; print(greeting_lib.text)'; ls -A /tmp; env | grep PIP_`)
	if !strings.Contains(out, "one\n") || strings.Contains(out, "casemate-constraints") || strings.Contains(out, "PIP_") {
		t.Errorf("%v: %s", err, out)
	}
	// The twin: without the lock file the build takes them; and what is kept of that is not taken for the locked one.
	l.ok("--no-cache", "--no-lock")
	if out := l.ok("--locked"); !strings.Contains(out, "the result is what the lock file says") {
		t.Error(out)
	}

	// Versions that are gone, of what is asked for and of what that needs; and one that became something else.
	index.offer(t, "greeting-lib", "2.0", "text = 'two'\n", "", false)
	index.offer(t, "voice-box", "1.5", "", "", false)
	l.refused([]string{"--locked", "--no-cache"}, "Dockerfile:2:", "the versions of the lock file can't be had",
		"pip greeting-lib is 2.0, was 1.0", "pip voice-box is 1.5, was 1.4")
	index.offer(t, "voice-box", "1.4", "", "", true)
	index.offer(t, "greeting-lib", "1.0", "text = 'another one'\n", "", true)
	l.refused([]string{"--locked", "--no-cache"}, "pip greeting-lib 1.0 has other files than it had in this version")
	if got := l.lock(); got != first {
		t.Errorf("the lock file became\n%s", got)
	}
}
