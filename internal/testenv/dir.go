package testenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// tag marks everything that this test binary makes on the host, so that the leak checks tell it from
// what other test binaries make at the same time.
var tag = sync.OnceValue(func() string {
	var b [3]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand.Read
	t := "t" + hex.EncodeToString(b[:])
	watch(t)
	// Programs started with this environment are found by it even after their parent is gone.
	_ = os.Setenv(tagVariable, t)
	return t
})

const tagVariable = "CASEMATE_TEST_TAG"

// MakeRunDir makes a directory with a path of at most 30 bytes, since a Unix socket's path may have 107
// (unix(7)) and t.TempDir spends most of them on the test's name. A guest in its own id range reaches what is in it. Its
// maker removes it; where the tests are killed, it goes all the same.
func MakeRunDir() (string, error) {
	dir, err := os.MkdirTemp("/tmp", "cm-"+tag()+"-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// RunDir is MakeRunDir for a directory that goes when the test ends.
func RunDir(t testing.TB) string {
	t.Helper()
	dir, err := MakeRunDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove run directory: %v", err)
		}
	})
	return dir
}

// ServerID returns a server id that no other test uses. What carries it, such as control groups, is
// found by NoLeaks.
func ServerID(t testing.TB) string {
	t.Helper()
	var b [3]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand.Read
	return tag() + hex.EncodeToString(b[:])
}

// busy is what anything may take beside other tests on few processors. It leaves room below the limit of a whole
// test program.
const busy = 2 * time.Minute

// Eventually waits until ok returns true and fails the test where it does not within limit, which is meant for an
// idle machine: it waits for busy at least. It asks again after 1 ms at first, then less and less often.
func Eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	limit = max(limit, busy)
	if !poll(limit, ok) {
		t.Fatalf("after %v still not: %s", limit, what)
	}
}

func poll(limit time.Duration, ok func() bool) bool {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if ok() {
			return true
		}
		select {
		case <-ctx.Done():
			return ok()
		case <-time.After(wait):
		}
	}
}

// Receive returns what comes from ch, or the zero value once it is closed, and fails the test where neither happens while
// anything may take. It must be called by the test's own goroutine. A wait without a bound would cost the time limit of all
// tests of a package, and say nothing.
func Receive[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	late := time.NewTimer(busy)
	defer late.Stop()
	select {
	case v := <-ch:
		return v
	case <-late.C:
		t.Fatalf("after %v still not: %s", busy, what)
		panic("unreachable")
	}
}

// Unhurried is a time limit for what a slow machine may take long for: a server's own, for who names none, is short.
const Unhurried = 10 * time.Minute

// overdue is far above what any test with a sandbox takes, and leaves room for others of its package.
const overdue = 5 * time.Minute

// Overdue fails a test that is not over after five minutes, and calls unblock, which is to make its waits end, as by
// taking down the sandbox that it waits for.
func Overdue(t testing.TB, unblock func()) {
	late := time.AfterFunc(overdue, func() {
		t.Errorf("after %v the test still waits: what it waits for is ended", overdue)
		unblock()
	})
	t.Cleanup(func() { late.Stop() })
}

// ours reports whether a host path or name was made by this test binary.
func ours(s string, dirs []string) bool {
	if strings.Contains(s, tag()) {
		return true
	}
	for _, d := range dirs {
		if strings.Contains(s, d) {
			return true
		}
	}
	return false
}
