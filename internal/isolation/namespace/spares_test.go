package namespace

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/testenv"
)

func (b *Backend) waiting() int {
	b.spares.mu.Lock()
	defer b.spares.mu.Unlock()
	return len(b.spares.ready)
}

// Spares are made after the first start, used up by later ones, made again, and gone with the backend.
func TestSpares(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHost(t, func(c *Config) { c.Spares = 2 })
	b := h.backend()
	if n := b.waiting(); n != 0 {
		t.Errorf("%d spares before the first start", n)
	}
	for _, p := range profiles() {
		start(t, b, conformance.Spec(t, p))
		testenv.Eventually(t, patience, "two spares wait", func() bool { return b.waiting() == 2 })
		name := b.spares.ready[0].name
		spec := conformance.Spec(t, p)
		spec.Limits.Pids, spec.Limits.MemoryBytes = 64, 128<<20
		x := start(t, b, spec)
		if x.inst.name != name {
			t.Errorf("%s: the start did not use the spare", p)
		}
		if a := x.inst.Applied().Limits; a.Pids != 64 || a.MemoryBytes != 128<<20 {
			t.Errorf("%s: a spare's limits: %+v", p, a)
		}
		wants(t, string(p)+": a process", x.sh("echo works"), "works")
	}
	// A spare that died is discarded.
	testenv.Eventually(t, patience, "two spares wait", func() bool { return b.waiting() == 2 })
	if err := b.spares.ready[0].proc.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the spare is dead", func() bool { return !b.spares.ready[0].proc.Alive() })
	wants(t, "a process after a spare died", start(t, b, conformance.Spec(t, isolation.Locked)).sh("echo works"), "works")
}

// Many starts at once share the spares and none is given away twice.
func TestSparesInABurst(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Spares = 3 })
	b := h.backend()
	start(t, b, conformance.Spec(t, isolation.Locked))
	testenv.Eventually(t, patience, "spares wait", func() bool { return b.waiting() == 3 })
	const n = 12
	specs := make([]isolation.Spec, n)
	for i := range specs {
		specs[i] = conformance.Spec(t, isolation.Locked)
	}
	var wg sync.WaitGroup
	got := make([]isolation.Instance, n)
	for i, s := range specs {
		wg.Go(func() {
			inst, err := b.Start(limited(t), s)
			if err != nil {
				t.Errorf("start %d: %v", i, err)
				return
			}
			got[i] = inst
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for _, i := range got {
		if i == nil {
			continue
		}
		if first := i.Applied().HostUID; seen[first] {
			t.Errorf("the id range from %d on was given away twice", first)
		} else {
			seen[first] = true
		}
		destroy(t, i)
	}
}

const serverVariable = "CASEMATE_TEST_SERVER"

// TestServerProcess is the other process of TestServerKilled.
func TestServerProcess(t *testing.T) {
	config := os.Getenv(serverVariable)
	if config == "" {
		return
	}
	var cfg Config
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		t.Fatal(err)
	}
	cfg.Guest = testenv.Guest(t)
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		x := start(t, b, conformance.Spec(t, isolation.Locked))
		if _, err := x.client.Start(limited(t), guestwire.StartProcess{ID: "prc_counter", Argv: []string{"sh", "-c", "i=0; while true; do echo $i; i=$((i+1)); sleep 0.01; done"}}, nil); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("record " + string(x.inst.Record()) + "\n")
	}
	testenv.Eventually(t, patience, "spares wait", func() bool { return b.waiting() == cfg.Spares })
	os.Stdout.WriteString("ready\n")
	select {} // until killed
}

// A server that is killed leaves its sandboxes running and its spares dying; the next one adopts what
// it knows of, and sweeps the rest.
func TestServerKilled(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Spares = 2 })
	cfg := h.cfg
	cfg.Guest, cfg.Log = nil, nil
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestServerProcess$", "-test.v")
	// Killed, it leaves its own temporary files behind: they go with ours.
	server.Env = append(os.Environ(), serverVariable+"="+string(config), "TMPDIR="+t.TempDir())
	// Its own mount namespace, as a server has, so that its layers go with it and the sandboxes.
	server.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	var records []string
	ready := false
	for lines := bufio.NewScanner(out); !ready && lines.Scan(); {
		if r, ok := strings.CutPrefix(lines.Text(), "record "); ok {
			records = append(records, r)
		}
		ready = lines.Text() == "ready"
	}
	if !ready || len(records) != 2 {
		t.Fatalf("the server said %q", records)
	}
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = server.Wait()

	h.cfg.Spares = -1
	b := h.backend()
	testenv.Eventually(t, patience, "only the two sandboxes run", func() bool {
		busy, err := runningIn(firstID, blockCount*blockSize)
		mine := 0
		for first := range busy {
			if b.ids.owned[first] {
				mine++
			}
		}
		return err == nil && mine == 2
	})
	kept, err := b.Adopt(t.Context(), json.RawMessage(records[0]))
	if err != nil {
		t.Fatal(err)
	}
	client := guestwire.NewClient(kept.Dial)
	before, err := client.Get(limited(t), "prc_counter")
	if err != nil {
		t.Fatal(err)
	}
	removed, err := b.Sweep(limited(t), map[string]bool{kept.ID(): true})
	if err != nil {
		t.Fatal(err)
	}
	var lost record
	if err := json.Unmarshal([]byte(records[1]), &lost); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.Join(removed, "\n"), lost.ID) {
		t.Errorf("removed: %q", removed)
	}
	if len(b.ids.free) != blockSize-1 {
		t.Errorf("%d of %d id ranges are free", len(b.ids.free), blockSize)
	}
	testenv.Eventually(t, patience, "the adopted sandbox's process goes on", func() bool {
		now, err := client.Get(limited(t), "prc_counter")
		return err == nil && now.Bytes > before.Bytes
	})
	destroy(t, kept)
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if len(b.ids.free) != blockSize {
		t.Errorf("%d of %d id ranges are free in the end", len(b.ids.free), blockSize)
	}
}
