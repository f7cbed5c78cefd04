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
