package sandbox

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

func TestFilesAreRecorded(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	f, err := s.Files(ctx, alice, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	at := func(p string) PathRequest { return PathRequest{Path: p} }
	if _, err := f.Write(ctx, WriteRequest{PathRequest: at("a.txt"), Offset: -1, Size: -1}, strings.NewReader("hello")); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if _, err := f.Read(ctx, ReadRequest{PathRequest: at("a.txt"), Length: -1}, func(FileInfo) error { return nil }, &got); err != nil || got.String() != "hello" {
		t.Errorf("read %q, %v", got.String(), err)
	}
	if _, err := f.MakeDir(ctx, MakeDirRequest{PathRequest: at("d")}); err != nil {
		t.Error(err)
	}
	if _, err := f.Move(ctx, MoveRequest{PathRequest: at("a.txt"), To: "d/b.txt"}); err != nil {
		t.Error(err)
	}
	mode := uint32(0o600)
	if _, err := f.Chmod(ctx, ChmodRequest{PathRequest: at("d/b.txt"), Mode: &mode, UID: -1, GID: -1}); err != nil {
		t.Error(err)
	}
	var names []string
	if err := f.List(ctx, ListRequest{PathRequest: at("d"), Depth: 1}, func(i FileInfo) error { names = append(names, i.Name); return nil }); err != nil || !slices.Equal(names, []string{"b.txt"}) {
		t.Errorf("list %v, %v", names, err)
	}
	if err := f.Remove(ctx, RemoveRequest{PathRequest: at("d"), Recursive: true}); err != nil {
		t.Error(err)
	}
	if _, err := f.Stat(ctx, at("d")); !errs.Is(err, errs.NotFound) {
		t.Errorf("stat: %v", err)
	}
	want := []journal.Type{
		journal.FileWritten, journal.FileRead, journal.DirectoryMade, journal.FileMoved, journal.FileMode, journal.FileRemoved,
	}
	if got := s.history(sb.ID)[3:]; !slices.Equal(got, want) {
		t.Errorf("history %v, want %v", got, want)
	}
	events, err := s.Events(ctx, alice, sb.ID, 3, 1)
	if err != nil {
		t.Fatal(err)
	}
	var facts fileFacts
	if err := json.Unmarshal(events[0].Facts[journal.Server], &facts); err != nil || facts.Path != "a.txt" || facts.Bytes != 5 {
		t.Errorf("facts %+v, %v", facts, err)
	}
}

func TestPorts(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	s.start(sb.ID, ProcessSpec{Argv: []string{"echo-server", "8080"}})
	testenv.Eventually(t, soon, "the port", func() bool {
		ports, err := s.Ports(ctx, alice, sb.ID)
		return err == nil && slices.Equal(ports, []int{8080})
	})
	conn, err := s.DialPort(ctx, alice, sb.ID, 8080)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != "ping" {
		t.Errorf("echo %q, %v", buf, err)
	}
	b := s.find(sb.ID)
	if b.inUse != 1 {
		t.Errorf("%d in use while a connection is open", b.inUse)
	}
	_, _ = conn.Close(), conn.Close()
	if b.inUse != 0 {
		t.Errorf("%d in use", b.inUse)
	}
	_, err = s.DialPort(ctx, alice, sb.ID, 81)
	wantKind(t, "a closed port", err, errs.Unavailable)
	_, err = s.DialPort(ctx, alice, sb.ID, 70000)
	wantKind(t, "no port", err, errs.InvalidArgument)
}

func TestCollector(t *testing.T) {
	for _, limit := range []int64{2, 7, 10, 64, 1000} {
		for _, size := range []int{1, 3, 50} {
			c := newCollector(limit)
			var all []byte
			for i := range 40 {
				piece := bytes.Repeat([]byte{byte('a' + i%26)}, 1+(size*i)%size)
				if err := c.Output(Stdout, int64(len(all)), piece); err != nil {
					t.Fatal(err)
				}
				all = append(all, piece...)
			}
			r := c.result()
			var dropped int64
			for _, g := range r.Gaps {
				dropped += g.To - g.From
			}
			if int64(len(r.Stdout)) > limit || int64(len(r.Stdout))+dropped != int64(len(all)) {
				t.Fatalf("limit %d: kept %d, dropped %d of %d", limit, len(r.Stdout), dropped, len(all))
			}
			if dropped > 0 {
				g := r.Gaps[0]
				want := append(slices.Clone(all[:g.From]), all[g.To:]...)
				if len(r.Gaps) != 1 || !bytes.Equal(r.Stdout, want) {
					t.Fatalf("limit %d: %q, want %q (gaps %v)", limit, r.Stdout, want, r.Gaps)
				}
			}
		}
	}
}
