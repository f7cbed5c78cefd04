package testenv

import (
	_ "embed"
	"os"
	"os/exec"
	"syscall"
)

// sweeper ends and removes what carries a tag, once nobody writes to it any more.
//
//go:embed watch.sh
var sweeper string

// watch starts a process that ends and removes what tests with this tag leave where they are killed, by a signal or by
// the time limit of a test program: their own cleanup does not run then. It must not carry the tag itself.
func watch(tag string) {
	var pipe [2]int
	if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC); err != nil {
		panic(err)
	}
	r := os.NewFile(uintptr(pipe[0]), "tag")
	cmd := exec.Command("/bin/sh", "-c", sweeper)
	cmd.Stdin = r
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a Ctrl-C at the terminal must not reach it
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	_ = r.Close()
	// The other end stays open for as long as this process lives: it is no os.File, which a collection of garbage would close.
	if _, err := syscall.Write(pipe[1], []byte(tag+"\n")); err != nil {
		panic(err)
	}
}
