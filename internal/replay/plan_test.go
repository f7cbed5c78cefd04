package replay

import (
	"slices"
	"strings"
	"testing"
)

// shape writes a plan as text.
func (p Plan) shape() string {
	var parts []string
	for _, s := range p.Segments {
		text := s.Commit + "["
		for i, step := range s.Steps {
			if i > 0 {
				text += " "
			}
			if step.Call != nil {
				text += step.Call.Type
			} else {
				text += step.Process.ID
			}
		}
		parts = append(parts, text+"]")
	}
	return strings.Join(parts, " ")
}

func TestPlan(t *testing.T) {
	sh := func(id string) ran { return ran{id: id, argv: []string{"sh", id}} }
	change := []object{{"op": "created", "path": "/x", "type": "file"}}
	for _, tt := range []struct {
		name     string
		settings object
		record   func(*tape)
		choice   Choice
		want     string
		not      map[string]string // beginnings of reasons
	}{
		{name: "all", record: func(w *tape) { w.run(sh("a")); w.run(sh("b")) }, want: "[a b]"},
		{name: "one, with what is before it", record: func(w *tape) { w.run(sh("a")); w.run(sh("b")); w.run(sh("c")) }, choice: Choice{Processes: []string{"b"}}, want: "[a b]"},
		{
			name: "from the last commit", record: func(w *tape) {
				w.run(sh("a"))
				w.add("commit.made", "", object{"server": object{"commit": "cmt_1"}})
				w.run(sh("b"))
			}, choice: Choice{Processes: []string{"b"}}, want: "cmt_1[b]",
		},
		{
			name: "a commit that is not needed", record: func(w *tape) {
				w.run(sh("a"))
				w.add("commit.made", "", object{"server": object{"commit": "cmt_1"}})
				w.run(sh("b"))
			}, want: "[a b]",
		},
		{
			name: "a checkout", record: func(w *tape) {
				w.run(sh("a"))
				w.add("sandbox.checkout", "", object{"server": object{"commit": "cmt_0"}})
				w.run(sh("b"))
			}, want: "[a] cmt_0[b]",
		},
		{
			name: "one that can't be run and changed nothing", record: func(w *tape) {
				w.run(ran{id: "a", argv: []string{"x"}, more: object{"tty": true}})
				w.run(sh("b"))
			}, want: "[b]", not: map[string]string{"a": "it had a terminal"},
		},
		{
			name: "one that can't be run and changed a file", record: func(w *tape) {
				w.run(ran{id: "a", argv: []string{"x"}, more: object{"tty": true}, files: change})
				w.run(sh("b"))
				w.add("commit.made", "", object{"server": object{"commit": "cmt_1"}})
				w.run(sh("c"))
			}, want: "cmt_1[c]", not: map[string]string{"a": "it had a terminal", "b": "it began with files that can't be had: a before it, which is not run again, changed a file"},
		},
		{
			name: "one that may have changed something", record: func(w *tape) {
				w.run(ran{id: "a", argv: []string{"x"}, end: "lost", unknown: true})
				w.run(sh("b"))
			}, not: map[string]string{"a": "it was ended from outside (lost)", "b": "it began with files that can't be had"},
		},
		{
			name: "at the same time", record: func(w *tape) { w.start(sh("a")); w.start(sh("b")); w.end(sh("b")); w.end(sh("a")); w.run(sh("c")) },
			want: "[c]", not: map[string]string{"a": "it ran at the same time as b", "b": "it ran at the same time as a"},
		},
		{
			name: "still alive", record: func(w *tape) { w.start(sh("a")) }, not: map[string]string{"a": "it has not ended"},
		},
		{
			name: "hashes alone", record: func(w *tape) {
				w.add("process.started", "a", object{"server": object{"argv": object{"body": "h", "bytes": 3, "hashed": true}}})
				w.end(ran{id: "a"})
			}, not: map[string]string{"a": "its arguments are not in the record: only hashes were kept (make sandboxes with --record content)"},
		},
		{
			name: "erased input", record: func(w *tape) {
				w.run(ran{id: "a", argv: []string{"cat"}, more: object{"stdin": object{"body": "h", "bytes": 3}}})
			}, not: map[string]string{"a": "its input is not in the record: it was erased"},
		},
		{
			name: "long arguments", record: func(w *tape) { w.run(ran{id: "a", argv: []string{"x"}, more: object{"cut": true}}) },
			not: map[string]string{"a": "its arguments are longer than what is recorded"},
		},
		{
			name: "the network", record: func(w *tape) {
				w.start(sh("a"))
				w.add("network.opened", "", object{"server": object{"target": "pypi.org:443"}})
				w.end(sh("a"))
				w.start(sh("b"))
				w.add("network.refused", "", object{"server": object{"target": "example.com:443"}})
				w.end(sh("b"))
			}, want: "[b]", not: map[string]string{"a": "it used the network (pypi.org:443)"},
		},
		{
			name: "environment", record: func(w *tape) {
				w.run(ran{id: "a", argv: []string{"x"}, more: object{"env": []string{"A", "B"}}})
				w.run(sh("b"))
			},
			choice: Choice{Env: []string{"A"}}, want: "[b]", not: map[string]string{"a": "the values of its environment are not in the record: give --env B"},
		},
		{
			name: "the sandbox's environment", settings: object{"env": []string{"A"}}, record: func(w *tape) { w.run(sh("a")) },
			not: map[string]string{"a": "the values of the sandbox's environment are not in the record: give --env A"},
		},
		{
			name: "the sandbox's environment, given", settings: object{"env": []string{"A"}}, record: func(w *tape) { w.run(sh("a")) },
			choice: Choice{Env: []string{"A"}}, want: "[a]",
		},
		{
			name: "a workspace", settings: object{"workspaces": []string{"/workspace"}}, record: func(w *tape) { w.run(sh("a")) },
			not: map[string]string{"a": "the sandbox had a folder of the host at /workspace"},
		},
		{
			name: "code", record: func(w *tape) {
				w.add("context.created", "", object{"server": object{"context": "c", "language": "python"}, "guest": object{"pid": 3}})
				w.code("r1", "c", "x = 1", nil)
				w.code("r2", "c", "x", nil)
				w.run(sh("a"))
			}, want: "[r1 r2 a]",
		},
		{
			name: "code whose interpreter has run other code", record: func(w *tape) {
				w.add("context.created", "", object{"server": object{"context": "c", "language": "python"}})
				w.code("r1", "c", "x = 1", object{"env": []string{"KEY"}})
				w.code("r2", "c", "x", nil)
				w.add("context.restarted", "", object{"server": object{"context": "c"}})
				w.code("r3", "c", "y", nil)
				w.run(sh("a"))
			}, want: "[r3 a]", not: map[string]string{
				"r1": "the values of its environment are not in the record", "r2": "r1 before it in the same interpreter is not run again",
			},
		},
		{
			name: "code after a commit that its interpreter is older than", record: func(w *tape) {
				w.add("context.created", "", object{"server": object{"context": "c", "language": "python"}})
				w.code("r1", "c", "x = 1", nil)
				w.add("commit.made", "", object{"server": object{"commit": "cmt_1"}})
				w.code("r2", "c", "x", nil)
			}, choice: Choice{Processes: []string{"r2"}}, want: "[r1 r2]",
		},
		{
			name: "files through the API", record: func(w *tape) {
				ref, body := put("server.content", []byte("hi"))
				w.add("file.written", "", object{"server": object{"path": "/a", "bytes": 2, "content": ref}, "guest": object{"size": 2, "mode": "0644"}}, body)
				w.add("directory.made", "", object{"server": object{"path": "/d", "mode": "0755"}})
				w.run(sh("a"))
			}, want: "[file.written directory.made a]",
		},
		{
			name: "files through the API that were not kept", record: func(w *tape) {
				w.add("file.written", "", object{
					"server": object{"path": "/a", "bytes": 2, "content": object{"body": "h", "bytes": 2, "hashed": true}}, "guest": object{"size": 2, "mode": "0644"},
				})
				w.run(sh("a"))
			}, not: map[string]string{"a": "through the API /a was changed (event 3), and the content is not in the record: only hashes were kept (make sandboxes with --record all)"},
		},
		{
			name: "a gap", record: func(w *tape) {
				w.run(sh("a"))
				w.add("gap", "", object{"server": object{"reason": "killed"}})
				w.run(sh("b"))
			},
			want: "[a]", not: map[string]string{"b": "something may be missing in the record (event 6)"},
		},
		{
			name: "one that did not start", record: func(w *tape) {
				ref, body := put("server.argv", []byte(`["nowhere"]`))
				w.add("process.failed", "a", object{"server": object{"argv": ref, "error": "no such file"}}, body)
				w.run(sh("b"))
			}, want: "[a b]",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := recorded(t, tt.settings)
			tt.record(w)
			p := w.r.Plan(tt.choice)
			if got := p.shape(); got != tt.want {
				t.Errorf("the plan is %s, want %s", got, tt.want)
			}
			if len(p.Not) != len(tt.not) {
				t.Errorf("not: %q", p.Not)
			}
			for id, why := range tt.not {
				if !strings.HasPrefix(p.Not[id], why) {
					t.Errorf("%s: %q, want %q", id, p.Not[id], why)
				}
			}
		})
	}
}

