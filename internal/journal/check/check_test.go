package check

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// rec makes records for tests.
type rec struct {
	t *testing.T
	Record
	seq uint64
}

func newRec(t *testing.T, level string) *rec {
	r := &rec{t: t}
	r.add("sandbox.created", "", map[string]any{"file_changes": level})
	return r
}

// add adds an event with the server's facts.
func (r *rec) add(typ, process string, server map[string]any) uint64 {
	return r.put(typ, process, map[string]any{"server": server})
}

func (r *rec) put(typ, process string, facts map[string]any) uint64 {
	r.t.Helper()
	r.seq++
	e := Event{Seq: r.seq, Type: typ, Process: process, Facts: map[string]json.RawMessage{}}
	for o, f := range facts {
		b, err := json.Marshal(f)
		if err != nil {
			r.t.Fatal(err)
		}
		e.Facts[o] = b
	}
	if argv, ok := facts["argv"]; ok {
		e.Argv, _ = json.Marshal(argv)
		delete(e.Facts, "argv")
	}
	r.Add(e)
	return r.seq
}

// run adds a process that ended with a code; below 0 it goes on.
func (r *rec) run(id string, code int, argv ...string) {
	r.put("process.started", id, map[string]any{"server": map[string]any{}, "argv": argv})
	if code >= 0 {
		r.put("process.ended", id, map[string]any{"server": map[string]any{}, "guest": map[string]any{"end": "exited", "code": code}})
	}
}

// changed adds what a process changed: "created /path", "renamed /from /to", "deleted /dir/" and the like.
func (r *rec) changed(process string, more map[string]any, lines ...string) {
	facts := map[string]any{}
	counts := map[string]int{}
	var files []map[string]any
	for _, l := range lines {
		f := strings.Fields(l)
		one := map[string]any{"op": f[0], "path": f[len(f)-1], "type": "file"}
		if strings.HasSuffix(f[len(f)-1], "/") {
			one["type"], one["path"] = "dir", strings.TrimSuffix(f[len(f)-1], "/")
		}
		if len(f) == 3 {
			one["from"] = strings.TrimSuffix(f[1], "/")
		}
		counts[f[0]]++
		files = append(files, one)
	}
	for op, n := range counts {
		facts[op] = n
	}
	facts["files"] = files
	for k, v := range more {
		facts[k] = v
	}
	r.add("files.changed", process, facts)
}

func (r *rec) verdict(rule string) Result {
	r.t.Helper()
	rules, err := Parse(strings.NewReader("rules:\n  - " + strings.ReplaceAll(rule, "\n", "\n    ")))
	if err != nil {
		r.t.Fatalf("%s: %v", rule, err)
	}
	return r.Judge(rules)[0]
}

func (r *rec) want(v Verdict, rules ...string) {
	r.t.Helper()
	for _, rule := range rules {
		if got := r.verdict(rule); got.Verdict != v {
			r.t.Errorf("%s: %s (%s; %v), want %s", rule, got.Verdict, got.Why, got.Evidence, v)
		} else if v != Pass && got.Why == "" {
			r.t.Errorf("%s: no reason", rule)
		}
	}
}

func TestFiles(t *testing.T) {
	r := newRec(t, "full")
	r.run("prc_1", 0, "make")
	r.changed("prc_1", nil, "created /project/out/a.o", "modified /project/src/x.c", "renamed /project/README /project/README.old", "deleted /project/tmp/")
	r.want(Pass, "changed: /project/src/x.c", `changed: ["/project/out/*.o", "**/x.c"]`, "unchanged: /etc/**", `only-changed: ["/project/**"]`,
		"changed: /project/README", "changed: /project/README.old", `unchanged: "/project/tests/**"`)
	r.want(Fail, "changed: /project/src/y.c", "unchanged: /project/src/**", `only-changed: ["/project/out/**"]`, "unchanged: /project/README",
		"unchanged: /project/tmp", `unchanged: ["/project/tmp/**"]`, "only-changed: []")
	// What was in the directory that went is not known.
	r.want(Undecided, `unchanged: "/project/tmp/x"`, `changed: "/project/tmp/x"`, `unchanged: "**/*.pem"`)
	// A process that still runs may have changed anything.
	r.run("prc_2", -1, "server")
	r.want(Undecided, "unchanged: /etc/**", `changed: /project/never`)
	r.want(Fail, "unchanged: /project/src/**")
	r.want(Pass, "changed: /project/src/x.c")
}

