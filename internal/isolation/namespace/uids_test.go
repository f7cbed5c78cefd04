package namespace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

func openPool(t *testing.T, dir, server string) *idPool {
	t.Helper()
	p, err := openIDPool(dir, server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

func acquire(t *testing.T, p *idPool) uint32 {
	t.Helper()
	first, err := p.acquire()
	if err != nil {
		t.Fatal(err)
	}
	return first
}

// Servers that share a directory never hand out the same range, and a server gets its block back.
func TestIDPoolsShareAHost(t *testing.T) {
	dir := t.TempDir()
	a, b := openPool(t, dir, "a"), openPool(t, dir, "b")
	seen := map[uint32]string{}
	for range 2 * blockSize {
		for _, p := range []*idPool{a, b} {
			first := acquire(t, p)
			if first < firstID || first > lastID || first%rangeSize != 0 {
				t.Fatalf("range from %#x on", first)
			}
			if owner := seen[first]; owner != "" {
				t.Fatalf("range from %#x on was given to %s and %s", first, owner, p.server)
			}
			seen[first] = p.server
		}
	}
	a.close()
	again := openPool(t, dir, "a")
	if first := acquire(t, again); seen[first] != "a" {
		t.Errorf("a restarted server got a range of %q", seen[first])
	}
	if _, err := a.acquire(); !errs.Is(err, errs.Unavailable) {
		t.Errorf("acquire from a closed pool: %v", err)
	}
}

// A range rests as long as possible before it is used again.
func TestIDPoolHandsOutTheOldest(t *testing.T) {
	p := openPool(t, t.TempDir(), "a")
	first := acquire(t, p)
	p.release(first)
	p.release(first) // once is enough
	for range blockSize - 1 {
		if again := acquire(t, p); again == first {
			t.Fatal("a range came again before the others")
		}
	}
	if again := acquire(t, p); again != first {
		t.Errorf("the released range did not come again: %#x", again)
	}
	p.take(first + 64<<16*blockSize) // of no block of ours
	p.release(first + 64<<16*blockSize)
	if len(p.free) != 0 {
		t.Errorf("a foreign range is free: %v", p.free)
	}
}

func TestIDPoolExhausted(t *testing.T) {
	dir := t.TempDir()
	p := openPool(t, dir, "a")
	// Others may run sandboxes on this host, so how many there are is not known; each only once.
	seen := map[uint32]bool{}
	for {
		first, err := p.acquire()
		if err != nil {
			if !errs.Is(err, errs.ResourceExhausted) {
				t.Errorf("acquire: %v", err)
			}
			break
		}
		if seen[first] {
			t.Fatalf("range from %#x on was given twice", first)
		}
		seen[first] = true
	}
	if len(seen) < blockCount*blockSize/2 {
		t.Errorf("only %d ranges", len(seen))
	}
	for block := range blockCount {
		if owner, err := os.ReadFile(p.path(block)); err == nil && p.owned[uint32(firstID+block*blockSize*rangeSize)] && string(owner) != "a\n" {
			t.Errorf("block %d belongs to %q", block, owner)
		}
	}
}

func TestOverlapsSubIDs(t *testing.T) {
	for text, want := range map[string]bool{
		"":                                 false,
		"user:100000:65536\n":              false,
		"user:1879048192:65536\n":          true,
		"user:1879048191:1\n":              false,
		"user:1879048191:2\n":              true,
		"user:1879113727:1":                true,
		"user:1879113728:65536\n":          false,
		"broken\nuser:x:y\nu:1879048200:5": true,
		"user:4294967295:1\n":              false,
	} {
		if got := overlapsSubIDs([]byte(text), firstID, rangeSize); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestRealUID(t *testing.T) {
	for text, want := range map[string]uint32{
		"Name:\tx\nUid:\t5\t6\t7\t8\n": 5,
		"Name:\tUid: 9\nUid:\t1":       1,
	} {
		if got, ok := realUID([]byte(text)); !ok || got != want {
			t.Errorf("%q: %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "Name:\tx\n", "\nUid:\t", "\nUid:\t-1"} {
		if got, ok := realUID([]byte(text)); ok {
			t.Errorf("%q: %d", text, got)
		}
	}
}

func TestLookupUser(t *testing.T) {
	top, bottom := t.TempDir(), t.TempDir()
	writeFile(t, filepath.Join(bottom, "etc/passwd"), "root:x:0:0::/root:/bin/sh\nuser:x:1000:1001::/:/bin/sh\nbroken\nbig:x:99999:1::/:\n")
	if uid, gid, err := lookupUser([]string{top, bottom}, "user"); uid != 1000 || gid != 1001 || err != nil {
		t.Errorf("user: %d, %d, %v", uid, gid, err)
	}
	for _, name := range []string{"nobody", "broken", "big"} {
		if _, _, err := lookupUser([]string{top, bottom}, name); !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if uid, _, err := lookupUser(nil, "root"); uid != 0 || err != nil {
		t.Errorf("root: %d, %v", uid, err)
	}
	// A template's link does not lead to the host's file.
	if err := os.Symlink("/etc", filepath.Join(top, "etc")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := lookupUser([]string{top, bottom}, "daemon"); err == nil || !strings.Contains(err.Error(), "symbolic links") {
		t.Errorf("through a link: %v", err)
	}
}
