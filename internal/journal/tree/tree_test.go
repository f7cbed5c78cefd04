package tree

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/errs"
)

const origin = "casemate.test/log"

// keys returns a signer and its verifier.
func keys(t testing.TB) (note.Signer, note.Verifier) {
	t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, origin)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

// quiet is a configuration in which nothing is published but by Close and by the test.
func quiet(t testing.TB, dir string) Config {
	s, v := keys(t)
	return Config{Dir: dir, Signer: s, Verifier: v, SyncEvery: time.Hour, PublishEvery: time.Hour}
}

func open(t testing.TB, cfg Config) *Tree {
	t.Helper()
	tr, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tr.Close() })
	return tr
}

func data(i int) []byte { return fmt.Appendf(nil, "entry %d", i) }

func grow(t *Tree, n int) {
	for i := int(t.Size()); n > 0; i, n = i+1, n-1 {
		t.Append("s", uint64(i+1), data(i))
	}
}

// abandon leaves a tree as a killed process does: what was not written is lost.
func abandon(t *Tree) {
	close(t.stopped)
	t.loop.Wait()
	t.closing.Do(func() {})
	_ = t.leaves.Close()
}

// reference is the root of n entries by another way.
func reference(t testing.TB, n int) tlog.Hash {
	t.Helper()
	var hashes memory
	for i := range n {
		more, err := tlog.StoredHashes(int64(i), data(i), hashes)
		if err != nil {
			t.Fatal(err)
		}
		hashes = append(hashes, more...)
	}
	root, err := tlog.TreeHash(int64(n), hashes)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

type memory []tlog.Hash

func (m memory) ReadHashes(at []int64) ([]tlog.Hash, error) {
	out := make([]tlog.Hash, len(at))
	for i, n := range at {
		out[i] = m[n]
	}
	return out, nil
}

func head(t testing.TB, tr *Tree) Head {
	t.Helper()
	text, err := tr.Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	h, err := ParseCheckpoint(text, tr.cfg.Verifier)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestRootsAreThoseOfTheReference compares sizes around the borders of tiles and of their levels.
func TestRootsAreThoseOfTheReference(t *testing.T) {
	tr := open(t, quiet(t, t.TempDir()))
	for _, n := range []int{0, 1, 2, 3, 7, 8, 255, 256, 257, 511, 512, 513, 1000} {
		grow(tr, n-int(tr.Size()))
		if h := head(t, tr); h.Root != reference(t, n) || h.Size != int64(n) || h.Origin != origin {
			t.Errorf("%d leaves: %+v", n, h)
		}
	}
}

func TestProofsHold(t *testing.T) {
	tr := open(t, quiet(t, t.TempDir()))
	heads := map[int64]tlog.Hash{}
	for _, n := range []int64{1, 5, 256, 300, 520, 70_000} {
		grow(tr, int(n-tr.Size()))
		heads[n] = head(t, tr).Root
		if n == 300 {
			if err := tr.publish(); err != nil { // some tiles are in files, others in memory
				t.Fatal(err)
			}
		}
	}
	v, err := tr.View()
	if err != nil {
		t.Fatal(err)
	}
	grow(tr, 400) // the view stays what it was
	for _, i := range []int64{0, 1, 255, 256, 299, 300, 65_535, 65_536, 69_999} {
		p, err := v.Prove(i)
		if err != nil {
			t.Fatal(err)
		}
		if err := tlog.CheckRecord(p, v.Head.Size, v.Head.Root, i, tlog.RecordHash(data(int(i)))); err != nil {
			t.Errorf("leaf %d: %v", i, err)
		}
	}
	for n, root := range heads {
		p, err := v.ProvePrefix(n)
		if err != nil {
			t.Fatal(err)
		}
		if err := tlog.CheckTree(p, v.Head.Size, v.Head.Root, n, root); err != nil {
			t.Errorf("prefix of %d: %v", n, err)
		}
	}
	if _, err := v.Prove(70_000); err == nil {
		t.Error("a leaf beyond the checkpoint was proved")
	}
}

// TestALogGoesOnAfterAKill abandons a log at many sizes, published or not, and takes it up again.
func TestALogGoesOnAfterAKill(t *testing.T) {
	cfg := quiet(t, t.TempDir())
	size := 0
	for round, more := range []int{1, 2, 250, 3, 0, 1, 255, 256, 300, 65_000, 5} {
		tr := open(t, cfg)
		if tr.Size() != int64(size) || tr.Opened().Rebuilt {
			t.Fatalf("round %d: opened with %d leaves (%+v), want %d", round, tr.Size(), tr.Opened(), size)
		}
		grow(tr, more)
		size += more
		want := head(t, tr)
		if round%2 == 0 {
			if err := tr.publish(); err != nil {
				t.Fatal(err)
			}
		}
		grow(tr, 7) // in no checkpoint: nobody was told of them
		abandon(tr)
		again := open(t, cfg)
		if got := head(t, again); got != want {
			t.Fatalf("round %d: %+v after the kill, %+v before", round, got, want)
		}
		abandon(again)
	}
	tr := open(t, cfg)
	if got := head(t, tr).Root; got != reference(t, size) {
		t.Error("the root is not that of all entries")
	}
}

func TestTornFilesAreRecognised(t *testing.T) {
	dir := t.TempDir()
	cfg := quiet(t, dir)
	tr := open(t, cfg)
	grow(tr, 700)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	want := reference(t, 700)
	leaves := filepath.Join(dir, leavesName)
	for name, harm := range map[string]func() error{
		"half a record":     func() error { return appendTo(leaves, make([]byte, 40)) },
		"a record of zeros": func() error { return appendTo(leaves, make([]byte, recordSize)) },
		"a tile cut short":  func() error { return os.Truncate(tr.tilePath(0, 2, 700%256), 32*3) },
		"a tile changed":    func() error { return os.WriteFile(tr.tilePath(1, 0, 2), make([]byte, 64), 0o600) },
		"no tiles":          func() error { return os.RemoveAll(filepath.Join(dir, "tile")) },
	} {
		if err := harm(); err != nil {
			t.Fatal(err)
		}
		again := open(t, cfg)
		if h := head(t, again); h.Size != 700 || h.Root != want {
			t.Errorf("%s: %+v", name, h)
		}
		v, err := again.View()
		if err != nil {
			t.Fatal(err)
		}
		for i := int64(0); i < 700; i += 99 {
			p, err := v.Prove(i)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if err := tlog.CheckRecord(p, 700, want, i, tlog.RecordHash(data(int(i)))); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func appendTo(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// TestAChangedLogIsNotTakenUp is somebody with the disk and without the key.
func TestAChangedLogIsNotTakenUp(t *testing.T) {
	for name, harm := range map[string]func(dir string) error{
		"tail cut": func(dir string) error { return os.Truncate(filepath.Join(dir, leavesName), 290*recordSize) },
		"leaf replaced": func(dir string) error {
			r := Record{Hash: tlog.RecordHash([]byte("another")), Stream: "s", Seq: 11}
			return writeAt(filepath.Join(dir, leavesName), r.append(nil), 10*recordSize)
		},
		"leaves swapped": func(dir string) error {
			path := filepath.Join(dir, leavesName)
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			one, other := b[3*recordSize:4*recordSize], b[200*recordSize:201*recordSize]
			return errors.Join(writeAt(path, other, 3*recordSize), writeAt(path, one, 200*recordSize))
		},
		"checkpoint rewritten": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, checkpointName), []byte(Text(origin, 200, tlog.Hash{})+"\n"), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := quiet(t, t.TempDir())
			tr := open(t, cfg)
			grow(tr, 300)
			was := head(t, tr)
			if err := tr.Close(); err != nil {
				t.Fatal(err)
			}
			if err := harm(cfg.Dir); err != nil {
				t.Fatal(err)
			}
			// Tiles that were left alone must not hide it.
			if err := os.RemoveAll(filepath.Join(cfg.Dir, "tile")); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(cfg); !errs.Is(err, errs.FailedPrecondition) {
				t.Errorf("open: %v", err)
			}
			// The twin: it is the signed checkpoint that shows it.
			if err := os.Remove(filepath.Join(cfg.Dir, checkpointName)); err != nil {
				t.Fatal(err)
			}
			if now := head(t, open(t, cfg)); (now == was) != (name == "checkpoint rewritten") {
				t.Errorf("without the checkpoint: %+v, before %+v", now, was)
			}
		})
	}
}

func writeAt(path string, b []byte, at int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, at)
	return errors.Join(err, f.Close())
}

func TestDamageIsNeverProved(t *testing.T) {
	cfg := quiet(t, t.TempDir())
	tr := open(t, cfg)
	grow(tr, 600)
	if err := tr.publish(); err != nil {
		t.Fatal(err)
	}
	path := tr.tilePath(0, 1, tileWidth)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	v, err := tr.View()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Prove(256); err == nil {
		t.Error("a proof was made of a changed tile")
	}
}

func TestACheckpointOfAnotherKeyIsToldOf(t *testing.T) {
	cfg := quiet(t, t.TempDir())
	tr := open(t, cfg)
	grow(tr, 5)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.Signer, cfg.Verifier = keys(t)
	again := open(t, cfg)
	if !again.Opened().OtherKey || again.Size() != 5 {
		t.Errorf("opened: %+v", again.Opened())
	}
}

func TestRecordsAreRead(t *testing.T) {
	tr := open(t, quiet(t, t.TempDir()))
	grow(tr, 20)
	v, err := tr.View()
	if err != nil {
		t.Fatal(err)
	}
	var seen []uint64
	if err := v.Records(15, func(at int64, r Record) bool {
		if r.Stream != "s" || r.Hash != tlog.RecordHash(data(int(at))) {
			t.Errorf("record %d: %+v", at, r)
		}
		seen = append(seen, r.Seq)
		return r.Seq < 18
	}); err != nil || len(seen) != 3 || seen[0] != 16 {
		t.Errorf("seen %v, %v", seen, err)
	}
}

func TestStreamsThatCantBeRecorded(t *testing.T) {
	for name, want := range map[string]bool{"": false, "@server": true, "abcdefghijklmnopqrst": true, "a\x00b": false, string(make([]byte, 29)): false} {
		if ValidStream(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
}

func BenchmarkAppendAndSign(b *testing.B) {
	tr := open(b, quiet(b, b.TempDir()))
	line := make([]byte, 400)
	for b.Loop() {
		binary.LittleEndian.PutUint64(line, uint64(tr.size))
		tr.Append("abcdefghijklmnopqrst", uint64(tr.size)+1, line)
		tr.Append("abcdefghijklmnopqrst", uint64(tr.size)+1, line)
		if _, err := tr.Checkpoint(); err != nil {
			b.Fatal(err)
		}
	}
}
