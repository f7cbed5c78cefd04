package journal

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
)

// told records a sandbox's story of n events, among those of others.
func told(t testing.TB, l *Log, sandbox string, n int) {
	t.Helper()
	for i := range n {
		p := "prc_" + strconv.Itoa(i/2)
		e := Event{Sandbox: sandbox, Type: ProcessStarted, Actor: "local", Process: p}
		if i%2 == 0 {
			l.Post(e.With(Server, map[string]any{"dir": "/home"}).WithBody(Server, "argv", fmt.Appendf(nil, `["echo","%d"]`, i)))
			l.Post(Event{Sandbox: "another", Type: FileRead})
			continue
		}
		e.Type = ProcessEnded
		if _, err := l.Record(t.Context(), e.With(Guest, map[string]any{"code": i}).WithBody(Guest, "stdout", []byte(strconv.Itoa(i)))); err != nil {
			t.Fatal(err)
		}
	}
	_ = l.db.Flush()
}

func export(t testing.TB, l *Log, sandbox string, heads ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := l.Export(context.Background(), sandbox, heads, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func verify(t testing.TB, b []byte, o bundle.Options) bundle.Report {
	t.Helper()
	r, err := bundle.Verify(bytes.NewReader(b), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestABundleVerifies(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	told(t, l, "s", 21)
	old, err := l.Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	old = slices.Clone(old)
	told(t, l, "s", 20)
	b := export(t, l, "s", old)
	r := verify(t, b, bundle.Options{Key: l.PublicKey(), Heads: [][]byte{old}})
	if p, bad := r.First(); bad {
		t.Fatalf("%+v", p)
	}
	if r.Events != 41 || r.Bodies != 41 || r.Erased != 0 || r.GuestOnly != 20 || !r.Anchored.OK || r.Anchored.Events != 21 || r.Reproduced.Processes == 0 {
		t.Errorf("%+v", r)
	}
	// Without the proof a head is not anchored, and a bundle that is older than a head neither.
	if r := verify(t, export(t, l, "s"), bundle.Options{Heads: [][]byte{old}}); r.Anchored.OK {
		t.Errorf("anchored without a proof: %+v", r.Anchored)
	}
	told(t, l, "s", 2)
	newer, err := l.Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	if r := verify(t, b, bundle.Options{Heads: [][]byte{newer}}); r.Anchored.OK {
		t.Errorf("anchored by a head beyond it: %+v", r.Anchored)
	}
}

// TestEachEventIsTold: who verifies a bundle is told of its events in order, as they are, with the bodies that are there.
func TestEachEventIsTold(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	told(t, l, "s", 6)
	whole := export(t, l, "s")
	private := slices.DeleteFunc(bytes.SplitAfter(whole, []byte("\n")), func(line []byte) bool {
		return bytes.HasPrefix(line, []byte(`{"body"`)) && bytes.Contains(line, []byte("argv"))
	})
	for name, b := range map[string][]byte{"whole": whole, "without arguments": bytes.Join(private, nil)} {
		var events []string
		var bodies []string
		verify(t, b, bundle.Options{Each: func(event json.RawMessage, with []bundle.Body) {
			var e Event
			if err := json.Unmarshal(event, &e); err != nil {
				t.Error(err)
			}
			events = append(events, fmt.Sprintf("%d %s %s", e.Seq, e.Type, e.Process))
			for _, one := range with {
				bodies = append(bodies, fmt.Sprintf("%d %s %s", e.Seq, one.Name, one.Data))
			}
		}})
		wantEvents := []string{
			"1 process.started prc_0", "2 process.ended prc_0", "3 process.started prc_1", "4 process.ended prc_1", "5 process.started prc_2", "6 process.ended prc_2",
		}
		wantBodies := []string{
			`1 server.argv ["echo","0"]`, "2 guest.stdout 1", `3 server.argv ["echo","2"]`, "4 guest.stdout 3", `5 server.argv ["echo","4"]`, "6 guest.stdout 5",
		}
		if name != "whole" {
			wantBodies = []string{"2 guest.stdout 1", "4 guest.stdout 3", "6 guest.stdout 5"}
		}
		if !slices.Equal(events, wantEvents) || !slices.Equal(bodies, wantBodies) {
			t.Errorf("%s: events %q, bodies %q", name, events, bodies)
		}
	}
	// What was cut off is not told, and what is there is, with its bodies.
	n := 0
	verify(t, whole[:bytes.LastIndex(whole, []byte(`{"seal"`))], bundle.Options{Each: func(_ json.RawMessage, with []bundle.Body) { n += len(with) }})
	if n != 6 {
		t.Errorf("%d bodies of a bundle without its seal", n)
	}
}

// TestRedactedBundlesVerify leaves bodies out, as whoever passes a bundle on may.
func TestRedactedBundlesVerify(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	told(t, l, "s", 10)
	lines := bytes.SplitAfter(export(t, l, "s"), []byte("\n"))
	lines = slices.DeleteFunc(lines, func(b []byte) bool { return bytes.HasPrefix(b, []byte(`{"body"`)) })
	r := verify(t, bytes.Join(lines, nil), bundle.Options{Key: l.PublicKey()})
	if p, bad := r.First(); bad || r.Bodies != 0 || r.Erased != 10 {
		t.Errorf("%+v %v %+v", p, bad, r)
	}
}

// TestAHeadOfACutLogIsRefused exports with a head of a log that has lost its tail since, or is another.
func TestAHeadOfACutLogIsRefused(t *testing.T) {
	home := t.TempDir()
	one, _ := openSigned(t, home)
	told(t, one, "s", 10)
	head, err := one.Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	// The attacker has everything, the key too, and begins the log anew.
	for _, n := range []int{4, 30} {
		dir := t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, "keys"), 0o700), os.Link(filepath.Join(home, "keys", KeyFile), filepath.Join(dir, "keys", KeyFile))); err != nil {
			t.Fatal(err)
		}
		other, _ := openSigned(t, dir)
		told(t, other, "s", n)
		refusesHead(t, other, head)
	}
}

// refusesHead fails unless a log that is not what it was is shown by a head from before, and, which is the twin, by
// that alone: without it a bundle verifies.
func refusesHead(t *testing.T, l *Log, head []byte) {
	t.Helper()
	if err := l.Export(t.Context(), "s", [][]byte{head}, &bytes.Buffer{}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a log of %d entries took the head: %v", l.tree.Size(), err)
	}
	b := export(t, l, "s")
	if r := verify(t, b, bundle.Options{Key: l.PublicKey()}); !r.Integrity.OK || !r.Completeness.OK {
		t.Errorf("the twin: %+v %+v", r.Integrity, r.Completeness)
	}
	if r := verify(t, b, bundle.Options{Key: l.PublicKey(), Heads: [][]byte{head}}); r.Anchored.OK {
		t.Errorf("anchored: %+v", r.Anchored)
	}
}

// TestARollbackShows sets the whole data directory back to what it was, which leaves no trace in it.
func TestARollbackShows(t *testing.T) {
	dir := t.TempDir()
	run := func(n int) (head []byte) {
		l, db := openSigned(t, dir)
		told(t, l, "s", n)
		head, err := l.Checkpoint()
		if err := errors.Join(err, l.Close(), db.Close()); err != nil {
			t.Fatal(err)
		}
		return head
	}
	run(6)
	data := filepath.Join(dir, "data")
	if err := os.CopyFS(filepath.Join(dir, "kept"), os.DirFS(data)); err != nil {
		t.Fatal(err)
	}
	head := run(4)
	if err := errors.Join(os.RemoveAll(data), os.Rename(filepath.Join(dir, "kept"), data)); err != nil {
		t.Fatal(err)
	}
	l, _ := openSigned(t, dir)
	refusesHead(t, l, head)
}

// TestAnotherKeyShows verifies what somebody made who has all but the key, and gives a key of the same name.
func TestAnotherKeyShows(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	told(t, l, "s", 6)
	honest := take(export(t, l, "s"))
	other, _ := openSigned(t, t.TempDir())
	told(t, other, "s", 6)
	forged := take(export(t, other, "s"))

	if r := verify(t, forged.join(), bundle.Options{Key: l.PublicKey()}); r.Integrity.OK {
		t.Error("a bundle of another key passed")
	}
	// The twin: the given key alone shows it.
	r := verify(t, forged.join(), bundle.Options{})
	if p, bad := r.First(); bad || r.KeyGiven {
		t.Errorf("the twin: %+v %+v", p, r)
	}
	// The right key's name over the other's signatures, for the whole and for the checkpoint alone.
	forged.head[0] = honest.head[0]
	honest.head[1] = forged.head[1]
	for name, b := range map[string]*parts{"whole": forged, "checkpoint": honest} {
		for _, key := range []string{"", l.PublicKey()} {
			if r := verify(t, b.join(), bundle.Options{Key: key}); r.Integrity.OK {
				t.Errorf("%s: a forged signature passed, key %q", name, key)
			}
		}
	}
}

// tamperings of a bundle of events and nothing else changed; each returns the position of the first event that
// is wrong, -1 for the bundle as a whole.
type tampering struct {
	name string
	do   func(r *rand.Rand, b *parts) int
}

// parts is a bundle taken apart: head lines, each event with its bodies, the seal.
type parts struct {
	head   [][]byte
	events [][][]byte
	tail   [][]byte
}

func take(b []byte) *parts {
	var p parts
	for l := range bytes.Lines(b) {
		switch {
		case bytes.HasPrefix(l, []byte(`{"event"`)):
			p.events = append(p.events, [][]byte{l})
		case bytes.HasPrefix(l, []byte(`{"body"`)):
			last := len(p.events) - 1
			p.events[last] = append(p.events[last], l)
		case bytes.HasPrefix(l, []byte(`{"seal"`)):
			p.tail = append(p.tail, l)
		default:
			p.head = append(p.head, l)
		}
	}
	return &p
}

func (p *parts) clone() *parts {
	return &parts{head: slices.Clone(p.head), events: slices.Clone(p.events), tail: slices.Clone(p.tail)}
}

func (p *parts) join() []byte {
	b := bytes.Join(p.head, nil)
	for _, e := range p.events {
		b = append(b, bytes.Join(e, nil)...)
	}
	return append(b, bytes.Join(p.tail, nil)...)
}

// changed returns a copy of an event's lines in which some byte of one of them is another.
func changed(r *rand.Rand, lines [][]byte) [][]byte {
	lines = slices.Clone(lines)
	at := r.IntN(len(lines))
	l := slices.Clone(lines[at])
	pos := r.IntN(len(l) - 1) // not the line feed
	for {
		if c := byte(r.IntN(256)); c != l[pos] && c != '\n' {
			l[pos] = c
			break
		}
	}
	lines[at] = l
	return lines
}

// recomputed changes an event and makes its line whole again, as somebody would who does not have the key.
func recomputed(t testing.TB, l []byte) []byte {
	var line bundle.Line
	if err := json.Unmarshal(l, &line); err != nil {
		t.Fatal(err)
	}
	line.Event = bytes.Replace(line.Event, []byte(`"actor":"local"`), []byte(`"actor":"other"`), 1)
	var b bytes.Buffer
	if err := line.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func tamperings(t testing.TB, foreign *parts) []tampering {
	return []tampering{
		{"edit", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			b.events[i] = changed(r, b.events[i])
			return i
		}},
		{"delete", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			b.events = slices.Delete(b.events, i, i+1+r.IntN(min(5, len(b.events)-i)))
			return i
		}},
		{"swap", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events) - 1)
			j := i + 1 + r.IntN(len(b.events)-i-1)
			b.events[i], b.events[j] = b.events[j], b.events[i]
			return i
		}},
		{"truncate", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			b.events = b.events[:i]
			if r.IntN(2) == 0 {
				b.tail = nil
			}
			return i
		}},
		{"splice", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			from := foreign.events[r.IntN(len(foreign.events))]
			if r.IntN(2) == 0 {
				b.events[i] = from
			} else {
				b.events = slices.Insert(b.events, i, from)
			}
			return i
		}},
		{"repeat", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			b.events = slices.Insert(b.events, i, b.events[i])
			return i + 1
		}},
		{"recompute", func(r *rand.Rand, b *parts) int {
			i := r.IntN(len(b.events))
			b.events[i] = append([][]byte{recomputed(t, b.events[i][0])}, b.events[i][1:]...)
			return i
		}},
		{"frame", func(r *rand.Rand, b *parts) int {
			if lines := [][][]byte{b.head, b.tail}; r.IntN(2) == 0 {
				b.head = changed(r, lines[0])
			} else {
				b.tail = changed(r, lines[1])
			}
			return -1
		}},
		{"another's seal", func(_ *rand.Rand, b *parts) int {
			b.tail = foreign.tail
			return -1
		}},
		{"another's log", func(_ *rand.Rand, b *parts) int {
			b.head = foreign.head // signed with another key
			return -1
		}},
	}
}

