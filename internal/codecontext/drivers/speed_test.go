package drivers

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
)

// BenchmarkPython measures one run from sending it to its end, with nothing between: a socket and the driver.
func BenchmarkPython(b *testing.B) {
	for _, i := range interpreters(b) {
		b.Run(i.name, func(b *testing.B) {
			c := i.python(b)
			for b.Loop() {
				if c.run("1+1").main() != "2" {
					b.Fatal("not 2")
				}
			}
		})
		b.Run(i.name+"-start", func(b *testing.B) {
			for b.Loop() {
				i.python(b).stop()
			}
		})
	}
}

// resident returns a process's own memory in KB, without pages that it shares with files.
func resident(t testing.TB, pid int) int {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if n := 0; strings.HasPrefix(s.Text(), "RssAnon:") {
			_, err := fmt.Sscanf(s.Text(), "RssAnon: %d kB", &n)
			must(t, err)
			return n
		}
	}
	t.Fatal("no RssAnon")
	return 0
}

// 10,000 runs leave no more memory behind than a thousand did: results, sources, errors and history are
// all bounded.
func TestPythonMemoryIsFlat(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		c.run("data = list(range(1000))")
		round := func(n int) {
			for i := range n {
				switch i % 10 {
				case 0:
					c.run(fmt.Sprintf("def f%d(x):\n    return x / 0\nf%d(1)", i%50, i%50))
				case 1:
					c.run("[n * n for n in data]")
				case 2:
					c.run("display('x' * 1000)")
				case 3:
					c.run("print('x' * 1000)")
				default:
					c.run(fmt.Sprintf("x = %d\nx + 1", i))
				}
			}
		}
		round(1500)
		before := resident(t, c.cmd.Process.Pid)
		round(8500)
		after := resident(t, c.cmd.Process.Pid)
		t.Logf("%d KB after 1,500 runs, %d KB after 10,000", before, after)
		if after > before+3<<10 {
			t.Errorf("memory grew from %d to %d KB", before, after)
		}
	})
}

func BenchmarkOthers(b *testing.B) {
	for _, language := range []string{"javascript", "bash"} {
		d := find(b, language)
		b.Run(language, func(b *testing.B) {
			c := launch(b, d, options{})
			code := map[string]string{"javascript": "1+1", "bash": "echo 2"}[language]
			for b.Loop() {
				if o := c.run(code); o.err != nil {
					b.Fatal(o.err)
				}
			}
		})
		b.Run(language+"-start", func(b *testing.B) {
			for b.Loop() {
				launch(b, d, options{}).stop()
			}
		})
	}
}

// BenchmarkFresh measures a fork of a zygote: placing it is the guest's, so the whole is one message more.
func BenchmarkFresh(b *testing.B) {
	for _, i := range interpreters(b) {
		b.Run(i.name, func(b *testing.B) {
			z := zygote(b, i)
			n := 0
			for b.Loop() {
				n++
				k := z.fork(n)
				if k.run("1+1").main() != "2" {
					b.Fatal("not 2")
				}
				z.reap(k)
			}
		})
	}
}
