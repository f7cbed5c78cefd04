package fake

import (
	"strings"
	"syscall"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake/script"
)

// faultCommand returns the programs that make trouble.
func faultCommand(name string) script.Command {
	switch name {
	case "crash": // the guest dies
		return func(sh *script.Shell, _ []string) int {
			taskOf(sh).machine.die(isolation.Exit{Reason: "guest_exited", Detail: "status 2"})
			return 0
		}
	case "oom": // the kernel kills this process for the memory it asked for
		return func(sh *script.Shell, _ []string) int { return allocate(sh, 1<<62) }
	case "alloc": // alloc N: holds N bytes
		return func(sh *script.Shell, argv []string) int { return allocate(sh, number(argv, 1)) }
	case "spam": // spam N: N bytes of output
		return runSpam
	case "ignore-term":
		return func(sh *script.Shell, _ []string) int {
			taskOf(sh).ignore(int(syscall.SIGTERM), true)
			return 0
		}
	case "count":
		return runCounter
	case "echo-server":
		return runEchoServer
	case "http-server":
		return runHTTPServer
	}
	return nil
}

func allocate(sh *script.Shell, n int64) int {
	t := taskOf(sh)
	if t.machine.charge(t, n) {
		return 0
	}
	if t == t.process.main {
		t.process.setReason(guestwire.EndOOMKilled)
	}
	t.signal(int(syscall.SIGKILL))
	return 137
}

func runSpam(sh *script.Shell, argv []string) int {
	block := []byte(strings.Repeat(strings.Repeat("spam", 15)+"...\n", 512))
	for left := number(argv, 1); left > 0; {
		n, err := sh.Stdout.Write(block[:min(int64(len(block)), left)])
		if err != nil {
			return 1
		}
		left -= int64(n)
	}
	return 0
}
