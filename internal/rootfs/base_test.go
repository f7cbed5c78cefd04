package rootfs

import (
	"fmt"
	"testing"
	"time"
)

func TestBuildBaseX(t *testing.T) {
	s := open(t, Config{DataDir: "/tmp/casemate-base-c", Mechanism: byBtrfs})
	t0 := time.Now()
	tm, err := s.Build(t.Context(), "base", true, func(step string, f float64, line string) { fmt.Printf("%-10s %.2f %s\n", step, f, line) })
	fmt.Println(tm, err, time.Since(t0))
}
