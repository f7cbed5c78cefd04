package drivers

import (
	"strings"
	"syscall"
	"testing"
)

// What code starts may outlive its run: threads and tasks go on, children have no way to the guest.
func TestPythonOutlivesRuns(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		c.run(`
import asyncio, threading, time, os, sys
ticks = []
async def tick():
    while True:
        ticks.append(1)
        await asyncio.sleep(0.001)
task = asyncio.create_task(tick())
await asyncio.sleep(0)
`)
		// Nothing runs now; the task goes on all the same.
		testenvPoll(t, func() bool { return len(c.run("ticks").main()) > 100 })
		if got := c.run("task.cancel(); n = len(ticks); time.sleep(0.01); len(ticks) == n").main(); got != "True" {
			t.Errorf("the task goes on: %s", got)
		}
		c.run("def later():\n    gate.wait()\n    print('from a thread')\n    display('shown by a thread')\n    done.set()\ngate, done = threading.Event(), threading.Event()\nth = threading.Thread(target=later); th.start()")
		o := c.run("gate.set(); done.wait(); th.join()")
		if o.order() != "stdout:from a thread\n|result:'shown by a thread'|end" {
			t.Errorf("%q", o.order())
		}
		// On a busy machine the thread may be as soon as the end of the run that starts it.
		shown := c.run("gate.clear(); done.clear(); th = threading.Thread(target=lambda: (time.sleep(0.05), display('between')), daemon=True); th.start()").order()
		testenvPoll(t, func() bool { shown += c.run("None").order(); return strings.Contains(shown, "result:'between'") })
		// A server's socket alone keeps the loop going.
		c.run(`
async def answer(r, w):
    w.write(b'hello'); w.close()
server = await asyncio.start_server(answer, '127.0.0.1', 0)
port = server.sockets[0].getsockname()[1]
port`)
		got := c.run("import subprocess\nsubprocess.Popen([sys.executable, '-c', f'import socket,time; s=socket.create_connection((\"127.0.0.1\", {port})); print(s.recv(9))']); None")
		seen := got.stdout
		testenvPoll(t, func() bool { seen += c.run("None").stdout; return strings.Contains(seen, "b'hello'") })
		c.run("server.close()")
	})
}

// Forked children share the output and never the control socket.
func TestPythonForks(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		for _, s := range []struct{ code, want string }{
			{"import os\npid = os.fork()\nif pid == 0:\n    print('child'); os._exit(0)\n_ = os.waitpid(pid, 0); print('parent')", "stdout:child\nparent\n|end"},
			// A child that comes back out of the run leaves, and says nothing in its parent's name.
			{"pid = os.fork()\nif pid: print(os.WEXITSTATUS(os.waitpid(pid, 0)[1]))\nelse: 'child value'", "stdout:0\n|end"},
			{"pid = os.fork()\nif pid == 0: raise ValueError('in the child')\nprint(os.WEXITSTATUS(os.waitpid(pid, 0)[1]))", ""},
			{"pid = os.fork()\nif pid == 0:\n    display('from the child')\n    os._exit(0)\nos.waitpid(pid, 0)[1]", "stdout:'from the child'\n|result:0|end"},
			{"import multiprocessing as mp\nctx = mp.get_context('fork')\ndef double(n): return n * 2\nwith ctx.Pool(2) as pool: r = pool.map(double, range(4))\nr", "result:[0, 2, 4, 6]|end"},
			{"p = ctx.Process(target=print, args=('in a process',)); p.start(); p.join(); p.exitcode", "stdout:in a process\n|result:0|end"},
			{"import concurrent.futures as cf\nwith cf.ThreadPoolExecutor() as e: r = list(e.map(double, range(3)))\nr", "result:[0, 2, 4]|end"},
			{"import subprocess\nsubprocess.run(['echo', 'sub']); subprocess.run('ls /proc/self/fd | grep -c 500', shell=True).returncode", "stdout:sub\n0\n|result:1|end"},
			{"os.system('exit 3') >> 8", "result:3|end"},
		} {
			o := c.run(s.code)
			if got := o.order(); s.want != "" && got != s.want {
				t.Errorf("%q: %q, want %q %+v", s.code, got, s.want, o.err)
			}
			if s.want == "" && (o.stdout != "1\n" || !strings.Contains(o.stderr, "ValueError: in the child") || o.err != nil) {
				t.Errorf("%q: %q %+v", s.code, o.order(), o.err)
			}
		}
	})
}

