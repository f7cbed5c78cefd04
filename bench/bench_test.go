package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

func TestQuantiles(t *testing.T) {
	var all []time.Duration
	for i := 100; i >= 1; i-- {
		all = append(all, time.Duration(i)*time.Millisecond)
	}
	if s := summarize(all); s.P50 != 50 || s.P95 != 95 || s.P99 != 99 || s.Mean != 50.5 || s.N != 100 {
		t.Errorf("1 to 100 ms: %+v", s)
	}
	if s := summarize(all[:1]); s.P50 != 100 || s.P99 != 100 {
		t.Errorf("one value: %+v", s)
	}
	a, b := summarize(all[:50]), summarize(all[50:])
	a.Rate, b.Rate = 100, 50
	if s := a.with(b); s.P50 != 50 || s.P99 != 99 || s.N != 100 || s.Rate < 66.6 || s.Rate > 66.7 {
		t.Errorf("%+v with %+v is %+v", a, b, s)
	}
	if s := (Stats{}).with(a); s.N != 50 || s.Rate != 100 {
		t.Errorf("nothing with %+v is %+v", a, s)
	}
	if s := oneByOne(all[50:]); s.Mean != 25.5 || s.Rate < 39.2 || s.Rate > 39.3 || s.N != 50 {
		t.Errorf("one after the other: %+v", s)
	}
	if s := oneByOne(nil); s.Rate != 0 {
		t.Errorf("none, one after the other: %+v", s)
	}
	if s := summarize(nil); s.N != 0 || s.P50 != 0 {
		t.Errorf("no value: %+v", s)
	}
}

// TestJournalRow measures it, which needs no server, as quickly as can be.
func TestJournalRow(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r, err := journalRow(t.Context(), &bench{o: Options{Quick: true}})
	if err != nil || r.N != 200 || r.P50 <= 0 || len(r.Budgets) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestVerifyRow measures it in the same way.
func TestVerifyRow(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r, err := verifyRow(t.Context(), &bench{o: Options{Quick: true}})
	if err != nil || r.N != 4 || r.P50 <= 0 || len(r.Budgets) != 1 || r.Peers["sha256"].P50 <= 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestFloor runs the floor's program and its stand-in: both must measure something of a sane size.
func TestFloor(t *testing.T) {
	f, err := newFloor(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	for _, program := range slices.Compact([]string{f.program, ""}) {
		g := &floor{program: program}
		s, err := g.each(t.Context(), 2, 10)
		if err != nil || s.N != 20 || s.P50 <= 0.01 || s.P50 > 1000 || s.Rate <= 0 {
			t.Errorf("program %q: %+v, %v", program, s, err)
		}
		took, err := g.burst(t.Context(), 5)
		if err != nil || took <= 0 {
			t.Errorf("burst of %q: %v, %v", program, took, err)
		}
		if (g.note() == "") != (program != "") {
			t.Errorf("program %q: the note is %q", program, g.note())
		}
	}
}

// TestBare serves bare HTTP from here: every call starts a process.
func TestBare(t *testing.T) {
	f, err := newFloor(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	if f.program == "" {
		t.Fatal("this test needs a C compiler; install gcc")
	}
	ctx, cancel := context.WithCancel(t.Context())
	b := &bare{socket: filepath.Join(f.dir, "bare.sock")}
	ready, tell := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- ServeBare(ctx, b.socket, f.program, tell) }()
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	s, err := b.each(t.Context(), 3, 10)
	if err != nil || s.N != 30 || s.P50 <= 0.01 || s.P50 > 1000 || s.Rate <= 0 {
		t.Errorf("%+v, %v", s, err)
	}
	cancel()
	if err := testenv.Receive(t, "it serves no more", served); err != nil {
		t.Error(err)
	}
	if _, err := b.each(t.Context(), 1, 1); err == nil {
		t.Error("it serves after its end")
	}
}

func TestParseFloorRefusesNonsense(t *testing.T) {
	for _, out := range []string{"", "12\n", "total x\n", "total 5\nmany\n"} {
		if _, _, err := parseFloor([]byte(out)); err == nil {
			t.Errorf("%q was taken", out)
		}
	}
}

func TestBudgets(t *testing.T) {
	var r Row
	r.budget("at most", 2, 3, 1)
	r.budget("at most", 4, 3, 0)
	r.atLeast("at least", 4, 3, 2)
	r.atLeast("at least", 2, 3, 0)
	for i, want := range []bool{true, false, true, false} {
		if r.Budgets[i].Held != want {
			t.Errorf("budget %d: %+v", i, r.Budgets[i])
		}
	}
	if r.Budgets[0].Ratio != 2 || r.Budgets[1].Ratio != 0 {
		t.Errorf("ratios: %+v", r.Budgets)
	}
	if (Report{Rows: []Row{r}}).OK() || !(Report{Rows: []Row{{Budgets: r.Budgets[:1]}}}).OK() {
		t.Error("a report is OK exactly where every budget held")
	}
}

func TestReport(t *testing.T) {
	r := Report{Host: "host", Notes: []string{"soft floor"}, Rows: []Row{
		{ID: "process-true", What: "true", Unit: "ms", Stats: Stats{P50: 0.5, P99: 2, N: 10}, Peers: map[string]Stats{"fork+exec": {P50: 0.4, N: 3}}},
		{ID: "idle-memory", Unit: "MB", Note: "needs root"},
	}}
	r.Rows[0].budget("p50 ≤ 1.5 × fork+exec", 0.5, 0.6, 0.4)
	var b bytes.Buffer
	if err := r.Table(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"process-true", "fork+exec", "held (0.50 of 0.60, 1.25 ×)", "needs root", "note: soft floor"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, b.String())
		}
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Rows []struct {
			ID  string
			P50 float64
		}
	}
	if err := json.Unmarshal(raw, &back); err != nil || back.Rows[0].ID != "process-true" || back.Rows[0].P50 != 0.5 {
		t.Errorf("%s: %+v, %v", raw, back, err)
	}
}

// TestRemoveRunsc removes a directory in which runsc has left its network namespace. The twin is os.RemoveAll alone.
func TestRemoveRunsc(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bench")
	at := filepath.Join(dir, stateOf(runscName), "null-netns")
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("/proc/self/ns/net", at, "", syscall.MS_BIND, ""); err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	if err := os.RemoveAll(dir); err == nil {
		t.Error("twin: the directory went although something is mounted there")
	}
	removeRunsc(dir, stateOf(runscName))
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		_ = syscall.Unmount(at, syscall.MNT_DETACH)
		t.Errorf("the directory is left: %v", err)
	}
}
