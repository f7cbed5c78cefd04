// Command reruns judges a test run in which failed tests were run once more: it reads the events of test2json that
// gotestsum wrote to a file, names each test that failed and then passed, and exits with 1 where the second run
// can't excuse the first.
//
// What belongs here: what a rerun must never hide. What does not: running tests, which test/gotest.sh does.
//
// A test that fails beside many others on a machine of two processors and passes alone is unsteady: somebody has
// to find out why, and others may land meanwhile. A data race, a test program that ended before its tests, and a
// failure of a package outside of its tests say that something is wrong wherever they show, and other tests of
// that package may not have run at all.
package main

import (
	"fmt"
	"io"
	"os"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: reruns EVENTS")
		os.Exit(2)
	}
	ok, err := run(os.Args[1], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "reruns:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run judges a file of events and reports whether the reruns count.
func run(path string, out io.Writer) (ok bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, fmt.Errorf("read the events of the run: %w", err)
	}
	defer f.Close()
	v, err := judge(f)
	if err != nil {
		return false, fmt.Errorf("read the events of the run: %w", err)
	}
	if len(v.Unsteady) > 0 {
		fmt.Fprintf(out, "\n!!! %d unsteady: failed beside other tests and passed alone. What failed stands above, under \"=== Failed\". Find out why:\n", len(v.Unsteady))
		for _, name := range v.Unsteady {
			fmt.Fprintf(out, "!!!   %s\n", name)
		}
	}
	for _, why := range v.Inexcusable {
		fmt.Fprintf(out, "!!! no second run excuses this: %s\n", why)
	}
	return len(v.Inexcusable) == 0, nil
}