// Ends that no driver survives: the guest sees them in the process's own end.
func TestPythonDies(t *testing.T) {
	for _, i := range interpreters(t) {
		c := i.python(t)
		c.start("print('last words', flush=True)\nimport os; os._exit(7)")
		if o := c.wait(); !o.died || o.stdout != "last words\n" || c.ended().ExitCode() != 7 {
			t.Errorf("%s: %v %q %v", i.name, o.died, o.stdout, c.cmd.ProcessState)
		}
		c = i.python(t)
		c.start("import ctypes; ctypes.string_at(0)")
		o := c.wait()
		st := c.ended().Sys().(syscall.WaitStatus)
		if !o.died || !st.Signaled() || st.Signal() != syscall.SIGSEGV || !strings.Contains(o.stderr, "Segmentation fault") || !strings.Contains(o.stderr, "Cell In") && !strings.Contains(o.stderr, "ipython-input") {
			t.Errorf("%s: %v %q %v", i.name, o.died, o.stderr, c.cmd.ProcessState)
		}
		c = i.python(t)
		_ = c.control.Close()
		if !c.ended().Success() {
			t.Errorf("%s: %v", i.name, c.cmd.ProcessState)
		}
	}
}

// Every byte arrives, whatever the pieces in which it was written.
func TestPythonOutputIsIntact(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		o := c.run(`
import sys, os, random
text = 'é漢😀' * 450_000
i = 0
while i < len(text):
    n = random.randrange(1, 5000)
    sys.stdout.write(text[i:i + n])
    i += n
`)
		if want := strings.Repeat("é漢😀", 450_000); o.stdout != want {
			t.Errorf("%d bytes of %d, or others", len(o.stdout), len(want))
		}
		o = c.run("sys.stdout.buffer.write('é漢😀'.encode()[:2]); sys.stdout.buffer.write('é漢😀'.encode()[2:]); print(); sys.stdout.write('\\udc80'), print('a', 1, sep='|', file=sys.stdout), print(), sys.stdout.isatty(), sys.stdout.encoding")
		if o.stdout != "é漢😀\n\\udc80a|1\n\n" {
			t.Errorf("%q", o.stdout)
		}
		// A program that shared the pipe made it non-blocking.
		o = c.run("os.set_blocking(1, False)\nprint('x' * 3_000_000)\nos.set_blocking(1, True)")
		if len(o.stdout) != 3_000_001 || o.err != nil {
			t.Errorf("%d bytes %+v", len(o.stdout), o.err)
		}
	})
}

// Code that replaces what the driver uses breaks itself, not the driver.
func TestPythonSurvivesItsCode(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		for _, code := range []string{
			"import sys, io, json, os, signal, builtins, linecache",
			"sys.stdout = io.StringIO(); sys.stderr = None",
			"json.dumps = json.loads = None; os.write = os.read = None",
			"signal.signal(signal.SIGINT, signal.SIG_IGN)",
			"linecache.clearcache(); sys.displayhook = None; sys.excepthook = None",
			"del print; None",
			"globals().clear()",
			"import sys; sys.modules['asyncio'] = None; sys.setrecursionlimit(100)",
			"import os; os.closerange(3, 100)",
			"def f(): f()\nf()",
			"class M(type):\n    def __instancecheck__(cls, x): raise ValueError\nclass X(metaclass=M): pass\nX()",
			"class N:\n    def __getattr__(self, name): raise RuntimeError(name)\nN()",
		} {
			if o := c.run(code); o.died {
				t.Fatalf("%q ended the context", code)
			}
		}
		if got := c.run("1+1").main(); got != "2" {
			t.Errorf("%q", got)
		}
		c.start("import sys; sys.stdout = sys.__stdout__\nprint('go')\nwhile True: pass")
		c.until("go")
		c.interrupt()
		if o := c.wait(); o.died || o.err == nil {
			t.Error("no interrupt")
		}
	})
}
