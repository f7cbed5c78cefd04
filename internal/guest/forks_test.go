package guest_test

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// zygote is a context that is there to be forked.
func (r *runner) zygote() *interpreter {
	return r.interpreter(func(c *guestwire.CreateContext) { c.Zygote = true })
}

// fork is a context forked from another.
func (i *interpreter) fork() *interpreter {
	i.t.Helper()
	id := i.serial()
	info, err := i.forkOne(i.id, id, nil, nil)
	if err != nil {
		i.t.Fatal(err)
	}
	if info.State != guestwire.ContextIdle || info.PID < 2 || info.Starts != 1 || !info.Fork {
		i.t.Fatalf("new fork is %+v", info)
	}
	return &interpreter{i.runner, id}
}

// forkOne makes one fork of a zygote.
func (r *runner) forkOne(zygote, id string, layout []string, files []*os.File) (info guestwire.ContextInfo, err error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	req := guestwire.ForkContexts{Zygote: zygote, IDs: []string{id}}
	if layout != nil {
		req.Scopes = [][]string{layout}
	}
	var failed error
	err = r.Fork(ctx, req, files, func(_ string, i guestwire.ContextInfo, err error) { info, failed = i, err })
	return info, errors.Join(err, failed)
}

func TestForks(t *testing.T) {
	z := newRunner(t, setup{}).zygote()
	a, b := z.fork(), z.fork()
	pids := map[string]bool{}
	for _, c := range []*interpreter{a, b} {
		s := c.run("x = 1\nimport os\nos.getpid()")
		if s.info.End != guestwire.RunCompleted {
			t.Fatalf("end %+v, errors %v", s.info, s.errors)
		}
		pids[s.text(t)] = true
	}
	if len(pids) != 2 {
		t.Errorf("pids %v", pids)
	}
	if s := z.fork().run("x"); s.info.Name != "NameError" {
		t.Errorf("a fork sees what another one did: %+v", s.info)
	}
	if _, err := a.try("1"); errs.KindOf(err) != errs.FailedPrecondition {
		t.Errorf("a second run: %v", err)
	}
	if _, err := z.try("1"); errs.KindOf(err) != errs.FailedPrecondition {
		t.Errorf("a run in the zygote: %v", err)
	}
	for _, c := range []*interpreter{a, b} {
		if err := c.DeleteContext(t.Context(), c.id); err != nil {
			t.Error(err)
		}
	}
}

