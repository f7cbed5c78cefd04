package walls

import (
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

// The verdicts of the tables. Calls that no row names are absent: ENOSYS is what an older kernel says,
// so libraries fall back as they do there, and calls that a newer kernel brings stay closed.
const (
	absent  = seccomp.Verdict(unix.SECCOMP_RET_ERRNO) | seccomp.Verdict(unix.ENOSYS)
	refused = seccomp.Verdict(unix.SECCOMP_RET_ERRNO) | seccomp.Verdict(unix.EPERM)
)

// tells is added to an errno's verdict where the call tells of an attempt to get out, or at the kernel. It lies above
// every errno, and resolve takes it out again.
const tells seccomp.Verdict = 0x8000

// resolve returns the verdict itself, or Notify for one that tells where attempts are observed.
func resolve(v seccomp.Verdict, attempts bool) seccomp.Verdict {
	if v&unix.SECCOMP_RET_ACTION_FULL != unix.SECCOMP_RET_ERRNO || v&tells == 0 {
		return v
	}
	if attempts {
		return seccomp.Notify
	}
	return v &^ tells
}

// row is some calls that share a verdict and the reason for it.
type row struct {
	reason string
	calls  string // separated by spaces
	// telling says that a refused call tells of an attempt to get out, or at the kernel: no program needs it, and few
	// try it.
	telling bool
}

// allowed holds what every program may call in both profiles.
func allowed() []row {
	return []row{
		{"read and write open files; the descriptors are the sandbox's own", "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek", false},
		{"open, close and duplicate descriptors", "open openat openat2 creat close close_range dup dup2 dup3 fcntl flock", false},
		{"file metadata", "stat lstat fstat newfstatat statx access faccessat faccessat2 readlink readlinkat statfs fstatfs", false},
		{"directories", "getdents getdents64 mkdir mkdirat rmdir getcwd chdir fchdir", false},
		{"names", "rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat", false},
		{"owners, modes and times; capabilities decide what chown may do", "chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat umask utime utimes futimesat utimensat", false},
		{"file size and space", "truncate ftruncate fallocate fadvise64 readahead cachestat", false},
		{"flush files", "sync fsync fdatasync syncfs sync_file_range", false},
		{"copy within the kernel", "sendfile splice tee vmsplice copy_file_range", false},
		{"extended attributes; security.* needs capabilities, trusted.* is refused by the kernel", "setxattr lsetxattr fsetxattr setxattrat getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat", false},
		{"watch files: editors, bundlers, tail -f", "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch", false},

		{"memory of the caller itself", "brk munmap mprotect mremap madvise msync mincore mlock mlock2 munlock mlockall munlockall mseal", false},
		{"protection keys and shadow stacks: V8, glibc", "pkey_alloc pkey_free pkey_mprotect map_shadow_stack", false},
		{"where memory lies; changing it is refused", "get_mempolicy", false},
		{"barriers and restartable sequences: allocators, JVM", "membarrier rseq", false},

		{"make processes; namespaces are behind clone's flags", "fork vfork execve execveat exit exit_group wait4 waitid", false},
		{"threads", "set_tid_address set_robust_list get_robust_list gettid futex futex_waitv futex_wake futex_wait futex_requeue", false},
		{"who am I", "getpid getppid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getpgrp getsid getcpu uname sysinfo times getrusage", false},
		{"change ids: sudo, su, apt; capabilities and no_new_privs decide", "setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset", false},
		{"sessions and process groups: shells", "setsid setpgid", false},
		{"priorities; the kernel refuses raising them without CAP_SYS_NICE", "getpriority setpriority ioprio_get ioprio_set", false},
		{"scheduling: nproc, taskset, thread pools", "sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_getattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval", false},
		{"own limits; others' only through prlimit64, which is filtered", "getrlimit setrlimit", false},
		{"signals; the pid namespace and Landlock's scope bound whom they reach", "kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack pause restart_syscall signalfd signalfd4", false},
		{"processes by descriptor: Go, systemd-style supervisors; pidfd_getfd is refused", "pidfd_open pidfd_send_signal", false},

		{"wait for events", "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 pipe pipe2", false},
		{"read clocks and sleep; setting clocks is refused", "time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep", false},
		{"timers", "alarm getitimer setitimer timer_create timer_delete timer_gettime timer_settime timer_getoverrun timerfd_create timerfd_gettime timerfd_settime", false},
		{"random numbers", "getrandom", false},

		{"use sockets; which kinds can be made is filtered at socket and socketpair", "bind connect listen accept accept4 getsockname getpeername getsockopt shutdown sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg", false},
		{"System V and POSIX IPC, in the sandbox's own IPC namespace: databases", "shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr", false},
		{"Landlock only takes rights away: agents nest sandboxes of their own", "landlock_create_ruleset landlock_add_rule landlock_restrict_self", false},
	}
}

// denied holds what is refused with EPERM in both profiles: calls that would reach out of the sandbox
// or into attack surface of the kernel that no agent's work needs, and that tell of an attempt.
func denied() []row {
	return []row{
		{"mounts are made before the payload starts, never after (CVE-2022-0492 and its like begin with one)", "mount umount2 pivot_root", true},
		{"the new mount API, a blind spot of older lists", "open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr", true},
		{"entering another namespace", "setns", true},
		{"other processes' memory, registers and descriptors; debuggers, strace and LeakSanitizer don't work inside", "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp", true},
		{"kernel programs and its counters: long lists of privilege escalations", "bpf perf_event_open", true},
		{"stops the kernel at a page fault of the caller's choice: the classic aid of race exploits", "userfaultfd", true},
		{"kernel modules", "init_module finit_module delete_module create_module", true},
		{"another kernel, and reboot", "kexec_load kexec_file_load reboot", true},
		{"keyrings: kernel memory that outlives processes, and a long list of privilege escalations", "keyctl add_key request_key", true},
		{"file handles open files past every path check (CAP_DAC_READ_SEARCH, 'shocker')", "open_by_handle_at name_to_handle_at", true},
		{"swap and process accounting are the host's", "swapon swapoff acct", true},
		{"disk quotas are the server's limits", "quotactl quotactl_fd", false},
		{"the clocks are the host's", "settimeofday clock_settime clock_adjtime adjtimex", false},
		{"names are given by the server at the claim", "sethostname setdomainname", false},
		{"the host's log, which names its kernel's addresses", "syslog", true},
		{"I/O ports and segment tables", "iopl ioperm modify_ldt", true},
		{"can ask for deadline and realtime scheduling behind a pointer that a filter can't follow", "sched_setattr", false},
		{"moves memory between the host's nodes, also of others", "mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages", false},
		{"watches whole file systems", "fanotify_init fanotify_mark", true},
		{"hangs up the terminal", "vhangup", false},
		{"profiler's cookies into kernel memory", "lookup_dcookie", false},
	}
}

// missing holds what is answered with ENOSYS on purpose, where the plain default needs a reason.
func missing() []row {
	return []row{
		{"a second interface to every file and socket call, which a filter can't see into; libuv and others fall back", "io_uring_setup io_uring_enter io_uring_register", true},
		{"flags behind a pointer: it made user namespaces past a filter on clone; glibc falls back to clone", "clone3", false},
		{"reads of the mount table by id; findmnt falls back to mountinfo, which is kept meaningless", "statmount listmount", false},
		{"asynchronous I/O is counted for the whole host (fs.aio-max-nr), and one sandbox could take all; databases fall back to threads", "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents", false},
		{"memory that the host can't reclaim or see", "memfd_secret", false},
		{"acts on other processes' memory", "process_madvise process_mrelease", false},
	}
}

// table returns the filter of a profile. fork says that it is for the thread that forks, which must
// reach clone3 where processes are born in their cgroup; execTable then closes it for the child.
func table(p isolation.Profile, fork bool, seen isolation.Calls, mark uint64) filter.Table {
	t := rawTable(p, fork)
	for i := range t.Entries {
		e := &t.Entries[i]
		e.Otherwise = resolve(e.Otherwise, seen.Attempts)
		for j := range e.Clauses {
			e.Clauses[j].Then = resolve(e.Clauses[j].Then, seen.Attempts)
		}
		observe(e, seen, mark)
	}
	return t
}

// observe hands calls that go on to the listener. What executes with mark as its last argument, which the kernel
// ignores, was asked for by the server, and known: only the thread that forks knows the mark.
func observe(e *filter.Entry, seen isolation.Calls, mark uint64) {
	switch e.Call {
	case "execve", "execveat":
		if seen.Exec {
			e.Otherwise = seccomp.Notify
			e.Clauses = []filter.Clause{when(seccomp.Allow, arg(5, uint32(mark)), filter.Test{Arg: 5, Mask: all, Values: []uint32{uint32(mark >> 32)}, High: true})}
		}
	case "connect":
		if seen.Connect {
			e.Otherwise = seccomp.Notify
		}
	case "open", "openat", "openat2", "creat":
		if seen.Open {
			e.Otherwise = seccomp.Notify
		}
	}
}

// rawTable is table with the verdicts that tell as they stand in the rows.
func rawTable(p isolation.Profile, fork bool) filter.Table {
	t := filter.Table{Default: absent}
	add := func(rows []row, v seccomp.Verdict) {
		for _, r := range rows {
			v := v
			if r.telling {
				v |= tells
			}
			for call := range strings.FieldsSeq(r.calls) {
				e := filter.Entry{Call: call, Otherwise: v, Reason: r.reason}
				if call == "clone3" && fork {
					e.Otherwise = seccomp.Allow
				}
				t.Entries = append(t.Entries, e)
			}
		}
	}
	add(allowed(), seccomp.Allow)
	add(denied(), refused)
	add(missing(), absent)
	t.Entries = append(t.Entries, conditional()...)
	root := filter.Entry{Call: "chroot", Otherwise: refused, Reason: "no one inside holds SYS_CHROOT"}
	if p == isolation.Standard {
		root = filter.Entry{
			Call: "chroot", Otherwise: seccomp.Allow,
			Reason: "dpkg and debootstrap; the mount namespace holds nothing but the sandbox",
		}
	}
	t.Entries = append(t.Entries, root)
	return t
}

// execTable is what each child takes on top, just before it executes: everything stays as the first
// filter says, except clone3.
func execTable() filter.Table {
	return filter.Table{Default: seccomp.Allow, Entries: []filter.Entry{{
		Call: "clone3", Otherwise: absent,
		Reason: "only the forking thread may: its flags lie behind a pointer",
	}}}
}
