package rootfs

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/testenv/scramble"
)

// grown starts a sandbox on a layer, lets change do something in it and commits that. It returns the layer and
// what the sandbox's files are then.
func grown(t *testing.T, s *Store, from string, change func(root string)) (Layer, []string) {
	t.Helper()
	g := start(t, s, from)
	change(g.root)
	l := commit(t, s, g.id, g.plan)
	must(t, syscall.Unmount(g.root, 0))
	g.root = overlay(t, g.plan)
	tree := scan(t, g.root)
	g.end(t, s)
	return l, tree
}

// shownBy returns what a sandbox that starts from a layer has.
func shownBy(t *testing.T, s *Store, layer string) []string {
	t.Helper()
	g := start(t, s, layer)
	defer g.end(t, s)
	return scan(t, g.root)
}

func (r MergeRequest) of(base, ours, theirs Layer) MergeRequest {
	r.Base, r.Ours, r.Theirs = State{Layer: base.ID}, State{Layer: ours.ID}, State{Layer: theirs.ID}
	return r
}

// TestSoakRandomPrograms runs random programs of file operations, a few, or at night a thousand. What is recorded of
// a program is what a full scan finds. A merge into what nobody changed since is theirs, bit for bit, and one of what nobody changed leaves ours as it
// is; where both did the same, nothing conflicts. Whatever conflicts there are between two random programs, each
// side's choice for all of them leaves the paths that conflicted as that side has them.
func TestSoakRandomPrograms(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		for seed := range uint64(programs()) {
			mergeProgram(t, s, seed)
			if seed%8 == 7 {
				_, err := s.Collect(t.Context(), nil, false)
				must(t, err)
			}
		}
	})
}

func mergeProgram(t *testing.T, s *Store, seed uint64) {
	t.Helper()
	run := func(stream uint64, n int) func(string) {
		return func(root string) { scramble.New(root, seed, stream).Do(n) }
	}
	where := fmt.Sprintf("seed %d", seed)
	base, baseTree := grown(t, s, "", run(200, 60))
	theirs, theirTree := grown(t, s, base.ID, run(201, 25))
	// The recorded difference is what a full scan of both finds.
	changes, err := s.Compare(t.Context(), State{Layer: base.ID}, State{Layer: theirs.ID})
	must(t, err)
	if d := cmp.Diff(oracle(byPath(baseTree), byPath(theirTree)), found(changes)); d != "" {
		t.Fatalf("%s: changes (-scanned +recorded):\n%s", where, d)
	}
	got, err := s.Merge(t.Context(), MergeRequest{}.of(base, base, theirs))
	must(t, err)
	if len(got.Conflicts) > 0 {
		t.Fatalf("%s: conflicts with a side that did nothing: %+v", where, got.Conflicts)
	}
	sameTree(t, where+", theirs alone", shownBy(t, s, got.Layer.ID), theirTree)
	sameDigest(t, s, where, got.Layer, theirs)
	got, err = s.Merge(t.Context(), MergeRequest{}.of(base, theirs, base))
	must(t, err)
	if len(got.Conflicts)+len(got.Changes) > 0 {
		t.Fatalf("%s: a merge of nothing: %+v", where, got)
	}
	sameTree(t, where+", ours alone", shownBy(t, s, got.Layer.ID), theirTree)
	sameDigest(t, s, where, got.Layer, theirs)
	// A second sandbox that did the same.
	again, againTree := grown(t, s, base.ID, run(201, 25))
	got, err = s.Merge(t.Context(), MergeRequest{}.of(base, again, theirs))
	must(t, err)
	if len(got.Conflicts) > 0 {
		t.Fatalf("%s: the same on both sides conflicts: %+v", where, got.Conflicts)
	}
	sameTree(t, where+", the same twice", shownBy(t, s, got.Layer.ID), againTree)
	sameDigest(t, s, where, got.Layer, theirs)

	ours, ourTree := grown(t, s, base.ID, run(202, 25))
	mergeBoth(t, s, where, base, ours, theirs, byPath(baseTree), byPath(ourTree), byPath(theirTree))
}

