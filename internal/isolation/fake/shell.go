package fake

import (
	"bytes"
	"fmt"
	"io"
	"path"
	"strings"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/fake/script"
)

// shellHost gives scripts the machine.
type shellHost struct{ machine *machine }

var _ script.Host = shellHost{}

func taskOf(sh *script.Shell) *task { return sh.Task.(*task) }

func (h shellHost) Checkpoint(sh *script.Shell) error {
	t := taskOf(sh)
	t.machine.gate(t.ctx)
	return t.ctx.Err()
}

func (h shellHost) Fork(sh *script.Shell, f func(*script.Shell) int) (int, func() int, error) {
	parent := taskOf(sh)
	t, err := h.machine.newTask(parent.process)
	if err != nil {
		return 0, nil, err
	}
	p := parent.process
	p.mu.Lock()
	p.tasks[t] = true
	p.mu.Unlock()
	c := sh.Clone()
	c.Task, c.PID, c.Stdin = t, t.pid, bytes.NewReader(nil)
	c.Stdout, c.Stderr = rebound(sh.Stdout, t), rebound(sh.Stderr, t)
	done := make(chan int, 1)
	go func() {
		status := f(c)
		p.ended(t, status)
		done <- status
	}()
	wait := func() int {
		select {
		case status := <-done:
			return status
		case <-parent.ctx.Done():
			return 128
		}
	}
	return t.pid, wait, nil
}

// rebound makes output of a new task depend on that task's life.
func rebound(w io.Writer, t *task) io.Writer {
	if old, ok := w.(*writer); ok {
		return &writer{t, old.out, old.stream}
	}
	return w
}

func (h shellHost) Lookup(sh *script.Shell, name string) script.Command {
	if dir, base := path.Split(name); dir == "" || strings.HasSuffix(dir, "/bin/") {
		if c := command(base); c != nil {
			return c
		}
	}
	if !strings.Contains(name, "/") {
		return nil
	}
	// A file in the tree is a script if it may be run.
	u := userOf(sh)
	p := absolute(name, sh.Dir, u)
	data, info, err := h.machine.tree.read(u, p)
	if err != nil || info.Mode&0o111 == 0 {
		return nil
	}
	return func(sh *script.Shell, argv []string) int {
		c := sh.Clone()
		c.Args = argv
		return c.Run(string(data))
	}
}

func userOf(sh *script.Shell) user {
	u, _ := taskOf(sh).machine.user(sh.Env["USER"])
	return u
}

func (h shellHost) Open(sh *script.Shell, name, op string) (io.ReadWriteCloser, error) {
	u := userOf(sh)
	p := absolute(name, sh.Dir, u)
	if p == "/dev/null" {
		return devNull{}, nil
	}
	f := &file{machine: h.machine, user: u, path: p}
	if op == "<" {
		data, _, err := h.machine.tree.read(u, p)
		if err != nil {
			return nil, err
		}
		f.data = bytes.NewReader(data)
		return f, nil
	}
	_, err := h.machine.tree.write(u, p, nil, writeOptions{appends: op == ">>"})
	return f, err
}

// file is an open file of the tree: read from a copy, or written at its end.
type file struct {
	machine *machine
	user    user
	path    string
	data    *bytes.Reader
}

func (f *file) Read(p []byte) (int, error) {
	if f.data == nil {
		return 0, io.EOF
	}
	return f.data.Read(p)
}

func (f *file) Write(p []byte) (int, error) {
	_, err := f.machine.tree.write(f.user, f.path, p, writeOptions{appends: true})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (f *file) Close() error { return nil }

type devNull struct{}

func (devNull) Read([]byte) (int, error)    { return 0, io.EOF }
func (devNull) Write(p []byte) (int, error) { return len(p), nil }
func (devNull) Close() error                { return nil }

// complain writes an error as programs do and returns status 1.
func complain(sh *script.Shell, name string, format string, args ...any) int {
	fmt.Fprintf(sh.Stderr, "%s: %s\n", name, fmt.Sprintf(format, args...))
	return 1
}

// isTerminal reports whether a stream is the process's terminal.
func isTerminal(w io.Writer) bool {
	o, ok := w.(*writer)
	return ok && o.stream == guestwire.TTY
}
