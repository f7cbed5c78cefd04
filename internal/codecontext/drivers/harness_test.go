package drivers

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

// patience is far more than anything here takes.
const patience = 2 * time.Minute

// message is what a driver says.
type message struct {
	Ev        string                     `json:"ev"`
	ID        string                     `json:"id"`
	Main      bool                       `json:"main"`
	Data      map[string]json.RawMessage `json:"data"`
	Metadata  json.RawMessage            `json:"metadata"`
	Name      string                     `json:"name"`
	Value     string                     `json:"value"`
	Traceback string                     `json:"traceback"`
	Count     int                        `json:"count"`
	Language  string                     `json:"language"`
	Version   string                     `json:"version"`
	IPython   bool                       `json:"ipython"`
	PID       int                        `json:"pid"`
	PIDs      []int                      `json:"pids"`
	ExitCode  int                        `json:"exit_code"`
	Left      bool                       `json:"left"`
	Slot      int                        `json:"slot"`
	Failed    map[string]string          `json:"failed"`
	Code      *int                       `json:"code"`
	Signal    *int                       `json:"signal"`
	Error     string                     `json:"error"`

	size int // of the line
}

// text returns a value of Data that is a string.
func (m message) text(key string) string {
	var s string
	if json.Unmarshal(m.Data[key], &s) != nil {
		return "no text: " + string(m.Data[key])
	}
	return s
}

// event is one thing that a context showed: output, or a message.
type event struct {
	stream string // "stdout", "stderr", or "" for a message
	text   string
	message
}

// context is a running driver, and what the guest knows of it. Output and messages get into one order
// as they do there: whoever reads a message drains both pipes first.
type context struct {
	t       testing.TB
	cmd     *exec.Cmd   // nil in a child
	process *os.Process // what interrupts go to
	control *os.File
	events  chan event
	done    chan struct{}
	ready   message
	code    *os.File // what it finds long code in, or nil
	runs    int
	heard   atomic.Bool // an interrupt was answered since the last was sent

	mu    sync.Mutex // held over reading and noting, so that nothing gets between
	pipes map[string]*os.File
}

type options struct {
	env  []string
	dir  string
	argv []string // in place of the driver's, or nil
}

// launch starts a driver as the guest does.
func launch(t testing.TB, d Driver, o options) *context {
	t.Helper()
	ours, theirs := pair(t)
	source, err := os.Create(filepath.Join(t.TempDir(), "source"))
	must(t, err)
	defer source.Close()
	_, err = source.Write(d.Source)
	must(t, err)
	argv := d.Argv
	if o.argv != nil {
		argv = o.argv
	}
	c := &context{t: t, control: ours, events: make(chan event, 1<<12), done: make(chan struct{}), pipes: map[string]*os.File{}}
	c.cmd = exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	c.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "LANG=C.UTF-8", "TMPDIR=" + t.TempDir()}, o.env...)
	c.cmd.Dir = o.dir
	if c.cmd.Dir == "" {
		c.cmd.Dir = t.TempDir()
	}
	out, err := c.cmd.StdoutPipe()
	must(t, err)
	errs, err := c.cmd.StderrPipe()
	must(t, err)
	c.pipes["stdout"], c.pipes["stderr"] = out.(*os.File), errs.(*os.File)
	c.cmd.ExtraFiles = []*os.File{theirs, source}
	if d.CodeFile {
		c.code, err = os.Create(filepath.Join(t.TempDir(), "code"))
		must(t, err)
		c.cmd.ExtraFiles = append(c.cmd.ExtraFiles, c.code)
	}
	// A process of its own group: what a test leaves behind goes with it.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, c.cmd.Start())
	c.process = c.cmd.Process
	theirs.Close()
	c.follow()
	t.Cleanup(c.stop)
	c.ready = c.next("ready").message
	return c
}

func pair(t testing.TB) (ours, theirs *os.File) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	must(t, err)
	must(t, syscall.SetNonblock(fds[0], true))
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
}

