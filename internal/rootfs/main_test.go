package rootfs

import (
	"os"
	"testing"

	"casemate.dev/internal/testenv/mounts"
)

// TestMain moves into a mount namespace of its own, as a server does: the store mounts there.
func TestMain(m *testing.M) { os.Exit(mounts.Main(m)) }
