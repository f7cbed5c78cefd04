package testenv

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/errs"
)

// Feature is one thing that a host may lack.
type Feature struct {
	Name string
	// Major and Minor are the first kernel that has it; on that one or a newer one its absence is a
	// failure, not a reason to skip.
	Major, Minor int
	// Probe returns nil where the feature works, an error of kind errs.Unsupported where the kernel
	// says that it has none, and any other error where the answer could not be had.
	Probe func() error
}

// Root fails the test unless it runs as root, and prints what host it runs on.
func Root(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Fatalf("this test needs root and runs as uid %d: sudo -E go test …", uid)
	}
	printHost()
}

// printHost prints what host this is, once per test binary, so that a log begins with it.
var printHost = sync.OnceFunc(func() { fmt.Fprintln(os.Stderr, HostInfo()) })

// Need ends the test unless the host has every feature: it fails where the feature should be there,
// and skips where the kernel is too old for it and REQUIRE does not ask for it.
func Need(t testing.TB, features ...Feature) {
	t.Helper()
	for _, f := range features {
		switch skip, err := judge(f, f.Probe(), kernelRelease(), os.Getenv("REQUIRE")); {
		case err != nil:
			t.Fatal(err)
		case skip != "":
			t.Skip(skip)
		}
	}
}

// judge decides what a probe's answer means for a test: go on (both zero), skip, or fail.
func judge(f Feature, answer error, release, require string) (skip string, fail error) {
	if answer == nil {
		return "", nil
	}
	if !errs.Is(answer, errs.Unsupported) {
		return "", fmt.Errorf("probing %s gave no answer: %w", f.Name, answer)
	}
	if required(require, f.Name) {
		return "", fmt.Errorf("REQUIRE names %s and the host lacks it: %w", f.Name, answer)
	}
	major, minor, err := parseRelease(release)
	if err != nil {
		return "", errors.Join(err, answer)
	}
	if major > f.Major || major == f.Major && minor >= f.Minor {
		return "", fmt.Errorf("%s should work from Linux %d.%d on, and this is %s: %w", f.Name, f.Major, f.Minor, release, answer)
	}
	return fmt.Sprintf("%s needs Linux %d.%d, this is %s", f.Name, f.Major, f.Minor, release), nil
}

func required(list, name string) bool {
	names := strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
	return slices.Contains(names, name) || slices.Contains(names, "all")
}

func parseRelease(s string) (major, minor int, err error) {
	if _, err := fmt.Sscanf(s, "%d.%d", &major, &minor); err != nil {
		return 0, 0, fmt.Errorf("kernel release %q: %w", s, err)
	}
	return major, minor, nil
}