// mergeBoth merges two sides that both changed something, and checks each path of the result against what the
// rule of a three-way merge says of it.
func mergeBoth(t *testing.T, s *Store, where string, base, ours, theirs Layer, b, o, th map[string]string) {
	t.Helper()
	plain, err := s.Merge(t.Context(), MergeRequest{}.of(base, ours, theirs))
	must(t, err)
	if (plain.Layer.ID == "") != (len(plain.Conflicts) > 0) {
		t.Fatalf("%s: layer %q with %d conflicts", where, plain.Layer.ID, len(plain.Conflicts))
	}
	for _, side := range []Side{Ours, Theirs} {
		got, err := s.Merge(t.Context(), MergeRequest{Choose: func(string) Side { return side }}.of(base, ours, theirs))
		must(t, err)
		if len(got.Conflicts) > 0 || len(plain.Conflicts) > 0 && len(got.Resolved) == 0 {
			t.Fatalf("%s: %s for all leaves %+v", where, side, got.Conflicts)
		}
		tree := byPath(shownBy(t, s, got.Layer.ID))
		// At and below a conflict the side's choice holds; above one, a directory may have to stay.
		near := func(path string) bool {
			return slices.ContainsFunc(got.Resolved, func(c Conflict) bool {
				q := fmt.Sprintf("%q", c.Path[1:])
				q = q[1 : len(q)-1]
				return path == q || strings.HasPrefix(path, q+"/") || strings.HasPrefix(q, path+"/")
			})
		}
		for _, path := range allPaths(b, o, th, tree) {
			if near(path) {
				continue
			}
			want := th[path]
			if th[path] == b[path] {
				want = o[path]
			}
			if d := tree[path]; d != want && o[path] != b[path] && th[path] != b[path] {
				continue // mixed of both: attributes here, contents there
			} else if d != want {
				t.Fatalf("%s, %s: %s is %q, want %q (base %q, ours %q, theirs %q)", where, side, path, d, want, b[path], o[path], th[path])
			}
		}
		for _, c := range got.Resolved {
			path := fmt.Sprintf("%q", c.Path[1:])
			path = path[1 : len(path)-1]
			want := map[Side]map[string]string{Ours: o, Theirs: th}[side][path]
			if tree[path] != want && !(want == "" && strings.HasPrefix(tree[path], "4")) {
				t.Fatalf("%s, %s: %s (%s %v) is %q, want %q", where, side, path, c.Kind, c.What, tree[path], want)
			}
		}
	}
}

// sameDigest wants the digests of two layers to be equal, as their trees are.
func sameDigest(t *testing.T, s *Store, where string, a, b Layer) {
	t.Helper()
	x, err := s.Digest(t.Context(), a.ID)
	must(t, err)
	y, err := s.Digest(t.Context(), b.ID)
	must(t, err)
	if x.Text != y.Text {
		t.Fatalf("%s: digests %s and %s", where, x.Text, y.Text)
	}
}

func allPaths(trees ...map[string]string) []string {
	all := map[string]bool{}
	for _, tree := range trees {
		for p := range tree {
			all[p] = true
		}
	}
	return sortedNames(all)
}

// programs is how many random programs a test runs: a few, or a thousand at night.
func programs() int {
	if os.Getenv("CASEMATE_SOAK") != "" {
		return 1000
	}
	return 24
}

// each conflict has its kind, and nothing else conflicts.
func TestMergeConflicts(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		sh := func(script string) func(string) {
			return func(root string) { shell(t, root, script) }
		}
		base, _ := grown(t, s, "", sh(`rm -rf ./*; mkdir d d/e k; for f in both same ours theirs gone type mode mixed d/f d/g e k/x; do printf '1\n2\n3\n4\n5\n' >$f; done; ln e hard; ln -s a link`))
		ours, _ := grown(t, s, base.ID, sh(`
			echo o >both; echo s >same; echo o >ours; echo o >gone; rm type; ln -s x type; chmod 600 mode; chmod 700 mixed
			echo new >d/f; echo o >added; echo s >added.same; mkdir sub; ln -sf b link; rm -r k; echo file >k`))
		theirs, _ := grown(t, s, base.ID, sh(`
			echo t >both; echo s >same; echo t >theirs; rm gone; echo t >type; chmod 640 mode; echo t >>mixed
			rm -r d; echo t >added; echo s >added.same; echo file >sub; ln -sf c link; echo y >k/x`))
		got, err := s.Merge(t.Context(), MergeRequest{}.of(base, ours, theirs))
		must(t, err)
		var lines []string
		for _, c := range got.Conflicts {
			lines = append(lines, fmt.Sprintf("%s %s %v", c.Path, c.Kind, c.What))
		}
		slices.Sort(lines)
		want := []string{
			"/added both-changed [contents]", "/both both-changed [contents]", "/d/f changed-deleted []",
			"/gone changed-deleted []", "/k directory-file []", "/link both-changed [contents]",
			"/mode attributes [mode]", "/sub directory-file []", "/type type [type]",
		}
		if d := cmp.Diff(want, lines); d != "" {
			t.Fatalf("conflicts (-want +got):\n%s", d)
		}
		if got.Layer.ID != "" {
			t.Error("a layer was made in spite of them")
		}
		// One by one, and the rest is merged.
		got, err = s.Merge(t.Context(), MergeRequest{Choose: func(path string) Side {
			if path == "/both" || path == "/sub" || path == "/k" || path == "/d/f" {
				return Ours
			}
			return Theirs
		}}.of(base, ours, theirs))
		must(t, err)
		tree := byPath(shownBy(t, s, got.Layer.ID))
		_, hasGone := tree["gone"]
		_, hasG := tree["d/g"]
		_, hasF := tree["d/f"]
		if hasGone || hasG || !hasF || !strings.HasPrefix(tree["sub"], "40755") || !strings.HasPrefix(tree["k"], "100644") || !strings.HasPrefix(tree["mixed"], "100700") {
			t.Errorf("%v", tree)
		}
	})
}

