package journal

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/store"
)

// TestHashesAreKeptAlone records content of which only the hash is wanted.
func TestHashesAreKeptAlone(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	k := NewKeeper(false)
	_, _ = k.Write([]byte("not to be kept"))
	e, err := l.Record(t.Context(), Event{Sandbox: "box", Type: FileWritten}.With(Server, map[string]string{"path": "/a"}).WithKept(Server, "content", k))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.ReadBody(t.Context(), "box", e.Seq, "server.content"); !errs.Is(err, errs.NotFound) {
		t.Errorf("content that was not kept: %v", err)
	}
	r := verify(t, export(t, l, "box"), bundle.Options{})
	if _, bad := r.First(); bad || r.Bodies != 0 || r.Erased != 0 {
		t.Errorf("%+v", r)
	}
}

// holds reports whether a file of the data directory holds the text.
func holds(t *testing.T, dir, text string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if bytes.Contains(b, []byte(text)) {
			names = append(names, filepath.Base(path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestRedactedContentIsGone erases a password, and looks for it in every file: at once, and after the server was killed and
// has replayed what it found. The same look finds it before, and its neighbour's afterwards.
func TestRedactedContentIsGone(t *testing.T) {
	const secret, other = "correct-horse-battery-staple", "what-may-stay-where-it-is"
	dir := t.TempDir()
	l, db := openSigned(t, dir)
	e := Event{Sandbox: "box", Type: ProcessEnded, Process: "p"}.With(Guest, map[string]int{"code": 0})
	first, err := l.Record(t.Context(), e.WithBody(Guest, "stdout", []byte(secret)).WithBody(Guest, "stderr", []byte(other)))
	if err != nil {
		t.Fatal(err)
	}
	before := export(t, l, "box")
	if len(holds(t, dir, secret)) == 0 {
		t.Fatal("the look finds nothing that is there")
	}
	asked := ""
	red, err := l.Redact(t.Context(), Redaction{Sandbox: "box", Event: first.Seq, Names: []string{"guest.stdout"}, Actor: "key_a", Reason: "a password"},
		func(process string, names []string) []store.Write {
			asked = process + strings.Join(names, ",")
			return nil
		})
	if err != nil || red.Type != BodyRedacted || asked != "pguest.stdout" {
		t.Fatalf("%+v, %v, asked %q", red, err, asked)
	}
	if where := holds(t, dir, secret); len(where) > 0 {
		t.Errorf("still in %v", where)
	}
	if len(holds(t, dir, other)) == 0 {
		t.Error("its neighbour is gone as well")
	}
	if b, err := l.ReadBody(t.Context(), "box", first.Seq, "guest.stderr"); err != nil || string(b.Data) != other {
		t.Errorf("%q, %v", b.Data, err)
	}
	if _, err := l.ReadBody(t.Context(), "box", first.Seq, "guest.stdout"); !errs.Is(err, errs.NotFound) {
		t.Errorf("what was erased: %v", err)
	}
	after := export(t, l, "box")
	if r := verify(t, after, bundle.Options{}); !r.Integrity.OK || !r.Completeness.OK || r.Erased != 1 || r.Redacted != 1 || r.Bodies != 1 {
		t.Errorf("%+v", r)
	}
	if r := verify(t, before, bundle.Options{}); !r.Integrity.OK || r.Bodies != 2 {
		t.Errorf("the older bundle: %+v", r)
	}
	again := copyOf(t, dir) // as a kill leaves it
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	l, _ = openSigned(t, again)
	if where := holds(t, again, secret); len(where) > 0 {
		t.Errorf("after a kill in %v", where)
	}
	if b, err := l.ReadBody(t.Context(), "box", first.Seq, "guest.stderr"); err != nil || string(b.Data) != other {
		t.Errorf("after a kill: %q, %v", b.Data, err)
	}
}

// TestAKillBeforeTheScrub erases as a server does that is killed between the record and the files: the next one finishes it.
func TestAKillBeforeTheScrub(t *testing.T) {
	const secret = "correct-horse-battery-staple"
	dir := t.TempDir()
	l, db := openSigned(t, dir)
	e, err := l.Record(t.Context(), Event{Sandbox: "box", Type: ProcessEnded}.WithBody(Guest, "stdout", []byte(secret)))
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Flush(); err != nil { // so that the write-ahead log holds it, which no start empties by itself
		t.Fatal(err)
	}
	if _, err := l.Record(t.Context(), Event{Sandbox: "box", Type: BodyRedacted}, store.EraseBody("box", e.Seq, "guest.stdout")); err != nil {
		t.Fatal(err)
	}
	again := copyOf(t, dir)
	if len(holds(t, again, secret)) == 0 {
		t.Fatal("nothing is left to be scrubbed")
	}
	openSigned(t, again)
	if where := holds(t, again, secret); len(where) > 0 {
		t.Errorf("still in %v", where)
	}
}

// copyOf copies a data directory as it is.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	err := os.CopyFS(to, os.DirFS(dir))
	if err == nil {
		err = os.Chmod(filepath.Join(to, "keys", KeyFile), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func TestWhatCantBeRedacted(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	plain, err := l.Record(t.Context(), Event{Sandbox: "box", Type: SandboxCreated})
	if err != nil {
		t.Fatal(err)
	}
	with, err := l.Record(t.Context(), Event{Sandbox: "box", Type: ProcessStarted}.WithBody(Server, "argv", []byte("x")))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		event uint64
		names []string
		kind  errs.Kind
	}{
		{0, nil, errs.InvalidArgument},
		{plain.Seq, nil, errs.NotFound},
		{99, nil, errs.NotFound},
		{with.Seq, []string{"guest.argv"}, errs.NotFound},
	} {
		_, err := l.Redact(t.Context(), Redaction{Sandbox: "box", Event: tc.event, Names: tc.names}, nil)
		if !errs.Is(err, tc.kind) {
			t.Errorf("event %d, %v: %v, want %v", tc.event, tc.names, err, tc.kind)
		}
	}
	if _, err := l.Redact(t.Context(), Redaction{Sandbox: "box", Event: with.Seq}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Redact(t.Context(), Redaction{Sandbox: "box", Event: with.Seq}, nil); !errs.Is(err, errs.NotFound) {
		t.Errorf("the second time: %v", err)
	}
	checkDense(t, l, "box", 3)
}

// handClock is moved by its test, between calls.
type handClock struct {
	clock.Clock
	now time.Time
}

func (c *handClock) Now() time.Time { return c.now }

// TestOldContentExpires fills a journal, and lets age and room take from its oldest end.
func TestOldContentExpires(t *testing.T) {
	now := &handClock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	db, err := store.Open(store.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	l := Open(db, Options{Clock: now})
	for range 10 {
		if _, err := l.Record(t.Context(), Event{Sandbox: "box", Type: ProcessEnded}.WithBody(Guest, "stdout", make([]byte, 1000))); err != nil {
			t.Fatal(err)
		}
		now.now = now.now.Add(time.Hour)
	}
	left := func() (have []uint64) {
		for seq := uint64(1); seq <= 10; seq++ {
			if _, err := l.ReadBody(t.Context(), "box", seq, "guest.stdout"); err == nil {
				have = append(have, seq)
			}
		}
		return have
	}
	for _, tc := range []struct {
		keep  Keep
		first uint64
		left  int
	}{
		{Keep{}, 1, 10},
		{Keep{Age: 7*time.Hour + time.Minute}, 4, 7},
		{Keep{Age: 7*time.Hour + time.Minute}, 4, 7},
		{Keep{Bytes: 5000}, 6, 5},
		{Keep{Age: 24 * time.Hour, Bytes: 4999}, 7, 4},
	} {
		if err := l.Expire(t.Context(), tc.keep); err != nil {
			t.Fatal(err)
		}
		if have := left(); len(have) != tc.left || have[0] != tc.first {
			t.Errorf("%+v leaves %v", tc.keep, have)
		}
	}
	events, err := l.Events(t.Context(), ServerStream, 0, 0)
	if err != nil || len(events) != 3 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	var f expiredFacts
	if err := json.Unmarshal(events[0].Facts[Server], &f); err != nil || events[0].Type != BodiesExpired || f.Bodies != 3 || f.Bytes != 3000 {
		t.Errorf("%+v, %v", f, err)
	}
	checkDense(t, l, "box", 10)
}