// TestForkBatch: one call makes several forks, another one ends them, and nothing of them is left.
func TestForkBatch(t *testing.T) {
	z := newRunner(t, setup{}).zygote()
	made := map[string]guestwire.ContextInfo{}
	fork := func(ids ...string) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		return z.Fork(ctx, guestwire.ForkContexts{Zygote: z.id, IDs: ids}, nil, func(id string, info guestwire.ContextInfo, err error) {
			if err != nil {
				t.Errorf("fork %s: %v", id, err)
			}
			made[id] = info
		})
	}
	ids := []string{"a", "b", "c", "d"}
	if err := fork(ids...); err != nil || len(made) != 4 {
		t.Fatalf("%d forks, %v", len(made), err)
	}
	if made["a"].PID == made["b"].PID {
		t.Errorf("forks are one process: %+v", made)
	}
	if err := fork("a", "e"); err != nil || !made["a"].Attached || made["e"].Attached || len(made) != 5 {
		t.Errorf("asking again: %+v, %v", made, err)
	}
	for _, id := range ids[:3] {
		if got := (&interpreter{z.runner, id}).run("1+1").text(t); got != "2" {
			t.Errorf("fork %s shows %s", id, got)
		}
	}
	if err := z.Drop(t.Context(), append(ids, "e", "unknown")); err != nil {
		t.Fatal(err)
	}
	infos, err := z.Contexts(t.Context())
	if err != nil || len(infos) != 1 {
		t.Fatalf("%+v, %v", infos, err)
	}
	testenv.Eventually(t, 30*time.Second, "the zygote has reaped its forks", func() bool {
		res := z.sh("cat /proc/" + strconv.Itoa(infos[0].PID) + "/task/*/children")
		return strings.TrimSpace(string(res.out)) == ""
	})
	for name, req := range map[string]guestwire.ForkContexts{
		"none":           {Zygote: z.id},
		"no such zygote": {Zygote: "nobody", IDs: []string{"x"}},
		"scopes":         {Zygote: z.id, IDs: []string{"x"}, Scopes: [][]string{{"tasks"}}},
		"no id":          {Zygote: z.id, IDs: []string{""}},
	} {
		if err := z.Fork(t.Context(), req, nil, func(string, guestwire.ContextInfo, error) {}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestForksEnd(t *testing.T) {
	r := newRunner(t, setup{})
	z := r.zygote()
	if s := z.fork().run("import ctypes; ctypes.string_at(0)"); s.info.End != guestwire.RunLost || s.info.Signal != int(unix.SIGSEGV) {
		t.Errorf("segfault: %+v", s.info)
	}
	if s := z.fork().run("import os; os._exit(3)"); s.info.End != guestwire.RunLost || s.info.Driver != guestwire.EndExited || s.info.Code != 3 {
		t.Errorf("exit: %+v", s.info)
	}
	short := func(r *guestwire.RunCode) { r.TimeoutMS, r.GraceMS = 3000, 200 } // by then the signal is ignored
	if s := z.fork().run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", short); s.info.End != guestwire.RunTimedOut || s.info.Signal != 9 {
		t.Errorf("loop: %+v", s.info)
	}
	// One that leaves a child behind, which holds the control socket open, has ended all the same.
	if s := z.fork().run("import os, time\nif os.fork() == 0: time.sleep(100)\nelse: os._exit(4)"); s.info.Driver != guestwire.EndExited || s.info.Code != 4 {
		t.Errorf("exit with a child left: %+v", s.info)
	}
}

func TestForksSideBySide(t *testing.T) {
	z := newRunner(t, setup{}).zygote()
	var all sync.WaitGroup
	for i := range 8 {
		c := z.fork()
		id := "run-" + strconv.Itoa(i)
		all.Go(func() {
			s, err := c.try("import time; time.sleep(0.3); "+strconv.Itoa(i), func(r *guestwire.RunCode) { r.ID = id })
			if err != nil || s.text(t) != strconv.Itoa(i) {
				t.Errorf("run %d: %v", i, err)
			}
		})
	}
	all.Wait()
}

// TestForksWithoutZygote: of a zygote that has ended nothing is forked, and who has a fork of it is told
// how that ends.
func TestForksWithoutZygote(t *testing.T) {
	r := newRunner(t, setup{})
	z := r.zygote()
	c := z.fork()
	infos, err := r.Contexts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if res := r.sh("kill -9 " + strconv.Itoa(infos[0].PID)); res.info.Code != 0 {
		t.Fatalf("kill: %s", res.err)
	}
	if _, err := r.WaitContext(t.Context(), guestwire.WaitContext{ID: z.id, Starts: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.forkOne(z.id, "late", nil, nil); errs.KindOf(err) != errs.FailedPrecondition {
		t.Errorf("a fork of what has ended: %v", err)
	}
	// Without control groups it has gone with the zygote, of which it descends.
	if s, err := c.try("1+1"); err != nil && errs.KindOf(err) != errs.FailedPrecondition || err == nil && s.info.End == guestwire.RunNone {
		t.Errorf("a fork whose zygote has ended: %+v, %v", s, err)
	}
}

// TestForkOfAnother: VULNERABILITY: the guest puts what a zygote calls its fork into a scope, signals it
// and kills it. ATTACK: a zygote that was taken over names a process that is not its own: the guest, another
// user's, itself. VERIFIES: none is taken for a fork. The twin is TestForks, where the same words name one.
func TestForkOfAnother(t *testing.T) {
	r := newRunner(t, setup{})
	if res := r.run(guestwire.StartProcess{Argv: []string{"sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"}, User: "other"}); res.info.Code != 0 {
		t.Fatalf("%s", res.err)
	}
	for _, pid := range []string{"1", "2", "os.getpid()", "-1", "0", "99999999"} {
		z := r.interpreter(func(c *guestwire.CreateContext) {
			c.Zygote = true
			c.Driver = `
import json, os
def say(m): os.write(3, json.dumps(m).encode() + b"\n")
say({"ev": "ready"})
for line in os.fdopen(os.dup(3), "rb"):
    order = json.loads(line)
    if order["op"] == "zygote": say({"ev": "zygote"})
    if order["op"] == "fork": say({"ev": "forked", "slot": order["slot"], "pids": [` + pid + `]})
`
		})
		if _, err := r.forkOne(z.id, r.serial(), nil, nil); err == nil {
			t.Errorf("process %s was taken for a fork", pid)
		}
		if err := r.DeleteContext(t.Context(), z.id); err != nil {
			t.Error(err)
		}
	}
	if res := r.sh("ls /proc | grep -c '^[0-9]'"); res.info.Code != 0 {
		t.Errorf("the sandbox is not well: %+v", res.info)
	}
}

// TestForkOutsideItsPlace: VULNERABILITY: a fork goes into its scope by itself. ATTACK: a zygote that was
// taken over forks one that stays where it is, so that what it starts is nobody's to end. VERIFIES: it is
// refused and killed. The twin goes there, and is taken.
func TestForkOutsideItsPlace(t *testing.T) {
	for name, goes := range map[string]bool{"stays": false, "goes": true} {
		t.Run(name, func(t *testing.T) {
			r := newRunner(t, setup{})
			step := "pass"
			if goes {
				step = `os.write(fds[3], b"0")`
			}
			z := r.interpreter(func(c *guestwire.CreateContext) {
				c.Zygote = true
				c.Driver = `
import json, os, socket, time
s = socket.socket(fileno=3)
def say(m): s.send(json.dumps(m).encode() + b"\n")
say({"ev": "ready"})
while True:
    data, fds, _, _ = socket.recv_fds(s, 65536, 8)
    if not data: break
    order = json.loads(data)
    if order["op"] == "zygote": say({"ev": "zygote"})
    if order["op"] == "reap":
        os.waitpid(pid, 0)
        say({"ev": "reaped", "slot": order["slot"], "pid": pid, "signal": 9})
    if order["op"] == "fork":
        pid = os.fork()
        if pid == 0:
            ` + step + `
            os.write(fds[0], b'{"ev":"ready"}\n')
            time.sleep(1000)
        for fd in fds: os.close(fd)
        say({"ev": "forked", "slot": order["slot"], "pids": [pid]})
`
			})
			layout, open := scope(t, "fork")
			id := r.serial()
			info, err := r.forkOne(z.id, id, layout, open)
			if goes {
				if err != nil || info.PID == 0 {
					t.Fatalf("%+v, %v", info, err)
				}
				if err := r.DeleteContext(t.Context(), id); err != nil {
					t.Error(err)
				}
			} else if err == nil || !strings.Contains(err.Error(), "not in its place") {
				t.Fatalf("%+v, %v", info, err)
			}
			infos, err := r.Contexts(t.Context())
			if err != nil || len(infos) != 1 || infos[0].ID != z.id {
				t.Fatalf("%+v, %v", infos, err)
			}
			if res := r.sh("cat /proc/" + strconv.Itoa(infos[0].PID) + "/task/*/children"); strings.TrimSpace(string(res.out)) != "" {
				t.Errorf("the zygote has the children %q left", res.out)
			}
		})
	}
}

func BenchmarkFork(b *testing.B) {
	z := newRunner(b, setup{}).zygote()
	for b.Loop() {
		c := z.fork()
		if c.run("1+1").text(b) != "2" {
			b.Fatal("no 2")
		}
		if err := c.DeleteContext(b.Context(), c.id); err != nil {
			b.Fatal(err)
		}
	}
}
