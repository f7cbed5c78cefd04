package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

// changes returns the facts of all files.changed events of a sandbox, with the event before each.
func (s *server) changes(id string) (facts []changedFacts, before []journal.Event) {
	s.w.t.Helper()
	events, err := s.Events(context.Background(), admin, id, 0, 100_000)
	if err != nil {
		s.w.t.Fatal(err)
	}
	for i, e := range events {
		if e.Type != journal.FilesChanged {
			continue
		}
		var f changedFacts
		if err := json.Unmarshal(e.Facts[journal.Server], &f); err != nil {
			s.w.t.Fatal(err)
		}
		facts, before = append(facts, f), append(before, events[i-1])
	}
	return facts, before
}

func created(path string) rootfs.FileChange {
	return rootfs.FileChange{Op: rootfs.Created, Path: path, Type: "file", Size: 3}
}

// Each end has a record right behind it, and what changed before a start is told of before it.
func TestFileChangesAreBoundToEnds(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{FileChanges: FileChangesFull})
	s.exec(sb.ID, "true")
	w.roots.Changed(sb.ID, created("/late\xff"))
	long := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	w.roots.Changed(sb.ID, created("/a"), rootfs.FileChange{Op: rootfs.Renamed, From: "/b", Path: "/c", Type: "dir"})
	short := s.exec(sb.ID, "true")
	if err := s.Signal(t.Context(), admin, sb.ID, long.ID, 9, false); err != nil {
		t.Fatal(err)
	}
	s.wait(sb.ID, long.ID)
	got, before := s.changes(sb.ID)
	if len(got) != 5 {
		t.Fatalf("%d records: %+v", len(got), got)
	}
	if f := got[0]; !f.Alone || f.Between || len(f.Files) > 0 || before[0].Type != journal.ProcessEnded {
		t.Errorf("nothing changed: %+v after %s", f, before[0].Type)
	}
	if f := got[1]; !f.Between || f.Created != 1 || f.Since <= got[0].Since || f.Files[0].Path != "/late\x00ff" {
		t.Errorf("between: %+v", f)
	}
	// What came while the long one ran alone is told before the short one starts; both could have done the rest.
	if f := got[2]; !f.Between || f.Created != 1 || f.Renamed != 1 || !slices.Equal(f.Alive, []string{long.ID}) {
		t.Errorf("before the second start: %+v", f)
	}
	if f := got[3]; f.Alone || before[3].Process != short.Process.ID || !slices.Equal(f.Alive, []string{long.ID}) {
		t.Errorf("end of the short one: %+v after %+v", f, before[3])
	}
	if f := got[4]; !f.Alone || before[4].Process != long.ID || before[4].Type != journal.ProcessEnded {
		t.Errorf("end of the long one: %+v after %+v", f, before[4])
	}
	s.history(sb.ID)
}