// TestSoakTamperingShows tampers with a bundle of 500 events at random, each time in one of ten ways, and wants the
// first wrong event named.
func TestSoakTamperingShows(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	told(t, l, "s", 500)
	whole := take(export(t, l, "s"))
	other, _ := openSigned(t, t.TempDir())
	told(t, other, "s", 40)
	kinds := tamperings(t, take(export(t, other, "s")))
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same each time
	for i := range rounds(200, 10_000) {
		k := kinds[i%len(kinds)]
		b := whole.clone()
		want := k.do(r, b)
		report := verify(t, b.join(), bundle.Options{Key: l.PublicKey()})
		if p, bad := report.First(); !bad || p.Event != want && (want != -1 || p.Event > len(b.events)) {
			t.Errorf("%d %s: first %+v (%v), want %d", i, k.name, p, bad, want)
		}
	}
}

// TestSoakCleanBundlesRaiseNoAlarm exports at many sizes of the log, from a new sandbox now and then: each bundle holds all of
// one.
func TestSoakCleanBundlesRaiseNoAlarm(t *testing.T) {
	l, _ := openSigned(t, t.TempDir())
	var heads [][]byte
	for i := range rounds(60, 1000) {
		sandbox := fmt.Sprintf("s%d", i/50)
		told(t, l, sandbox, 1+i%3)
		head, err := l.Checkpoint()
		if err != nil {
			t.Fatal(err)
		}
		if heads = append(heads, slices.Clone(head)); len(heads) > 5 {
			heads = heads[1:]
		}
		r := verify(t, export(t, l, sandbox, heads...), bundle.Options{Key: l.PublicKey(), Heads: heads})
		if p, bad := r.First(); bad || !r.Anchored.OK {
			t.Fatalf("round %d: %+v, %+v", i, p, r.Anchored)
		}
	}
}

