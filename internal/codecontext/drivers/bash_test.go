package drivers

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func startBash(t testing.TB, o options) *context {
	t.Helper()
	return launch(t, find(t, "bash"), o)
}

func TestBash(t *testing.T) {
	dir := t.TempDir()
	c := startBash(t, options{dir: dir, env: []string{"GIVEN=1"}})
	for _, s := range []struct{ code, want string }{
		{"echo hi", "stdout:hi\n|end"},
		{"pwd", "stdout:" + dir + "\n|end"},
		{"x=5; f() { echo \"f $1 $x\"; }; cd /; shopt -s nullglob", "end"},
		{"f arg; pwd; shopt -q nullglob && echo on", "stdout:f arg 5\n/\non\n|end"},
		{"false", "error|end"},
		{"true", "end"},
		{"(exit 3)", "error|end"},
		{"exit_code_of_missing_command_xyz", ""},
		{"for i in 1 2; do\n  echo \"line $i\"\ndone", "stdout:line 1\nline 2\n|end"},
		{"cat <<'END'\na 'b' \"c\" $d \\e\nEND", "stdout:a 'b' \"c\" $d \\e\n|end"},
		{"echo 'é漢😀' \"$(printf '\\u00e9')\" '<&>' \u2028", "stdout:é漢😀 é <&> \u2028\n|end"},
		{"printf '%s|' a $'t\\tb' 'q\"q' '\\\\n'", "stdout:a|t\tb|q\"q|\\\\n||end"},
		{"echo out; echo err >&2", ""},
		{"cat", "end"}, // standard input is empty
		{"echo $GIVEN $-", "stdout:1 hiBs\n|end"},
		{"set -o pipefail; false | true", "error|end"},
		{"false | true", "error|end"},
		{"set +o pipefail; false | true", "end"},
		{"echo a\necho b # done", "stdout:a\nb\n|end"},
		{"if", ""},
		{"echo still here", "stdout:still here\n|end"},
		{"bash -c 'readlink /proc/self/fd/* | grep socket; ls /proc/self/fd | grep -w 200'; true", "end"}, // neither socket nor answers
		{"", "end"},
		{"(sleep 0.05 & wait); echo waited", "stdout:waited\n|end"},
		{"alias ll='echo aliased'\nll() { :; }", ""},
		{"echo !x", "stdout:!x\n|end"},
		{"trap 'echo trapped' USR1; kill -USR1 $$; true", "stdout:trapped\n|end"},
		{"read -r line; echo \"[$line]\"", "stdout:[]\n|end"},
	} {
		o := c.run(s.code)
		if got := o.order(); s.want != "" && got != s.want {
			t.Errorf("%q: %q, want %q", s.code, got, s.want)
		}
	}
	if o := c.run("exit_code_of_missing_command_xyz"); o.end.ExitCode != 127 || o.err == nil || o.err.Value != "exit status 127" || !strings.Contains(o.stderr, "command not found") {
		t.Errorf("%s %+v", o.order(), o.end)
	}
	if o := c.run("if"); o.end.ExitCode != 2 || !strings.Contains(o.stderr, "syntax error") {
		t.Errorf("%s %+v", o.order(), o.end)
	}
	if o := c.run("echo out; echo err >&2"); o.stdout != "out\n" || o.stderr != "err\n" {
		t.Errorf("%s", o.order())
	}
}

func TestBashEnvironment(t *testing.T) {
	c := startBash(t, options{env: []string{"GIVEN=1"}})
	c.run("mine=2")
	c.startWith("echo $FOO $GIVEN $mine; env | grep -c '^FOO='", map[string]string{"FOO": "b a\"r\\ é", "GIVEN": "2", "mine": "3"}, false)
	if got := c.wait().order(); got != "stdout:b a\"r\\ é 2 3\n1\n|end" {
		t.Errorf("%q", got)
	}
	if got := c.run("echo ${FOO:-default} $GIVEN $mine; env | grep -c mine").stdout; got != "default 1 2\n0\n" {
		t.Errorf("%q", got)
	}
	c.startWith("echo silent; false", nil, true)
	if o := c.wait(); o.order() != "stdout:silent\n|error|end" || o.end.Count != 3 {
		t.Errorf("%s %d", o.order(), o.end.Count)
	}
}

// A shell that leaves is replaced, and the run says so.
func TestBashExit(t *testing.T) {
	c := startBash(t, options{})
	for _, code := range []string{"exit 3", "set -e; (exit 3)", "f() { exit 3; }; f; echo not reached", "bash -c 'exit 3' || exec sh -c 'exit 3'"} {
		c.run("x=1; cd /tmp")
		o := c.run(code)
		if o.err == nil || o.err.Name != "ExitError" || o.err.Value != "exit status 3" || o.end.ExitCode != 3 || !strings.Contains(o.err.Traceback, "A new one") || o.stderr != "" {
			t.Fatalf("%q: %s %+v", code, o.order(), o.err)
		}
		if got := c.run("echo ${x:-gone}; pwd").order(); got != "stdout:gone\n/tmp\n|end" {
			t.Fatalf("%q: %q", code, got)
		}
	}
	o := c.run("kill -KILL $$")
	if o.err == nil || o.err.Value != "signal 9" {
		t.Errorf("%s %+v", o.order(), o.err)
	}
	_ = c.control.Close()
	if !c.ended().Success() {
		t.Errorf("%v", c.cmd.ProcessState)
	}
}

