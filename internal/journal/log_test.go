package journal

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	_ "modernc.org/sqlite" // raw access, to make the store refuse events
	"pgregory.net/rapid"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/store"
	"casemate.dev/internal/testenv"
)

func openLog(t testing.TB, dir string) (*Log, *store.DB) {
	t.Helper()
	db, err := store.Open(store.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() }) // some tests close it themselves
	return Open(db, Options{}), db
}

// checkDense fails unless sandbox has exactly want events, numbered from 1.
func checkDense(t testing.TB, l *Log, sandbox string, want int) []Event {
	t.Helper()
	var all []Event
	for {
		page, err := l.Events(t.Context(), sandbox, uint64(len(all)), 0)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		all = append(all, page...)
	}
	for i, e := range all {
		if e.Seq != uint64(i+1) {
			t.Fatalf("%s: event %d has counter %d", sandbox, i+1, e.Seq)
		}
	}
	if len(all) != want {
		t.Fatalf("%s: %d events, want %d", sandbox, len(all), want)
	}
	return all
}

func TestCountersAreDenseUnderConcurrency(t *testing.T) {
	dir := t.TempDir()
	l, db := openLog(t, dir)
	const sandboxes, callers, each = 5, 8, 60
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for n := range each {
				e := Event{Sandbox: fmt.Sprint("s", (c+n)%sandboxes), Type: ProcessStarted, Actor: fmt.Sprint(c)}
				e = e.With(Guest, map[string]int{"n": n})
				if n%3 == 0 {
					l.Post(e)
				} else if _, err := l.Record(t.Context(), e); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for s := range sandboxes {
		last := map[string]int{}
		for _, e := range checkDense(t, l, fmt.Sprint("s", s), callers*each/sandboxes) {
			var facts struct{ N int }
			if err := json.Unmarshal(e.Facts[Guest], &facts); err != nil {
				t.Fatal(err)
			}
			if before, ok := last[e.Actor]; ok && facts.N <= before {
				t.Fatalf("caller %s: event %d came after %d", e.Actor, facts.N, before)
			}
			last[e.Actor] = facts.N
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	again, _ := openLog(t, dir)
	e, err := again.Record(t.Context(), Event{Sandbox: "s0", Type: SandboxEnded})
	if err != nil || e.Seq != callers*each/sandboxes+1 {
		t.Errorf("after a restart the next counter is %d, %v", e.Seq, err)
	}
}

func TestRecordCommitsItsWritesTogether(t *testing.T) {
	l, db := openLog(t, t.TempDir())
	if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: SandboxCreated}, store.PutSetting("a", "1")); err != nil {
		t.Fatal(err)
	}
	bad := errors.New("refused")
	refuse := store.Func(func(*store.Tx) error { return bad })
	_, err := l.Record(t.Context(), Event{Sandbox: "s", Type: SandboxUpdated}, store.PutSetting("a", "2"), refuse)
	if !errors.Is(err, bad) {
		t.Fatalf("record: %v", err)
	}
	l.Post(Event{Sandbox: "s", Type: ProcessStarted}, store.PutSetting("a", "3"), refuse)
	if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: SandboxEnded}); err != nil {
		t.Fatal(err)
	}
	all := checkDense(t, l, "s", 4)
	if st := l.Stats(); st.Events != 4 || st.Gaps != 1 || st.Pending != 0 {
		t.Errorf("counts %+v", st)
	}
	for i, want := range []Type{SandboxCreated, Gap, ProcessStarted, SandboxEnded} {
		if all[i].Type != want {
			t.Errorf("event %d is %s, want %s", i+1, all[i].Type, want)
		}
	}
	if v, _ := db.Setting(t.Context(), "a"); v != "1" {
		t.Errorf("a write of a failed event was kept: %q", v)
	}
	var facts struct{ Missing Type }
	if err := json.Unmarshal(all[1].Facts[Server], &facts); err != nil || facts.Missing != SandboxUpdated {
		t.Errorf("the gap says %s, %v", all[1].Facts[Server], err)
	}
}