func TestFilesThatAreNotNamed(t *testing.T) {
	r := newRec(t, "full")
	r.changed("prc_1", map[string]any{"created": 900, "more": 899, "more_in": []map[string]any{{"dir": "/project/node_modules", "files": 899}}}, "created /project/a")
	r.want(Pass, `only-changed: "/project/**"`, "unchanged: /etc/**")
	r.want(Fail, `unchanged: "/project/node_modules/**"`, `only-changed: "/project/a"`)
	r.want(Undecided, `unchanged: "**/*.pem"`, `changed: "/project/node_modules/x"`)
	r.changed("prc_1", map[string]any{"unknown": "more than 50,000 files"})
	r.want(Undecided, "unchanged: /etc/**", "changed: /etc/x")
	r.want(Pass, "changed: /project/a")

	sum := newRec(t, "summary")
	sum.changed("prc_1", nil)
	sum.want(Pass, "unchanged: /etc/**", "only-changed: []")
	sum.want(Fail, "changed: /etc/x")
	sum.add("files.changed", "prc_2", map[string]any{"created": 1})
	sum.want(Undecided, "unchanged: /etc/**", "changed: /etc/x", "only-changed: []")

	off := newRec(t, "")
	off.want(Undecided, "unchanged: /etc/**", "changed: /etc/x", "only-changed: []")
	if why := off.verdict("unchanged: /etc/**").Why; !strings.Contains(why, "--file-changes full") {
		t.Errorf("why: %s", why)
	}
}

// Whatever may be missing makes a rule that says "not" undecided, never a pass, and never hides a failure.
func TestGaps(t *testing.T) {
	all := []string{"unchanged: /etc/**", "only-changed: /w", "not-reached: example.org", "only-reached: []", "not-ran: curl*", "not-refused: connections"}
	whole := newRec(t, "full")
	whole.want(Pass, all...)
	for what, damage := range map[string]func(r *rec){
		"gap":  func(r *rec) { r.add("gap", "", map[string]any{"reason": "killed"}) },
		"hole": func(r *rec) { r.seq++; r.add("sandbox.paused", "", nil) },
		"garbage": func(r *rec) {
			r.Add(Event{Seq: 2, Type: "files.changed", Facts: map[string]json.RawMessage{"server": []byte("[]")}})
		},
	} {
		r := newRec(t, "full")
		damage(r)
		r.seq = r.Last
		t.Log(what)
		r.want(Undecided, all...)
		r.add("network.opened", "", map[string]any{"target": "example.org:443", "dialed": "192.0.2.7:443"})
		r.add("network.refused", "", map[string]any{"target": "evil.example:80"})
		r.run("prc_1", 0, "curl", "x")
		r.want(Fail, all[2:]...)
		r.want(Pass, "reached: example.org:443", "reached: 192.0.2.7", "ran: curl *")
		r.want(Undecided, "ran: wget*", "tests-passed: curl*")
	}
	var none rec
	none.t = t
	none.run("prc_1", 0, "true")
	none.want(Undecided, all...)
}

func TestHosts(t *testing.T) {
	r := newRec(t, "")
	r.add("network.opened", "", map[string]any{"target": "PyPI.org:443", "dialed": "192.0.2.7:443"})
	r.add("network.opened", "", map[string]any{"target": "files.pythonhosted.org:443", "dialed": "[2001:db8::1]:443"})
	r.want(Pass, "reached: pypi.org", `reached: ["*.pythonhosted.org:443", "2001:db8::1"]`, `only-reached: [pypi.org, "*.pythonhosted.org"]`,
		"not-reached: pypi.org:80", "not-reached: pythonhosted.org", `only-reached: "*"`)
	r.want(Fail, "reached: example.org", "not-reached: 192.0.2.7", `only-reached: pypi.org`, `not-reached: "*"`)
	r.want(Pass, "not-reached: 192.0.2.8", "not-reached: example.org")
	// A bare address may be any name's, and a name that a proxy looks up may have any address.
	bare := newRec(t, "")
	bare.add("network.opened", "", map[string]any{"target": "192.0.2.7:443", "dialed": "192.0.2.7:443"})
	bare.want(Undecided, "not-reached: example.org", "reached: example.org")
	bare.want(Pass, "not-reached: example.org:80", "only-reached: 192.0.2.7", "not-reached: 192.0.2.8")
	far := newRec(t, "")
	far.add("network.opened", "", map[string]any{"target": "example.org:443", "dialed": "example.org:443"})
	far.want(Undecided, "not-reached: 192.0.2.7")
	far.want(Pass, "not-reached: example.com")
	r.add("network.opened", "", map[string]any{"count": 30})
	r.want(Undecided, "not-reached: example.org", `only-reached: [pypi.org, "*.pythonhosted.org"]`, "reached: example.org")
}

