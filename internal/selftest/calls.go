package selftest

// callCases are section C: system calls.
func callCases() []Case {
	return []Case{
		both(Case{ID: "C01", Class: Escape, Title: "bpf", Twin: Bare, Script: `sc bpf 0 0 0`}, refusedAll()),
		both(Case{ID: "C02", Class: Escape, Title: "userfaultfd", Twin: Bare, Script: `sc userfaultfd 0`}, refusedAll()),
		both(Case{ID: "C03", Class: Escape, Title: "io_uring", Twin: Bare, Script: `sc io_uring_setup 1 0`}, refusedAll()),
		both(Case{ID: "C04", Class: Escape, Title: "perf_event_open", Twin: Bare, Script: `sc perf_event_open 0 0 -1 -1 0`}, refusedAll()),
		both(Case{
			ID: "C05", Class: Escape, Title: "reaching into other processes", Twin: Bare,
			Script: `sc process_vm_readv 1 0 0 0 0 0; sc pidfd_getfd -1 0 0; sc kcmp 1 1 0 0 0; sc ptrace 16 1 0 0; sc process_madvise -1 0 0 0 0`,
		}, refusedAll()),
		both(Case{
			ID: "C06", Class: Escape, Title: "modules, kexec, reboot", Twin: Bare,
			// Each argument is wrong in a way that is only looked at after the permission.
			Script: `sc init_module 0 0 0; sc finit_module -1 0 0; sc kexec_load 0 4096 0 0; sc reboot 0 0 0 0`,
		}, refusedAll()),
		both(Case{
			ID: "C07", Class: Escape, Title: "user namespaces by clone and unshare", Twin: Bare,
			Python: `
call("clone", 0x10000000 | 17, 0, 0, 0, 0)
call("unshare", 0x10000000)`,
		}, refusedAll()),
		both(Case{
			ID: "C08", Class: Escape, Title: "other namespaces by unshare and setns", Twin: Bare,
			Script: `for f in 0x00020000 0x04000000 0x08000000 0x20000000 0x40000000 0x02000000; do sc unshare $f; done; sc setns -1 0`,
		}, refusedAll()),
		both(Case{
			ID: "C09", Class: Escape, Title: "calls of the x32 table", Untwinned: "most kernels are built without x32 and refuse it to everybody; the filter is tried in a BPF machine beside it",
			Python: `
if platform.machine() == "x86_64":
    r = libc.syscall(ctypes.c_long(0x40000027))
    print("x32 through" if r > 0 else "x32 refused ENOSYS")
else:
    print("x32 refused ENOSYS")`,
			Standard: Want{},
		}, Want{Match: `refused|^$`, Reject: `through`}).killed(),
		both(Case{
			ID: "C10", Class: Escape, Title: "calls of the i386 table", Twin: Bare, Python: i386Call,
		}, Want{Match: `refused|^trying`, Reject: `through`}).killed(),
		both(Case{
			ID: "C11", Class: Escape, Title: "personality, descriptor tables, port access", Twin: Bare,
			Script: `sc personality 0x0400000; sc modify_ldt 1 0 0; sc iopl 3; sc ioperm 0 1 1`,
		}, refusedAll()),
		both(Case{
			ID: "C12", Class: Escape, Title: "key rings", Twin: Bare, Script: `sc keyctl 0 -3 1; sc add_key 0 0 0 0 -3`,
		}, refusedAll()),
		both(Case{
			ID: "C13", Class: HostDoS, Title: "swap, clocks, realtime scheduling", Twin: Bare,
			Script: `sc swapon 0 0; sc clock_settime 0 0; sc adjtimex 0; sc settimeofday 1 0
chrt -f 99 true 2>/dev/null && echo "chrt through " || echo "chrt refused "`,
		}, refusedAll()),
		both(Case{
			ID: "C14", Class: Compat, Title: "Landlock for a sandbox within", Script: `sc landlock_create_ruleset 0 0 1`,
			Untwinned: "nothing is defended: the call must work",
		}, Want{Match: `through [1-9]`}),
		both(Case{
			ID: "C15", Class: Escape, Title: "socket families that lead out", Twin: Bare,
			Python: `
import socket
for name, family, kind, proto in (("vsock", 40, 1, 0), ("xdp", 44, 3, 0), ("packet", 17, 3, 0), ("raw", 2, 3, 1), ("raw6", 10, 3, 58), ("alg", 38, 5, 0),
        ("netfilter", 16, 3, 12), ("audit", 16, 3, 9), ("uevent", 16, 2, 15), ("xfrm", 16, 3, 6), ("bluetooth", 31, 1, 0), ("can", 29, 3, 1), ("tipc", 30, 1, 0), ("rds", 21, 5, 0)):
    try:
        socket.socket(family, kind, proto).close()
        print(name, "through ")
    except OSError as e:
        print(name, "refused", errno.errorcode[e.errno])`,
		}, refusedAll()),
		both(Case{
			ID: "C16", Class: Escape, Title: "user namespaces by clone3", Twin: Bare,
			Python: `
import struct
args = ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
call("clone3", ctypes.addressof(args), 88)`,
		}, Want{Match: ` refused ENOSYS`, Reject: gotThrough}),
		both(Case{
			ID: "C17", Class: Escape, Title: "files by handle", Twin: Bare,
			Script: `sc open_by_handle_at -1 0 0; sc name_to_handle_at -100 0 0 0 0`,
		}, refusedAll()),
		both(Case{
			ID: "C18", Class: HostDoS, Title: "accounting, quotas, fanotify", Twin: Bare,
			Script: `sc acct 1; sc quotactl 0 0 0 0; sc fanotify_init 0 0`,
		}, refusedAll()),
	}
}

// killed also accepts that the system call filter kills the process: a call of a foreign table has no
// honest use.
func (c Case) killed() Case {
	c.Locked.End, c.Standard.End = "exited or SIGSYS", "exited or SIGSYS"
	return c
}

// i386Call asks for the process's number through the 32-bit door (int 0x80), where the same number
// means another call than in the 64-bit table that a filter may have been written for.
const i386Call = `
import mmap
if platform.machine() != "x86_64":
    print("i386 refused: another machine"); sys.exit()
print("trying"); sys.stdout.flush()
code = bytes.fromhex("53b814000000cd805bc3") # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
m.write(code)
pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
print("i386 through" if pid == os.getpid() else "i386 refused")`
