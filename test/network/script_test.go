package network

import (
	"errors"
	"os/exec"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs the scripts of testdata against one server each, in a fake internet with https://api.test in it. Beside
// testscript's own they have casemate ARG…, exits CODE ARG…, and unplug, after which nobody serves api.test any more.
func TestScripts(t *testing.T) {
	p := newPlace(t)
	api := p.counter("api.test")
	testscript.Run(t, testscript.Params{
		Dir: "testdata", WorkdirRoot: t.TempDir(), RequireExplicitExec: true, RequireUniqueNames: true,
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"casemate": func(ts *testscript.TestScript, neg bool, args []string) { p.scripted(ts, neg, 0, args) },
			"exits": func(ts *testscript.TestScript, neg bool, args []string) {
				code, err := strconv.Atoi(args[0])
				ts.Check(err)
				p.scripted(ts, neg, code, args[1:])
			},
			"unplug": func(*testscript.TestScript, bool, []string) { api.close() },
		},
	})
}

// scripted runs the command line in a script, which is to end with a code.
func (p *place) scripted(ts *testscript.TestScript, neg bool, code int, args []string) {
	if neg {
		ts.Fatalf("say which exit code it has: exits CODE ARG…")
	}
	err := ts.Exec("/proc/self/exe", append([]string{"casemate", "--url", "unix://" + p.srv.UnixSocket()}, args...)...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != code {
		ts.Fatalf("exit code %d, want %d", got, code)
	}
}
