package spawn_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// probe tries things inside, by their names, and says "ok" or the name of the error for each, a line
// each. Every one has a thread of its own, with which what it did to that thread goes.
func probe(names string) string {
	var out []string
	for name := range strings.FieldsSeq(names) {
		said := make(chan string)
		go func() {
			runtime.LockOSThread()
			said <- name + " " + try(name)
		}()
		out = append(out, <-said)
	}
	return strings.Join(out, "\n")
}

func try(name string) string {
	f, ok := probes()[name]
	if !ok {
		return "no such probe"
	}
	err := f()
	var errno unix.Errno
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	}
	return err.Error()
}

// probes are the attacks. Each succeeds ("ok") in a guest without walls: that is its twin.
func probes() map[string]func() error {
	return map[string]func() error{
		"mount":     func() error { return unix.Mount("tmpfs", "/mnt", "tmpfs", 0, "") },
		"fsopen":    func() error { return syscall3(unix.SYS_FSOPEN, str("tmpfs"), 0, 0) },
		"open_tree": func() error { return syscall3(unix.SYS_OPEN_TREE, ^uintptr(99), str("/tmp"), 1) },
		"unshare-user": func() error { // from one thread, as the kernel wants it
			return inFork(unix.SYS_UNSHARE, unix.CLONE_NEWUSER)
		},
		"unshare-mount": func() error { return unix.Unshare(unix.CLONE_NEWNS) },
		"clone-user":    func() error { return forkWith(unix.SYS_CLONE, unix.CLONE_NEWUSER) },
		"clone3-user":   func() error { return forkWith(unix.SYS_CLONE3, unix.CLONE_NEWUSER) },
		"setns": func() error {
			fd, err := unix.Open("/proc/self/ns/uts", unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			return unix.Setns(fd, unix.CLONE_NEWUTS)
		},
		"chroot":         func() error { return unix.Chroot("/tmp") },
		"vsock":          func() error { return socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0) },
		"packet":         func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0) },
		"xdp":            func() error { return socket(unix.AF_XDP, unix.SOCK_RAW, 0) },
		"raw":            func() error { return socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP) },
		"netlink-uevent": func() error { return socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT) },
		"mptcp":          func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP) },
		"ptrace": func() error {
			return withChild(func(pid int) error {
				return unix.PtraceAttach(pid)
			})
		},
		"ptrace-me":    func() error { return syscall3(unix.SYS_PTRACE, unix.PTRACE_TRACEME, 0, 0) },
		"process-read": func() error { return withChild(readMemory) },
		"pidfd-getfd": func() error {
			return withChild(func(pid int) error {
				fd, err := unix.PidfdOpen(pid, 0)
				if err != nil {
					return err
				}
				_, err = unix.PidfdGetfd(fd, 0, 0)
				return err
			})
		},
		"kcmp":         func() error { p := uintptr(os.Getpid()); return syscall3(unix.SYS_KCMP, p, p, 0) },
		"userfaultfd":  func() error { return syscall3(unix.SYS_USERFAULTFD, 1, 0, 0) }, // 1: UFFD_USER_MODE_ONLY
		"io-uring":     ioUring,
		"keyctl":       func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_PROCESS_KEYRING, true); return err },
		"handle":       func() error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/tmp", 0); return err },
		"sethostname":  func() error { return unix.Sethostname([]byte("x")) },
		"personality":  func() error { return syscall3(unix.SYS_PERSONALITY, 0x0400000, 0, 0) },
		"prlimit-init": func() error { return unix.Prlimit(1, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: 200}, nil) },
		"tiocsti":      func() error { return ioctlByte(unix.TIOCSTI) },
		"tiocsti-high": func() error { return ioctlByte(1<<32 | unix.TIOCSTI) },
		"tiocsetd":     func() error { return ioctlByte(unix.TIOCSETD) },
		"mknod":        func() error { return unix.Mknod("/tmp/whiteout", unix.S_IFCHR, 0) },
		"listener":     listener,
		"init-mem":     func() error { return openClose("/proc/1/mem") },
		"init-fd":      func() error { _, err := os.Readlink("/proc/1/fd/0"); return err },
		"init-signal":  func() error { return unix.Kill(1, unix.SIGWINCH) },
		"x32":          func() error { return syscall3(0x40000000|unix.SYS_GETPID, 0, 0, 0) },

		// What must work in every profile.
		"work-thread":   func() error { return threads() },
		"work-fork":     func() error { return exec.Command("/bin/true").Run() },
		"work-pipe":     func() error { _, err := exec.Command("/bin/sh", "-c", "echo a | cat | wc -l").Output(); return err },
		"work-rename":   renameAcross,
		"work-landlock": landlockABI,
		"work-seccomp":  ownFilter,
		"work-tcp":      func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, 0) },
		"work-unix":     func() error { return socket(unix.AF_UNIX, unix.SOCK_STREAM, 0) },
		"work-route":    func() error { return socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE) },
		"work-fifo":     func() error { return unix.Mkfifo(fmt.Sprintf("/tmp/fifo%d", os.Getpid()), 0o600) },
		"work-signal":   func() error { return withChild(func(pid int) error { return unix.Kill(pid, unix.SIGCONT) }) },
		"work-kill-group": func() error {
			return exec.Command("/bin/sh", "-c", "sleep 100 & kill $!; wait $! ; [ $? -eq 143 ]").Run()
		},
		"work-limit":  func() error { return unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &unix.Rlimit{}) },
		"work-noaslr": func() error { return syscall3(unix.SYS_PERSONALITY, 0x0040000, 0, 0) },
	}
}

func syscall3(trap, a1, a2, a3 uintptr) error {
	if _, _, errno := unix.RawSyscall(trap, a1, a2, a3); errno != 0 {
		return errno
	}
	return nil
}

