package sandbox

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/journal/content"
)

// lastOf returns a sandbox's newest event of a type.
func (s *server) lastOf(id string, typ journal.Type) journal.Event {
	s.w.t.Helper()
	events, err := s.Events(s.w.t.Context(), alice, id, 0, 0)
	if err != nil {
		s.w.t.Fatal(err)
	}
	for _, e := range slices.Backward(events) {
		if e.Type == typ {
			return e
		}
	}
	s.w.t.Fatalf("no %s among %d events", typ, len(events))
	return journal.Event{}
}

// body returns content that an event speaks of; "" with an error of kind NotFound is content that is not kept.
func (s *server) body(e journal.Event, name string) (string, error) {
	b, err := s.ReadBody(s.w.t.Context(), alice, e.Sandbox, e.Seq, name)
	return string(b.Data), err
}

// TestWhatProcessesSayIsKept ends a process in each of the ways in which the server can learn what it said.
func TestWhatProcessesSayIsKept(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	script := []string{"sh", "-c", "echo out; echo err >&2"}
	for name, run := range map[string]func() string{
		"streamed": func() string { return s.exec(sb.ID, script...).Process.ID },
		"followed": func() string {
			p := s.start(sb.ID, ProcessSpec{Argv: script})
			if _, err := s.Output(t.Context(), alice, sb.ID, p.ID, OutputOptions{Follow: true}, &gather{}); err != nil {
				t.Fatal(err)
			}
			return p.ID
		},
		"unwatched": func() string {
			p := s.start(sb.ID, ProcessSpec{Argv: script})
			s.wait(sb.ID, p.ID)
			return p.ID
		},
		"from the middle": func() string {
			p := s.start(sb.ID, ProcessSpec{Argv: script})
			if _, err := s.Output(t.Context(), alice, sb.ID, p.ID, OutputOptions{Follow: true, Offset: 2}, &gather{next: 2}); err != nil {
				t.Fatal(err)
			}
			return p.ID
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := s.ended(sb.ID, run())
			for body, want := range map[string]string{"guest.stdout": "out\n", "guest.stderr": "err\n"} {
				if got, err := s.body(e, body); got != want || err != nil {
					t.Errorf("%s is %q, %v", body, got, err)
				}
			}
			var f serverEndFacts
			if err := json.Unmarshal(e.Facts[journal.Server], &f); err != nil || f.Unread {
				t.Errorf("%+v, %v", f, err)
			}
		})
	}
}

