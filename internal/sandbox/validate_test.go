package sandbox

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

func TestSpecsThatAreRefused(t *testing.T) {
	s := newWorld(t).serve()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(s.w.dir, link); err != nil {
		t.Fatal(err)
	}
	many := map[string]string{}
	for i := range MaxLabels + 1 {
		many[strings.Repeat("a", i+1)] = ""
	}
	space := func(source, target string) Spec { return Spec{Workspaces: []Workspace{{source, target}}} }
	for name, c := range map[string]struct {
		spec  Spec
		field string // must be named by the text
		kind  errs.Kind
	}{
		"name with a dot":        {Spec{Name: "a.b"}, "name", 0},
		"name with capitals":     {Spec{Name: "Web"}, "name", 0},
		"name that ends with -":  {Spec{Name: "web-"}, "name", 0},
		"long name":              {Spec{Name: strings.Repeat("a", 64)}, "name", 0},
		"template":               {Spec{Template: "../etc"}, "template", 0},
		"no such template":       {Spec{Template: "nope"}, "template", errs.NotFound},
		"template not built":     {Spec{Template: "unbuilt"}, "template", errs.FailedPrecondition},
		"profile":                {Spec{Profile: "open"}, "profile", 0},
		"profile not allowed":    {Spec{Profile: Standard}, "profile", 0},
		"isolation":              {Spec{Isolation: "nope"}, "isolation", errs.NotFound},
		"label name":             {Spec{Labels: map[string]string{`a"b`: ""}}, "label", 0},
		"label value":            {Spec{Labels: map[string]string{"a": "b\nc"}}, "label a", 0},
		"too many labels":        {Spec{Labels: many}, "labels", 0},
		"env name":               {Spec{Env: map[string]string{"1A": ""}}, "env", 0},
		"env value":              {Spec{Env: map[string]string{"A": "x\x00y"}}, "env", 0},
		"env size":               {Spec{Env: map[string]string{"A": strings.Repeat("x", maxText)}}, "env", 0},
		"user":                   {Spec{User: "root; rm"}, "user", 0},
		"user number":            {Spec{User: "70000"}, "user", 0},
		"dir":                    {Spec{Dir: "here"}, "dir", 0},
		"little memory":          {Spec{Limits: Limits{MemoryBytes: 1}}, "memory", 0},
		"negative memory":        {Spec{Limits: Limits{MemoryBytes: -1}}, "memory", 0},
		"cpus":                   {Spec{Limits: Limits{CPUs: 0.01}}, "cpus", 0},
		"cpus NaN":               {Spec{Limits: Limits{CPUs: math.NaN()}}, "cpus", 0},
		"cpus Inf":               {Spec{Limits: Limits{CPUs: math.Inf(1)}}, "cpus", 0},
		"pids":                   {Spec{Limits: Limits{Pids: 1}}, "pids", 0},
		"open files":             {Spec{Limits: Limits{OpenFiles: 1}}, "open_files", 0},
		"disk":                   {Spec{Limits: Limits{DiskBytes: 1}}, "disk", 0},
		"inodes":                 {Spec{Limits: Limits{Inodes: 1}}, "inodes", 0},
		"lifetime":               {Spec{Lifetime: time.Millisecond}, "lifetime", 0},
		"idle":                   {Spec{Idle: math.MaxInt64}, "idle", 0},
		"layer name":             {Spec{AllowMissing: []string{"a b"}}, "allow_missing", 0},
		"workspace relative":     {space("here", ""), "workspace", 0},
		"workspace missing":      {space(filepath.Join(dir, "none"), ""), "workspace", 0},
		"workspace file":         {space(file, ""), "workspace", 0},
		"workspace /":            {space("/", ""), "workspace", 0},
		"workspace /proc":        {space("/proc/self", ""), "workspace", 0},
		"workspace data dir":     {space(s.w.dir, ""), "workspace", 0},
		"workspace above it":     {space(filepath.Dir(s.w.dir), ""), "workspace", 0},
		"workspace link to it":   {space(link, ""), "workspace", 0},
		"workspace target /":     {space(dir, "/"), "workspace", 0},
		"workspace target /proc": {space(dir, "/x/../proc/sys"), "workspace", 0},
		"workspace target /usr":  {space(dir, "/usr/lib"), "workspace", 0},
		"workspace target":       {space(dir, "x"), "workspace", 0},
		"workspaces overlap":     {Spec{Workspaces: []Workspace{{dir, "/w"}, {dir, "/w/x"}}}, "workspace", 0},
		"too many workspaces":    {Spec{Workspaces: make([]Workspace, 9)}, "workspaces", 0},
	} {
		_, err := s.Create(t.Context(), admin, c.spec, CreateOptions{})
		kind := c.kind
		if kind == 0 {
			kind = errs.InvalidArgument
		}
		wantKind(t, name, err, kind)
		if text, _ := errs.PublicText(err); !strings.Contains(text, c.field) {
			t.Errorf("%s: text %q does not name %s", name, text, c.field)
		}
	}
	for _, id := range []string{"short", strings.Repeat("A", 20), strings.Repeat("a", 21), "../../../../etc/pass"} {
		_, err := s.Create(t.Context(), alice, Spec{}, CreateOptions{ID: id})
		wantKind(t, "id "+id, err, errs.InvalidArgument)
	}
	if len(s.w.host.Instances()) != 0 || s.backend.Starts() != 0 {
		t.Error("something was started")
	}
}