func (c *context) follow() {
	var readers sync.WaitGroup
	for name, f := range c.pipes {
		readers.Go(func() {
			for c.read(name, f, true) {
			}
		})
	}
	readers.Go(func() {
		lines := bufio.NewReaderSize(c.control, 1<<16)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			var m message
			if err := json.Unmarshal(line, &m); err != nil {
				m = message{Ev: "broken", Value: string(line[:min(len(line), 200)])}
			}
			m.size = len(line)
			c.mu.Lock()
			for name, f := range c.pipes {
				c.readLocked(name, f)
			}
			c.events <- event{message: m}
			c.mu.Unlock()
		}
	})
	go func() {
		readers.Wait()
		close(c.done)
		close(c.events)
	}()
}

// read waits for output and notes it; false at the end.
func (c *context) read(name string, f *os.File, wait bool) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	more := true
	err = raw.Read(func(fd uintptr) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		buf := make([]byte, 1<<16)
		n, err := syscall.Read(int(fd), buf)
		switch {
		case n > 0:
			c.events <- event{stream: name, text: string(buf[:n])}
		case errors.Is(err, syscall.EAGAIN):
			return !wait
		default:
			more = false
		}
		return true
	})
	return more && err == nil
}

// readLocked notes what there is by now.
func (c *context) readLocked(name string, f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for {
			buf := make([]byte, 1<<16)
			n, _ := syscall.Read(int(fd), buf)
			if n <= 0 {
				return
			}
			c.events <- event{stream: name, text: string(buf[:n])}
		}
	})
}

// next returns the next message of a kind; a driver that ends instead fails the test.
func (c *context) next(ev string) event {
	c.t.Helper()
	var seen strings.Builder
	timeout := time.After(patience)
	for {
		select {
		case e, ok := <-c.events:
			switch {
			case !ok:
				c.t.Fatalf("the driver ended; wanted %s, saw %s", ev, &seen)
			case e.Ev == ev:
				return e
			}
			fmt.Fprintf(&seen, "%s%s%s%s; ", e.stream, e.text, e.Ev, e.Value)
		case <-timeout:
			c.t.Fatalf("no %s in time, saw %s", ev, &seen)
		}
	}
}

func (c *context) send(m any) {
	c.t.Helper()
	line, err := json.Marshal(m)
	must(c.t, err)
	_, err = c.control.Write(append(line, '\n'))
	must(c.t, err)
}

// outcome is what one run showed.
type outcome struct {
	events         []event
	stdout, stderr string
	results        []message
	err            *message
	end            message
	died           bool // the driver ended before the run did
}

// main returns the text of the main result, or "".
func (o outcome) main() string {
	for _, r := range o.results {
		if r.Main {
			return r.text("text/plain")
		}
	}
	return ""
}

// order returns output and messages in the order in which they came, in short.
func (o outcome) order() string {
	var b strings.Builder
	last := ""
	for _, e := range o.events {
		switch {
		case e.stream != "" && e.stream == last:
			b.WriteString(e.text)
		case e.stream != "":
			fmt.Fprintf(&b, "|%s:%s", e.stream, e.text)
		case e.Ev == "result":
			fmt.Fprintf(&b, "|result:%s", e.shown())
		default:
			fmt.Fprintf(&b, "|%s", e.Ev)
		}
		last = e.stream
	}
	return strings.TrimPrefix(b.String(), "|")
}

func (e event) shown() string { return e.message.text("text/plain") }

// run runs code and waits for its end.
func (c *context) run(code string) outcome {
	c.t.Helper()
	c.start(code)
	return c.wait()
}

func (c *context) start(code string) { c.startWith(code, nil, false) }

func (c *context) startWith(code string, env map[string]string, silent bool) {
	c.t.Helper()
	c.runs++
	id := fmt.Sprintf("run_%d", c.runs)
	m := map[string]any{"op": "run", "id": id, "code": code, "env": env, "silent": silent}
	if c.code != nil {
		must(c.t, c.code.Truncate(0))
		if len(code) >= 4<<10 {
			_, err := c.code.WriteAt([]byte(code), 0)
			must(c.t, err)
			delete(m, "code")
			m["file"] = true
		}
	}
	c.send(m)
}