// TestAccept takes replays as they are made, in two sandboxes each time.
func TestAccept(t *testing.T) {
	was := recorded(t, nil)
	was.run(ran{id: "a", argv: []string{"true"}})
	was.add("sandbox.checkout", "", object{"server": object{"commit": "cmt_0"}})
	was.run(ran{id: "b", argv: []string{"cat"}, stdin: "x", out: "x"})
	var all []*Record
	for run := 1; run <= 2; run++ {
		one, two := again(t, "web", run, nil), again(t, "web", run, object{"commit": "cmt_0"})
		one.run(ran{id: "a", argv: []string{"true"}})
		two.run(ran{id: "b", argv: []string{"cat"}, stdin: "x", out: "x", more: object{"env": []string{"TZ"}}})
		all = append(all, one.r, two.r)
	}
	plan, runs, err := was.r.Accept(all)
	if err != nil || len(runs) != 2 {
		t.Fatal(err, len(runs))
	}
	for _, r := range was.r.Judge(plan, runs...) {
		if r.Verdict != Reproduced {
			t.Errorf("%s: %s", r.Process, r.Text())
		}
	}
	if _, _, err := was.r.Accept(all[2:]); err == nil {
		t.Error("a second run without a first one was taken")
	}
	// What was left out is not attempted, and hides nothing else.
	plan, runs, err = was.r.Accept([]*Record{all[1], all[3]})
	if err != nil {
		t.Fatal(err)
	}
	got := was.r.Judge(plan, runs...)
	if got[0].Verdict != NotAttempted || got[1].Verdict != Reproduced {
		t.Errorf("%s, %s", got[0].Text(), got[1].Text())
	}
}

