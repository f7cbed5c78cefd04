package rootfs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/scramble"
)

// still is for commits of layers to which nobody writes.
func still() error { return nil }

func commit(t testing.TB, s *Store, id string, p Plan) Layer {
	t.Helper()
	l, err := s.Commit(t.Context(), id, p, still, still)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// scan tells everything about a tree but times of directories, which a mount of an overlay may change,
// one line a file.
func scan(t testing.TB, dir string) []string {
	t.Helper()
	root, err := fd.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var lines []string
	links := map[[2]uint64]string{}
	err = fd.Walk(t.Context(), root, func(e fd.Entry) error {
		i := e.Info
		line := fmt.Sprintf("%q %o %d:%d", e.Path, i.Mode, i.UID, i.GID)
		names, err := fd.Xattrs(e.Dir, e.Name)
		if err != nil {
			return err
		}
		slices.Sort(names)
		for _, x := range names {
			v, _, err := fd.XattrBytes(e.Dir, e.Name, x)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%x", x, v)
		}
		switch {
		case i.IsSymlink():
			target, err := fd.Readlink(e.Dir, e.Name)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", target)
		case i.IsRegular():
			f, err := fd.OpenFile(e.Dir, e.Name)
			if err != nil {
				return err
			}
			defer f.Close()
			h := sha256.New()
			if _, err := io.Copy(h, f); err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %s %d.%09d", i.Size, hex.EncodeToString(h.Sum(nil)[:8]), i.Modified.Sec, i.Modified.Nsec)
		}
		if !i.IsDir() && i.Links > 1 {
			key := [2]uint64{i.Dev, i.Ino}
			if first, ok := links[key]; ok {
				line += fmt.Sprintf(" = %q", first)
			} else {
				links[key] = e.Path
			}
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// sameTree compares two scans.
func sameTree(t testing.TB, what string, got, want []string) {
	t.Helper()
	var diff []string
	for _, l := range want {
		if !slices.Contains(got, l) {
			diff = append(diff, "- "+l)
		}
	}
	for _, l := range got {
		if !slices.Contains(want, l) {
			diff = append(diff, "+ "+l)
		}
	}
	if len(diff) > 0 {
		t.Fatalf("%s differs:\n%s", what, strings.Join(diff[:min(len(diff), 20)], "\n"))
	}
}

// generation is one sandbox in a line of forks.
type generation struct {
	id   string
	plan Plan
	root string
}

func start(t *testing.T, s *Store, layer string) generation {
	t.Helper()
	id, p := plan(t, s, Request{Layer: layer})
	if layer == "" {
		// A template in which the names mean something already.
		p.Lowers = []string{t.TempDir()}
		scramble.New(p.Lowers[0], 1, 1).Do(200)
	}
	return generation{id: id, plan: p, root: overlay(t, p)}
}

func (g generation) end(t *testing.T, s *Store) {
	t.Helper()
	must(t, syscall.Unmount(g.root, 0), s.Release(t.Context(), g.id))
}

// Random programs, each in a sandbox that starts where the one before was committed: every commit shows
// exactly the tree that it was made of, however many lie below it.
func TestCommitKeepsTheTree(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		for seed := range uint64(3) {
			g := start(t, s, "")
			for n := range 3 * maxStack {
				scramble.New(g.root, seed, uint64(n)).Do(60)
				l := commit(t, s, g.id, g.plan)
				// Mounted anew, since overlayfs shows two names of a file that was copied up under its eyes as
				// two files, though one lies in the layer.
				must(t, syscall.Unmount(g.root, 0))
				g.root = overlay(t, g.plan)
				want := scan(t, g.root)
				next := start(t, s, l.ID)
				if depth := len(next.plan.Committed); depth > maxStack {
					t.Fatalf("%d committed layers lie below generation %d", depth, n)
				}
				sameTree(t, fmt.Sprintf("seed %d, generation %d", seed, n), scan(t, next.root), want)
				g.end(t, s)
				g = next
			}
			g.end(t, s)
		}
		freed, err := s.Collect(t.Context(), nil, false)
		if err != nil || len(freed) == 0 {
			t.Fatalf("collect: %v, %v", freed, err)
		}
		left, err := os.ReadDir(s.area("commits"))
		if err != nil || len(left) != 0 {
			t.Errorf("left of the commits: %v, %v", left, err)
		}
	})
}

// A sandbox that goes on while its commit is still being written finds its way into none of it.
func TestCommitHoldsWhatWasThereWhenHeld(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		id, p := plan(t, s, Request{})
		var mu sync.Mutex // held while the sandbox is
		count := 0
		stop, stopped := make(chan struct{}), make(chan struct{})
		var failed error
		go func() {
			defer close(stopped)
			for failed == nil {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				count++
				text := fmt.Sprintf("%08d", count)
				// In place, and a file that is new: data and names alike.
				failed = errors.Join(overwrite(p.Upper+"/a", text), overwrite(p.Upper+"/b", text),
					os.WriteFile(p.Upper+"/n"+text, nil, 0o644), ignoreMissing(os.Remove(p.Upper+"/n"+fmt.Sprintf("%08d", count-1))))
				mu.Unlock()
			}
		}()
		for range 20 {
			var at string
			l, err := s.Commit(t.Context(), id, p, func() error { mu.Lock(); at = fmt.Sprintf("%08d", count); return nil },
				func() error { mu.Unlock(); return nil })
			must(t, err)
			dir := s.keptPath(l.ID) + "/upper/"
			for _, name := range []string{"a", "b"} {
				if b, err := os.ReadFile(dir + name); at != "00000000" && (err != nil || string(b) != at) {
					t.Fatalf("%s is %q, %v; it was held at %s", name, b, err, at)
				}
			}
			names, err := filepath.Glob(dir + "n*")
			if at != "00000000" && (err != nil || len(names) != 1 || filepath.Base(names[0]) != "n"+at) {
				t.Fatalf("names %v, %v; it was held at %s", names, err, at)
			}
		}
		close(stop)
		testenv.Receive(t, "the writer stops", stopped)
		must(t, failed)
	})
}

// overwrite writes a file in place.
func overwrite(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(text), 0)
	return errors.Join(err, f.Close())
}

