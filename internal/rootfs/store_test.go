package rootfs

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"casemate.dev/internal/id"
	"casemate.dev/internal/testenv"
)

// mechanisms are those that this machine's kernel and packages give; project quotas need a kernel with
// a quota format and a file system made for them.
var mechanisms = []string{byBtrfs, byTmpfs}

const testImage = 768 << 20

// open opens a store of its own for the test and closes it.
func open(t testing.TB, cfg Config) *Store {
	t.Helper()
	testenv.Root(t)
	if cfg.DataDir == "" {
		cfg.DataDir = t.TempDir()
	}
	if cfg.ImageBytes == 0 {
		cfg.ImageBytes = testImage
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = s.Sweep(context.Background(), nil)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func plan(t testing.TB, s *Store, r Request) (string, Plan) {
	t.Helper()
	if r.ID == "" {
		r.ID = id.Sandbox()
	}
	if r.Template == "" {
		r.Template = "host"
	}
	if r.DiskBytes == 0 {
		r.DiskBytes = 64 << 20
	}
	p, err := s.Plan(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return r.ID, p
}

func TestQuick(t *testing.T) {
	testenv.NoLeaks(t)
	t0 := time.Now()
	s := open(t, Config{Mechanism: byBtrfs})
	fmt.Println("open", time.Since(t0), s.templates.hostErr)
	time.Sleep(200 * time.Millisecond)
	for range 20 {
		t0 = time.Now()
		i, p := plan(t, s, Request{})
		fmt.Println("plan", time.Since(t0), p.Disk)
		t0 = time.Now()
		fmt.Println(os.WriteFile(p.Upper+"/x", make([]byte, 100<<20), 0o644))
		if err := s.Release(t.Context(), i); err != nil {
			t.Fatal(err)
		}
		fmt.Println("release", time.Since(t0))
	}
}