func TestWhatProcessesAreGivenIsKept(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	if _, err := s.Execute(t.Context(), alice, sb.ID, ProcessSpec{Argv: []string{"cat"}}, RunOptions{Input: []byte("at once")}); err != nil {
		t.Fatal(err)
	}
	if got, err := s.body(s.lastOf(sb.ID, journal.ProcessStarted), "server.stdin"); got != "at once" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	b := s.find(sb.ID)
	b.mu.Lock()
	for _, pr := range b.procs {
		if pr.input != nil {
			t.Error("what it was given is held after its end")
		}
	}
	b.mu.Unlock()
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	for i, text := range []string{"bit ", "by ", "bit"} {
		for range 2 { // the second time nothing of it is taken
			if _, err := s.Input(t.Context(), alice, sb.ID, p.ID, int64([]int{0, 4, 7}[i]), []byte(text), false); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := s.Input(t.Context(), alice, sb.ID, p.ID, -1, nil, true); err != nil {
		t.Fatal(err)
	}
	s.wait(sb.ID, p.ID)
	if got, err := s.body(s.ended(sb.ID, p.ID), "server.stdin"); got != "bit by bit" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// Whatever is written side by side is kept whole and in the order in which the process got it: what cat says.
func TestInputSideBySideIsKept(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			if _, err := s.Input(t.Context(), alice, sb.ID, p.ID, -1, fmt.Appendf(nil, "line %d\n", i), false); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if _, err := s.Input(t.Context(), alice, sb.ID, p.ID, -1, nil, true); err != nil {
		t.Fatal(err)
	}
	s.wait(sb.ID, p.ID)
	e := s.ended(sb.ID, p.ID)
	got, err := s.body(e, "server.stdin")
	if err != nil || strings.Count(got, "\n") != 40 {
		t.Errorf("kept %q, %v", got, err)
	}
	if said, err := s.body(e, "guest.stdout"); said != got || err != nil {
		t.Errorf("cat said %q, %v", said, err)
	}
}

// What a process took of input that could not be written whole, or while another server was there, is told of as far as it
// is known.
func TestInputThatIsNotKeptIsCounted(t *testing.T) {
	pr := &proc{box: &box{}}
	steps := []struct {
		start int64
		data  string
		upTo  int64
	}{
		{5, "67", 7},     // five bytes went to an earlier server
		{-1, "89abc", 9}, // two were taken before the process closed its input
		{7, "89ab", 11},  // again, and two are new
		{-1, "xyz", -1},  // nobody knows
		{12, "d", 13},    // one of the three was taken
		{-1, "uv", -1},   // nobody knows, and nothing follows
	}
	for _, step := range steps {
		pr.took(step.start, []byte(step.data), step.upTo, true)
	}
	k := pr.stdin.k.Kept()
	if string(k.Data) != "6789abd" || pr.stdin.lost != 6 || pr.stdin.unsure != 2 {
		t.Errorf("%q, %d lost, %d unsure", k.Data, pr.stdin.lost, pr.stdin.unsure)
	}
}

func TestWhatCodeSaysIsKept(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.code(sb.ID, CodeSpec{ID: "r1", Code: "print hello\n1+1"})
	if got, err := s.body(s.lastOf(sb.ID, journal.RunStarted), "server.code"); got != "print hello\n1+1" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	e := s.lastOf(sb.ID, journal.RunEnded)
	if got, err := s.body(e, "guest.stdout"); got != "hello\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	got, err := s.body(e, "guest.results")
	if err != nil || !strings.HasPrefix(got, `{"result":{`) || !strings.Contains(got, `"2"`) || !json.Valid([]byte(got)) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestHowMuchIsKept makes a sandbox of each level and wants what it names, and nothing else; hashes are there in any case.
func TestHowMuchIsKept(t *testing.T) {
	s := newWorld(t).serve()
	for level, want := range map[Recording][]string{
		RecordHashes: nil, "": {"server.argv", "guest.stdout"}, RecordContent: {"server.argv", "guest.stdout"},
		RecordAll: {"server.argv", "guest.stdout", "server.content"},
	} {
		sb := s.create(alice, Spec{Record: level})
		s.exec(sb.ID, "echo", "out")
		files, err := s.Files(t.Context(), alice, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := files.Write(t.Context(), WriteRequest{PathRequest: PathRequest{Path: "f", Asker: Asker{User: "user", Dir: "/home/user"}}, Offset: -1, Size: -1}, strings.NewReader("content")); err != nil {
			t.Fatal(err)
		}
		if _, err := files.Read(t.Context(), ReadRequest{PathRequest: PathRequest{Path: "f", Asker: Asker{User: "user", Dir: "/home/user"}}}, func(FileInfo) error { return nil }, io.Discard); err != nil {
			t.Fatal(err)
		}
		for name, typ := range map[string]journal.Type{
			"server.argv": journal.ProcessStarted, "guest.stdout": journal.ProcessEnded, "server.content": journal.FileWritten,
		} {
			e := s.lastOf(sb.ID, typ)
			observer, fact, _ := strings.Cut(name, ".")
			if !strings.Contains(string(e.Facts[journal.Observer(observer)]), `"`+fact+`":{"body":"`) {
				t.Errorf("%q: no hash of %s in %s", level, name, e.Facts[journal.Observer(observer)])
			}
			if _, err := s.body(e, name); (err == nil) != slices.Contains(want, name) || err != nil && !errs.Is(err, errs.NotFound) {
				t.Errorf("%q: %s: %v", level, name, err)
			}
		}
	}
	if _, err := s.Create(t.Context(), alice, Spec{Record: "everything"}, CreateOptions{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a level that does not exist: %v", err)
	}
}

// TestSandboxesKeepTheirRecord: who calls back from inside can neither erase the record nor make children that keep less.
func TestSandboxesKeepTheirRecord(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Record: RecordAll})
	s.exec(sb.ID, "echo", "out")
	e := s.lastOf(sb.ID, journal.ProcessEnded)
	inside := Principal{ID: alice.ID, Sandbox: sb.ID}
	for _, p := range []Principal{inside, {ID: alice.ID, Inside: true}} {
		if _, err := s.Redact(t.Context(), p, sb.ID, journal.Redaction{Event: e.Seq}); !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	if _, err := s.Create(t.Context(), inside, Spec{Record: RecordContent}, CreateOptions{}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a child with less: %v", err)
	}
	if child, err := s.Create(t.Context(), inside, Spec{}, CreateOptions{}); err != nil || child.Spec.Record != RecordAll {
		t.Errorf("a child that says nothing keeps %q, %v", child.Spec.Record, err)
	}
	if _, err := s.Redact(t.Context(), bob, sb.ID, journal.Redaction{Event: e.Seq}); !errs.Is(err, errs.NotFound) {
		t.Errorf("somebody else: %v", err)
	}
	if _, err := s.body(e, "guest.stdout"); err != nil {
		t.Error(err)
	}
	red, err := s.Redact(t.Context(), alice, sb.ID, journal.Redaction{Event: e.Seq})
	if err != nil || red.Actor != alice.ID { // the twin
		t.Errorf("%+v, %v", red, err)
	}
}

// TestArgumentsAreForgottenAtWork redacts the start of processes while these end: the ends stay, and no argument comes back.
func TestArgumentsAreForgottenAtWork(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{})
	ids := make([]string, 20)
	for i := range ids {
		ids[i] = fmt.Sprintf("p%d", i)
		s.start(sb.ID, ProcessSpec{ID: ids[i], Argv: []string{"sh", "-c", "sleep 0.01; echo hunter2"}})
		e := s.lastOf(sb.ID, journal.ProcessStarted)
		if _, err := s.Redact(t.Context(), alice, sb.ID, journal.Redaction{Event: e.Seq}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		s.wait(sb.ID, id)
	}
	s.stop(false)
	s = w.serve()
	for _, id := range ids {
		if got, err := s.GetProcess(t.Context(), alice, sb.ID, id); err != nil || got.End != EndExited || !slices.Equal(got.Argv, []string{"[redacted]"}) {
			t.Errorf("%s: %+v, %v", id, got, err)
		}
	}
}

// TestArgumentsAreForgotten redacts a start, and looks for its arguments wherever a process is told of.
func TestArgumentsAreForgotten(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{})
	p := s.exec(sb.ID, "echo", "hunter2").Process
	e := s.lastOf(sb.ID, journal.ProcessStarted)
	if _, err := s.Redact(t.Context(), alice, sb.ID, journal.Redaction{Event: e.Seq}); err != nil {
		t.Fatal(err)
	}
	check := func(s *server) {
		t.Helper()
		got, err := s.GetProcess(t.Context(), alice, sb.ID, p.ID)
		if err != nil || !slices.Equal(got.Argv, []string{"[redacted]"}) {
			t.Errorf("%v, %v", got.Argv, err)
		}
		all, err := s.ListProcesses(t.Context(), alice, sb.ID)
		if err != nil || len(all) != 1 || slices.Contains(all[0].Argv, "hunter2") {
			t.Errorf("%+v, %v", all, err)
		}
	}
	check(s)
	check(s.crash())
}

// TestCommitsCarryTheLevel: what is made from a sandbox's files keeps as much as it, unless told otherwise.
func TestCommitsCarryTheLevel(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Record: RecordHashes})
	c := s.commit(sb.ID, CommitOptions{})
	if got := s.create(alice, Spec{Template: c.ID}).Spec.Record; got != RecordHashes {
		t.Errorf("from the commit: %q", got)
	}
	if got := s.create(alice, Spec{Template: c.ID, Record: RecordAll}).Spec.Record; got != RecordAll {
		t.Errorf("from the commit, with a level: %q", got)
	}
	_, forks, err := s.Fork(t.Context(), alice, sb.ID, ForkOptions{})
	if err != nil || forks[0].Err != nil || forks[0].Sandbox.Spec.Record != RecordHashes {
		t.Errorf("a fork: %+v, %v", forks, err)
	}
}

// TestRequestsAreKeptBesideTheRecord takes what the gateway tells of a request and its answer; what can't be is left out.
func TestRequestsAreKeptBesideTheRecord(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	k := content.NewKeeper(true)
	_, _ = k.Write([]byte("an answer"))
	e := egress.Event{
		Sandbox: sb.ID, Time: time.Now(), Type: egress.EventRequest, Method: "GET", Path: "/a", Status: 200,
		Bodies: map[string]content.Kept{egress.BodyAnswer: k.Kept()},
	}
	bad := e
	other := k.Kept()
	other.Data = []byte("AN ANSWER")
	bad.Path, bad.Bodies = "/b", map[string]content.Kept{egress.BodyAnswer: other}
	if err := s.RecordNetwork([]egress.Event{e, bad}); err != nil {
		t.Fatal(err)
	}
	events, err := s.Events(t.Context(), alice, sb.ID, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	events = slices.DeleteFunc(events, func(e journal.Event) bool { return e.Type != journal.NetworkRequest })
	if len(events) != 2 {
		t.Fatalf("%d requests", len(events))
	}
	if got, err := s.body(events[0], "server.answer_body"); got != "an answer" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if f := string(events[0].Facts[journal.Server]); strings.Contains(f, "an answer") || strings.Contains(f, "bodies") || !strings.Contains(f, `"answer_body":{"body":"`) {
		t.Errorf("facts %s", f)
	}
	if f := string(events[1].Facts[journal.Server]); !strings.Contains(f, "not_kept") || strings.Contains(f, "answer_body") || !strings.Contains(f, `"/b"`) {
		t.Errorf("facts %s", f)
	}
}
