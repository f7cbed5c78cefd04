package namespace

import (
	"fmt"
	"os"
	"testing"

	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/keeper/watch"
)

// TestMain makes the tests' own program a keeper where it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == keeper.Verb {
		if err := watch.Main(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
