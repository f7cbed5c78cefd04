package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv/scramble"
)

var mtime = regexp.MustCompile(` \d+\.\d{9}$`)

// scanned tells everything about a tree that a comparison looks at, by path.
func scanned(t *testing.T, dir string) map[string]string {
	t.Helper()
	return byPath(scan(t, dir))
}

// byPath takes a scan apart. Hard links and times are no difference.
func byPath(lines []string) map[string]string {
	all := map[string]string{}
	for _, line := range lines {
		line, _, _ = strings.Cut(line, ` = "`)
		path, rest, _ := strings.Cut(line[1:], `" `)
		all[path] = mtime.ReplaceAllString(rest, "")
	}
	return all
}

// oracle compares two scans: what Compare must find.
func oracle(from, to map[string]string) []string {
	isDir := func(all map[string]string, path string) bool { return strings.HasPrefix(all[path], "4") }
	var out []string
	for path := range from {
		if _, there := to[path]; there {
			continue
		}
		// A directory that went, or was replaced, is one change.
		if above := filepath.Dir(path); above == "." || isDir(from, above) && isDir(to, above) {
			out = append(out, "removed /"+path)
		}
	}
	for path, is := range to {
		was, there := from[path]
		switch {
		case !there:
			out = append(out, "added /"+path)
		case is != was:
			out = append(out, "modified /"+path)
		}
	}
	slices.Sort(out)
	return out
}

func found(changes []Change) []string {
	var out []string
	for _, c := range changes {
		quoted := fmt.Sprintf("%q", c.Path)
		out = append(out, c.Op+" "+quoted[1:len(quoted)-1])
	}
	slices.Sort(out)
	return out
}

// Random programs in a line of sandboxes, each started from the one before: whichever two commits are
// compared, or a commit and a sandbox, the answer is what a full scan of both finds.
func TestCompareFindsWhatAScanFinds(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		type point struct {
			state State
			tree  map[string]string
		}
		for seed := range uint64(3) {
			var points []point
			g := start(t, s, "")
			for n := range 6 {
				scramble.New(g.root, seed, uint64(100+n)).Do(40)
				must(t, syscall.Unmount(g.root, 0))
				g.root = overlay(t, g.plan)
				tree := scanned(t, g.root)
				changes, err := s.Changes(t.Context(), g.id, g.plan, "")
				must(t, err)
				var before map[string]string
				if n > 0 {
					before = points[len(points)-1].tree
				} else {
					before = scanned(t, g.plan.Lowers[0])
				}
				if d := cmp.Diff(oracle(before, tree), found(changes)); d != "" {
					t.Fatalf("seed %d, changes of generation %d (-want +got):\n%s", seed, n, d)
				}
				l := commit(t, s, g.id, g.plan)
				points = append(points, point{State{Layer: l.ID}, tree})
				if n == 5 {
					points = append(points, point{State{ID: g.id, Plan: g.plan}, tree})
					break
				}
				g.end(t, s)
				g = start(t, s, l.ID)
			}
			for i, from := range points {
				for j, to := range points {
					changes, err := s.Compare(t.Context(), from.state, to.state)
					must(t, err)
					if d := cmp.Diff(oracle(from.tree, to.tree), found(changes)); d != "" {
						t.Fatalf("seed %d, from %d to %d (-want +got):\n%s", seed, i, j, d)
					}
				}
			}
			g.end(t, s)
		}
	})
}

// ATTACK: a sandbox leaves links to the host, FIFOs and a directory 2,000 deep, and is committed,
// compared, merged and started from. Nobody on the host waits, follows a link or falls over.
func TestHostileTreesAreKept(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		id, p := plan(t, s, Request{})
		secret := filepath.Join(t.TempDir(), "secret")
		text(t, secret, "the host's")
		for i := range maxStack + 2 {
			root := overlay(t, p)
			must(t,
				os.Symlink(secret, fmt.Sprintf("%s/link%d", root, i)), os.Symlink("/", fmt.Sprintf("%s/up%d", root, i)),
				os.Symlink("/proc/self/fd/3/../../..", fmt.Sprintf("%s/magic%d", root, i)),
				syscall.Mkfifo(fmt.Sprintf("%s/fifo%d", root, i), 0o666))
			if i > 0 { // a link in the place of a directory that lies below, and the other way round
				must(t, os.RemoveAll(root+"/swap"), os.Symlink(filepath.Dir(secret), root+"/swap"))
			}
			if i%2 == 0 {
				must(t, os.RemoveAll(root+"/swap"), os.Mkdir(root+"/swap", 0o755))
				text(t, root+"/swap/secret", "the sandbox's")
			}
			if i == 0 {
				deepen(t, root, 2000)
			}
			must(t, syscall.Unmount(root, 0))
			l := commit(t, s, id, p)
			next, q := plan(t, s, Request{Layer: l.ID})
			if _, err := s.Compare(t.Context(), State{Layer: l.ID}, State{ID: next, Plan: q}); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Changes(t.Context(), id, p, ""); err != nil {
				t.Fatal(err)
			}
			must(t, s.Release(t.Context(), id))
			id, p = next, q
		}
		if b, err := os.ReadFile(secret); err != nil || string(b) != "the host's" {
			t.Errorf("the host's file is %q, %v", b, err)
		}
		must(t, s.Release(t.Context(), id))
		if _, err := s.Collect(t.Context(), nil, false); err != nil {
			t.Error(err)
		}
		// Twin: a call that follows links gets out of a committed tree.
		dir := t.TempDir()
		must(t, os.Symlink(filepath.Dir(secret), dir+"/swap"))
		if b, err := os.ReadFile(dir + "/swap/secret"); err != nil || string(b) != "the host's" {
			t.Errorf("twin: %q, %v", b, err)
		}
		root, err := fd.OpenRoot(dir)
		must(t, err)
		defer root.Close()
		if _, err := fd.OpenFile(root, "swap/secret"); !fd.Missing(err) {
			t.Errorf("beneath its root: %v", err)
		}
	})
}
