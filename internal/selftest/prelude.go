package selftest

// python is the interpreter's path inside; both templates have it there.
const python = "/usr/bin/python3"

// pythonPrelude gives probes raw system calls by name. Numbers are per machine; a name that the
// machine has no call for is refused by nature.
const pythonPrelude = `
import ctypes, errno, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if platform.machine() == "x86_64" else 1
numbers = {
 "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
 "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "ptrace": (101, 117),
 "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
 "clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268),
 "mount": (165, 40), "umount2": (166, 39), "fsopen": (430, 430), "open_tree": (428, 428), "mount_setattr": (442, 442), "move_mount": (429, 429),
 "personality": (135, 92), "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
 "swapon": (167, 224), "clock_settime": (227, 112), "adjtimex": (159, 171), "settimeofday": (164, 170),
 "keyctl": (250, 219), "add_key": (248, 217), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
 "landlock_create_ruleset": (444, 444), "prlimit64": (302, 261), "syslog": (103, 116), "quotactl": (179, 60), "acct": (163, 89),
 "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "getpid": (39, 172), "process_madvise": (440, 440), "sched_setscheduler": (144, 119),
}
def call(name, *args):
    n = numbers[name][column]
    if n is None:
        print(name, "refused ENOSYS"); return -1
    r = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in (n,) + args])
    if r == 0 and name in ("clone", "clone3"): os._exit(0) # the child, which prints nothing beside its parent
    e = errno.errorcode.get(ctypes.get_errno(), "?")
    if r < 0 and e in ("EPERM", "ENOSYS", "EACCES"):
        print(name, "refused", e)
    elif r < 0:
        print(name, "answered", e)
    else:
        print(name, "through", r)
    sys.stdout.flush()
    return r
`

// prelude, in which pythonPrelude stands between single quotes, gives scripts the same as "sc NAME ARGUMENTS…", and "tcp HOST PORT".
const prelude = `
PATH=/usr/sbin:/usr/bin:/sbin:/bin
sc() { /usr/bin/python3 -c '` + pythonPrelude + `
call(sys.argv[1], *[int(a, 0) for a in sys.argv[2:]])' "$@" 2>&1; r=$?
  case $r in 0) ;; 159) echo "$1 refused SIGSYS";; *) echo "$1 answered nothing: the probe is broken, status $r";; esac; }
tcp() { /usr/bin/python3 -c '
import socket, sys
s = socket.socket()
s.settimeout(3)
try:
    s.connect((sys.argv[1], int(sys.argv[2]))); print("OPEN")
except OSError as e:
    print("CLOSED", e)' "$@"; }
`

// gotThrough matches a call of the prelude that the kernel looked at rather than refused.
const gotThrough = ` (through|answered) `

// refusedAll is what a list of calls that must all be refused gives.
func refusedAll() Want { return Want{Match: ` refused `, Reject: gotThrough} }
