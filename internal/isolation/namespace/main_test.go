package namespace

import (
	"testing"

	"casemate.dev/internal/isolation/conformance"
)

func TestMain(m *testing.M) { conformance.Main(m) }