// TestBashKeepsTheStatus: $? is the last run's.
func TestBashKeepsTheStatus(t *testing.T) {
	c := startBash(t, options{})
	for _, code := range []string{"(exit 7)", "true", "set -o pipefail; (exit 3) | cat"} {
		want := fmt.Sprintln(c.run(code).end.ExitCode)
		if got := c.run("echo $?").stdout; got != want {
			t.Errorf("after %q: %q, want %q", code, got, want)
		}
	}
	c.run("trap 'echo trapped' ERR")
	if got := c.run("(exit 5)").stdout; got != "trapped\ntrapped\n" { // for the command and for the eval around it
		t.Errorf("%q", got)
	}
	if got := c.run("echo $?").stdout; got != "5\n" {
		t.Errorf("%q", got)
	}
}

// TestBashLateProgram: what an interrupt has missed outlives its run, and its end is no answer to the next.
func TestBashLateProgram(t *testing.T) {
	c := startBash(t, options{})
	// A program that takes its second interrupt only, as one does that was just being started at the first.
	c.start(`echo go; bash -c 'trap "trap - INT" INT; while :; do read -rt 0.05 <> <(:); done'`)
	c.until("go")
	c.interrupt()
	c.wait()
	for i := range 3 {
		if o := c.run(fmt.Sprint("echo ", i)); o.stdout != fmt.Sprintln(i) || o.err != nil {
			t.Fatalf("run %d: %q %+v", i, o.order(), o.err)
		}
	}
}

func TestBashInterrupts(t *testing.T) {
	c := startBash(t, options{})
	c.run("kept=here")
	for _, code := range []string{
		"echo go; sleep 300; echo not reached",
		"echo go; while :; do :; done",
		"f() { echo go; sleep 300; }; f; echo not reached",
		"echo go; (sleep 300; echo no) | cat",
		"echo go; x=$(sleep 300)",
		"echo go; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
		"echo go; while :; do sleep 0.01; done",
		"echo go; read -r x < <(sleep 300)",
		"echo go; sleep 300 & wait",
	} {
		c.start(code)
		c.until("go")
		c.interrupt()
		o := c.wait()
		if o.err == nil || o.err.Name != "InterruptError" || strings.Contains(o.stdout, "not reached") {
			t.Errorf("%q: %.200s %+v", code, o.order(), o.err)
		}
		if got := c.run("echo $kept").stdout; got != "here\n" {
			t.Fatalf("%q: afterwards %q", code, got)
		}
	}
	for range 20 {
		c.interrupt()
		if o := c.run("echo $kept"); o.died {
			t.Fatal("died of an interrupt between runs")
		}
	}
	if got := c.run("echo $kept").stdout; got != "here\n" {
		t.Errorf("%q", got)
	}
}

// TestBashCode: large code and strange characters arrive as they were sent, and long code is code like any other.
func TestBashCode(t *testing.T) {
	c := startBash(t, options{})
	for _, n := range []int{2000, 60_000} { // 45 KB, 1.3 MB
		text := strings.Repeat("é漢😀 \\ \"q\" '$x `y`", n)
		out := t.TempDir() + "/out"
		o := c.run(fmt.Sprintf("cat > %s <<'END OF TEXT'\n%s\nEND OF TEXT", out, text))
		got, err := os.ReadFile(out)
		if err != nil || string(got) != text+"\n" || o.err != nil {
			t.Errorf("%v %d bytes, want %d %s", err, len(got), len(text)+1, o.stderr)
		}
	}
	long := "# " + strings.Repeat("x", 5000) + "\n"
	c.run("(exit 3)")
	for _, s := range []struct{ code, want string }{
		{"echo $?; v=1; f() { echo f; }", "stdout:3\n|end"},
		{"f; echo $v; ls /proc/self/fd | grep -w 202; true", "stdout:f\n1\n|end"},
		{"(exit 4)", "error|end"},
		{"read -r line; echo \"[$line]\"", "stdout:[]\n|end"},
		{"printf 'a\\n\\n'\n\n\n", "stdout:a\n\n|end"},
	} {
		if got := c.run(long + s.code).order(); got != s.want {
			t.Errorf("%q: %q, want %q", s.code, got, s.want)
		}
	}
	if got := c.run("echo short").stdout; got != "short\n" {
		t.Errorf("%q", got)
	}
}
