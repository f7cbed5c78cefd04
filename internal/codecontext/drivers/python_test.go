package drivers

import (
	"os"
	"strings"
	"testing"
)

func TestPythonBasics(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		for _, s := range []struct{ code, want string }{
			{"1+1", "result:2|end"},
			{"x = 1; x", "result:1|end"},
			{"x += 1", "end"},
			{"x", "result:2|end"},
			{"x;", "end"},
			{"x; # no result", "end"},
			{"'a;b' # ;", "result:'a;b'|end"},
			{"None", "end"},
			{"", "end"},
			{"# nothing", "end"},
			{"print('a'); print('b', 'c', sep='-', end='!')\n'd'", "stdout:a\nb-c!|result:'d'|end"},
			{"import sys\nprint('e', file=sys.stderr)", "stderr:e\n|end"},
			{"def f(n):\n    return n * 2\nf(21)", "result:42|end"},
			{"    y = 3\n    y", "result:3|end"},
			{"_", "result:3|end"},
			{"import asyncio\nawait asyncio.sleep(0, 'slept')", "result:'slept'|end"},
			{"async def g():\n    return 7\nz = await g()\nprint(z)\nz", "stdout:7\n|result:7|end"},
			{"asyncio.run(g())", "result:7|end"},
			{"await g()", "result:7|end"},
			{"raise SystemExit(3)", "error|end"},
			{"import sys; sys.exit()", "error|end"},
			{"x", "result:2|end"},
			{"display(1); display('two')", "result:1|result:'two'|end"},
			{"import os; os.system('echo hi')", "stdout:hi\n|result:0|end"},
			{"print('a', end=''); os.system('echo hi'); print('b')", "stdout:ahi\nb\n|end"},
			{"class A: pass\nA.__module__", "result:'__main__'|end"},
			{"from __future__ import annotations\ndef h(a: nope): pass", "end"},
			{"__name__", "result:'__main__'|end"},
		} {
			if got := c.run(s.code).order(); got != s.want {
				t.Errorf("%q: %q, want %q", s.code, got, s.want)
			}
		}
	})
}

// TestPythonShowsAtOnce: the value of a cell's last expression goes out together with the run's end, but what is
// shown before does not wait.
func TestPythonShowsAtOnce(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		sign := t.TempDir() + "/sign"
		c.run("import os, sys, time\ndef wait():\n    while not os.path.exists('" + sign + "'): time.sleep(0.01)\n    os.remove('" + sign + "')")
		for _, code := range []string{
			"sys.displayhook(5) or wait()",
			"def f():\n    sys.displayhook(5)\n    wait()\nf()",
			"exec(compile('5', 'x', 'single')) or wait()",
			"display(5); wait()",
		} {
			c.start(code)
			if got := c.next("result").shown(); got != "5" {
				t.Errorf("%q: %s", code, got)
			}
			must(t, os.WriteFile(sign, nil, 0o600))
			if o := c.wait(); o.err != nil {
				t.Errorf("%q: %s", code, o.err.Traceback)
			}
		}
	})
}

func TestPythonErrors(t *testing.T) {
	eachPython(t, func(t *testing.T, i interpreter, c *context) {
		for _, s := range []struct{ code, name, value, in string }{
			{"1/0", "ZeroDivisionError", "division by zero", "1/0"},
			{"def f():\n    return nope\nf()", "NameError", "name 'nope' is not defined", "return nope"},
			{"a b", "SyntaxError", "invalid syntax", "a b"},
			{"input('?')", "NoInput", "", "input() can't be answered"},
			{"breakpoint()", "NoInput", "", "standard input"},
			{"raise SystemExit(3)", "SystemExit", "3", "its variables are kept"},
			{"exit()", "SystemExit", "", "its variables are kept"},
			{"await nope()", "NameError", "name 'nope' is not defined", "await nope()"},
			{"raise KeyboardInterrupt", "KeyboardInterrupt", "", "KeyboardInterrupt"},
			{"class E(Exception):\n    def __str__(self): 1/0\nraise E()", "E", "", "E"},
			{"class R:\n    def __repr__(self): raise ValueError('no repr')\nR()", "", "", ""},
		} {
			o := c.run(s.code)
			if s.name == "" {
				if o.err != nil && !strings.Contains(o.err.Traceback, "no repr") || o.err == nil && !strings.Contains(o.stderr, "no repr") {
					t.Errorf("%q: %s %q", s.code, o.order(), o.stderr)
				}
				continue
			}
			if o.err == nil {
				t.Errorf("%q: no error: %s", s.code, o.order())
				continue
			}
			if o.err.Name != s.name || s.value != "" && !strings.Contains(o.err.Value, s.value) || !strings.Contains(o.err.Traceback, s.in) {
				t.Errorf("%q: %s: %s\n%s", s.code, o.err.Name, o.err.Value, o.err.Traceback)
			}
			if strings.Contains(o.err.Traceback, "<casemate>") || strings.Contains(o.err.Traceback, "\x1b") {
				t.Errorf("%q: the driver or colors in the traceback:\n%s", s.code, o.err.Traceback)
			}
			t.Logf("%s %s\n%s", i.name, s.code, o.err.Traceback)
		}
	})
}
