package pty

import (
	"bufio"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTerminal runs stty on a fresh terminal: it is a controlling terminal of the size asked for and
// of the owner asked for, and reading it ends once the process is gone.
func TestTerminal(t *testing.T) {
	master, terminal, err := Open(1234, 33, 77)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(terminal.Fd()), &st); err != nil || st.Uid != 1234 || st.Mode&0o777 != 0o620 {
		t.Fatalf("owner %d, mode %o, %v", st.Uid, st.Mode, err)
	}
	fd := terminal.Fd()
	p, err := os.StartProcess("/bin/sh", []string{"sh", "-c", "stty size; tty >&2; read x; stty size < /dev/tty; echo got $x"}, &os.ProcAttr{
		Files: []*os.File{terminal, terminal, terminal},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0},
	})
	_ = fd
	_ = terminal.Close()
	if err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(master)
	line := func() string {
		s, _ := r.ReadString('\n')
		return strings.TrimSpace(s)
	}
	if got := line(); got != "33 77" {
		t.Fatalf("size %q", got)
	}
	if got := line(); !strings.HasPrefix(got, "/dev/pts/") {
		t.Fatalf("tty %q", got)
	}
	if err := Resize(master, 40, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := master.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	var rest []string
	for {
		s, err := r.ReadString('\n')
		rest = append(rest, strings.TrimSpace(s))
		if err != nil {
			break // EIO: nobody has the terminal open
		}
	}
	if got := strings.Join(rest, ","); !strings.Contains(got, "40 100,got hello") {
		t.Fatalf("rest %q", got)
	}
	if st, err := p.Wait(); err != nil || !st.Success() {
		t.Fatalf("%v, %v", st, err)
	}
}