func TestSpecsThatAreTaken(t *testing.T) {
	s := newWorld(t).serve()
	for name, spec := range map[string]Spec{
		"all": {
			Template: "base", Profile: Standard, Name: "a-1", Labels: map[string]string{"example.com/x": "ü"},
			Env: map[string]string{"_A1": "two\nlines"}, User: "1000", Dir: "/x", Lifetime: time.Second, Idle: time.Hour,
			Limits: Limits{MemoryBytes: 64 << 20, CPUs: 1.5, Pids: 8, OpenFiles: 64, DiskBytes: 16 << 20, Inodes: 1000},
		},
		"none":        {Lifetime: -1},
		"missing":     {AllowMissing: []string{"landlock"}},
		"by template": {Template: "base"},
	} {
		if _, err := s.Create(t.Context(), admin, spec, CreateOptions{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := s.w.roots.listed; n > 1 {
		t.Errorf("templates were listed %d times", n)
	}
}

func TestProfileFor(t *testing.T) {
	both, locked := rootfs.Template{Profiles: []string{"standard", "locked"}}, rootfs.Template{Profiles: []string{"locked"}}
	for _, c := range []struct {
		t                    rootfs.Template
		asked, byDefault, to Profile
	}{
		{both, "", "", Standard},
		{both, Locked, "", Locked},
		{both, "", Locked, Locked},
		{locked, "", Standard, Locked}, // a server's default gives way, a caller's wish does not
		{locked, "", "", Locked},
		{rootfs.Template{}, "", "", Locked},
	} {
		if got, err := profileFor(c.t, c.asked, c.byDefault); err != nil || got != c.to {
			t.Errorf("%v, %q, %q: %q, %v", c.t.Profiles, c.asked, c.byDefault, got, err)
		}
	}
	_, err := profileFor(locked, Standard, "")
	wantKind(t, "standard where locked is allowed", err, errs.InvalidArgument)
	_, err = profileFor(locked, Standard, Standard)
	wantKind(t, "the same with a default", err, errs.InvalidArgument)
}

func TestStates(t *testing.T) {
	all := []State{Starting, Running, Paused, Stopping, Stopped}
	legal := map[State]string{
		Starting: "RXx", Running: "PXx", Paused: "RXx", Stopping: "x", Stopped: "",
	}
	letter := map[State]string{Starting: "S", Running: "R", Paused: "P", Stopping: "X", Stopped: "x"}
	for _, from := range all {
		for _, to := range all {
			if got, want := from.CanBecome(to), strings.Contains(legal[from], letter[to]); got != want {
				t.Errorf("%s can become %s: %v", from, to, got)
			}
		}
	}
}

func FuzzPageToken(f *testing.F) {
	f.Add(position{Created: 5, ID: "abcdefghij0123456789"}.token())
	f.Add("")
	f.Add("eyJjIjoxfQ")
	f.Fuzz(func(t *testing.T, token string) {
		p, err := parseToken(token)
		if err != nil {
			if !errs.Is(err, errs.InvalidArgument) {
				t.Fatal(err)
			}
			return
		}
		if token == "" {
			return
		}
		if again, err := parseToken(p.token()); err != nil || again != p {
			t.Fatalf("%+v became %+v, %v", p, again, err)
		}
	})
}
