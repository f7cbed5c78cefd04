package walls

import (
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

const all = ^uint32(0)

// newNamespaces are clone's and unshare's flags that make a namespace. CLONE_NEWTIME lies in clone's
// signal byte and so can't be asked of clone.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// arg is a test on a whole argument.
func arg(n int, values ...uint32) filter.Test { return filter.Test{Arg: n, Mask: all, Values: values} }

// bits is a test on some bits of an argument.
func bits(n int, mask uint32, values ...uint32) filter.Test {
	return filter.Test{Arg: n, Mask: mask, Values: values}
}

func when(v seccomp.Verdict, tests ...filter.Test) filter.Clause {
	return filter.Clause{When: tests, Then: v}
}

// only allows a call under any of the conditions, and otherwise answers v.
func only(call string, v seccomp.Verdict, reason string, conditions ...[]filter.Test) filter.Entry {
	e := filter.Entry{Call: call, Otherwise: v, Reason: reason}
	for _, c := range conditions {
		e.Clauses = append(e.Clauses, when(seccomp.Allow, c...))
	}
	return e
}

// conditional holds the calls whose arguments decide, in both profiles.
func conditional() []filter.Entry {
	invalid, attempt := seccomp.Errno(unix.EINVAL), refused|tells
	return append(sockets(),
		only("clone", attempt, "processes and threads, but no namespaces: root in one of its own opens the kernel's privileged half",
			[]filter.Test{bits(0, newNamespaces, 0)}),
		only("unshare", attempt, "files and working directory of a thread, but no namespaces",
			[]filter.Test{bits(0, newNamespaces|unix.CLONE_NEWTIME, 0)}),
		filter.Entry{
			Call: "mmap", Otherwise: seccomp.Allow,
			Reason: "memory of the caller itself; but no huge pages from the pool that the host set aside for " +
				"others, which no memory limit counts. The error is that of an empty pool",
			Clauses: []filter.Clause{when(seccomp.Errno(unix.ENOMEM), bits(3, unix.MAP_HUGETLB, unix.MAP_HUGETLB))},
		},
		filter.Entry{
			Call: "memfd_create", Otherwise: seccomp.Allow,
			Reason:  "anonymous files: compilers, runtimes, Wayland-style IPC; no huge pages, as in mmap",
			Clauses: []filter.Clause{when(seccomp.Errno(unix.ENOMEM), bits(1, unix.MFD_HUGETLB, unix.MFD_HUGETLB))},
		},
		only("prlimit64", refused, "own limits only: prlimit(1, NOFILE, 3) starved the guest",
			[]filter.Test{arg(0, 0)}),
		only("sched_setscheduler", refused, "no realtime: it would keep other sandboxes off the processor",
			[]filter.Test{bits(1, ^uint32(unix.SCHED_RESET_ON_FORK), unix.SCHED_NORMAL, unix.SCHED_BATCH, unix.SCHED_IDLE)}),
		only("personality", refused, "query, Linux, 32-bit uname, and no ASLR (sanitizers, gdb); not READ_IMPLIES_EXEC and foreign systems",
			[]filter.Test{arg(0, 0, perLinux32, unameOld, unameOld|perLinux32, noRandomize, noRandomize|perLinux32, all)}),
		modes("mknod", 1), modes("mknodat", 2),
		only("seccomp", attempt, "filters of one's own: agents nest sandboxes; but no listener, which could outlive ours",
			[]filter.Test{arg(0, unix.SECCOMP_SET_MODE_STRICT, unix.SECCOMP_GET_ACTION_AVAIL, unix.SECCOMP_GET_NOTIF_SIZES)},
			[]filter.Test{arg(0, unix.SECCOMP_SET_MODE_FILTER), bits(1, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, 0)}),
		filter.Entry{
			Call: "ioctl", Otherwise: seccomp.Allow,
			Reason: "devices decide, and Landlock and /dev say which there are; but no bytes into a terminal's input " +
				"(TIOCSTI, CVE-2017-5226; TIOCLINUX), no line disciplines (modules full of holes), no console redirection",
			Clauses: []filter.Clause{when(attempt, arg(1, unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSETD, unix.TIOCCONS))},
		},
		only("prctl", invalid, "options known to be about the caller alone; not core scheduling, memory maps, page merging",
			[]filter.Test{arg(0, prctlOptions()...)}),
		only("arch_prctl", invalid, "segment bases (C libraries, Go), CPUID faults, AMX, tagged addresses, shadow stacks",
			[]filter.Test{arg(0, archPrctlOptions()...)}),
	)
}

// udpEncap is UDP_ENCAP of udp(7).
const udpEncap = 100

// Personalities of personality(2) that x/sys does not name.
const (
	perLinux32  = 0x0008
	unameOld    = 0x0020000 // UNAME26
	noRandomize = 0x0040000 // ADDR_NO_RANDOMIZE
)

// modes allows mknod of plain files, FIFOs and sockets. No one holds MKNOD, but a whiteout (character
// device 0:0) needs no capability since Linux 5.8.
func modes(call string, n int) filter.Entry {
	return only(call, refused|tells, "FIFOs, sockets and files; no devices",
		[]filter.Test{bits(n, unix.S_IFMT, 0, unix.S_IFREG, unix.S_IFIFO, unix.S_IFSOCK)})
}

// sockets says which kinds can be made. The errors are those of a kernel without the family or
// protocol, which libraries expect: EPERM on NETLINK_AUDIT makes sudo and useradd give up.
func sockets() []filter.Entry {
	family, protocol := seccomp.Errno(unix.EAFNOSUPPORT), seccomp.Errno(unix.EPROTONOSUPPORT)
	const kind = 0xf // SOCK_TYPE_MASK: the flags SOCK_CLOEXEC and SOCK_NONBLOCK lie above
	inet := arg(0, unix.AF_INET, unix.AF_INET6)
	return []filter.Entry{
		{
			Call: "socket", Otherwise: family,
			Reason: "Unix, TCP, UDP, ping and routing information; AF_VSOCK reached the hypervisor from an empty " +
				"network namespace, raw and packet sockets forge, other families are attack surface",
			Clauses: []filter.Clause{
				when(seccomp.Allow, arg(0, unix.AF_UNIX)),
				when(refused|tells, inet, bits(1, kind, unix.SOCK_RAW, unix.SOCK_PACKET)),
				when(seccomp.Allow, inet, bits(1, kind, unix.SOCK_STREAM), arg(2, 0, unix.IPPROTO_TCP)),
				when(seccomp.Allow, inet, bits(1, kind, unix.SOCK_DGRAM),
					arg(2, 0, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6)),
				when(protocol, inet),
				when(seccomp.Allow, arg(0, unix.AF_NETLINK), arg(2, unix.NETLINK_ROUTE)),
				when(protocol, arg(0, unix.AF_NETLINK)),
				when(refused|tells, arg(0, unix.AF_PACKET)),
				when(family|tells, arg(0, unix.AF_VSOCK, unix.AF_XDP)),
			},
		},
		{
			Call: "setsockopt", Otherwise: seccomp.Allow,
			Reason: "options of one's own sockets; but no protocols of the kernel's put on top of TCP and UDP (TLS, " +
				"ESP, SMC: a hole a year, as CVE-2023-0461). The error is that of a kernel without them, and libraries do it themselves",
			Clauses: []filter.Clause{
				when(seccomp.Errno(unix.ENOPROTOOPT), arg(1, unix.SOL_TCP), arg(2, unix.TCP_ULP)),
				when(seccomp.Errno(unix.ENOPROTOOPT), arg(1, unix.SOL_UDP), arg(2, udpEncap)),
			},
		},
		only("socketpair", family, "pairs within the sandbox", []filter.Test{arg(0, unix.AF_UNIX)}),
	}
}

func prctlOptions() []uint32 {
	return []uint32{
		unix.PR_SET_PDEATHSIG, unix.PR_GET_PDEATHSIG, unix.PR_GET_DUMPABLE, unix.PR_SET_DUMPABLE,
		unix.PR_GET_KEEPCAPS, unix.PR_SET_KEEPCAPS, unix.PR_GET_TIMING, unix.PR_SET_TIMING,
		unix.PR_SET_NAME, unix.PR_GET_NAME, unix.PR_GET_SECCOMP, unix.PR_SET_SECCOMP,
		unix.PR_CAPBSET_READ, unix.PR_CAPBSET_DROP, unix.PR_GET_TSC, unix.PR_SET_TSC,
		unix.PR_GET_SECUREBITS, unix.PR_SET_SECUREBITS, unix.PR_SET_TIMERSLACK, unix.PR_GET_TIMERSLACK,
		unix.PR_MCE_KILL, unix.PR_MCE_KILL_GET, unix.PR_SET_CHILD_SUBREAPER, unix.PR_GET_CHILD_SUBREAPER,
		unix.PR_SET_NO_NEW_PRIVS, unix.PR_GET_NO_NEW_PRIVS, unix.PR_GET_TID_ADDRESS,
		unix.PR_SET_THP_DISABLE, unix.PR_GET_THP_DISABLE, unix.PR_CAP_AMBIENT,
		unix.PR_SVE_SET_VL, unix.PR_SVE_GET_VL, unix.PR_SME_SET_VL, unix.PR_SME_GET_VL,
		unix.PR_GET_SPECULATION_CTRL, unix.PR_SET_SPECULATION_CTRL,
		unix.PR_PAC_RESET_KEYS, unix.PR_PAC_SET_ENABLED_KEYS, unix.PR_PAC_GET_ENABLED_KEYS,
		unix.PR_SET_TAGGED_ADDR_CTRL, unix.PR_GET_TAGGED_ADDR_CTRL, unix.PR_SET_SYSCALL_USER_DISPATCH,
		unix.PR_SET_MDWE, unix.PR_GET_MDWE, unix.PR_SET_VMA, unix.PR_GET_AUXV, unix.PR_SET_PTRACER,
		unix.PR_GET_SHADOW_STACK_STATUS, unix.PR_SET_SHADOW_STACK_STATUS, unix.PR_LOCK_SHADOW_STACK_STATUS,
		unix.PR_TASK_PERF_EVENTS_DISABLE, unix.PR_TASK_PERF_EVENTS_ENABLE, unix.PR_FUTEX_HASH,
	}
}

// archPrctlOptions are ARCH_* of arch/x86/include/uapi/asm/prctl.h.
func archPrctlOptions() []uint32 {
	return []uint32{
		0x1001, 0x1002, 0x1003, 0x1004, // set and get GS and FS
		0x1011, 0x1012, // CPUID faulting
		0x1021, 0x1022, 0x1023, // extended state (AMX)
		0x4001, 0x4002, 0x4003, 0x4004, // linear address masking
		0x5001, 0x5002, 0x5003, 0x5004, 0x5005, // shadow stacks
	}
}
