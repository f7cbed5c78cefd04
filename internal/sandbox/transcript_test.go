package sandbox

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
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
