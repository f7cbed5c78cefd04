package btrfs

import (
	"os"
	"testing"

	"casemate.dev/internal/testenv/mounts"
)

func TestMain(m *testing.M) { os.Exit(mounts.Main(m)) }