// rawDB opens the journal's database beside it.
func rawDB(t *testing.T, dir string) *sql.DB {
	t.Helper()
	raw, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "casemate.db")+"?_pragma=busy_timeout(30000)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = raw.Close() })
	return raw
}

// TestEventsWaitForADiskThatRefusesThem lets every insert fail for a while, as a full disk does.
func TestEventsWaitForADiskThatRefusesThem(t *testing.T) {
	dir := t.TempDir()
	l, _ := openLog(t, dir)
	raw := rawDB(t, dir)
	record := func(typ Type) error {
		_, err := l.Record(t.Context(), Event{Sandbox: "s", Type: typ})
		return err
	}
	if err := record(SandboxCreated); err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Exec("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END"); err != nil {
		t.Fatal(err)
	}
	l.Post(Event{Sandbox: "s", Type: ProcessStarted})
	if err := record(ProcessEnded); err != nil {
		t.Fatalf("an event that is in the spool: %v", err)
	}
	if err := l.db.Flush(); err == nil {
		t.Fatal("the trigger does not work")
	}
	for range 2 {
		if err := record(ProcessEnded); err == nil {
			t.Fatal("a refused event was acknowledged")
		}
	}
	if st := l.Stats(); st.Events != 5 || st.Gaps != 2 || st.Backlog < 2 || st.Pending < 2 {
		t.Errorf("counts while the disk refuses: %+v", st)
	}
	if _, err := raw.Exec("DROP TRIGGER full"); err != nil {
		t.Fatal(err)
	}
	if err := record(SandboxEnded); err != nil {
		t.Fatal(err)
	}
	all := checkDense(t, l, "s", 6)
	if st := l.Stats(); st.Events != 6 || st.Gaps != 2 || st.Backlog != 0 || st.Pending != 0 {
		t.Errorf("counts %+v", st)
	}
	for i, want := range []Type{SandboxCreated, ProcessStarted, ProcessEnded, Gap, Gap, SandboxEnded} {
		if all[i].Type != want {
			t.Errorf("event %d is %s, want %s", i+1, all[i].Type, want)
		}
	}
}

// A disk that refuses more than may wait: what finds no place is told of in each stream, once there is room, and the journal
// goes on without a restart.
func TestBacklogIsBounded(t *testing.T) {
	dir := t.TempDir()
	l, db := openLog(t, dir)
	for _, stream := range []string{"s", "t"} {
		if _, err := l.Record(t.Context(), Event{Sandbox: stream, Type: SandboxCreated}); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	raw := rawDB(t, dir)
	if _, err := raw.Exec("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END"); err != nil {
		t.Fatal(err)
	}
	for range maxBacklog {
		l.Post(Event{Sandbox: "s", Type: ProcessStarted})
	}
	testenv.Eventually(t, time.Minute, "all wait for the disk", func() bool {
		_ = db.Flush() // which it refuses
		return l.Stats().Backlog >= maxBacklog
	})
	if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: ProcessEnded}); !errs.Is(err, errs.Unavailable) {
		t.Errorf("record with a full backlog: %v", err)
	}
	l.Post(Event{Sandbox: "s", Type: ProcessEnded})
	l.Post(Event{Sandbox: "t", Type: ProcessEnded})
	_ = db.Flush()
	if st := l.Stats(); st.Dropped != 3 || st.Backlog != maxBacklog {
		t.Errorf("counts %+v", st)
	}
	if _, err := raw.Exec("DROP TRIGGER full"); err != nil {
		t.Fatal(err)
	}
	tries := 0
	testenv.Eventually(t, time.Minute, "events are recorded again", func() bool {
		tries++
		_, err := l.Record(t.Context(), Event{Sandbox: "s", Type: SandboxUpdated})
		return err == nil
	})
	l.tellDropped()
	all := checkDense(t, l, "s", 1+maxBacklog+2)
	if e := all[maxBacklog+1]; e.Type != Gap || !strings.Contains(string(e.Facts[Server]), fmt.Sprintf(`"dropped":%d`, 2+tries-1)) {
		t.Errorf("%d tries: %s %s", tries, e.Type, e.Facts[Server])
	}
	if other := checkDense(t, l, "t", 2); other[1].Type != Gap || !strings.Contains(string(other[1].Facts[Server]), `"dropped":1`) {
		t.Errorf("%+v", other[1])
	}
	if st := l.Stats(); st.Dropped != 0 || st.Backlog != 0 || st.Gaps != 2 {
		t.Errorf("counts %+v", st)
	}
}

