package drivers

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// child is a fork of a zygote: a context whose process the test did not start.
type child struct {
	*context
	slot, pid int
}

// fork asks a zygote for a child and waits until it is parked.
func (c *context) fork(slot int) child {
	c.t.Helper()
	ours, theirs := pair(c.t)
	k := &context{t: c.t, control: ours, events: make(chan event, 1<<12), done: make(chan struct{}), pipes: map[string]*os.File{}}
	fds := []int{int(theirs.Fd())}
	for _, name := range []string{"stdout", "stderr"} {
		r, w, err := os.Pipe()
		must(c.t, err)
		defer w.Close()
		k.pipes[name] = r
		fds = append(fds, int(w.Fd()))
	}
	line, err := json.Marshal(map[string]any{"op": "fork", "slots": []int{slot}})
	must(c.t, err)
	raw, err := c.control.SyscallConn()
	must(c.t, err)
	var sent error
	must(c.t, raw.Write(func(fd uintptr) bool {
		sent = syscall.Sendmsg(int(fd), append(line, '\n'), syscall.UnixRights(fds...), nil, 0)
		return true
	}))
	must(c.t, sent)
	theirs.Close()
	forked := c.next("forked")
	if forked.Slot != slot || len(forked.PIDs) != 1 {
		c.t.Fatalf("slot %d with pids %v, want %d", forked.Slot, forked.PIDs, slot)
	}
	k.follow()
	k.ready = k.next("ready").message
	if k.ready.PID != forked.PIDs[0] {
		c.t.Errorf("pids %d and %d", k.ready.PID, forked.PIDs[0])
	}
	k.process, err = os.FindProcess(k.ready.PID)
	must(c.t, err)
	return child{k, slot, k.ready.PID}
}

// reap waits for a child's end.
func (c *context) reap(k child) message {
	c.t.Helper()
	<-k.done
	c.send(map[string]any{"op": "reap", "slot": k.slot})
	return c.next("reaped").message
}

func zygote(t testing.TB, i interpreter, imports ...string) *context {
	t.Helper()
	c := i.python(t, "FROM=zygote")
	c.send(map[string]any{"op": "zygote", "imports": imports})
	if z := c.next("zygote"); len(z.Failed) != 0 {
		t.Fatalf("imports failed: %v", z.Failed)
	}
	return c
}

// A fresh run sees what was imported and nothing of earlier runs.
func TestFreshRuns(t *testing.T) {
	for _, i := range interpreters(t) {
		t.Run(i.name, func(t *testing.T) {
			z := zygote(t, i, "json", "random", "uuid")
			a, b := z.fork(1), z.fork(2)
			o := a.run("import sys, os, random, uuid\nfor m in ('json', 'random'): assert m in sys.modules\nleft = 1\nos.chdir('/')\nos.environ['LEFT'] = '1'\nrandom.random(), uuid.uuid4(), random.getrandbits(64)")
			if o.err != nil {
				t.Fatal(o.err.Traceback)
			}
			p := b.run("import os, random, uuid\nassert os.getcwd() != '/' and 'LEFT' not in os.environ and os.environ['FROM'] == 'zygote' and 'left' not in globals()\nrandom.random(), uuid.uuid4(), random.getrandbits(64)")
			if p.err != nil {
				t.Fatal(p.err.Traceback)
			}
			if o.main() == p.main() || o.main() == "" {
				t.Errorf("the same random numbers: %s", o.main())
			}
			if o.end.Count != 1 || p.end.Count != 1 {
				t.Errorf("counts %d %d", o.end.Count, p.end.Count)
			}
			if got := z.reap(a); got.PID != a.pid || got.Code == nil || *got.Code != 0 {
				t.Errorf("%+v", got)
			}
			z.reap(b)

			for n, s := range []struct{ code, want string }{
				{"print('out'); import sys; print('err', file=sys.stderr); 5", "out\n err\n 5"},
				{"import os; sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n))", "  [0, 1, 2, 500]"},
				{"import asyncio; await asyncio.sleep(0, 'x')", "  'x'"},
				{"1/0", "  "},
			} {
				k := z.fork(10 + n)
				o := k.run(s.code)
				if got := fmt.Sprintf("%s %s %s", o.stdout, o.stderr, o.main()); got != s.want {
					t.Errorf("%s: %q, want %q", s.code, got, s.want)
				}
				z.reap(k)
			}

			k := z.fork(20)
			k.start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
			if o := k.wait(); !o.died || !strings.Contains(o.stderr, "Segmentation fault") {
				t.Errorf("%v %s", o.died, o.order())
			}
			if got := z.reap(k); got.Signal == nil || *got.Signal != int(syscall.SIGSEGV) {
				t.Errorf("%+v", got)
			}
			k = z.fork(21)
			k.start("import time; print('go'); time.sleep(300)")
			k.until("go")
			if o := k.interrupted(); o.err == nil || o.err.Name != "KeyboardInterrupt" {
				t.Errorf("%s", o.order())
			}
			z.reap(k)
			// A child whose guest lost interest leaves by itself, as does the zygote.
			k = z.fork(22)
			_ = k.control.Close()
			<-k.done
			_ = z.control.Close()
			if !z.ended().Success() {
				t.Errorf("%v", z.cmd.ProcessState)
			}
		})
	}
}

func TestFreshNumpy(t *testing.T) {
	z := zygote(t, interpreters(t)[1], "numpy", "pandas", "matplotlib.pyplot")
	var seen []string
	for n := range 3 {
		k := z.fork(n)
		o := k.run("import numpy as np, matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nfloat(np.random.rand())")
		if len(o.results) != 2 || o.err != nil {
			t.Fatal(o.order(), o.stderr, o.err)
		}
		seen = append(seen, o.main())
		z.reap(k)
	}
	if seen[0] == seen[1] || seen[1] == seen[2] {
		t.Errorf("the same random numbers: %v", seen)
	}
	c := interpreters(t)[0].python(t)
	c.send(map[string]any{"op": "zygote", "imports": []string{"no_such_module"}})
	if f := c.next("zygote").Failed; !strings.Contains(f["no_such_module"], "No module named") {
		t.Errorf("%v", f)
	}
}