// ATTACK: records of sandboxes that were made to look like a replay, which would reproduce what never happened.
func TestForgedReplays(t *testing.T) {
	change := []object{{"op": "created", "path": "/x", "type": "file"}}
	was := recorded(t, nil)
	was.run(ran{id: "a", argv: []string{"make"}, files: change})
	was.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
	whole := func(w *tape) {
		w.run(ran{id: "a", argv: []string{"make"}, files: change})
		w.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
	}
	if _, _, err := was.r.Accept([]*Record{func() *Record { w := again(t, "web", 1, nil); whole(w); return w.r }()}); err != nil {
		t.Fatalf("the twin, which is as it should be: %v", err)
	}
	for _, tt := range []struct {
		name     string
		of       string
		settings object
		do       func(*tape)
		want     string
	}{
		{name: "of another sandbox", of: "other", do: whole, want: "no replay of sandbox web"},
		{name: "another template", settings: object{"template": "forged"}, do: whole, want: "another template"},
		{name: "another profile", settings: object{"profile": "standard"}, do: whole, want: "another profile"},
		{name: "another environment", settings: object{"env": []string{"LD_PRELOAD"}}, do: whole, want: "another environment"},
		{name: "other files", settings: object{"commit": "cmt_forged"}, do: whole, want: "other files"},
		{name: "another command", want: "other arguments", do: func(w *tape) {
			w.run(ran{id: "a", argv: []string{"make"}, files: change})
			w.run(ran{id: "b", argv: []string{"echo", "ok"}, out: "ok\n"})
		}},
		{name: "a process before", want: "steps were done", do: func(w *tape) {
			w.run(ran{id: "z", argv: []string{"forge"}})
			whole(w)
		}},
		{name: "a file through the API", want: "steps were done", do: func(w *tape) {
			w.add("directory.made", "", object{"server": object{"path": "/forged", "mode": "0755"}})
			whole(w)
		}},
		{name: "code", want: "steps were done", do: func(w *tape) {
			w.add("context.created", "", object{"server": object{"context": "c", "language": "python"}})
			w.code("r", "c", "forge()", nil)
			whole(w)
		}},
		{name: "a checkout", want: "something else was done", do: func(w *tape) {
			w.add("sandbox.checkout", "", object{"server": object{"commit": "cmt_forged"}})
			whole(w)
		}},
		{name: "the other order", want: "another process", do: func(w *tape) {
			w.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
			w.run(ran{id: "a", argv: []string{"make"}, files: change})
		}},
		{name: "without what it depends on", want: "could not be run again", do: func(w *tape) {
			w.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
		}},
		{name: "other input", want: "other input", do: func(w *tape) {
			w.run(ran{id: "a", argv: []string{"make"}, files: change, stdin: "forged"})
			w.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
		}},
		{name: "another variable", want: "another environment", do: func(w *tape) {
			w.run(ran{id: "a", argv: []string{"make"}, files: change, more: object{"env": []string{"PATH"}}})
			w.run(ran{id: "b", argv: []string{"make", "test"}, out: "ok\n"})
		}},
		{name: "a run that is none", settings: object{"labels": map[string]string{LabelOf: "web", LabelRun: "3"}}, do: whole, want: "which run"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			of := "web"
			if tt.of != "" {
				of = tt.of
			}
			w := again(t, of, 1, tt.settings)
			tt.do(w)
			_, _, err := was.r.Accept([]*Record{w.r})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
	if ids := was.r.Processes(); !slices.EqualFunc(ids, []string{"a", "b"}, func(p *Process, id string) bool { return p.ID == id }) {
		t.Errorf("%v", ids)
	}
}
