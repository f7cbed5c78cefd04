// Package watch is the keeper process: it answers the system calls that sandboxes' filters hand over, notes what it saw,
// and does what an attempt is to bring about.
//
// What belongs here: answering, reading arguments, noting, the reactions. What does not: which calls are handed over, and
// what becomes of them (isolation/walls makes the filter, and the keeper answers as that filter would); recording (the
// server takes the events); starting the process (package keeper).
//
// The process runs as a user of its own without any capability. It can read the memory of sandboxes' processes, kill and
// freeze them, since their user namespaces belong to that user; nothing else of the host is its.
package watch

import (
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/daemon"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

// memoryLimit is what the runtime may use before it collects harder. What is kept is bounded far below.
const memoryLimit = 256 << 20

// Main is the keeper process. It returns when the server asks it to end, or nobody needs it any more.
func Main() error {
	l, err := daemon.Enter()
	if err != nil {
		return err
	}
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/proc", Err: err}
	}
	if err := confine(); err != nil {
		return err
	}
	debug.SetMemoryLimit(memoryLimit)
	k, err := newKeeper(proc, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	return k.serve(l)
}

// confine takes every thread's right to gain any, and holds it to what answering takes. There is no Landlock domain: a
// process in one can look at no process outside of it.
func confine() error {
	program, err := calls().Program(runtime.GOARCH)
	if err != nil {
		return err
	}
	return seccomp.ConfineProcess(program)
}

// calls is the keeper's own table.
func calls() filter.Table {
	refused := seccomp.Errno(unix.EPERM)
	t := filter.Table{Default: refused}
	for _, r := range []struct{ reason, calls string }{
		{"read and write what is open", "read write close fcntl fstat"},
		{"the server's connections", "accept4 getsockname getpeername getsockopt setsockopt shutdown sendmsg recvmsg"},
		{"wait for events", "epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 pipe2 ppoll"},
		{"look at sandboxes' processes, and end them; the kernel says which are in reach", "process_vm_readv pidfd_send_signal"},
		{"Go's runtime: memory", "mmap munmap mprotect madvise mincore brk mremap prctl"},
		{"Go's runtime: threads and clocks", "clone futex nanosleep clock_nanosleep clock_gettime sched_yield sched_getaffinity gettid getpid rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack timer_create timer_settime timer_delete set_robust_list rseq membarrier restart_syscall setitimer getrlimit prlimit64 uname"},
		{"random numbers", "getrandom"},
		{"to end", "exit exit_group"},
	} {
		for call := range strings.FieldsSeq(r.calls) {
			t.Entries = append(t.Entries, filter.Entry{Call: call, Otherwise: seccomp.Allow, Reason: r.reason})
		}
	}
	t.Entries = append(t.Entries, filter.Entry{Call: "clone3", Otherwise: seccomp.Errno(unix.ENOSYS), Reason: "a C library takes clone instead"})
	only := func(call, reason string, test filter.Test) {
		t.Entries = append(t.Entries, filter.Entry{
			Call: call, Otherwise: refused, Reason: reason,
			Clauses: []filter.Clause{{When: []filter.Test{test}, Then: seccomp.Allow}},
		})
	}
	const all = ^uint32(0)
	only("openat", "look at processes; write nothing, make nothing",
		filter.Test{Arg: 2, Mask: unix.O_ACCMODE | unix.O_CREAT | unix.O_TRUNC | unix.O_PATH, Values: []uint32{unix.O_RDONLY}})
	only("tgkill", "Go's runtime: preemption, of its own threads", filter.Test{Arg: 0, Mask: all, Values: []uint32{uint32(os.Getpid())}})
	only("ioctl", "a listener's operations", filter.Test{Arg: 1, Mask: all, Values: []uint32{
		unix.SECCOMP_IOCTL_NOTIF_RECV, unix.SECCOMP_IOCTL_NOTIF_SEND, unix.SECCOMP_IOCTL_NOTIF_ID_VALID,
	}})
	return t
}
