package journal

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"
	"pgregory.net/rapid"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/tree"
	"casemate.dev/internal/store"
)

// openSigned opens a journal with proofs in dir.
func openSigned(t testing.TB, dir string) (*Log, *store.DB) {
	t.Helper()
	l, db, err := reopen(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.Close() // some tests close them themselves
		_ = db.Close()
	})
	return l, db
}

func reopen(dir string) (*Log, *store.DB, error) { return reopenTelling(dir, nil) }

// reopenTelling is reopen with what the journal logs.
func reopenTelling(dir string, log *slog.Logger) (*Log, *store.DB, error) {
	if err := os.MkdirAll(filepath.Join(dir, "keys"), 0o700); err != nil {
		return nil, nil, err
	}
	key, err := LoadKey(filepath.Join(dir, "keys"), "casemate.test/log")
	if err != nil {
		return nil, nil, err
	}
	db, err := store.Open(store.Config{Dir: filepath.Join(dir, "data")})
	if err != nil {
		return nil, nil, err
	}
	l, err := OpenSigned(context.Background(), db, SignedOptions{
		Options: Options{Log: log}, Dir: filepath.Join(dir, "data", "journal"), Key: key, PublishEvery: 20 * time.Millisecond,
	})
	return l, db, err
}

// checkLeaves fails unless the log holds every event of the store once, as it is there, each sandbox's in
// order; streams in lost may have leaves without events.
func checkLeaves(t testing.TB, l *Log, lost ...string) {
	t.Helper()
	_ = l.db.Flush() // what fails is the test's own doing
	v, err := l.tree.View()
	if err != nil {
		t.Fatal(err)
	}
	last := map[string]uint64{}
	if err := v.Records(0, func(at int64, r tree.Record) bool {
		if r.Seq != last[r.Stream]+1 {
			t.Errorf("leaf %d: event %d of %s after %d", at, r.Seq, r.Stream, last[r.Stream])
		}
		last[r.Stream] = r.Seq
		rows, err := l.db.EventsAfter(t.Context(), r.Stream, r.Seq-1, 1)
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) == 0 || rows[0].Seq != r.Seq {
			if !slices.Contains(lost, r.Stream) {
				t.Errorf("leaf %d: event %d of %s is not in the store", at, r.Seq, r.Stream)
			}
			return true
		}
		if e, err := ofRow(rows[0]); err != nil || tlog.RecordHash(line(row(e, encode(e.Facts)))) != r.Hash {
			t.Errorf("leaf %d: event %d of %s is another in the store: %s %s", at, r.Seq, r.Stream, rows[0].Type, rows[0].Facts)
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	streams, err := l.db.EventStreams(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range streams {
		if n, err := l.db.LastEvent(t.Context(), s); err != nil || n != last[s] {
			t.Errorf("%s: %d events in the store, %d in the log, %v", s, n, last[s], err)
		}
	}
}

// checkHead fails unless the log as it is began with the one of that checkpoint.
func checkHead(t testing.TB, l *Log, checkpoint []byte) {
	t.Helper()
	v, err := l.tree.View()
	if err != nil {
		t.Fatal(err)
	}
	h, err := tree.ParseCheckpoint(checkpoint, l.key.verifier)
	if err != nil {
		t.Fatal(err)
	}
	p, err := v.ProvePrefix(h.Size)
	if err != nil {
		t.Fatal(err)
	}
	if err := tlog.CheckTree(p, v.Head.Size, v.Head.Root, h.Size, h.Root); err != nil {
		t.Errorf("a checkpoint of %d leaves: %v", h.Size, err)
	}
}

func TestEveryEventBecomesALeaf(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			for n := range 80 {
				e := Event{Sandbox: fmt.Sprint("s", (c+n)%4), Type: ProcessStarted, Actor: "über \"c\"\n"}.With(Guest, map[string]any{"n": n, "a": "<&>\u2028"})
				switch n % 4 {
				case 0, 1:
					l.Post(e.WithBody(Server, "argv", []byte("x")), store.PutProcess(store.Process{Sandbox: e.Sandbox, ID: fmt.Sprint(c, n)}))
				case 2: // one that can't be spooled
					if _, err := l.Record(t.Context(), e, store.PutSetting("a", "b")); err != nil {
						t.Error(err)
					}
				default:
					if _, err := l.Record(t.Context(), e); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	checkLeaves(t, l)
	if n := l.tree.Size(); n != 6*80+1 {
		t.Errorf("%d leaves", n)
	}
	if len(l.posted) != 0 {
		t.Errorf("%d events wait for nothing", len(l.posted))
	}
}

// TestACheckpointCoversWhatWasRecordedBefore looks at the moment of the answer.
func TestACheckpointCoversWhatWasRecordedBefore(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	for n := range 50 {
		with := []store.Write(nil)
		if n%3 == 0 {
			with = append(with, store.PutSetting("a", fmt.Sprint(n)))
		}
		l.Post(Event{Sandbox: "s", Type: ProcessStarted}, store.PutProcess(store.Process{Sandbox: "s", ID: "p"}))
		if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: ProcessEnded}, with...); err != nil {
			t.Fatal(err)
		}
		if size := l.tree.Size(); size != int64(2*n+3) {
			t.Fatalf("after %d events the log has %d leaves", 2*n+3, size)
		}
	}
}

// rounds is how often a test repeats what it does: by day, or in the nightly run.
func rounds(day, night int) int {
	if os.Getenv("CASEMATE_SOAK") != "" {
		return night
	}
	return day
}

// TestSoakKillLosesNothingAcknowledged kills a recording process with -9, again and again on the same
// data, and holds the log against the checkpoints and events that were acknowledged. At night that goes on for five
// minutes, with new data now and then.
func TestSoakKillLosesNothingAcknowledged(t *testing.T) {
	if dir := os.Getenv("JOURNAL_SIGNED_CHILD"); dir != "" {
		recordSignedForever(dir)
	}
	dir := t.TempDir()
	acknowledged := map[string]uint64{}
	var heads [][]byte
	total, begun := 0, time.Now()
	night := rounds(0, 1) == 1
	for round := 0; round < 4 || night && time.Since(begun) < 5*time.Minute; round++ {
		if round > 0 && round%20 == 0 {
			dir, acknowledged, heads = t.TempDir(), map[string]uint64{}, nil
		}
		lines := killAfter(t, dir, 40+rand.IntN(rounds(400, 4000)))
		total += len(lines)
		for _, l := range lines {
			var s, head string
			var n uint64
			if _, err := fmt.Sscan(l, &s, &n, &head); err != nil {
				continue // the kill cut it
			}
			checkpoint, err := base64.StdEncoding.DecodeString(head)
			if err != nil || len(checkpoint) < 100 {
				continue
			}
			acknowledged[s] = max(acknowledged[s], n)
			heads = append(heads, checkpoint)
		}
		l, db := openSigned(t, dir)
		checkLeaves(t, l)
		for s, n := range acknowledged {
			last, err := l.db.LastEvent(t.Context(), s)
			if err != nil || last < n {
				t.Errorf("%s: event %d was acknowledged, the last is %d, %v", s, n, last, err)
			}
			events := checkDense(t, l, s, int(last))
			if e := events[len(events)-1]; e.Type != Gap {
				t.Errorf("round %d: the last event of %s is %s, not a gap", round, s, e.Type)
			}
		}
		for i := 0; i < len(heads); i += 1 + len(heads)/60 {
			checkHead(t, l, heads[i])
		}
		if len(heads) > 0 {
			checkHead(t, l, heads[len(heads)-1])
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		if night {
			t.Logf("round %d: %d acknowledged so far", round, total)
		}
	}
}

// killAfter runs a recording child, kills it after it has printed that many lines, and returns all.
func killAfter(t *testing.T, dir string, count int) []string {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestSoakKillLosesNothingAcknowledged$")
	cmd.Env = append(os.Environ(), "JOURNAL_SIGNED_CHILD="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for in := bufio.NewScanner(out); in.Scan(); {
		if lines = append(lines, in.Text()); len(lines) == count {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // killed
	if len(lines) < count {
		t.Fatalf("the child ended early: %q", lines)
	}
	return lines
}

func recordSignedForever(dir string) {
	l, _, err := reopen(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for c := range 4 {
		go func() {
			for n := 0; ; n++ {
				s := fmt.Sprint("s", rand.IntN(3))
				e := Event{Sandbox: s, Type: ProcessEnded}.With(Guest, map[string]int{"n": n}).WithBody(Server, "stdout", make([]byte, rand.IntN(100)))
				with := []store.Write(nil)
				switch {
				case c == 0:
					l.Post(Event{Sandbox: s, Type: ProcessStarted})
				case n%10 == 0: // one that can't be spooled
					with = append(with, store.PutSetting("n", fmt.Sprint(n)))
				}
				e, err := l.Record(context.Background(), e, with...)
				if err != nil {
					os.Exit(1)
				}
				head, err := l.Checkpoint()
				if err != nil {
					os.Exit(1)
				}
				fmt.Printf("%s %d %s\n", s, e.Seq, base64.StdEncoding.EncodeToString(head))
			}
		}()
	}
	select {}
}

// TestEventsFromBeforeTheLogAreImported begins with a data directory of a version without one.
func TestEventsFromBeforeTheLogAreImported(t *testing.T) {
	dir := t.TempDir()
	db, err := store.Open(store.Config{Dir: filepath.Join(dir, "data")})
	if err != nil {
		t.Fatal(err)
	}
	for s := range 5 {
		for n := range 30 {
			// As it was written: members in no order, and escaped for HTML.
			if err := db.Write(store.AddEvent(store.Event{
				Sandbox: fmt.Sprint("s", s), Seq: uint64(n + 1), Time: int64(n), Type: "process.started", Actor: "a",
				Facts: []byte(`{"server":{"z":1,"a":"\u003c","n":1e3}}`),
			})); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	l, db := openSigned(t, dir)
	checkLeaves(t, l)
	events := checkDense(t, l, ServerStream, 1)
	var f begunFacts
	if err := json.Unmarshal(events[0].Facts[Server], &f); err != nil || events[0].Type != JournalBegun || f.Imported != 150 {
		t.Errorf("the first event of the server is %s %s, %v", events[0].Type, events[0].Facts, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	again, _ := openSigned(t, dir)
	if again.tree.Size() != 151 {
		t.Errorf("%d leaves after a clean restart", again.tree.Size())
	}
}

// TestEventsThatTheStoreLostAreAGap takes the newest events out of the store, as a power loss could, and as
// somebody with the disk could.
func TestEventsThatTheStoreLostAreAGap(t *testing.T) {
	dir := t.TempDir()
	l, db := openSigned(t, dir)
	for range 10 {
		if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: FileRead}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.tree.Sync(); err != nil {
		t.Fatal(err)
	}
	head, err := l.Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil { // and not l: as after a kill
		t.Fatal(err)
	}
	raw, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "data", "casemate.db"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.ExecContext(t.Context(), "DELETE FROM events WHERE sandbox = 's' AND seq > 7"); err != nil {
		t.Fatal(err)
	}
	if err := raw.Close(); err != nil {
		t.Fatal(err)
	}
	again, _ := openSigned(t, dir)
	checkLeaves(t, again, "s")
	checkHead(t, again, head)
	events, err := again.Events(t.Context(), "s", 7, 0)
	if err != nil || len(events) != 1 {
		t.Fatalf("events: %v, %v", events, err)
	}
	var f gapFacts
	if err := json.Unmarshal(events[0].Facts[Server], &f); err != nil || events[0].Seq != 11 || f.From != 8 || f.To != 10 {
		t.Errorf("the gap is %d %s, %v", events[0].Seq, events[0].Facts[Server], err)
	}
}

// TestAHoleIsFilled is a counter that a kill left out between others.
func TestAHoleIsFilled(t *testing.T) {
	dir := t.TempDir()
	l, db := openSigned(t, dir)
	if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: FileRead}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []uint64{2, 4, 7} {
		if err := db.Write(add(Event{Sandbox: "s", Seq: n, Time: time.Unix(int64(n), 0), Type: FileRead})); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	again, _ := openSigned(t, dir)
	checkLeaves(t, again)
	var got []Type
	for _, e := range checkDense(t, again, "s", 8) {
		got = append(got, e.Type)
	}
	if want := []Type{FileRead, FileRead, Gap, FileRead, Gap, Gap, FileRead, Gap}; !slices.Equal(got, want) {
		t.Errorf("events %v", got)
	}
}

// TestACutLogIsNotGoneOnWith cuts the log's tail, with and without the files beside it.
func TestACutLogIsNotGoneOnWith(t *testing.T) {
	for _, also := range [][]string{nil, {"log/checkpoint"}, {"log/checkpoint", "log/tile"}} {
		dir := t.TempDir()
		l, db := openSigned(t, dir)
		for range 10 {
			if _, err := l.Record(t.Context(), Event{Sandbox: "s", Type: FileRead}); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		log := filepath.Join(dir, "data", "journal")
		if err := os.Truncate(filepath.Join(log, "log", "leaves"), 5*72); err != nil {
			t.Fatal(err)
		}
		for _, name := range also {
			if err := os.RemoveAll(filepath.Join(log, name)); err != nil {
				t.Fatal(err)
			}
		}
		_, db, err := reopen(dir)
		if !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("with %v removed: %v", also, err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAnyOrderOfCallsIsInTheLog(t *testing.T) {
	checks := flag.Lookup("rapid.checks").Value.String()
	if err := flag.Set("rapid.checks", "15"); err != nil { // each opens several journals, which flush to disk
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flag.Set("rapid.checks", checks) })
	base, round := t.TempDir(), 0
	rapid.Check(t, func(r *rapid.T) {
		dir := filepath.Join(base, fmt.Sprint(round))
		round++
		l, db, err := reopen(dir)
		if err != nil {
			r.Fatal(err)
		}
		defer func() { _ = l.Close(); _ = db.Close() }()
		var heads [][]byte
		stream := rapid.SampledFrom([]string{"a", "b"})
		again := func(r *rapid.T) {
			if l, db, err = reopen(dir); err != nil {
				r.Fatal(err)
			}
		}
		r.Repeat(map[string]func(*rapid.T){
			"record": func(r *rapid.T) {
				if _, err := l.Record(context.Background(), Event{Sandbox: stream.Draw(r, "stream"), Type: FileRead}); err != nil {
					r.Fatal(err)
				}
			},
			"post": func(r *rapid.T) { l.Post(Event{Sandbox: stream.Draw(r, "stream"), Type: FileRead}) },
			"slow": func(r *rapid.T) {
				l.Enqueue(Event{Sandbox: stream.Draw(r, "stream"), Type: FileWritten}, store.PutSetting("a", "b"))
			},
			"refused": func(r *rapid.T) {
				l.Enqueue(Event{Sandbox: stream.Draw(r, "stream"), Type: FileMoved}, store.Func(func(*store.Tx) error { return errDone }))
			},
			"refused post": func(r *rapid.T) {
				l.Post(Event{Sandbox: stream.Draw(r, "stream"), Type: FileMode}, store.Func(func(*store.Tx) error { return errDone }))
			},
			"head": func(r *rapid.T) {
				head, err := l.Checkpoint()
				if err != nil {
					r.Fatal(err)
				}
				heads = append(heads, slices.Clone(head))
			},
			"restart": func(r *rapid.T) {
				if err := l.Close(); err != nil {
					r.Fatal(err)
				}
				_ = db.Close()
				again(r)
			},
			"crash": func(r *rapid.T) { // the store ends well, the log does not
				_ = db.Close()
				_ = l.tree.Close()
				again(r)
			},
			"": func(*rapid.T) {
				checkLeaves(t, l)
				for _, h := range heads {
					checkHead(t, l, h)
				}
			},
		})
	})
}

// TestAnotherKeyIsToldOf opens a log again with its key and, which begins another, without it.
func TestAnotherKeyIsToldOf(t *testing.T) {
	dir := t.TempDir()
	openAndClose := func() (told string) {
		var b strings.Builder
		l, db, err := reopenTelling(dir, slog.New(slog.NewTextHandler(&b, nil)))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(l.Close(), db.Close()); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for round := range 2 {
		if told := openAndClose(); told != "" {
			t.Errorf("round %d: %s", round, told)
		}
	}
	if err := os.Remove(filepath.Join(dir, "keys", KeyFile)); err != nil {
		t.Fatal(err)
	}
	if told := openAndClose(); !strings.Contains(told, "is not signed with its key") {
		t.Errorf("with another key: %q", told)
	}
}

func TestKeysAreKept(t *testing.T) {
	dir := t.TempDir()
	k, err := LoadKey(dir, "casemate.test/log")
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadKey(dir, "another")
	if err != nil || again.String() != k.String() || again.verifier.Name() != "casemate.test/log" {
		t.Errorf("read again: %s, %v", again, err)
	}
	if s := fmt.Sprintf("%v %+v %s", k, k, k); strings.Contains(s, "PRIVATE") {
		t.Errorf("a key prints as %s", s)
	}
	path := filepath.Join(dir, KeyFile)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadKey(dir, ""); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a key that others may read: %v", err)
	}
	if err := os.WriteFile(path, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadKey(dir, ""); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("no key: %v", err)
	}
}

func TestLinesAreCanonical(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		facts := map[Observer]json.RawMessage{}
		for _, o := range []Observer{Kernel, Server, Guest} {
			if rapid.Bool().Draw(r, string(o)) {
				v := rapid.MapOf(rapid.String(), rapid.OneOf(rapid.String().AsAny(), rapid.Int32().AsAny(), rapid.Bool().AsAny(), rapid.Float64Range(-1e9, 1e9).AsAny()))
				facts = maps.Clone(Event{Facts: facts}.With(o, v.Draw(r, "facts")).Facts)
			}
		}
		e := Event{
			Sandbox: rapid.StringN(1, 9, 20).Draw(r, "sandbox"), Seq: rapid.Uint64Range(1, 1<<50).Draw(r, "seq"), Time: time.Unix(0, rapid.Int64Range(0, 1<<62).Draw(r, "time")),
			Type: Type(rapid.String().Draw(r, "type")), Actor: string(rapid.SliceOf(rapid.Byte()).Draw(r, "actor")), Process: rapid.String().Draw(r, "process"), Facts: facts,
		}
		got := line(row(e, encode(e.Facts)))
		want, err := canonicalFacts(nil)
		if err != nil || string(want) != "{}" {
			r.Fatal(err)
		}
		again, err := canonical(got)
		if err != nil || string(again) != string(got) {
			r.Fatalf("%v\n%s\n%s", err, got, again)
		}
	})
}

func BenchmarkSignedStartAndEnd(b *testing.B) {
	l, _ := openSigned(b, b.TempDir())
	e := Event{Sandbox: "s", Actor: "local", Process: "prc_x"}.With(Guest, map[string]any{"pid": 12})
	for b.Loop() {
		start := e.WithBody(Server, "argv", []byte(`["true"]`))
		start.Type = ProcessStarted
		l.Post(start)
		e.Type = ProcessEnded
		if _, err := l.Record(context.Background(), e); err != nil {
			b.Fatal(err)
		}
		if _, err := l.Checkpoint(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLine(b *testing.B) {
	e := Event{Sandbox: "abcdefghijklmnopqrst", Seq: 12, Time: time.Now(), Type: ProcessEnded, Actor: "local", Process: "prc_x"}.
		With(Guest, map[string]any{"end": "exited", "code": 0, "bytes": 12, "user_ms": 1, "system_ms": 2, "max_rss": 1234567}).
		With(Server, map[string]any{"duration_ms": 3})
	for b.Loop() {
		_ = line(row(e, encode(e.Facts)))
	}
}