// What a merge may not put together: a program that one side made setuid, with contents of the other's.
func TestMergeGivesNoPrivileges(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		sh := func(script string) func(string) {
			return func(root string) { shell(t, root, script) }
		}
		base, _ := grown(t, s, "", sh(`rm -rf ./*; echo good >tool; echo good >plain; chmod 755 tool plain`))
		ours, _ := grown(t, s, base.ID, sh(`chmod 4755 tool; chmod 700 plain`))
		theirs, _ := grown(t, s, base.ID, sh(`echo evil >tool; echo fine >plain`))
		got, err := s.Merge(t.Context(), MergeRequest{}.of(base, ours, theirs))
		must(t, err)
		if len(got.Conflicts) != 1 || got.Conflicts[0].Path != "/tool" || !slices.Equal(got.Conflicts[0].What, []string{"privileges"}) {
			t.Errorf("%+v", got.Conflicts)
		}
		// Twin: where nobody gives privileges, both changes come together.
		got, err = s.Merge(t.Context(), MergeRequest{Choose: func(string) Side { return Ours }}.of(base, ours, theirs))
		must(t, err)
		if tree := byPath(shownBy(t, s, got.Layer.ID)); !strings.HasPrefix(tree["plain"], "100700") || tree["plain"] == byPath(shownBy(t, s, ours.ID))["plain"] {
			t.Errorf("%v", tree)
		}
	})
}

func TestMergeByLines(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		sh := func(script string) func(string) {
			return func(root string) { shell(t, root, script) }
		}
		base, _ := grown(t, s, "", sh(`rm -rf ./*; seq 9 >f; seq 9 >near; seq 9 >bin; printf '\0' >>bin`))
		ours, _ := grown(t, s, base.ID, sh(`sed -i s/2/two/ f near; sed -i s/2/two/ bin`))
		theirs, _ := grown(t, s, base.ID, sh(`sed -i s/8/eight/ f; sed -i s/3/three/ near; sed -i s/8/eight/ bin`))
		got, err := s.Merge(t.Context(), MergeRequest{Text: true}.of(base, ours, theirs))
		must(t, err)
		if len(got.Conflicts) != 2 || len(got.Resolved) != 1 || got.Resolved[0].Path != "/f" {
			t.Fatalf("%+v", got)
		}
		got, err = s.Merge(t.Context(), MergeRequest{Text: true, Choose: func(string) Side { return Ours }}.of(base, ours, theirs))
		must(t, err)
		g := start(t, s, got.Layer.ID)
		defer g.end(t, s)
		if b, err := os.ReadFile(g.root + "/f"); err != nil || string(b) != "1\ntwo\n3\n4\n5\n6\n7\neight\n9\n" {
			t.Errorf("%q, %v", b, err)
		}
	})
}

// However two texts differ, what is merged without a conflict has each side's lines.
func FuzzMergeLines(f *testing.F) {
	f.Add("a\nb\nc\n", "a\nB\nc\n", "a\nb\nc\nd\n")
	f.Add("", "a", "b")
	f.Add("a\na\na\n", "a\n", "a\na\na\na\n")
	f.Fuzz(func(t *testing.T, base, ours, theirs string) {
		lines := func(s string) []string { return slices.Collect(strings.Lines(s)) }
		if len(base)+len(ours)+len(theirs) > 1<<16 || linePairs(lines(base), lines(base+ours+theirs)) > 1<<16 {
			return // fuzzing gives each input ten seconds, also on a busy machine
		}
		for _, pair := range [][2]string{{ours, base}, {base, ours}, {ours, ours}} {
			got, ok, err := mergeLines(lines(base), lines(pair[0]), lines(pair[1]))
			if err != nil || ok && string(got) != ours {
				t.Fatalf("one side alone: %q %v %v, want %q", got, ok, err, ours)
			}
		}
		_, _, _ = mergeLines(lines(base), lines(ours), lines(theirs))
	})
}

