package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/errs"
)

func open(t testing.TB, cfg Config) *DB {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	db, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return db
}

func TestOpenRefusesADirectoryInUse(t *testing.T) {
	dir := t.TempDir()
	open(t, Config{Dir: dir})
	_, err := Open(Config{Dir: dir})
	if !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("second server: %v", err)
	}
	text, hint := errs.PublicText(err)
	if !strings.Contains(text, fmt.Sprintf("process %d", os.Getpid())) || !strings.Contains(hint, "--data-dir") {
		t.Errorf("text %q, hint %q", text, hint)
	}
}

func TestSharedOpenWorksBesideAServer(t *testing.T) {
	dir := t.TempDir()
	server := open(t, Config{Dir: dir})
	tool := open(t, Config{Dir: dir, Shared: true})
	var wg sync.WaitGroup
	for i, db := range []*DB{server, tool} {
		wg.Go(func() {
			for n := range 100 {
				if err := db.Write(PutSetting(fmt.Sprintf("%d-%d", i, n), "x")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if v, err := server.Setting(t.Context(), "1-99"); err != nil || v != "x" {
		t.Errorf("the server reads %q, %v of what the tool wrote", v, err)
	}
	if v, err := tool.Setting(t.Context(), "0-99"); err != nil || v != "x" {
		t.Errorf("the tool reads %q, %v of what the server wrote", v, err)
	}
}

// TestSharedOpenMakesNothing: a mistyped path must not become a directory that no server reads.
func TestSharedOpenMakesNothing(t *testing.T) {
	empty := t.TempDir()
	for _, dir := range []string{empty, filepath.Join(empty, "nowhere")} {
		if _, err := Open(Config{Dir: dir, Shared: true}); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("made %v, %v", left, err)
	}
}

func TestOpenRefusesANewerSchema(t *testing.T) {
	dir := t.TempDir()
	db, err := Open(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Write(Func(func(tx *Tx) error { return tx.exec("PRAGMA user_version = 999") })); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = Open(Config{Dir: dir})
	if !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(err.Error(), "999") {
		t.Errorf("open: %v", err)
	}
}

func TestDirectoryIsPrivateAndMayHaveAnyName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a ?x=1&_pragma=query_only(1)#%41")
	db := open(t, Config{Dir: dir})
	if err := db.Write(PutSetting("a", "b")); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := os.Stat(filepath.Join(dir, fileName)); err != nil {
		t.Error(err)
	}
}

func TestOneBadWriteFailsAlone(t *testing.T) {
	db := open(t, Config{})
	bad := errors.New("bad")
	var all []Pending
	for i := range 10 {
		all = append(all, db.Queue(Change{Writes: []Write{PutSetting(fmt.Sprint("n", i), "x"), Func(func(*Tx) error {
			if i == 5 {
				return bad
			}
			return nil
		})}, Instead: func() []Write { return []Write{PutSetting(fmt.Sprint("instead", i), "x")} }}))
	}
	for i, p := range all {
		err := p.Wait()
		if i == 5 && !errors.Is(err, bad) || i != 5 && err != nil {
			t.Errorf("write %d: %v", i, err)
		}
	}
	for i := range 10 {
		v, err := db.Setting(t.Context(), fmt.Sprint("n", i))
		if want := map[bool]string{true: "", false: "x"}[i == 5]; err != nil || v != want {
			t.Errorf("setting %d is %q, %v, want %q", i, v, err, want)
		}
		v, err = db.Setting(t.Context(), fmt.Sprint("instead", i))
		if want := map[bool]string{true: "x", false: ""}[i == 5]; err != nil || v != want {
			t.Errorf("instead of %d is %q, %v, want %q", i, v, err, want)
		}
	}
}

func TestConcurrentWritesShareCommitsAndKeepTheirOrder(t *testing.T) {
	db := open(t, Config{})
	const callers, each = 32, 50
	var mu sync.Mutex
	order := make(map[string][]int)
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for n := range each {
				p := db.Queue(Change{
					Writes: []Write{PutSetting(fmt.Sprint(c), fmt.Sprint(n))},
					After: func(_, _ error) {
						mu.Lock()
						defer mu.Unlock()
						order[fmt.Sprint(c)] = append(order[fmt.Sprint(c)], n)
					},
				})
				if n%2 == 0 { // the odd ones ride along
					if err := p.Wait(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	for c := range callers {
		got := order[fmt.Sprint(c)]
		if len(got) != each {
			t.Fatalf("caller %d: %d of %d writes were told their outcome", c, len(got), each)
		}
		for i := range got {
			if got[i] != i {
				t.Fatalf("caller %d: write %d came at %d", c, got[i], i)
			}
		}
		if v, err := db.Setting(t.Context(), fmt.Sprint(c)); err != nil || v != fmt.Sprint(each-1) {
			t.Errorf("caller %d: %q, %v", c, v, err)
		}
	}
}

func TestQueuedWritesAreWrittenWithoutAWaiter(t *testing.T) {
	db := open(t, Config{})
	done := make(chan error, 1)
	db.Queue(Change{Writes: []Write{PutSetting("a", "1")}, After: func(err, _ error) { done <- err }})
	db.Kick()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("not written")
	}
}

func TestCloseWritesWhatIsQueued(t *testing.T) {
	dir := t.TempDir()
	db, err := Open(Config{Dir: dir, FlushEvery: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	db.Queue(Change{Writes: []Write{PutSetting("a", "1")}})
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := db.Write(PutSetting("c", "3")); err == nil {
		t.Error("a closed database took a write")
	}
	again := open(t, Config{Dir: dir})
	for k, want := range map[string]string{"a": "1", "c": ""} {
		if v, err := again.Setting(t.Context(), k); err != nil || v != want {
			t.Errorf("%s is %q, %v, want %q", k, v, err, want)
		}
	}
}

// TestLogStaysBounded writes some 120 MB without a rest, faster than any server does.
func TestLogStaysBounded(t *testing.T) {
	dir := t.TempDir()
	db := open(t, Config{Dir: dir, SyncEvery: time.Millisecond})
	value := strings.Repeat("x", 1000)
	var largest int64
	for i := range 8_000 {
		if err := db.Write(PutSetting(fmt.Sprint(i%500), value)); err != nil {
			t.Fatal(err)
		}
		if i%100 == 0 {
			info, err := os.Stat(filepath.Join(dir, fileName+"-wal"))
			if err != nil {
				t.Fatal(err)
			}
			largest = max(largest, info.Size())
		}
	}
	if largest > 80<<20 {
		t.Errorf("the write-ahead log grew to %d MB", largest>>20)
	}
}

// TestAcknowledgedWritesSurviveKill runs a child that writes and says so, and kills it with -9.
func TestAcknowledgedWritesSurviveKill(t *testing.T) {
	if dir := os.Getenv("STORE_TEST_CHILD"); dir != "" {
		writeForever(dir)
	}
	for _, mode := range []string{"", "synced", "spool"} {
		dir := t.TempDir()
		cmd := exec.Command(os.Args[0], "-test.run=^TestAcknowledgedWritesSurviveKill$")
		cmd.Env = append(os.Environ(), "STORE_TEST_CHILD="+dir, "STORE_TEST_MODE="+mode)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var last int
		for last < 300 {
			if _, err := fmt.Fscanln(out, &last); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for { // what it had said before it died
			n := 0
			if _, err := fmt.Fscanln(out, &n); err != nil {
				break
			}
			last = n
		}
		_ = cmd.Wait() // killed
		db := open(t, Config{Dir: dir})
		n, err := db.LastEvent(t.Context(), "s")
		if err != nil || n < uint64(last) {
			t.Errorf("mode %q: acknowledged %d events, found %d, %v", mode, last, n, err)
		}
		if all, err := db.EventsAfter(t.Context(), "s", 0, 1<<20); err != nil || uint64(len(all)) != n {
			t.Errorf("mode %q: %d events up to %d, %v", mode, len(all), n, err)
		}
	}
}

func writeForever(dir string) {
	db, err := Open(Config{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for n := uint64(1); ; n++ {
		e := AddEvent(Event{Sandbox: "s", Seq: n, Type: "t", Facts: []byte("{}")})
		mode := os.Getenv("STORE_TEST_MODE")
		if err := db.Queue(Change{Writes: []Write{e}, Synced: mode == "synced", Spool: mode == "spool"}).Wait(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(n)
	}
}

func TestEntities(t *testing.T) {
	db, ctx := open(t, Config{}), t.Context()
	s := Sandbox{
		ID: "abc", State: "running", Owner: "o", Name: "n", Created: 5,
		Labels: map[string]string{"a.b/c": "1"}, Body: []byte(`{"x":1}`),
	}
	p := Process{Sandbox: "abc", ID: "p", Started: 3, Body: []byte(`{}`)}
	a := Answered{Principal: "o", Scope: "create", Key: "k", Request: []byte{1}, Answer: "abc", Created: 9}
	if err := db.Write(PutSandbox(s), AddProcess(p), PutAnswered(a)); err != nil {
		t.Fatal(err)
	}
	got, ok, err := db.GetSandbox(ctx, "abc")
	check(t, "sandbox", got, s, ok, err)
	gotP, ok, err := db.GetProcess(ctx, "abc", "p")
	check(t, "process", gotP, p, ok, err)
	gotA, ok, err := db.GetAnswered(ctx, "o", "create", "k")
	check(t, "idempotency key", gotA, a, ok, err)

	p.Ended = 7
	if err := db.Write(PutProcess(p), AddProcess(Process{Sandbox: "abc", ID: "p"}), ForgetAnsweredBefore(10)); err != nil {
		t.Fatal(err)
	}
	gotP, ok, err = db.GetProcess(ctx, "abc", "p")
	check(t, "ended process", gotP, p, ok, err)
	if open, err := db.OpenProcesses(ctx, "abc"); err != nil || len(open) != 0 {
		t.Errorf("open processes: %v, %v", open, err)
	}
	if _, ok, _ := db.GetAnswered(ctx, "o", "create", "k"); ok {
		t.Error("an old idempotency key is still there")
	}
	if err := db.Write(AddEvent(Event{Sandbox: "abc", Seq: 1, Facts: []byte{}})); err != nil {
		t.Fatal(err)
	}
	if err := db.Write(AddEvent(Event{Sandbox: "abc", Seq: 1, Facts: []byte{}})); !errs.Is(err, errs.AlreadyExists) {
		t.Errorf("a counter was used twice: %v", err)
	}
}

func check[T any](t *testing.T, what string, got, want T, ok bool, err error) {
	t.Helper()
	if !ok || err != nil {
		t.Errorf("%s: found %v, %v", what, ok, err)
	} else if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func TestListSandboxes(t *testing.T) {
	db, ctx := open(t, Config{}), t.Context()
	var writes []Write
	for i := range 25 {
		state := "running"
		if i%5 == 0 {
			state = "stopped"
		}
		writes = append(writes, PutSandbox(Sandbox{
			ID: fmt.Sprintf("s%02d", i), State: state, Owner: fmt.Sprint("o", i%2), Parent: map[bool]string{true: "s00"}[i > 20],
			Name: "same", Created: int64(100 + i/3), Labels: map[string]string{"n.x": fmt.Sprint(i % 3)}, Body: []byte("{}"),
		}))
	}
	if err := db.Write(writes...); err != nil {
		t.Fatal(err)
	}
	count := func(q SandboxQuery) int {
		t.Helper()
		n, seen := 0, map[string]bool{}
		for q.Limit = 4; ; {
			page, err := db.ListSandboxes(ctx, q)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range page {
				if seen[s.ID] {
					t.Fatalf("%s is on two pages", s.ID)
				}
				seen[s.ID] = true
			}
			if n += len(page); len(page) < q.Limit {
				return n
			}
			q.Created, q.ID = page[len(page)-1].Created, page[len(page)-1].ID
		}
	}
	for _, c := range []struct {
		q    SandboxQuery
		want int
	}{
		{SandboxQuery{}, 25},
		{SandboxQuery{States: []string{"stopped"}}, 5},
		{SandboxQuery{States: []string{"running", "paused"}}, 20},
		{SandboxQuery{Owner: "o1"}, 12},
		{SandboxQuery{Parent: "s00"}, 4},
		{SandboxQuery{Labels: map[string]string{"n.x": "1"}}, 8},
		{SandboxQuery{Labels: map[string]string{"n.x": "1"}, Owner: "o0", States: []string{"running"}}, 3},
		{SandboxQuery{Labels: map[string]string{"n": "1"}}, 0},
	} {
		if got := count(c.q); got != c.want {
			t.Errorf("%+v: %d sandboxes, want %d", c.q, got, c.want)
		}
	}
	if all, err := db.SandboxesByPrefix(ctx, "s0", 100); err != nil || len(all) != 10 {
		t.Errorf("by prefix: %d, %v", len(all), err)
	}
	if all, err := db.SandboxesByName(ctx, "same", 1); err != nil || len(all) != 1 || all[0].Created != 108 {
		t.Errorf("by name: %v, %v", all, err)
	}
	if all, err := db.LiveSandboxes(ctx); err != nil || len(all) != 20 {
		t.Errorf("live: %d, %v", len(all), err)
	}
}

func BenchmarkProcess(b *testing.B) {
	for _, spool := range []bool{false, true} {
		b.Run(fmt.Sprint("spool=", spool), func(b *testing.B) {
			db := open(b, Config{})
			facts := []byte(strings.Repeat("f", 200))
			var n uint64
			for b.Loop() {
				n += 2
				sandbox := fmt.Sprintf("%020d", n/2%50)
				row := Process{Sandbox: sandbox, ID: fmt.Sprintf("prc_%016x", n*0x9E3779B97F4A7C15), Body: facts}
				db.Queue(Change{Writes: []Write{AddEvent(Event{Sandbox: sandbox, Seq: n, Type: "process.started", Facts: facts}), AddProcess(row)}})
				db.Kick()
				row.Ended = 1
				end := []Write{AddEvent(Event{Sandbox: sandbox, Seq: n + 1, Type: "process.ended", Facts: facts}), PutProcess(row)}
				if err := db.Queue(Change{Writes: end, Spool: spool}).Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	db := open(b, Config{})
	if err := db.Write(PutSetting("a", "b")); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := db.Setting(context.Background(), "a"); err != nil {
			b.Fatal(err)
		}
	}
}
