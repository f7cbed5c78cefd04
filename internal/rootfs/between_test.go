package rootfs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/testenv/scramble"
)

// tracked is a sandbox with points of its files.
type tracked struct {
	generation
	s    *Store
	at   Point
	tree map[string]string
	sums SumLimits
}

func track(t testing.TB, s *Store, g generation) *tracked {
	t.Helper()
	p, err := s.MakePoint(t.Context(), g.id)
	if err == nil {
		err = s.KeepPoint(g.id, p)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &tracked{generation: g, s: s, at: p}
}

// since returns what changed since the point before, and makes a new one.
func (g *tracked) since(t testing.TB) []FileChange {
	t.Helper()
	p, err := g.s.MakePoint(t.Context(), g.id)
	if err != nil {
		t.Fatal(err)
	}
	changes, err := g.s.Between(t.Context(), g.id, g.plan, g.at, p, g.sums)
	if err == nil {
		err = g.s.KeepPoint(g.id, p)
	}
	if err != nil {
		t.Fatal(err)
	}
	g.at = p
	return changes
}

// applied checks that changes lead from one scan to the other: every path that differs is told of, and only those.
func applied(from, to map[string]string, changes []FileChange) (wrong []string) {
	expected := map[string]string{} // what the tree must be like, where a change says so
	gone := func(dir string) {
		for path := range from {
			if path == dir || strings.HasPrefix(path, dir+"/") {
				if _, told := expected[path]; !told {
					expected[path] = ""
				}
			}
		}
	}
	quoted := func(p string) string {
		q := fmt.Sprintf("%q", p)
		return strings.TrimPrefix(q[1:len(q)-1], "/")
	}
	told := map[string]string{}
	for _, c := range changes {
		told[quoted(c.Path)] = c.Op
	}
	for _, c := range changes {
		path := quoted(c.Path)
		switch c.Op {
		case Created, Modified:
			expected[path] = to[path]
			if c.Op == Created && from[path] != "" || to[path] == "" || c.Op == Modified && from[path] == to[path] {
				wrong = append(wrong, fmt.Sprintf("%+v: was %q, is %q", c, from[path], to[path]))
			}
			if slices.Contains(c.What, WhatType) {
				gone(path)
			}
			expected[path] = to[path]
		case Deleted:
			gone(path)
			if to[path] != "" && told[path] == Deleted || from[path] == "" {
				wrong = append(wrong, fmt.Sprintf("%+v: was %q, is %q", c, from[path], to[path]))
			}
		case Renamed:
			was := quoted(c.From)
			if from[was] == "" || to[path] == "" || len(c.What) == 0 && from[was] != to[path] {
				wrong = append(wrong, fmt.Sprintf("%+v: was %q, is %q", c, from[was], to[path]))
			}
			gone(was)
			if from[path] != "" {
				gone(path)
			}
			expected[path] = to[path]
			for below, is := range from { // what moved along
				if rest, ok := strings.CutPrefix(below, was+"/"); ok {
					if _, known := told[path+"/"+rest]; !known && to[path+"/"+rest] == is {
						expected[path+"/"+rest] = is
					}
				}
			}
		}
	}
	for path, is := range to {
		want, told := expected[path]
		switch {
		case told && want != is:
			wrong = append(wrong, fmt.Sprintf("%s: told %q, is %q", path, want, is))
		case !told && from[path] != is:
			wrong = append(wrong, fmt.Sprintf("%s: not told: was %q, is %q", path, from[path], is))
		}
	}
	for path := range from {
		if _, told := expected[path]; to[path] == "" && !told {
			wrong = append(wrong, fmt.Sprintf("%s: not told that it went", path))
		}
	}
	slices.Sort(wrong)
	return wrong
}

// Random programs, one after the other in a sandbox: what is found to have changed after each is what a full scan of
// before and after finds. By night more of them.
func TestBetweenFindsWhatAScanFinds(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	seeds := uint64(40)
	if os.Getenv("CASEMATE_TEST_NIGHTLY") != "" {
		seeds = 200
	}
	for seed := range seeds {
		g := track(t, s, start(t, s, ""))
		g.sums = SumLimits{Files: 1 << 20, FileBytes: 1 << 40, Bytes: 1 << 40, Within: time.Hour}
		g.tree = scanned(t, g.root)
		for n := range uint64(5) {
			p := scramble.New(g.root, seed, n)
			p.Do(1 + p.IntN(60))
			// Mounted anew: overlayfs shows two names of a file that was copied up under its eyes as one.
			must(t, syscall.Unmount(g.root, 0))
			g.root = overlay(t, g.plan)
			tree := scanned(t, g.root)
			changes := g.since(t)
			if wrong := applied(g.tree, tree, changes); len(wrong) > 0 {
				t.Fatalf("seed %d, program %d:\n%s\nchanges:\n%s", seed, n, strings.Join(wrong, "\n"), told(changes))
			}
			for _, c := range changes {
				if sum := sumAt(t, g.root, c); c.Sum != sum || c.NotSummed != "" {
					t.Fatalf("seed %d, program %d: %s %q has the hash %q (%s), and is %q", seed, n, c.Op, c.Path, c.Sum, c.NotSummed, sum)
				}
			}
			g.tree = tree
		}
		g.end(t, s)
	}
}

// sumAt hashes what a file holds that a change is about; "": there is none.
func sumAt(t *testing.T, root string, c FileChange) string {
	t.Helper()
	if c.Op == Deleted || c.Type != "file" {
		return ""
	}
	data, err := os.ReadFile(root + c.Path)
	must(t, err)
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// What is hashed is bounded, and what is left out says why.
func TestSumsAreBounded(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	id, p := plan(t, s, Request{DiskBytes: 64 << 20})
	at := func(name string) string { return filepath.Join(p.Upper, name) }
	text(t, at("before"), "before")
	g := track(t, s, generation{id: id, plan: p})
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		text(t, at(name), name+"12345678")
	}
	text(t, at("b"), strings.Repeat("x", 21))
	mkdirs(t, at("dir"))
	must(t, os.Remove(at("before")), os.Symlink("a", at("f")), syscall.Mkfifo(at("g"), 0o600))
	// Of a to e, which have 9 bytes and b 21: b is too long, and e finds no room.
	g.sums = SumLimits{Files: 100, FileBytes: 20, Bytes: 28, Within: time.Hour}
	got := map[string]string{}
	for _, c := range g.since(t) {
		got[c.Path] = c.NotSummed
		if (c.Sum != "") != (c.NotSummed == "" && strings.Contains("/a/c/d", c.Path)) {
			t.Errorf("%s %s: %q, %q", c.Op, c.Path, c.Sum, c.NotSummed)
		}
	}
	want := map[string]string{
		"/a": "", "/b": NotSummedSize, "/before": "", "/c": "", "/d": "", "/dir": "", "/e": NotSummedLimit, "/f": "", "/g": "",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// Of the first one alone, within no time, and none at all.
	for _, tt := range []struct {
		limits SumLimits
		want   string
	}{
		{SumLimits{Files: 1, FileBytes: 100, Bytes: 100, Within: time.Hour}, "sum"},
		{SumLimits{Files: 1, FileBytes: 100, Bytes: 100, Within: -1}, NotSummedLimit},
		{SumLimits{}, ""},
	} {
		for _, name := range []string{"a", "e"} {
			text(t, at(name), tt.want+time.Now().String())
		}
		g.sums = tt.limits
		changes := g.since(t)
		if len(changes) != 2 || changes[1].Sum+changes[1].NotSummed != "" {
			t.Fatalf("%+v: %+v", tt.limits, changes)
		}
		if first := changes[0]; (first.Sum != "") != (tt.want == "sum") || tt.want != "sum" && first.NotSummed != tt.want {
			t.Errorf("%+v: %+v", tt.limits, first)
		}
	}
	must(t, s.Release(t.Context(), id))
}

func told(changes []FileChange) string {
	var b strings.Builder
	for _, c := range changes {
		fmt.Fprintf(&b, "%s %q from %q (%s) %v\n", c.Op, c.Path, c.From, c.Type, c.What)
	}
	return b.String()
}

func brief(changes []FileChange) []string {
	var out []string
	for _, c := range changes {
		line := c.Op + " "
		if c.From != "" {
			line += c.From + " → "
		}
		line += c.Path
		if len(c.What) > 0 {
			line += " " + strings.Join(c.What, ",")
		}
		out = append(out, line)
	}
	return out
}

// What a program can do to files, and how it is called.
func TestBetween(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	source := t.TempDir()
	text(t, source+"/README.md", "hello")
	id, p := plan(t, s, Request{DiskBytes: 64 << 20, Workspaces: []WorkspaceRequest{{Source: source, Target: "/project"}}})
	p.Lowers = []string{lower(t)}
	root := overlay(t, p)
	work := overlay(t, Plan{Lowers: []string{source}, Upper: p.Workspaces[0].Upper, Work: p.Workspaces[0].Work})
	in := func(name string) string { return root + "/" + name }
	mkdirs(t, in("tree/sub"), in("other"))
	text(t, in("tree/sub/f"), "1")
	text(t, in("tree/lost"), "2")
	text(t, in("own"), "own")
	g := track(t, s, generation{id: id, plan: p, root: root})

	if got := g.since(t); got != nil {
		t.Errorf("nothing happened: %v", brief(got))
	}
	if !s.AtPoint(id, g.at) {
		t.Error("nothing happened, and it is not certain")
	}
	text(t, in("new"), "new")
	text(t, in("edit"), "after!")
	must(t, os.Chmod(in("own"), 0o600), os.Remove(in("tofile")), os.RemoveAll(in("gone")), os.Rename(in("samesize"), in("kept")))
	text(t, work+"/made", "y")
	must(t, os.Rename(work+"/README.md", work+"/README.old"))
	want := []string{
		"modified /edit contents", "deleted /gone", "created /new", "modified /own mode", "renamed /samesize → /kept", "deleted /tofile",
		"renamed /project/README.md → /project/README.old", "created /project/made",
	}
	got := brief(g.since(t))
	slices.Sort(got)
	slices.Sort(want)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// A directory moves; in it one file is changed, one removed, one made, and another moves out of it.
	must(t, os.Rename(in("tree"), in("moved")), os.Remove(in("moved/lost")))
	text(t, in("moved/fresh"), "x")
	text(t, in("moved/sub/f"), "changed")
	must(t, os.Rename(in("new"), in("other/new")), os.Chown(in("own"), 5, 6), os.Rename(in("own"), in("edit")))
	want = []string{
		"created /moved/fresh", "modified /moved/sub/f contents", "renamed /new → /other/new", "renamed /own → /edit owner",
		"renamed /tree → /moved", "deleted /tree/lost",
	}
	got = brief(g.since(t))
	slices.Sort(got)
	slices.Sort(want)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// Touched, and the same.
	must(t, os.WriteFile(in("moved/sub/f"), []byte("changed"), 0o644), os.Chmod(in("kept"), 0o600), os.Chmod(in("kept"), 0o644))
	if got := brief(g.since(t)); got != nil {
		t.Errorf("nothing is other than it was: %v", got)
	}
	must(t, os.Chmod(root, 0o711), syscall.Setxattr(in("kept"), "user.note", []byte("x"), 0))
	if d := cmp.Diff([]string{"modified / mode", "modified /kept attributes"}, brief(g.since(t))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	must(t, syscall.Unmount(root, 0), syscall.Unmount(work, 0), s.Release(t.Context(), id))
	if left, err := os.ReadDir(s.area("points")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A later server goes on from the point that was kept; points that nobody kept go.
func TestPointsOutliveTheServer(t *testing.T) {
	cfg := Config{DataDir: t.TempDir(), Mechanism: byBtrfs, ImageBytes: 1 << 30}
	s := open(t, cfg)
	id, p := plan(t, s, Request{DiskBytes: 64 << 20})
	g := track(t, s, generation{id: id, plan: p})
	g.at.Event = 7
	must(t, s.KeepPoint(id, g.at))
	text(t, p.Upper+"/made", "x")
	if _, err := s.MakePoint(t.Context(), id); err != nil { // killed before it was kept
		t.Fatal(err)
	}
	must(t, s.Close())
	s = open(t, cfg)
	at, err := s.PointOf(id)
	must(t, err)
	if at.Name != g.at.Name || at.Event != 7 || !at.Made.Equal(g.at.Made) {
		t.Errorf("the point is %+v, was %+v", at, g.at)
	}
	entries, err := os.ReadDir(s.area("points"))
	must(t, err)
	if len(entries) != 2 {
		t.Errorf("kept: %v", entries)
	}
	next, err := s.MakePoint(t.Context(), id)
	must(t, err)
	changes, err := s.Between(t.Context(), id, p, at, next, SumLimits{})
	must(t, err)
	if d := cmp.Diff([]string{"created /made"}, brief(changes)); d != "" {
		t.Error(d)
	}
	must(t, s.DropPoint(next), s.Release(t.Context(), id))
	entries, err = os.ReadDir(s.area("points"))
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// ATTACK: a sandbox makes more files than anybody should look at, and names that are long. It is told that it can't be
// told, and nothing of the comparison is left.
func TestBetweenIsBounded(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	id, p := plan(t, s, Request{DiskBytes: 512 << 20})
	g := track(t, s, generation{id: id, plan: p})
	mkdirs(t, p.Upper+"/many")
	name := strings.Repeat("n", 200)
	must(t, os.WriteFile(filepath.Join(p.Upper, "one"), nil, 0o644))
	for i := range maxBetween + 10 {
		must(t, os.Link(filepath.Join(p.Upper, "one"), fmt.Sprintf("%s/many/%s%d", p.Upper, name, i)))
	}
	next, err := s.MakePoint(t.Context(), id)
	must(t, err)
	if _, err := s.Between(t.Context(), id, p, g.at, next, SumLimits{}); err == nil || !strings.Contains(err.Error(), "more files") {
		t.Errorf("error %v", err)
	}
	must(t, s.DropPoint(next), s.Release(t.Context(), id))
}

func BenchmarkBetween(b *testing.B) {
	for _, tt := range []struct {
		name  string
		files int
		sums  SumLimits
	}{
		{"ten", 0, SumLimits{}},
		{"ten-hashed", 0, SumLimits{Files: 500, FileBytes: 4 << 20, Bytes: 16 << 20, Within: time.Second}},
		{"ten-of-20000", 20_000, SumLimits{}},
	} {
		files := tt.files
		b.Run(tt.name, func(b *testing.B) {
			s := open(b, Config{Mechanism: byBtrfs, ImageBytes: 2 << 30})
			id, p := plan(b, s, Request{DiskBytes: 1 << 30})
			for i := range files {
				dir := fmt.Sprintf("%s/d%d", p.Upper, i/100)
				if i%100 == 0 {
					if err := os.Mkdir(dir, 0o755); err != nil {
						b.Fatal(err)
					}
				}
				if err := os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), []byte("x"), 0o644); err != nil {
					b.Fatal(err)
				}
			}
			g := track(b, s, generation{id: id, plan: p})
			g.sums = tt.sums
			n := 0
			for b.Loop() {
				b.StopTimer()
				n++
				for i := range 10 {
					if err := os.WriteFile(fmt.Sprintf("%s/changed%d", p.Upper, i), []byte(fmt.Sprint(n)), 0o644); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				if len(g.since(b)) != 10 {
					b.Fatal("not ten")
				}
			}
		})
	}
}