func (c *context) wait() outcome {
	c.t.Helper()
	var o outcome
	timeout := time.After(patience)
	for {
		select {
		case e, ok := <-c.events:
			if !ok {
				o.died = true
				return o
			}
			if e.Ev == "interrupted" {
				c.heard.Store(true)
				continue
			}
			o.events = append(o.events, e)
			switch {
			case e.stream == "stdout":
				o.stdout += e.text
			case e.stream == "stderr":
				o.stderr += e.text
			case e.Ev == "result":
				o.results = append(o.results, e.message)
			case e.Ev == "error":
				if o.err != nil {
					c.t.Errorf("a second error in one run: %s", e.Value)
				}
				o.err = &e.message
			case e.Ev == "end":
				o.end = e.message
				for _, other := range o.events {
					if other.Ev != "" && other.ID != e.ID {
						c.t.Errorf("message %s of run %q in run %q", other.Ev, other.ID, e.ID)
					}
				}
				return o
			default:
				c.t.Errorf("unexpected message %q %s", e.Ev, e.Value)
			}
		case <-timeout:
			c.t.Fatalf("the run did not end; so far: %s", o.order())
		}
	}
}

// until waits for output of the run at work that contains a text.
func (c *context) until(text string) {
	c.t.Helper()
	var seen string
	timeout := time.After(patience)
	for !strings.Contains(seen, text) {
		select {
		case e, ok := <-c.events:
			if !ok {
				c.t.Fatalf("the driver ended; saw %q", seen)
			}
			seen += e.text + e.Ev + e.Value
		case <-timeout:
			c.t.Fatalf("no %q in %q", text, seen)
		}
	}
}

func (c *context) interrupt() {
	c.t.Helper()
	c.heard.Store(false)
	must(c.t, c.process.Signal(syscall.SIGINT))
}

// interrupted interrupts the run at work as the guest does: again while the driver does not answer.
func (c *context) interrupted() outcome {
	c.t.Helper()
	c.interrupt()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for again := time.NewTicker(5 * time.Second); ; {
			select {
			case <-stop:
				again.Stop()
				return
			case <-again.C:
				if !c.heard.Load() {
					_ = c.process.Signal(syscall.SIGINT)
				}
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	return c.wait()
}

// ended waits for the process, and returns how it ended.
func (c *context) ended() *os.ProcessState {
	c.t.Helper()
	wait := make(chan error, 1)
	go func() { wait <- c.cmd.Wait() }()
	select {
	case <-wait:
	case <-time.After(patience):
		c.t.Fatal("the driver did not end")
	}
	return c.cmd.ProcessState
}

func (c *context) stop() {
	_ = c.control.Close()
	if c.cmd.ProcessState == nil {
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
		_ = c.cmd.Wait()
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func find(t testing.TB, language string) Driver {
	t.Helper()
	d, err := Find(language)
	must(t, err)
	return d
}

// interpreter is a Python that tests run on.
type interpreter struct {
	name    string
	program string
	ipython bool
}

// venv is the directory of the Python environment that `make test-python` installs.
func venv(t testing.TB) string {
	return filepath.Join(testenv.Module(t), ".cache/python")
}

// interpreters returns a bare Python and one with IPython, pandas and matplotlib.
func interpreters(t testing.TB) []interpreter {
	t.Helper()
	with := filepath.Join(venv(t), "bin/python3")
	if _, err := os.Stat(with); err != nil {
		t.Fatalf("%v: run make test-python first", err)
	}
	return []interpreter{{"bare", "/usr/bin/python3", false}, {"ipython", with, true}}
}

// python starts the Python driver on an interpreter.
func (i interpreter) python(t testing.TB, env ...string) *context {
	t.Helper()
	d := find(t, "python")
	c := launch(t, d, options{argv: append([]string{i.program}, d.Argv[1:]...), env: env})
	if c.ready.IPython != i.ipython {
		t.Fatalf("%s: ipython %v", i.name, c.ready.IPython)
	}
	return c
}

// eachPython runs a test on all interpreters.
func eachPython(t *testing.T, test func(t *testing.T, i interpreter, c *context)) {
	t.Helper()
	for _, i := range interpreters(t) {
		t.Run(i.name, func(t *testing.T) { test(t, i, i.python(t)) })
	}
}

// full starts the driver on the interpreter that has everything.
func full(t testing.TB, env ...string) *context {
	t.Helper()
	all := interpreters(t)
	return all[len(all)-1].python(t, env...)
}

// testenvPoll waits until something that happens by itself has happened.
func testenvPoll(t *testing.T, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, patience, "what goes on between runs", ok)
}