// Events that come while the journal can't even read where a stream ends are told of as well.
func TestUnreadableHeadLeavesAGap(t *testing.T) {
	dir := t.TempDir()
	l, _ := openLog(t, dir)
	if _, err := l.Record(t.Context(), Event{Sandbox: "other", Type: SandboxCreated}); err != nil {
		t.Fatal(err)
	}
	raw := rawDB(t, dir)
	if _, err := raw.Exec("ALTER TABLE events RENAME TO away"); err != nil {
		t.Fatal(err)
	}
	l.Post(Event{Sandbox: "s", Type: ProcessStarted})
	if st := l.Stats(); st.Dropped != 1 {
		t.Fatalf("counts %+v", st)
	}
	if _, err := raw.Exec("ALTER TABLE away RENAME TO events"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: ProcessEnded}); err != nil {
		t.Fatal(err)
	}
	all := checkDense(t, l, "s", 2)
	if all[0].Type != Gap || all[1].Type != ProcessEnded {
		t.Errorf("%s, %s", all[0].Type, all[1].Type)
	}
}

func TestFollowSeesEveryEventOnce(t *testing.T) {
	l, _ := openLog(t, t.TempDir())
	const before, during = 20, 200
	for range before {
		if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: FileRead}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for f := range 4 {
		wg.Go(func() {
			after := uint64(f * 5)
			err := l.Follow(ctx, "s", after, func(e Event) error {
				if e.Seq != after+1 {
					return fmt.Errorf("follower %d: event %d after %d", f, e.Seq, after)
				}
				if after = e.Seq; after == before+during {
					return errDone
				}
				return nil
			})
			if !errors.Is(err, errDone) {
				t.Errorf("follower %d: %v after event %d", f, err, after)
			}
		})
	}
	for range during / 2 {
		l.Post(Event{Sandbox: "s", Type: FileRead})
		l.Post(Event{Sandbox: "other", Type: FileRead})
		if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: FileRead}); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

var errDone = errors.New("done")

