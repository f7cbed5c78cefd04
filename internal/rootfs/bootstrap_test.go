package rootfs

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

func TestReadAptSources(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  aptSources
	}{
		"deb822": {
			map[string]string{"sources.list.d/debian.sources": `Types: deb
# a comment
URIs: http://mirror.test/debian/
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main
`},
			aptSources{mirror: "http://mirror.test/debian", security: "http://mirror.test/debian-security", keyring: "/usr/share/keyrings/k.gpg"},
		},
		"one line": {
			map[string]string{"sources.list": "# deb http://no.test/debian bookworm main\n" +
				"deb [arch=amd64 signed-by=/k] https://mirror.test/debian bookworm main # x\ndeb http://s.test/sec bookworm-security main\n"},
			aptSources{mirror: "https://mirror.test/debian", security: "http://s.test/sec"},
		},
		"other release": {map[string]string{"sources.list": "deb http://mirror.test/debian trixie main\n"}, aptSources{}},
		"password":      {map[string]string{"sources.list": "deb http://me:pw@mirror.test/debian bookworm main\n"}, aptSources{}},
		"local files":   {map[string]string{"sources.list": "deb file:/srv/mirror bookworm main\ndeb cdrom:[x]/ bookworm main\n"}, aptSources{}},
		"disabled":      {map[string]string{"sources.list.d/x.sources": "Types: deb\nEnabled: no\nURIs: http://m.test/d\nSuites: bookworm\nComponents: main\n"}, aptSources{}},
		"other vendor":  {map[string]string{"sources.list": "deb http://vendor.test/repo bookworm stable\n"}, aptSources{}},
		"nothing":       {nil, aptSources{}},
	} {
		dir := t.TempDir()
		mkdirs(t, dir+"/sources.list.d")
		for f, s := range c.files {
			text(t, dir+"/"+f, s)
		}
		got := readAptSources(dir)
		if d := cmp.Diff(c.want, got, cmp.AllowUnexported(aptSources{})); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	if s := (aptSources{mirror: "http://m", security: "http://s"}).text(); strings.Count(s, "\n") != 3 {
		t.Errorf("%q", s)
	}
}

func TestFollowBootstrap(t *testing.T) {
	log := `I: Retrieving InRelease
I: Validating a 1
I: Extracting a...
I: Unpacking a...
I: Configuring a...
I: Base system installed successfully.
`
	var steps []string
	last := -1.0
	end := follow(strings.NewReader(log+strings.Repeat("x", 100<<10)+"\n"), func(step string, f float64, _ string) {
		steps = append(steps, step)
		if f < last || f < 0 || f > 1 {
			t.Errorf("%s: %v after %v", step, f, last)
		}
		last = f
	})
	want := []string{"download", "download", "unpack", "unpack", "install", "prepare"}
	if d := cmp.Diff(want, steps); d != "" {
		t.Error(d)
	}
	if end != "I: Base system installed successfully." || last < 0.9 {
		t.Errorf("ended with %q at %v", end, last)
	}
	if got := tail("a\nb\nc\n", 2); got != "b\nc" {
		t.Errorf("tail %q", got)
	}
}

// A build that is called off half way leaves no file, mount or process.
func TestBuildLeavesNothingWhenCanceled(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: light(t)})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	second := errors.New("not tried")
	_, err := s.Build(ctx, "base", false, func(string, float64, string) {
		if second.Error() == "not tried" {
			_, second = s.Build(ctx, "base", false, nil)
		}
		cancel()
	})
	// Canceled, or Unavailable where this machine reaches no mirror.
	if !errors.Is(err, context.Canceled) && !errs.Is(err, errs.Unavailable) {
		t.Errorf("build: %v", err)
	}
	if !errs.Is(second, errs.FailedPrecondition) {
		t.Errorf("second build meanwhile: %v, want failed_precondition", second)
	}
	left, err := os.ReadDir(s.templateDir())
	must(t, err)
	for _, e := range left {
		if strings.Contains(e.Name(), "base") {
			t.Errorf("left %s", e.Name())
		}
	}
	if strings.Contains(mountInfo(t), s.templateDir()) {
		t.Error("a mount is left")
	}
	if _, err := s.Build(t.Context(), "none", false, nil); !errs.Is(err, errs.NotFound) {
		t.Errorf("unknown template: %v", err)
	}
	if tm, err := s.Build(t.Context(), "host", false, nil); err != nil || tm.Name != "host" {
		t.Errorf("host: %+v %v", tm, err)
	}
}

// A stored build is found again; one of another version or without its mark is not used.
func TestOpenBase(t *testing.T) {
	s := &Store{dir: t.TempDir()}
	for name, m := range map[string]meta{
		"base-1": {Version: baseVersion, Source: "old"}, "base-9": {Version: baseVersion + 1, Source: "other version"},
	} {
		mkdirs(t, s.templateDir()+"/"+name)
		must(t, writeMeta(s.templateDir()+"/"+name, m))
	}
	mkdirs(t, s.templateDir()+"/base-5") // half deleted
	base, _ := recipeOf("base")
	b, err := s.openBuilt(base)
	if err != nil || b == nil || b.meta.Source != "old" {
		t.Errorf("%+v %v", b, err)
	}
	p := b.plan()
	if p.User != "user" || p.Lowers[0] != s.templateDir()+"/base-1/root" || len(p.Binds) != 0 {
		t.Errorf("%+v", p)
	}
}

func FuzzAptSources(f *testing.F) {
	f.Add("deb [a=b] http://m.test/d bookworm main\n")
	f.Add("Types: deb\nURIs: http://m.test/d\nSuites: bookworm\nComponents: main\n")
	f.Fuzz(func(t *testing.T, s string) {
		var a aptSources
		a.addLines(s)
		a.addStanzas(s)
		if strings.ContainsAny(a.mirror+a.security, " \n\t@") {
			t.Errorf("mirror %q %q", a.mirror, a.security)
		}
	})
}
