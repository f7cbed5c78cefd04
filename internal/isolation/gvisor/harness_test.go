package gvisor_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	// The guest is built while the tests run; this tells go test that its answers depend on it.
	_ "casemate.dev/internal/guest"
	_ "casemate.dev/internal/guest/launch"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/testenv"
)

// host is what the backends of one test share: a run directory, id claims, a server id.
type host struct {
	t   *testing.T
	cfg namespace.Config
	// keeper is that of the backend that was made last; nil unless cfg names one.
	keeper *keeper.Keeper
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.Root(t)
	run := testenv.RunDir(t)
	h := &host{t: t, cfg: namespace.Config{
		ServerID: testenv.ServerID(t), RunDir: filepath.Join(run, "r"), IDDir: filepath.Join(run, "ids"),
		Guest: testenv.Guest(t), Spares: -1, SpareLimits: conformance.Limits(), Cells: true,
	}}
	t.Cleanup(func() {
		b, err := namespace.New(h.cfg)
		if err != nil {
			t.Errorf("open for the last sweep: %v", err)
			return
		}
		if _, err := b.Sweep(context.Background(), nil); err != nil {
			t.Errorf("last sweep: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return h
}

func (h *host) backend() isolation.Backend { return h.with(testenv.Runsc(h.t)) }

func (h *host) with(program string) isolation.Backend { return h.on(program, "") }

// on is with on a host whose devices lie in dev.
func (h *host) on(program, dev string) isolation.Backend {
	h.t.Helper()
	cells, err := namespace.New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.keeper = cells.Keeper()
	b := gvisor.New(gvisor.Config{Cells: cells, Program: program, Dev: dev})
	h.t.Cleanup(func() {
		if err := b.Close(); err != nil {
			h.t.Errorf("close: %v", err)
		}
	})
	return b
}

func TestMain(m *testing.M) { conformance.Main(m) }

// leftovers lists what is on the host of this test's instances.
func (h *host) leftovers() []string {
	return slices.DeleteFunc(conformance.Leftovers(h.cfg.ServerID, h.cfg.RunDir), func(l string) bool {
		// The guest's program stays for the next, the keeper until its backend is closed.
		return strings.HasPrefix(l, "file inside-") || strings.HasPrefix(l, "file keeper.")
	})
}
