package spawn_test

import (
	"fmt"
	"os"
	"testing"
)

// TestMain lets the test binary play three parts besides the tests: the guest of a small sandbox, the
// program that the guest starts inside its walls, and the guest's worker.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "play-guest":
			guestMain()
		case "play-probe":
			fmt.Print(probe(os.Args[2]))
			os.Exit(0)
		case "play-worker":
			workerMain()
		}
	}
	os.Exit(m.Run())
}