func FuzzVerify(f *testing.F) {
	l, _ := openSigned(f, f.TempDir())
	told(f, l, "s", 6)
	good := export(f, l, "s")
	f.Add(good)
	f.Add([]byte(`{"bundle":{"version":1,"origin":"a","sandbox":"s","key":"a+00000000+AQ=="}}` + "\n"))
	f.Add([]byte(`{"lost":{"seq":1,"hash":"` + base64.StdEncoding.EncodeToString(make([]byte, 32)) + `"},"leaf":0}` + "\n"))
	events := take(good).events
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := bundle.Verify(bytes.NewReader(b), bundle.Options{Key: l.PublicKey()})
		if err != nil {
			t.Fatal(err)
		}
		if _, bad := r.First(); bad {
			return
		}
		// Nothing passes but what was exported, with bodies or without.
		got := take(b)
		if len(got.events) != len(events) {
			t.Fatalf("a bundle of %d events passed", len(got.events))
		}
		for i, e := range got.events {
			if !bytes.Equal(e[0], events[i][0]) {
				t.Fatalf("event %d passed as %q", i, e[0])
			}
		}
	})
}

func BenchmarkVerify500Processes(b *testing.B) {
	l, _ := openSigned(b, b.TempDir())
	told(b, l, "s", 1000)
	whole := export(b, l, "s")
	b.SetBytes(int64(len(whole)))
	for b.Loop() {
		r, err := bundle.Verify(bytes.NewReader(whole), bundle.Options{Key: l.PublicKey()})
		if _, bad := r.First(); bad || err != nil {
			b.Fatal(r, err)
		}
	}
}
