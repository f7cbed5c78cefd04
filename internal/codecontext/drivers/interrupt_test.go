package drivers

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// An interrupt ends what runs, wherever that is, and the context goes on with its variables.
func TestPythonInterrupts(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		c.run("import time, asyncio, subprocess, threading, sys\nkept = 'here'")
		for name, code := range map[string]string{
			"busy":       "print('go')\nwhile True: pass",
			"sleep":      "print('go')\ntime.sleep(300)",
			"lock":       "print('go')\nthreading.Lock().acquire() or 1\nl = threading.Lock(); l.acquire(); l.acquire()",
			"await":      "print('go')\nawait asyncio.sleep(300)",
			"await busy": "async def f():\n    print('go')\n    while True: pass\nawait f()",
			"run":        "async def f():\n    print('go')\n    await asyncio.sleep(300)\nasyncio.run(f())",
			"subprocess": "print('go')\nsubprocess.run(['sleep', '300'])",
			"regex":      "import re\nprint('go')\nre.match('(a+)+b', 'a' * 60)",
			"repr":       "class R:\n    def __repr__(self):\n        print('go')\n        while True: pass\nR()",
			"printing":   "print('go')\nwhile True: print('x' * 10000, end='')",
			"result":     "print('go')\nwhile True: display('x' * 10000)",
		} {
			c.start(code)
			c.until("go")
			o := c.interrupted()
			if o.err == nil || o.err.Name != "KeyboardInterrupt" || strings.Contains(o.err.Traceback, "<casemate>") {
				t.Errorf("%s: %s %+v", name, o.order()[:min(200, len(o.order()))], o.err)
			}
			if got := c.run("kept").order(); got != "result:'here'|end" {
				t.Fatalf("%s: afterwards %q", name, got)
			}
		}
	})
}

// Code that catches an interrupt meets the next one, and the driver none between runs.
func TestPythonInterruptsAreMany(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		c.start("n = 0\nwhile n < 3:\n    try:\n        print('wait', n)\n        while True: pass\n    except KeyboardInterrupt:\n        n += 1\nn")
		for _, at := range []string{"wait 0", "wait 1", "wait 2"} {
			c.until(at)
			c.interrupt()
		}
		if got := c.wait(); got.main() != "3" {
			t.Errorf("%s", got.order())
		}
		for range 20 {
			c.interrupt() // nothing runs
			if got := c.run("1+1"); got.err != nil && got.err.Name != "KeyboardInterrupt" || got.died {
				t.Fatalf("%s", got.order())
			}
		}
		// At random moments: every run ends in order, whatever happens.
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() {
			defer close(done)
			tick := time.NewTicker(137 * time.Microsecond) // what is tested is any moment
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
					_ = c.cmd.Process.Signal(syscall.SIGINT)
				}
			}
		}()
		for i := range 300 {
			o := c.run("sum(range(1000)); print('line')\ndisplay('shown')\n1/0 if " + string(rune('0'+i%2)) + " else 5")
			if o.died || o.end.Count == 0 {
				t.Fatalf("run %d: %s", i, o.order())
			}
		}
		close(stop)
		<-done
		c.run("1") // an interrupt may still be on its way
		if got := c.run("1+1").main(); got != "2" {
			t.Errorf("%q", got)
		}
	})
}