// What a kill leaves at each step of a commit and of a removal is the old state or the new one.
func TestRecoverKept(t *testing.T) {
	testenv.Root(t)
	for _, m := range mechanisms(t) {
		t.Run(m, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, Config{DataDir: dir, Mechanism: m})
			box, p := plan(t, s, Request{})
			text(t, p.Upper+"/f", "kept")
			whole, half := commit(t, s, box, p), commit(t, s, box, p)
			removed := commit(t, s, box, p)
			must(t, os.Remove(s.keptNote(half.ID)), // killed before the note
				s.disk.dropKept(s.keptPath(removed.ID)),                                  // killed before its removal
				os.WriteFile(filepath.Join(s.area("commits"), "x.json.new"), nil, 0o600), // killed while writing
				os.Mkdir(filepath.Join(s.area("snapshots"), "merge"), 0o700))
			must(t, s.Close())
			s = open(t, Config{DataDir: dir, Mechanism: m})
			for id, there := range map[string]bool{whole.ID: true, half.ID: false, removed.ID: false} {
				if _, err := s.Layer(id); errs.Is(err, errs.NotFound) == there {
					t.Errorf("layer %s: %v", id, err)
				}
			}
			for _, area := range []string{"commits", "snapshots"} {
				entries, err := os.ReadDir(s.area(area))
				if want := map[string]int{"commits": 2}[area]; err != nil || len(entries) != want {
					t.Errorf("%s: %v, %v", area, entries, err)
				}
			}
			_, p = plan(t, s, Request{Layer: whole.ID})
			if b, err := os.ReadFile(p.Lowers[0] + "/f"); err != nil || string(b) != "kept" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
}

// A layer stays while a commit names it, lies below one that does, or lies below a sandbox.
func TestCollectKeepsWhatIsNeeded(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{})
		first := commit(t, s, box, p)
		box, p = plan(t, s, Request{Layer: first.ID})
		second := commit(t, s, box, p)
		alone := commit(t, s, box, p)
		must(t, s.Release(t.Context(), box))
		user, _ := plan(t, s, Request{Layer: alone.ID})
		ids := func(all []Freed) (ids []string) {
			for _, f := range all {
				ids = append(ids, f.Layer)
			}
			return ids
		}
		collect := func(want []string, keep ...string) {
			t.Helper()
			kept := map[string]bool{}
			for _, k := range keep {
				kept[k] = true
			}
			for _, dry := range []bool{true, false} {
				freed, err := s.Collect(t.Context(), kept, dry)
				if got := ids(freed); err != nil || !slices.Equal(got, want) {
					t.Errorf("freed %v, %v; want %v", got, err, want)
				}
			}
		}
		collect(nil, second.ID)
		must(t, s.Release(t.Context(), user))
		collect([]string{alone.ID}, second.ID)
		collect(slices.Sorted(slices.Values([]string{first.ID, second.ID})))
	})
}
