package gateway

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/control"
	"casemate.dev/internal/linux/daemon"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

// confinedArg marks the second execution of the program, which is behind its walls already.
const confinedArg = "confined"

// Main is the gateway process: args are what control.Start gave it. It returns when the server asks it to end.
//
// The walls are put on in two steps. Landlock and no_new_privs belong to a thread, so the first execution
// takes them and executes the program again, whose threads all have them. The system call filter comes
// then, on all threads at once, and forbids executing anything.
func Main(args []string, inspector egress.Inspector) error {
	if len(args) == 0 || args[0] != confinedArg {
		return confine(args)
	}
	l, err := daemon.Enter()
	if err != nil {
		return err
	}
	if err := filterCalls(); err != nil {
		return err
	}
	// What the runtime may use before it collects harder. The kernel's own limit on the process is higher.
	debug.SetMemoryLimit(memoryLimit)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	g := New(Config{Nameservers: control.NameserversOf(args[1:]), Inspector: inspector, Log: log})
	defer g.Close()
	return g.Serve(l)
}

const memoryLimit = 1 << 30

// confine takes what can't be given back, and executes the program again.
func confine(args []string) error {
	runtime.LockOSThread()
	if err := seccomp.NoNewPrivs(); err != nil {
		return err
	}
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	abi, err := landlock.ABI()
	if err != nil {
		return err
	}
	if abi > 0 {
		known, scope := landlock.Known(abi)
		read := landlock.ReadFile | landlock.ReadDir
		// What the resolver reads, and the program itself.
		_, err = landlock.Restrict(landlock.Ruleset{Handled: known, Scoped: scope, Rules: []landlock.Rule{
			{Path: "/etc", Access: read & known},
			{Path: "/run/systemd/resolve", Access: read & known, Optional: true},
			{Path: "/run/resolvconf", Access: read & known, Optional: true},
			{Path: "/proc/self/exe", Access: (landlock.ReadFile | landlock.Execute) & known},
		}})
		if err != nil {
			return fmt.Errorf("landlock: %w", err)
		}
	}
	argv := append([]string{os.Args[0], control.Verb, confinedArg}, args...)
	return fmt.Errorf("execute %s again: %w", self, syscall.Exec("/proc/self/exe", argv, os.Environ())) //nolint:forbidigo // the gateway is no process of a sandbox
}

// filterCalls holds every thread to what carrying packets needs. Anything else fails.
func filterCalls() error {
	program, err := calls().Program(runtime.GOARCH)
	if err != nil {
		return err
	}
	return seccomp.InstallProcess(program)
}

// calls is the gateway's table.
func calls() filter.Table {
	t := filter.Table{Default: seccomp.Errno(unix.EPERM)}
	for _, r := range []struct{ reason, calls string }{
		{"read and write what is open", "read write readv writev pread64 pwrite64 close lseek fcntl dup3"},
		{"the resolver's files; Landlock says which", "openat newfstatat fstat statx readlinkat getdents64 faccessat2"},
		{"sockets", "bind connect listen accept4 getsockname getpeername getsockopt setsockopt shutdown sendto sendmsg recvfrom recvmsg"},
		{"wait for events", "epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 pipe2 ppoll"},
		{"Go's runtime: memory", "mmap munmap mprotect madvise mincore brk mremap prctl"},
		{"Go's runtime: threads and clocks", "clone futex nanosleep clock_nanosleep clock_gettime sched_yield sched_getaffinity gettid getpid tgkill rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack timer_create timer_settime timer_delete set_robust_list rseq membarrier restart_syscall setitimer getrlimit prlimit64 uname"},
		{"random numbers", "getrandom"},
		{"to end", "exit exit_group"},
	} {
		for call := range strings.FieldsSeq(r.calls) {
			t.Entries = append(t.Entries, filter.Entry{Call: call, Otherwise: seccomp.Allow, Reason: r.reason})
		}
	}
	t.Entries = append(t.Entries, filter.Entry{
		Call: "socket", Otherwise: seccomp.Errno(unix.EPERM), Reason: "TCP and UDP, and netlink for the host's addresses",
		Clauses: []filter.Clause{{When: []filter.Test{{Arg: 0, Mask: 0xffffffff, Values: []uint32{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}}}, Then: seccomp.Allow}},
	})
	t.Entries = append(t.Entries, filter.Entry{
		Call: "ioctl", Otherwise: seccomp.Errno(unix.EPERM), Reason: "how much a socket has for us",
		Clauses: []filter.Clause{{When: []filter.Test{{Arg: 1, Mask: 0xffffffff, Values: []uint32{unix.SIOCINQ}}}, Then: seccomp.Allow}},
	})
	return t
}