func TestFollowEndsWithItsContext(t *testing.T) {
	l, _ := openLog(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	l.Post(Event{Sandbox: "s", Type: FileRead})
	err := l.Follow(ctx, "s", 0, func(Event) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("follow: %v", err)
	}
	if l.heads["s"].followers != 0 {
		t.Error("the follower is still counted")
	}
}

func TestCountersMayLeaveMemory(t *testing.T) {
	l, _ := openLog(t, t.TempDir())
	for round := range 3 {
		for s := range maxHeads/2 + 200 {
			l.Post(Event{Sandbox: fmt.Sprintf("s%d-%d", round%2, s), Type: FileRead})
		}
		if err := l.db.Flush(); err != nil {
			t.Fatal(err)
		}
		if len(l.heads) > maxHeads {
			t.Fatalf("%d counters in memory", len(l.heads))
		}
	}
	checkDense(t, l, "s0-7", 2)
	checkDense(t, l, "s1-7", 1)
}

// TestAcknowledgedEventsSurviveKill kills a recording child with -9 and looks for what it had said
// was recorded.
func TestAcknowledgedEventsSurviveKill(t *testing.T) {
	if dir := os.Getenv("JOURNAL_TEST_CHILD"); dir != "" {
		recordForever(dir)
	}
	for round := range 3 {
		dir := t.TempDir()
		cmd := exec.Command(os.Args[0], "-test.run=^TestAcknowledgedEventsSurviveKill$")
		cmd.Env = append(os.Environ(), "JOURNAL_TEST_CHILD="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		acknowledged := map[string]uint64{}
		read := func() bool {
			var s string
			var n uint64
			if _, err := fmt.Fscanln(out, &s, &n); err != nil {
				return false
			}
			acknowledged[s] = max(acknowledged[s], n)
			return true
		}
		for range 100 + 300*round {
			if !read() {
				t.Fatal("the child died early")
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for read() {
		}
		_ = cmd.Wait() // killed
		l, _ := openLog(t, dir)
		for s, n := range acknowledged {
			last, err := l.db.LastEvent(t.Context(), s)
			if err != nil || last < n {
				t.Errorf("%s: event %d was acknowledged, the last is %d, %v", s, n, last, err)
			}
			checkDense(t, l, s, int(last))
		}
	}
}

func recordForever(dir string) {
	db, err := store.Open(store.Config{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	l := Open(db, Options{})
	for c := range 4 {
		go func() {
			for {
				s := fmt.Sprint("s", rand.IntN(3))
				if c == 0 {
					l.Post(Event{Sandbox: s, Type: ProcessStarted})
				}
				e, err := l.Record(context.Background(), Event{Sandbox: s, Type: ProcessEnded})
				if err != nil {
					os.Exit(1)
				}
				fmt.Printf("%s %d\n", s, e.Seq)
			}
		}()
	}
	select {}
}

// TestAnyOrderOfCallsKeepsTheRecord compares the log with a plain list, over calls and restarts.
func TestAnyOrderOfCallsKeepsTheRecord(t *testing.T) {
	base, round := t.TempDir(), 0
	rapid.Check(t, func(r *rapid.T) {
		dir := filepath.Join(base, fmt.Sprint(round))
		round++
		db, err := store.Open(store.Config{Dir: dir})
		if err != nil {
			r.Fatal(err)
		}
		defer func() { _ = db.Close() }()
		l := Open(db, Options{Strict: rapid.Bool().Draw(r, "strict")})
		want := map[string][]Type{}
		sandbox := rapid.SampledFrom([]string{"a", "b"})
		typ := rapid.SampledFrom([]Type{ProcessStarted, ProcessEnded, FileRead})
		r.Repeat(map[string]func(*rapid.T){
			"record": func(r *rapid.T) {
				s, y := sandbox.Draw(r, "sandbox"), typ.Draw(r, "type")
				if _, err := l.Record(context.Background(), Event{Sandbox: s, Type: y}); err != nil {
					r.Fatal(err)
				}
				want[s] = append(want[s], y)
			},
			"post": func(r *rapid.T) {
				s, y := sandbox.Draw(r, "sandbox"), typ.Draw(r, "type")
				if e := l.Post(Event{Sandbox: s, Type: y}); e.Seq != uint64(len(want[s])+1) {
					r.Fatalf("counter %d", e.Seq)
				}
				want[s] = append(want[s], y)
			},
			"refused": func(r *rapid.T) {
				s := sandbox.Draw(r, "sandbox")
				refuse := store.Func(func(*store.Tx) error { return errDone })
				if _, err := l.Record(context.Background(), Event{Sandbox: s, Type: FileRead}, refuse); err == nil {
					r.Fatal("acknowledged")
				}
				want[s] = append(want[s], Gap)
			},
			"restart": func(r *rapid.T) {
				if err := db.Close(); err != nil {
					r.Fatal(err)
				}
				if db, err = store.Open(store.Config{Dir: dir}); err != nil {
					r.Fatal(err)
				}
				l = Open(db, Options{})
			},
			"": func(r *rapid.T) {
				for s := range want {
					got, err := l.Events(context.Background(), s, 0, 0)
					if err != nil || len(got) != len(want[s]) {
						r.Fatalf("%s: %d events, %v, want %d", s, len(got), err, len(want[s]))
					}
					for i, e := range got {
						if e.Seq != uint64(i+1) || e.Type != want[s][i] {
							r.Fatalf("%s: event %d is %s %d", s, i+1, e.Type, e.Seq)
						}
					}
				}
			},
		})
	})
}

func BenchmarkStartAndEnd(b *testing.B) {
	l, _ := openLog(b, b.TempDir())
	e := Event{Sandbox: "s", Actor: "local", Process: "prc_x"}.With(Guest, map[string]any{"argv": []string{"true"}, "pid": 12})
	for b.Loop() {
		e.Type = ProcessStarted
		l.Post(e)
		e.Type = ProcessEnded
		if _, err := l.Record(context.Background(), e); err != nil {
			b.Fatal(err)
		}
	}
}