func TestCommandsAndExits(t *testing.T) {
	r := newRec(t, "")
	r.run("prc_1", 1, "pytest", "-q")
	r.run("prc_2", 0, "pytest", "-q")
	r.run("prc_3", 3, "grep", "x")
	r.want(Pass, "ran: pytest*", "not-ran: rm *", "tests-passed: pytest -q", "exited:\n  command: grep*\n  code: [1, 3]", "exited: {command: pytest*, code: [0, 1]}")
	r.want(Fail, "ran: tox", "not-ran: grep ?", "exited: {}", "exited: {command: pytest*}", `tests-passed: ["pytest*", "tox"]`)
	r.want(Undecided, "exited: {command: tox}")
	r.run("prc_4", -1, "pytest")
	r.want(Undecided, "tests-passed: pytest*", "exited: {command: pytest*, code: [0, 1]}")
	r.put("process.started", "prc_5", map[string]any{"server": map[string]any{"argv": map[string]any{"body": "00", "bytes": 9}}})
	r.want(Undecided, "not-ran: rm *", "ran: tox", "exited: {command: grep*, code: 3}")
	e := r.verdict("exited: {command: pytest -q}").Evidence
	if len(e) != 1 || e[0].Observer != "guest" || e[0].What != "exit 1: pytest -q" {
		t.Errorf("evidence %+v", e)
	}
}

func TestRefused(t *testing.T) {
	r := newRec(t, "")
	r.want(Pass, "not-refused: connections")
	r.add("network.refused", "", map[string]any{"target": "example.org:443"})
	r.want(Fail, "not-refused: connections")
}

// Attempts count where they are recorded; where they are not, nobody can say that there were none.
func TestAttempts(t *testing.T) {
	blind := newRec(t, "")
	blind.want(Undecided, "not-refused: calls")
	blind.add("sandbox.started", "", map[string]any{"calls": map[string]any{"attempts": "off"}})
	blind.want(Undecided, "not-refused: calls", "not-refused: [connections, calls]")
	r := newRec(t, "")
	r.add("sandbox.started", "", map[string]any{"calls": map[string]any{"attempts": "recorded"}})
	r.want(Pass, "not-refused: calls", "not-refused: [connections, calls]")
	r.put("call.attempt", "prc_1", map[string]any{"kernel": map[string]any{
		"call": "mount", "target": "/mnt", "args": []string{"none", "tmpfs"}, "command": "sh",
	}})
	r.want(Fail, "not-refused: calls", "not-refused: [connections, calls]")
	r.want(Pass, "not-refused: connections")
	e := r.verdict("not-refused: calls").Evidence
	if len(e) != 1 || e[0].Observer != "kernel" || e[0].What != "attempted: mount /mnt none tmpfs by sh" {
		t.Errorf("evidence %+v", e)
	}
	lost := newRec(t, "")
	lost.add("sandbox.started", "", map[string]any{"calls": map[string]any{"attempts": "recorded"}})
	lost.add("gap", "", map[string]any{"note": "the keeper ended"})
	lost.want(Undecided, "not-refused: calls")
}

// A start that failed is no run, and no proof that there was none.
func TestStartsThatFailed(t *testing.T) {
	r := newRec(t, "full")
	r.put("process.failed", "prc_1", map[string]any{"server": map[string]any{"error": "no such file"}, "argv": []string{"curl", "x"}})
	r.want(Fail, "ran: curl*", "exited: {command: curl*}", "tests-passed: curl*")
	r.want(Undecided, "not-ran: curl*")
	r.want(Pass, "not-ran: wget*", "unchanged: /etc/**")
}

// Arguments that were not kept, erased, or found out from the guest.
func TestArgumentsThatAreNotThere(t *testing.T) {
	all := []string{"ran: make", "not-ran: make", "exited: {command: make}", "tests-passed: make"}
	r := newRec(t, "")
	r.put("process.started", "prc_1", map[string]any{"server": map[string]any{"argv": map[string]any{"body": "00", "bytes": 9}}})
	r.put("process.ended", "prc_1", map[string]any{"guest": map[string]any{"end": "exited", "code": 0}})
	r.want(Undecided, all...)
	r.want(Pass, "exited: {}", "ran: '*'")
	r.want(Fail, "not-ran: '*'")

	long := newRec(t, "")
	long.put("process.started", "prc_1", map[string]any{"server": map[string]any{"cut": true}, "argv": []string{"sh", "-c", "true --x"}})
	long.want(Undecided, "ran: sh -c true --x", "not-ran: '*--x'")
	long.want(Pass, "ran: sh -c true *")

	found := newRec(t, "")
	found.put("process.started", "prc_1", map[string]any{"server": map[string]any{"found": true}, "argv": []string{"make", strings.Repeat("x", maxArgv-6)}})
	found.want(Undecided, "not-ran: '*y'")
	found.put("process.started", "prc_2", map[string]any{"server": map[string]any{"found": true}, "argv": []string{"make"}})
	if e := found.verdict("ran: make").Evidence; len(e) != 1 || e[0].Observer != "guest" {
		t.Errorf("evidence %+v", e)
	}
}

