package watch

import (
	"encoding/json"
	"errors"
	"os"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/keeper"
)

// TestRefusedCallsKeepNoFiles: what comes with a call that is refused does not stay open.
func TestRefusedCallsKeepNoFiles(t *testing.T) {
	k := &process{events: newEvents()}
	fits, err := json.Marshal(keeper.Attach{PID: os.Getpid(), Sandbox: "box"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []guestwire.Call{
		{Method: keeper.MethodAttach, Body: []byte(`{`)},
		{Method: keeper.MethodAttach, Body: fits}, // too few files
		{Method: keeper.MethodState, Body: []byte(`{`)},
		{Method: "keeper.nothing"},
	} {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.answer(t.Context(), c, []*os.File{f}); !errs.Is(err, errs.InvalidArgument) && !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s %s: %v", c.Method, c.Body, err)
		}
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s %s: its file was left open: %v", c.Method, c.Body, err)
		}
	}
}

// VULNERABILITY: events are lost where a keeper dies and another one comes in its place.
// ATTACK: what was recorded of the one is told to the other.
// VERIFIES: that one refuses, and has all of its events still. The twin is told of itself, and forgets them.
func TestNumbersOfAnotherKeeper(t *testing.T) {
	k := &process{events: newEvents()}
	k.events.add(attempt("/a"))
	k.events.add(attempt("/b"))
	for _, c := range []struct {
		pid  int
		want errs.Kind
		left int
	}{{os.Getpid() + 1, errs.FailedPrecondition, 2}, {os.Getpid(), 0, 1}} {
		b, err := json.Marshal(keeper.After{After: 1, PID: c.pid})
		if err != nil {
			t.Fatal(err)
		}
		_, err = k.answer(t.Context(), guestwire.Call{Method: keeper.MethodEvents, Body: b}, nil)
		if (err != nil) != (c.want != 0) || err != nil && !errs.Is(err, c.want) || len(k.events.list) != c.left {
			t.Errorf("told of process %d: %v, and %d events are left", c.pid, err, len(k.events.list))
		}
	}
}
