package anchor

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// source is a journal whose checkpoint is what it is set to.
type source struct {
	mu   sync.Mutex
	note string
}

func (s *source) set(note string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note = note
}

func (s *source) checkpoint() ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return []byte(s.note), nil
}

// notary takes checkpoints; the first is refused.
type notary struct {
	mu    sync.Mutex
	asked int
	notes []string
}

func (n *notary) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.asked++; n.asked == 1 {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	n.notes = append(n.notes, string(b))
}

func (n *notary) has(note string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.notes) > 0 && n.notes[len(n.notes)-1] == note
}

func lines(t *testing.T, path string) (notes []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for l := range strings.Lines(string(b)) {
		note, err := base64.StdEncoding.DecodeString(strings.TrimSpace(l))
		if err != nil {
			t.Fatal(err)
		}
		notes = append(notes, string(note))
	}
	return notes
}

// TestEachCheckpointGoesOutOnce anchors in a file and at a URL that refuses at first; what is sent last goes at the end.
func TestEachCheckpointGoesOutOnce(t *testing.T) {
	n := &notary{}
	at := httptest.NewServer(n)
	defer at.Close()
	file := filepath.Join(t.TempDir(), "anchors")
	s := &source{note: "one\n"}
	var log bytes.Buffer
	a, err := Start(Config{
		Places: []string{file, at.URL + "/log?token=hidden"}, Every: time.Millisecond, Checkpoint: s.checkpoint,
		Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		note := fmt.Sprintf("note %d\n", i)
		s.set(note)
		testenv.Eventually(t, time.Minute, "both have it", func() bool {
			all := lines(t, file)
			return len(all) > 0 && all[len(all)-1] == note && n.has(note)
		})
	}
	s.set("the last\n")
	a.Close()
	a.Close()
	all := lines(t, file)
	if all[len(all)-1] != "the last\n" || !n.has("the last\n") {
		t.Errorf("%q, %q", all, n.notes)
	}
	for i := 1; i < len(all); i++ {
		if all[i] == all[i-1] {
			t.Errorf("%q went out twice", all[i])
		}
	}
	if text := log.String(); !strings.Contains(text, "503") || strings.Contains(text, "hidden") {
		t.Errorf("the log says %q", text)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestPlacesThatAreNone(t *testing.T) {
	for _, place := range []string{"", "relative/file", "ftp://example.com", "http://", "https:///x"} {
		if _, err := Start(Config{Places: []string{place}}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%q: %v", place, err)
		}
	}
}

// A line that a full disk has cut off takes none of those behind it along.
func TestTornLineIsAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "held")
	for _, note := range []string{first, second} {
		if err := put(path, []byte(note)); err != nil {
			t.Fatal(err)
		}
	}
	held, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, held[:len(held)-9], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := put(path, []byte(second)); err != nil {
		t.Fatal(err)
	}
	got, err := Read(t.Context(), path)
	if err != nil || len(got) != 3 || string(got[0]) != first || string(got[2]) != second {
		t.Errorf("%q, %v", got, err)
	}
}