func TestCheckouts(t *testing.T) {
	r := newRec(t, "full")
	r.changed("prc_1", nil, "created /project/a")
	r.add("sandbox.checkout", "", map[string]any{"commit": "cmt_1"})
	r.want(Undecided, "unchanged: /etc/**", "changed: /etc/x", "only-changed: /project/**")
	r.want(Pass, "changed: /project/a")
	r.want(Fail, "unchanged: /project/*")
}

func TestGlobs(t *testing.T) {
	for _, c := range []struct {
		glob, path string
		want       bool
	}{
		{"/a", "/a", true},
		{"/a", "/a/b", false},
		{"/a/*", "/a/b", true},
		{"/a/*", "/a/b/c", false},
		{"/a/**", "/a", false},
		{"/a/**", "/a/b/c", true},
		{"/a/**/c", "/a/c", true},
		{"/a/**/c", "/a/b/d/c", true},
		{"**/*.pem", "/x.pem", true},
		{"**/*.pem", "/a/b/x.pem", true},
		{"/**", "/a", true},
		{"/[ab]?", "/ax", true},
		{"/", "/", true},
		{"/**", "/", false},
		{"/a/**/**/d", "/a/d", true},
		{"/a/*", "/a/\xff", true},
	} {
		g, err := parseGlob(c.glob)
		if err != nil || g.match(c.path) != c.want {
			t.Errorf("%s on %q: not %v (%v)", c.glob, c.path, c.want, err)
		}
	}
	for _, c := range []struct {
		glob, dir   string
		some, every bool
	}{
		{"/a/**", "/a", true, true},
		{"/a/**", "/a/b", true, true},
		{"/a/**", "/", true, false},
		{"/a/*", "/a", true, false},
		{"/a/*", "/a/b", false, false},
		{"**/*.pem", "/x", true, false},
		{"/a", "/a", false, false},
		{"/a/**/*", "/a", true, true},
		{"/**", "/q", true, true},
	} {
		g, _ := parseGlob(c.glob)
		if some, every := g.below(c.dir); some != c.some || every != c.every {
			t.Errorf("%s below %s: %v %v", c.glob, c.dir, some, every)
		}
	}
	for _, bad := range []string{"a", "/a//b", "/a/../b", "/a**", "/[", ""} {
		if _, err := parseGlob(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// Whatever is wrong is told with its line, and what was meant.
func TestRulesThatAreWrong(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "there are no rules",
		"rule: []":                             `line 1: unknown key "rule": did you mean "rules"?`,
		"rules: []":                            "line 1: rules is no list, or an empty one",
		"rules:\n  - unchnaged: /a":            `line 2: unknown key "unchnaged": did you mean "unchanged"?`,
		"rules:\n  - name: x":                  "line 2: the rule asserts nothing",
		"rules:\n  - ran: a\n    not-ran: b":   "line 3: a rule asserts one thing",
		"rules:\n  - ran: a\n    ran: b":       "line 3: ran is there twice",
		"rules:\n  - changed: a":               `line 2: changed: "a" is not absolute`,
		"rules:\n  - changed:":                 "line 2: changed must be text",
		"rules:\n  - changed: []":              "line 2: changed is an empty list",
		"rules:\n  - reached: http://x":        "the port must be a number",
		"rules:\n  - reached: x:99999":         "the port must be",
		"rules:\n  - not-refused: connection":  `unknown "connection": did you mean "connections"?`,
		"rules:\n  - exited: {code: x}":        `code "x" is no exit code`,
		"rules:\n  - exited: {cmd: x}":         `unknown key "cmd"`,
		"rules:\n  - ran: &a x\n  - ran: *a":   "anchors, aliases",
		"rules: [\n":                           "it is no YAML",
		"rules:\n  - ran: x\n---\nrules: []\n": "several documents",
		"- ran: x":                             "line 1: the file must be a mapping",
	} {
		_, err := Parse(strings.NewReader(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	_, err := Parse(strings.NewReader("rules:\n  - rann: x\n  - changed: y\n"))
	if got := fmt.Sprint(err); strings.Count(got, "\n") != 1 {
		t.Errorf("not all problems are told: %s", got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("rules:\n  - name: x\n    unchanged: [\"/a/**\", \"**/*.pem\"]\n  - exited: {command: x, code: [0, 1]}\n")
	f.Add("rules:\n  - ran: &a [*a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := Parse(strings.NewReader(text))
		if err != nil {
			return
		}
		var r Record
		r.Add(Event{Seq: 1, Type: "sandbox.created", Facts: map[string]json.RawMessage{"server": []byte(`{"file_changes":"full"}`)}})
		for _, one := range r.Judge(rules) {
			if one.Verdict == "" {
				t.Errorf("no verdict on %+v", one)
			}
		}
	})
}
