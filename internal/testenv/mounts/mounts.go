// Package mounts runs the tests of a package in a mount namespace of its own.
//
// What belongs here: that, for packages whose tests mount something. What does not: looking for mounts that a test
// left, which package testenv does. Beside it, since packages that mounting itself uses are tested with testenv.
package mounts

import (
	"fmt"
	"os"
	"testing"

	"casemate.dev/internal/linux/mount"
)

// Main is m.Run in a mount namespace of the test program's own, and returns its exit code. As root the program is
// started again for it, so that it must come first in TestMain. What tests mount among the host's mounts is copied by
// every namespace that another test program makes in that moment, and stays busy until that program ends.
func Main(m *testing.M) int {
	if code := Enter(); code != 0 {
		return code
	}
	return m.Run()
}

// Enter is what Main does before it runs the tests. It returns 1 where it failed.
func Enter() int {
	if os.Geteuid() != 0 {
		return 0 // the tests that mount say that they need root
	}
	if err := mount.EnterPrivate(); err != nil {
		fmt.Fprintln(os.Stderr, "enter a private mount namespace:", err)
		return 1
	}
	return 0
}