// Off, which is the default, records nothing; a summary counts.
func TestFileChangesOffAndSummary(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	off := s.create(alice, Spec{})
	w.roots.Changed(off.ID, created("/a"))
	s.exec(off.ID, "true")
	if got, _ := s.changes(off.ID); len(got) > 0 {
		t.Errorf("off: %+v", got)
	}
	sum := s.create(alice, Spec{FileChanges: FileChangesSummary})
	p := s.start(sum.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	w.roots.Changed(sum.ID, created("/a"), created("/b"))
	if err := s.Signal(t.Context(), admin, sum.ID, p.ID, 9, false); err != nil {
		t.Fatal(err)
	}
	s.wait(sum.ID, p.ID)
	if got, _ := s.changes(sum.ID); len(got) != 1 || got[0].Created != 2 || got[0].Files != nil || !got[0].Alone {
		t.Errorf("summary: %+v", got)
	}
	_, err := s.Create(t.Context(), alice, Spec{FileChanges: "much"}, CreateOptions{})
	wantKind(t, "unknown level", err, errs.InvalidArgument)
	fork := s.create(alice, Spec{Template: mustCommit(t, s, sum.ID)})
	if fork.Spec.FileChanges != FileChangesSummary {
		t.Errorf("a sandbox of the commit has %q", fork.Spec.FileChanges)
	}
	none := s.create(alice, Spec{Template: mustCommit(t, s, sum.ID), FileChanges: FileChangesOff})
	if none.Spec.FileChanges != "" {
		t.Errorf("one that wants none has %q", none.Spec.FileChanges)
	}
}

// What the named files hold is hashed, as content beside the event: it is kept and erased like other content.
func TestFileHashesAreContent(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	hashed, long := created("/a"), created("/long")
	hashed.Sum, long.NotSummed = strings.Repeat("ab", 32), rootfs.NotSummedSize
	for level, kept := range map[Recording]bool{RecordContent: true, RecordHashes: false} {
		sb := s.create(alice, Spec{FileChanges: FileChangesFull, Record: level})
		w.roots.Changed(sb.ID, rootfs.FileChange{Op: rootfs.Deleted, Path: "/0", Type: "file"}, hashed, long)
		s.exec(sb.ID, "true")
		events, err := s.Events(t.Context(), admin, sb.ID, 0, 1000)
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(events, func(e journal.Event) bool { return e.Type == journal.FilesChanged })
		if at < 0 || !strings.Contains(string(events[at].Facts[journal.Server]), `"unhashed":"size"`) || strings.Contains(string(events[at].Facts[journal.Server]), hashed.Sum) {
			t.Fatalf("%s: %+v", level, events)
		}
		body, err := s.ReadBody(t.Context(), alice, sb.ID, events[at].Seq, "server.hashes")
		if want := fmt.Sprintf("[%q,%q,%q]", "", hashed.Sum, ""); kept && string(body.Data) != want {
			t.Errorf("%s: %s, %v; want %s", level, body.Data, err, want)
		} else if !kept && !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %s, %v", level, body.Data, err)
		}
		if !kept {
			continue
		}
		if _, err := s.Redact(t.Context(), alice, sb.ID, journal.Redaction{Event: events[at].Seq}); err != nil {
			t.Fatal(err)
		}
		if body, err := s.ReadBody(t.Context(), alice, sb.ID, events[at].Seq, "server.hashes"); !errs.Is(err, errs.NotFound) {
			t.Errorf("erased, and there: %s, %v", body.Data, err)
		}
	}
	// A summary hashes nothing, and where nothing has a hash there is no body.
	sum := s.create(alice, Spec{FileChanges: FileChangesSummary})
	none := s.create(alice, Spec{FileChanges: FileChangesFull})
	w.roots.Changed(sum.ID, hashed)
	w.roots.Changed(none.ID, long)
	for _, id := range []string{sum.ID, none.ID} {
		s.exec(id, "true")
		events, err := s.Events(t.Context(), admin, id, 0, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			if strings.Contains(string(e.Facts[journal.Server]), `"hashes"`) && e.Type == journal.FilesChanged {
				t.Errorf("hashes: %s", e.Facts[journal.Server])
			}
		}
	}
}

func mustCommit(t *testing.T, s *server, id string) string {
	t.Helper()
	c, err := s.MakeCommit(t.Context(), alice, id, CommitOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c.ID
}

// What can't be told is said, and what comes next can be.
func TestFileChangesThatAreNotKnown(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{FileChanges: FileChangesFull})
	for range 2 {
		p := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
		w.roots.Changed(sb.ID, created("/a"))
		if err := s.Signal(t.Context(), admin, sb.ID, p.ID, 9, false); err != nil {
			t.Fatal(err)
		}
		w.roots.FailPoints(errs.New(errs.ResourceExhausted, "too many"))
		s.wait(sb.ID, p.ID)
		w.roots.FailPoints(nil)
	}
	s.exec(sb.ID, "true")
	got, _ := s.changes(sb.ID)
	if last := got[len(got)-1]; len(got) < 3 || last.Unknown != "" || !last.Alone {
		t.Errorf("records: %+v", got)
	}
}

