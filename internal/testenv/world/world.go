// Package world is a fake internet for tests (package fakenet), with what a test needs beside it.
//
// A test binary calls Main from TestMain, which starts it again in a network namespace of its own, wired to
// the world: so the test reaches the world's addresses as a host reaches the internet, and nothing of it
// reaches the real one. What belongs here: what ties a fake internet to a test. What does not: anything that is
// tested.
package world

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"casemate.dev/internal/fakenet"
)

// The world's addresses.
const (
	Web      = fakenet.Web
	Other    = fakenet.Other
	Resolver = fakenet.Resolver
	Metadata = fakenet.Metadata
	Private  = fakenet.Private
	Web6     = fakenet.Web6
)

// marked says in the environment that the namespace is there.
const marked = "CASEMATE_TEST_WORLD"

// Main runs the tests of a package in a network namespace of their own and returns their exit code.
func Main(m *testing.M) int {
	if os.Getenv(marked) != "" {
		return m.Run()
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make network namespaces and need root")
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), marked+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() > 0 {
			return cmd.ProcessState.ExitCode()
		}
		fmt.Fprintln(os.Stderr, "run in a network namespace:", err)
		return 1
	}
	return 0
}

// World is one fake internet, whose methods fail the test instead of returning errors.
type World struct {
	*fakenet.Net
	t testing.TB
}

// Log is a list of words that is safe for concurrent use.
type Log struct {
	mu   sync.Mutex
	list []string
}

// Add appends a word.
func (l *Log) Add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, s)
}

// All returns the words.
func (l *Log) All() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.list...)
}

// New makes a world with a name server on Resolver, and the way from here to it. It ends with the test.
func New(t testing.TB) *World {
	t.Helper()
	if os.Getenv(marked) == "" {
		t.Fatal("call world.Main from TestMain")
	}
	n, err := fakenet.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return &World{n, t}
}

// Listen opens a server's socket in the world.
func (w *World) Listen(addr string) net.Listener {
	w.t.Helper()
	l, err := w.Net.Listen(addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = l.Close() })
	return l
}

// Serve gives each connection to addr in the world to f, in a goroutine of its own, and closes it when f returns.
func (w *World) Serve(addr string, f func(net.Conn)) {
	w.t.Helper()
	l := w.Listen(addr)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				f(c)
			}()
		}
	}()
}

// ListenUDP opens a server's socket for UDP in the world.
func (w *World) ListenUDP(addr string) net.PacketConn {
	w.t.Helper()
	c, err := w.Net.ListenUDP(addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// TLS returns a server's configuration with a certificate of the world's authority for the names.
func (w *World) TLS(names ...string) *tls.Config {
	w.t.Helper()
	c, err := w.Net.TLS(names...)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}