func str(s string) uintptr { return uintptr(unsafe.Pointer(unsafe.StringData(s + "\x00"))) }

func socket(family, kind, protocol int) error {
	_, err := unix.Socket(family, kind, protocol)
	return err
}

func openClose(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return f.Close()
}

// withChild calls f with the pid of a child that sleeps.
func withChild(f func(pid int) error) error {
	cmd := exec.Command("/bin/sleep", "100")
	if err := cmd.Start(); err != nil {
		return err
	}
	err := f(cmd.Process.Pid)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return err
}

func readMemory(pid int) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	var base uint64
	if _, err := fmt.Sscanf(string(maps), "%x-", &base); err != nil {
		return err
	}
	buf := make([]byte, 4)
	local := []unix.Iovec{{Base: &buf[0], Len: 4}}
	_, err = unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: uintptr(base), Len: 4}}, 0)
	return err
}

func ioctlByte(request uintptr) error {
	b := [8]byte{}
	return syscall3(unix.SYS_IOCTL, 0, request, uintptr(unsafe.Pointer(&b)))
}

func ioUring() error {
	var params [120]byte
	return syscall3(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
}

// listener installs a filter with a listener of its own.
func listener() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return seccompAllow(unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
}

// ownFilter installs a filter as agents' own sandboxes do.
func ownFilter() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return seccompAllow(0)
}

func seccompAllow(flags uintptr) error {
	insn := unix.SockFilter{Code: unix.BPF_RET, K: unix.SECCOMP_RET_ALLOW}
	prog := unix.SockFprog{Len: 1, Filter: &insn}
	return syscall3(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
}

func landlockABI() error {
	v, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return errno
	}
	if v < 1 {
		return errors.New("no version")
	}
	return nil
}

func threads() error {
	done := make(chan int)
	for range 8 {
		go func() { runtime.LockOSThread(); done <- unix.Gettid() }()
	}
	for range 8 {
		<-done
	}
	return nil
}

// renameAcross moves a file between directories, which Landlock refuses without REFER.
func renameAcross() error {
	dir, err := os.MkdirTemp("/tmp", "")
	if err != nil {
		return err
	}
	for _, d := range []string{"/a", "/b"} {
		if err := os.Mkdir(dir+d, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(dir+"/a/f", nil, 0o644); err != nil {
		return err
	}
	return os.Rename(dir+"/a/f", dir+"/b/f")
}

// inFork makes one system call in a child.
func inFork(trap, a1 uintptr) error {
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, errno = unix.RawSyscall(trap, a1, 0, 0)
		for {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
		}
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &ws, 0, nil); err != nil {
		return err
	}
	if ws.ExitStatus() != 0 {
		return unix.Errno(ws.ExitStatus())
	}
	return nil
}

// forkWith makes a child with extra flags, which leaves at once.
func forkWith(trap uintptr, flags uint64) error {
	args := [11]uint64{0: flags, 4: uint64(unix.SIGCHLD)}
	a1, a2 := uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args)
	if trap == unix.SYS_CLONE {
		a1, a2 = uintptr(flags)|uintptr(unix.SIGCHLD), 0
	}
	pid, _, errno := unix.RawSyscall(trap, a1, a2, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		for {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	return err
}

// workerMain is the guest's own program as a worker: it tells through descriptor 3 what it holds.
func workerMain() {
	out := os.NewFile(3, "socket")
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		fmt.Fprintln(out, err)
		os.Exit(1)
	}
	var open []string
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil { // else it was the list's own
			open = append(open, fd.Name()+":"+strings.SplitN(target, "[", 2)[0])
		}
	}
	fmt.Fprintf(out, "uid %d fds %s mem %v", os.Getuid(), strings.Join(open, " "), openClose("/proc/self/mem"))
	os.Exit(0)
}

// int80 is a static i386 program that calls getpid and leaves, by the 32-bit entry to the kernel. On
// amd64 a filter that looks at numbers only takes its call 20 for writev. It was written by hand:
//
//	00000000  7f 45 4c 46 01 01 01 00  00 00 00 00 00 00 00 00  ELF header: 32 bit, little endian
//	00000010  02 00 03 00 01 00 00 00  54 80 04 08 34 00 00 00  EXEC, 386, entry 0x8048054, program header at 0x34
//	00000020  00 00 00 00 00 00 00 00  34 00 20 00 01 00 00 00  one program header of 32 bytes
//	00000030  00 00 00 00 01 00 00 00  00 00 00 00 00 80 04 08  LOAD, offset 0, address 0x8048000
//	00000040  00 80 04 08 66 00 00 00  66 00 00 00 05 00 00 00  0x66 bytes, readable and executable
//	00000050  00 10 00 00                                       aligned to a page
//	00000054  b8 14 00 00 00           mov eax, 20 (getpid)
//	00000059  cd 80                    int 0x80
//	0000005b  b8 01 00 00 00           mov eax, 1 (exit)
//	00000060  31 db                    xor ebx, ebx
//	00000062  cd 80                    int 0x80
//	00000064  90 90                    padding
func int80() []byte {
	return []byte("\x7fELF\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00" +
		"\x02\x00\x03\x00\x01\x00\x00\x00\x54\x80\x04\x08\x34\x00\x00\x00" +
		"\x00\x00\x00\x00\x00\x00\x00\x00\x34\x00\x20\x00\x01\x00\x00\x00" +
		"\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x80\x04\x08" +
		"\x00\x80\x04\x08\x66\x00\x00\x00\x66\x00\x00\x00\x05\x00\x00\x00" +
		"\x00\x10\x00\x00" +
		"\xb8\x14\x00\x00\x00\xcd\x80\xb8\x01\x00\x00\x00\x31\xdb\xcd\x80\x90\x90")
}
