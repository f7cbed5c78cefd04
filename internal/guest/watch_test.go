package guest_test

import (
	"strconv"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
)

// TestWatchOverflow changes more than the kernel's queue holds while nobody reads.
func TestWatchOverflow(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkdir w")
	s, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at("w")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	r.sh(`python3 -c '
import os
for i in range(60000):
    open("w/%d" % i, "w").close(); os.unlink("w/%d" % i)
'; touch w/last`)
	overflow := false
	for !overflow {
		e, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		overflow = e.Op == "overflow" && e.Path == "/home/user/w"
	}
}

// TestUploadIsToldOnce: who watches a directory learns of a new file that it was made and written, each
// once, however fast they read: as of any program's open and write.
func TestUploadIsToldOnce(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkdir w")
	s, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at("w")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range 20 {
		name := "w/" + strconv.Itoa(i)
		if _, err := r.Write(t.Context(), guestwire.WriteRequest{PathRequest: at(name), Offset: -1, Size: -1, InPlace: true}, strings.NewReader("text")); err != nil {
			t.Fatal(err)
		}
	}
	r.sh("mkdir w/end")
	var ops []string
	for {
		e, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(e.Path, "/end") {
			break
		}
		ops = append(ops, e.Op)
	}
	if got, want := strings.Join(ops, " "), strings.TrimSpace(strings.Repeat("create write ", 20)); got != want {
		t.Errorf("events: %s", got)
	}
}
