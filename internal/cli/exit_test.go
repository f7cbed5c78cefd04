package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

func TestReport(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		code int
		text string
	}{
		{"none", nil, 0, ""},
		{"child", &exitError{code: 3}, 3, ""},
		{"child with a word", &exitError{code: 124, text: "too late", hint: "wait"}, 124, "casemate: too late\nhint: wait\n"},
		{
			"client", cannot(&client.Error{Kind: client.NotFound, Message: "no sandbox x", Hint: "casemate ls"}, "end sandbox %s", "x"), 125,
			"casemate: cannot end sandbox x: no sandbox x\nhint: casemate ls\n",
		},
		{
			"client that says cannot", cannot(&client.Error{Kind: client.Unavailable, Message: "cannot reach the server"}, "list"), 125,
			"casemate: cannot reach the server\n",
		},
		{
			"client deadline", cannot(&client.Error{Kind: client.DeadlineExceeded, Message: "it took too long"}, "run x"), 124,
			"casemate: cannot run x: it took too long\n",
		},
		{
			"logged", cannot(&client.Error{Kind: client.Internal, Message: "internal error (e1 in the server's log)", ID: "e1"}, "run x"), 125,
			"casemate: cannot run x: internal error (e1 in the server's log)\n",
		},
		{"ours", usageError("x takes %d", 2), 125, "casemate: x takes 2\n"},
		{"hostile text", errs.New(errs.NotFound, "no \x1b]0;x\x07"), 125, "casemate: no \\x1b]0;x\\x07\n"},
		{"closed pipe", fmt.Errorf("write: %w", syscall.EPIPE), 141, ""},
		{"interrupted", cannot(context.Canceled, "list"), 130, ""},
	} {
		var b bytes.Buffer
		if code := report(&b, tc.err, false); code != tc.code || b.String() != tc.text {
			t.Errorf("%s: %d %q, want %d %q", tc.name, code, b.String(), tc.code, tc.text)
		}
	}
	if err := cannot(nil, "x"); err != nil {
		t.Errorf("cannot(nil) = %v", err)
	}
	if !errors.Is(cannot(syscall.EPIPE, "x"), syscall.EPIPE) {
		t.Error("cannot hides the cause")
	}
}

func TestProcessExit(t *testing.T) {
	for _, tc := range []struct {
		p    *client.Process
		code int
		says bool
	}{
		{&client.Process{End: "exited"}, 0, false},
		{&client.Process{End: "exited", Code: 42}, 42, false},
		{&client.Process{End: "signaled", Signal: 15}, 143, false},
		{&client.Process{End: "timed_out", Signal: 9}, 124, true},
		{&client.Process{End: "oom_killed", Signal: 9}, 137, true},
		{&client.Process{End: "canceled", Signal: 9}, 137, false},
		{&client.Process{End: "failed", Error: "no such file"}, 125, true},
		{&client.Process{End: "sandbox_stopped"}, 125, true},
		// A connection that broke must never look like success.
		{&client.Process{End: "lost"}, 125, true},
		{&client.Process{}, 125, true},
		{nil, 125, true},
	} {
		code, text, _ := processExit(tc.p)
		if code != tc.code || (text != "") != tc.says {
			t.Errorf("processExit(%v) = %d %q, want %d", tc.p, code, text, tc.code)
		}
	}
}
