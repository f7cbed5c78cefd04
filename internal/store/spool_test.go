package store

import (
	"bytes"
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/testenv"
)

// left returns the data directory of a process that died with its last changes in the spool only.
func left(t *testing.T, changes ...[]Write) string {
	t.Helper()
	dir := t.TempDir()
	db, err := Open(Config{Dir: dir, FlushEvery: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range changes {
		if p := db.Queue(Change{Writes: w, Spool: true}); !p.Spooled() {
			t.Fatal("not spooled")
		}
	}
	spool, err := os.ReadFile(filepath.Join(dir, spoolName))
	if err != nil {
		t.Fatal(err)
	}
	db.writer.mu.Lock()
	db.writer.queue = nil // died
	db.writer.mu.Unlock()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, spoolName), spool, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func testEvent(seq uint64) Event {
	return Event{Sandbox: "s", Seq: seq, Time: -int64(seq), Type: "t", Actor: "ä", Facts: []byte(`{"x":"\u0000"}`)}
}

func TestSpoolIsReplayed(t *testing.T) {
	p := Process{Sandbox: "s", ID: "p", Started: 5, Body: []byte("{}")}
	ended := p
	ended.Ended = 9
	dir := left(t, []Write{AddEvent(testEvent(1)), AddProcess(p)}, []Write{AddEvent(testEvent(2)), PutProcess(ended)}, []Write{AddEvent(testEvent(3))})
	for range 2 { // the second time there is nothing to replay
		db := open(t, Config{Dir: dir})
		all, err := db.EventsAfter(t.Context(), "s", 0, 10)
		if d := cmp.Diff([]Event{testEvent(1), testEvent(2), testEvent(3)}, all); d != "" || err != nil {
			t.Errorf("events: %v\n%s", err, d)
		}
		got, ok, err := db.GetProcess(t.Context(), "s", "p")
		check(t, "process", got, ended, ok, err)
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestErasuresAreReplayed: what was erased does not come back with what is replayed before it, and its neighbour does.
func TestErasuresAreReplayed(t *testing.T) {
	kept := Body{Sandbox: "s", Seq: 1, Name: "guest.stderr", Time: 7, Size: 4, Salt: []byte("salt"), Data: []byte("stay")}
	gone := kept
	gone.Name, gone.Data = "guest.stdout", []byte("away")
	p := Process{Sandbox: "s", ID: "p", Started: 5, Body: []byte(`{"Argv":["away"],"PID":3}`)}
	dir := left(t, []Write{AddBody(kept), AddBody(gone), AddProcess(p)},
		[]Write{EraseBody("s", 1, gone.Name), ReplaceInProcess("s", "p", "$.Argv", `["redacted"]`)})
	db := open(t, Config{Dir: dir})
	all, err := db.BodiesOf(t.Context(), "s", 1, 1, 100)
	if d := cmp.Diff([]Body{kept}, all); d != "" || err != nil {
		t.Errorf("bodies: %v\n%s", err, d)
	}
	p.Body = []byte(`{"Argv":["redacted"],"PID":3}`)
	got, ok, err := db.GetProcess(t.Context(), "s", "p")
	check(t, "process", got, p, ok, err)
}

// TestTornSpoolGivesWhatIsWhole cuts the file at every length, and spoils every byte of its tail.
func TestTornSpoolGivesWhatIsWhole(t *testing.T) {
	dir := left(t, []Write{AddEvent(testEvent(1))}, []Write{AddEvent(testEvent(2))}, []Write{AddEvent(testEvent(3))})
	whole, err := os.ReadFile(filepath.Join(dir, spoolName))
	if err != nil {
		t.Fatal(err)
	}
	frame := len(whole) / 3
	replayed := func(spool []byte) int {
		t.Helper()
		seen := 0
		for r := bytes.NewReader(spool); ; {
			body, err := readFrame(r)
			if err != nil {
				t.Fatal(err)
			}
			if body == nil {
				return seen
			}
			if _, rest, err := parseRedo(body); err != nil || len(rest) != 0 {
				t.Fatalf("frame %d: %v, %d bytes left", seen, err, len(rest))
			}
			seen++
		}
	}
	for n := range len(whole) + 1 {
		if got := replayed(whole[:n]); got != n/frame {
			t.Errorf("of %d bytes %d frames were taken", n, got)
		}
	}
	for i := 2 * frame; i < len(whole); i++ {
		spoiled := bytes.Clone(whole)
		spoiled[i] ^= 0x40
		if got := replayed(spoiled); got != 2 {
			t.Errorf("with byte %d spoiled %d frames were taken", i, got)
		}
	}
}

func TestSpoolIsEmptied(t *testing.T) {
	dir := t.TempDir()
	db := open(t, Config{Dir: dir, FlushEvery: time.Millisecond})
	big := []byte(strings.Repeat("x", 20_000))
	slow := 0
	for n := range uint64(1500) {
		e := testEvent(n + 1)
		e.Facts = big
		p := db.Queue(Change{Writes: []Write{AddEvent(e)}, Spool: true})
		db.Kick()
		if !p.Spooled() {
			slow++
			if err := p.Wait(); err != nil {
				t.Fatal(err)
			}
		}
		if info, err := os.Stat(filepath.Join(dir, spoolName)); err != nil || info.Size() > spoolMax+50_000 {
			t.Fatalf("the spool has %d bytes, %v", info.Size(), err)
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, err := db.LastEvent(t.Context(), "s"); err != nil || n != 1500 {
		t.Errorf("%d events, %v", n, err)
	}
	if slow > 1000 {
		t.Errorf("%d of 1500 changes took the slow way", slow)
	}
	db.writer.mu.Lock()
	defer db.writer.mu.Unlock()
	if s := db.writer.spool; s.unsettled != 0 || s.size > spoolKeep || len(s.next) != 0 {
		t.Errorf("spool %d, %d, %d", len(s.next), s.size, s.unsettled)
	}
}

func TestSpoolTakesOnlyWhatItCanRedo(t *testing.T) {
	db := open(t, Config{FlushEvery: time.Hour})
	p := db.Queue(Change{Writes: []Write{AddEvent(testEvent(1)), PutSetting("a", "b")}, Spool: true})
	if p.Spooled() || p.InOrder() {
		t.Error("a change with a write that has no redo form was spooled")
	}
	if p := db.Queue(Change{Writes: []Write{AddEvent(testEvent(2))}}); p.Spooled() || !p.InOrder() {
		t.Error("a change that did not ask was spooled, or has no place in the order")
	}
	if p := db.Queue(Change{Writes: []Write{AddEvent(testEvent(3))}, Spool: true, Synced: true}); p.Spooled() {
		t.Error("a change that is to be on disk was only spooled")
	}
	if p := db.Queue(Change{Writes: []Write{AddEvent(testEvent(4))}, Spool: true}); !p.Spooled() || p.Wait() != nil {
		t.Error("not spooled")
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
}

// TestAcknowledgedChangeOutlivesADatabaseThatRefusesIt: what the spool has taken must be there after
// a restart, though the database would not have it at first.
func TestAcknowledgedChangeOutlivesADatabaseThatRefusesIt(t *testing.T) {
	dir := t.TempDir()
	db, err := Open(Config{Dir: dir, FlushEvery: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := sql.Open("sqlite", "file:"+filepath.Join(dir, fileName)+"?_pragma=busy_timeout(5000)")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = raw.Close() }()
	if _, err := raw.Exec("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END"); err != nil {
		t.Fatal(err)
	}
	if p := db.Queue(Change{Writes: []Write{AddEvent(testEvent(1))}, Spool: true}); !p.Spooled() {
		t.Fatal("not spooled")
	}
	if err := db.Flush(); err == nil {
		t.Fatal("the trigger does not work")
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Exec("DROP TRIGGER full"); err != nil {
		t.Fatal(err)
	}
	if n, err := open(t, Config{Dir: dir}).LastEvent(t.Context(), "s"); err != nil || n != 1 {
		t.Errorf("%d events, %v", n, err)
	}
}

// TestUnwaitedChangeIsSpooled: a change that nobody waits for is safe from a kill before the database has it, unless
// it can't lie in the spool; then the database has it as soon.
func TestUnwaitedChangeIsSpooled(t *testing.T) {
	dir := t.TempDir()
	db := open(t, Config{Dir: dir, FlushEvery: time.Millisecond, CommitEvery: time.Hour})
	db.Queue(Change{Writes: []Write{AddEvent(testEvent(1))}})
	db.Kick()
	inSpool := func() (n int) {
		spool, err := os.ReadFile(filepath.Join(dir, spoolName))
		if err != nil {
			t.Fatal(err)
		}
		for r := bytes.NewReader(spool); ; n++ {
			if body, err := readFrame(r); err != nil || body == nil {
				return n
			}
		}
	}
	testenv.Eventually(t, time.Minute, "the event lies in the spool", func() bool { return inSpool() == 1 })
	if n, err := db.LastEvent(t.Context(), "s"); err != nil || n != 0 {
		t.Errorf("the database has %d events, %v", n, err)
	}
	db.Queue(Change{Writes: []Write{PutSetting("a", "b")}})
	db.Kick()
	testenv.Eventually(t, time.Minute, "the database has both", func() bool {
		v, err := db.Setting(t.Context(), "a")
		n, nerr := db.LastEvent(t.Context(), "s")
		return err == nil && nerr == nil && v == "b" && n == 1
	})
}

func TestSpooledChangeReachesTheDatabase(t *testing.T) {
	db := open(t, Config{FlushEvery: time.Millisecond, CommitEvery: 5 * time.Millisecond})
	if !db.Queue(Change{Writes: []Write{AddEvent(testEvent(1))}, Spool: true}).Spooled() {
		t.Fatal("not spooled")
	}
	db.Kick()
	testenv.Eventually(t, time.Minute, "the database has the event", func() bool {
		n, err := db.LastEvent(t.Context(), "s")
		return err == nil && n == 1
	})
}

func FuzzReplay(f *testing.F) {
	body := AddEvent(testEvent(1)).redo(nil)
	f.Add(body)
	f.Add(PutProcess(Process{Sandbox: "s", ID: "p"}).redo(body))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, body []byte) {
		for len(body) > 0 {
			_, rest, err := parseRedo(body)
			if err != nil {
				return
			}
			if len(rest) >= len(body) {
				t.Fatal("no progress")
			}
			body = rest
		}
	})
}

// TestLateRows: a row that its successor replaces before it is written is never made, neither in the spool nor in
// the database; another one is.
func TestLateRows(t *testing.T) {
	dir := t.TempDir()
	db := open(t, Config{Dir: dir, FlushEvery: time.Hour})
	late := func(id string) Write {
		return AddProcess(Process{Sandbox: "s", ID: id, Late: func() []byte {
			if id == "short" {
				t.Error("a row was made that is not needed")
			}
			return []byte(id)
		}})
	}
	db.Queue(Change{Writes: []Write{late("short")}})
	db.Queue(Change{Writes: []Write{late("long")}})
	if !db.Queue(Change{Writes: []Write{PutProcess(Process{Sandbox: "s", ID: "short", Ended: 1, Body: []byte("end")})}, Spool: true}).Spooled() {
		t.Fatal("not spooled")
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"short": "end", "long": "long"} {
		p, ok, err := db.GetProcess(t.Context(), "s", id)
		if err != nil || !ok || string(p.Body) != want {
			t.Errorf("%s: %s, %v, %v", id, p.Body, ok, err)
		}
	}
}