// shell runs a script in a directory.
func shell(t *testing.T, dir, script string) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// Whatever changes in a tree changes its digest, but for times; how it is spread over layers does not.
func TestDigest(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		base, _ := grown(t, s, "", func(root string) { shell(t, root, `rm -rf ./*; echo a >f; echo a >g; mkdir d; ln -s f l`) })
		digest := func(l Layer) string {
			t.Helper()
			d, err := s.Digest(t.Context(), l.ID)
			must(t, err)
			return d.Text
		}
		was := digest(base)
		for script, differs := range map[string]bool{
			"true": false, "touch -d 2001-01-01 f": false, "echo b >f; echo a >f": false,
			"echo b >f": true, "chmod 600 f": true, "chown 7 f": true, "chown 7:7 d": true, "rm g": true, "rmdir d": true,
			"ln -f f g": true, "ln -sfn g l": true, "mv g h": true, "touch d/x": true, "rm f; mkdir f": true, "chmod 700 .": true,
		} {
			l, _ := grown(t, s, base.ID, func(root string) { shell(t, root, script) })
			if now := digest(l); (now != was) != differs {
				t.Errorf("%s: %s, before %s", script, now, was)
			}
		}
	})
}

// What was changed in a workspace is merged as the root is; the folder of the host stays as it is.
func TestMergeOfWorkspaces(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		source := t.TempDir()
		shell(t, source, `echo host >a; echo host >b; echo host >gone; mkdir d; echo host >d/x`)
		request := []WorkspaceRequest{{Source: source, Target: "/workspace"}}
		on := func(layer string, script string) Layer {
			t.Helper()
			id, p := plan(t, s, Request{Layer: layer, Workspaces: request})
			w := p.Workspaces[0]
			lowers := append(slices.Clone(w.Lowers), w.Source)
			root := overlay(t, Plan{Lowers: lowers, Upper: w.Upper, Work: w.Work})
			shell(t, root, script)
			must(t, syscall.Unmount(root, 0))
			l := commit(t, s, id, p)
			must(t, s.Release(t.Context(), id))
			return l
		}
		shown := func(l Layer) map[string]string {
			t.Helper()
			id, p := plan(t, s, Request{Layer: l.ID, Workspaces: request})
			w := p.Workspaces[0]
			root := overlay(t, Plan{Lowers: append(slices.Clone(w.Lowers), w.Source), Upper: w.Upper, Work: w.Work})
			defer func() { must(t, syscall.Unmount(root, 0), s.Release(t.Context(), id)) }()
			return scanned(t, root)
		}
		base := on("", "echo base >c")
		ours, theirs := on(base.ID, "echo ours >a; rm c"), on(base.ID, "echo theirs >b; rm gone; chmod 700 d; echo new >d/y")
		got, err := s.Merge(t.Context(), MergeRequest{}.of(base, ours, theirs))
		must(t, err)
		if len(got.Conflicts) > 0 {
			t.Fatalf("%+v", got.Conflicts)
		}
		tree, o, th := shown(got.Layer), shown(ours), shown(theirs)
		for path, want := range map[string]string{"a": o["a"], "b": th["b"], "d": th["d"], "d/y": th["d/y"], "d/x": o["d/x"], "gone": "", "c": ""} {
			if tree[path] != want {
				t.Errorf("%s is %q, want %q", path, tree[path], want)
			}
		}
		var paths []string
		for _, c := range got.Changes {
			paths = append(paths, c.Op+" "+c.Path)
		}
		slices.Sort(paths)
		if d := cmp.Diff([]string{"added /workspace/d/y", "modified /workspace/b", "modified /workspace/d", "removed /workspace/gone"}, paths); d != "" {
			t.Errorf("changes (-want +got):\n%s", d)
		}
		clash := on(base.ID, "echo other >a")
		got, err = s.Merge(t.Context(), MergeRequest{}.of(base, ours, clash))
		must(t, err)
		if len(got.Conflicts) != 1 || got.Conflicts[0].Path != "/workspace/a" {
			t.Errorf("%+v", got.Conflicts)
		}
		if b, err := os.ReadFile(source + "/a"); err != nil || string(b) != "host\n" {
			t.Errorf("the folder has %q, %v", b, err)
		}
	})
}