// A file API call, an end of the server and an end of the sandbox: everything is told of once.
func TestFileChangesAcrossServers(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{FileChanges: FileChangesFull})
	f, err := s.Files(t.Context(), alice, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(t.Context(), WriteRequest{PathRequest: PathRequest{Path: "x.txt"}, Offset: -1, Size: -1}, strings.NewReader("text")); err != nil {
		t.Fatal(err)
	}
	w.roots.Changed(sb.ID, created("/home/user/x"))
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	w.roots.Changed(sb.ID, created("/mine"))
	s = s.crash()
	if err := s.Signal(t.Context(), admin, sb.ID, p.ID, 9, false); err != nil {
		t.Fatal(err)
	}
	s.wait(sb.ID, p.ID)
	w.roots.Changed(sb.ID, created("/left"))
	if _, err := s.Delete(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
	got, before := s.changes(sb.ID)
	if len(got) != 3 {
		t.Fatalf("%d records: %+v", len(got), got)
	}
	if f := got[0]; !f.Between || f.Calls != 1 || f.Created != 1 {
		t.Errorf("by the file API: %+v", f)
	}
	if f := got[1]; f.Unknown != "" || f.Created != 1 || f.Files[0].Path != "/mine" || before[1].Process != p.ID {
		t.Errorf("over the kill: %+v after %+v", f, before[1])
	}
	if f := got[2]; !f.Between || f.Files[0].Path != "/left" {
		t.Errorf("at the end: %+v", f)
	}
	s.history(sb.ID)
}

// A process that this server did not begin, as one that came along in a memory image, is named like the others.
func TestFileChangesNameWhatWasTakenUp(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{FileChanges: FileChangesFull})
	other := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	b := s.find(sb.ID)
	b.changes.leave(other.ID)
	b.changes.mu.Lock()
	clear(b.changes.seen)
	b.changes.mu.Unlock()
	alone := func() bool {
		w.roots.Changed(sb.ID, created("/a"))
		s.exec(sb.ID, "true")
		got, _ := s.changes(sb.ID)
		return got[len(got)-1].Alone
	}
	if !alone() {
		t.Error("the twin: the tracker knows of it before it is taken up")
	}
	infos, err := b.guest.List(t.Context())
	if err == nil {
		_, err = s.takeUpProcesses(t.Context(), b, slices.DeleteFunc(infos, func(i guestwire.ProcessInfo) bool { return i.ID != other.ID }))
	}
	if err != nil {
		t.Fatal(err)
	}
	if alone() {
		t.Error("nobody else could have changed files, beside one that was taken up")
	}
}

// However many files there are and whatever they are called, a record is bounded, and says where the rest is.
func TestListOfChangesIsBounded(t *testing.T) {
	var all []rootfs.FileChange
	for i := range 5000 {
		all = append(all, created(fmt.Sprintf("/project/node_modules/p%02d/f%d", i%40, i)))
	}
	var f changedFacts
	f.list(all, true)
	if f.Created != 5000 || len(f.Files) != maxNamed || f.More != 5000-maxNamed {
		t.Errorf("%d created, %d named, %d more", f.Created, len(f.Files), f.More)
	}
	sum := 0
	for _, d := range f.MoreIn {
		if !strings.HasPrefix(d.Dir, "/project/node_modules/p") {
			t.Errorf("directory %s", d.Dir)
		}
		sum += d.Files
	}
	if sum != f.More || len(f.MoreIn) != 40 {
		t.Errorf("%d in %d directories", sum, len(f.MoreIn))
	}
	var g changedFacts
	long := strings.Repeat("\xff", 4000)
	g.list([]rootfs.FileChange{created("/" + long), created("/x/" + long), created("/x/y")}, true)
	if len(g.Files) != 1 || g.More != 2 || len(g.MoreIn) != 1 || g.MoreIn[0].Dir != "/x" {
		t.Errorf("long names: %d named, %d more in %v", len(g.Files), g.More, g.MoreIn)
	}
	var deep changedFacts
	bottom := strings.Repeat("/d", 2000)
	all = all[:0]
	for i := range 20_000 {
		all = append(all, created(fmt.Sprintf("%s/f%d", bottom, i)))
	}
	deep.list(all, true)
	if len(deep.MoreIn) != 1 || deep.MoreIn[0].Dir != strings.Repeat("/d", maxMoreDepth) || deep.MoreIn[0].Files != deep.More {
		t.Errorf("far down: %d more in %v", deep.More, deep.MoreIn)
	}
	var none changedFacts
	none.list(all, false)
	if none.Files != nil || none.MoreIn != nil || none.Created != len(all) {
		t.Errorf("summary: %+v", none)
	}
}
