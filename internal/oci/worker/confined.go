package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
	"casemate.dev/internal/oci/layer"
)

// What one worker may take: Go's runtime collects harder from memory on, and cpu is above what the largest layer
// takes that the limits allow.
const (
	memory = 512 << 20
	cpu    = 3600 // seconds
)

// Main is the worker: args are what Unpack gave it. It is the first process of its pid namespace, and nothing of
// the server's is open in it but what it was given.
func Main(args []string) error {
	var o order
	if len(args) != 1 {
		return errors.New("the server starts this")
	}
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	if err := confine(o); err != nil {
		return err
	}
	debug.SetMemoryLimit(memory)
	go endWith(os.NewFile(lifeFD, "life"))
	blob, out := os.NewFile(blobFD, "layer"), os.NewFile(answerFD, "answer")
	a := answer{}
	root, err := fd.OpenRoot("/")
	if err == nil {
		a.Result, err = layer.Unpack(context.Background(), blob, o.Size, root, o.Limits)
	}
	if err != nil {
		text, hint := errs.PublicText(err)
		a = answer{Kind: errs.KindOf(err).String(), Error: text, Hint: hint, Cause: err.Error()}
	}
	return json.NewEncoder(out).Encode(a)
}

// endWith ends the process with the server, which holds the pipe's other end and writes nothing.
func endWith(life *os.File) {
	_, _ = life.Read(make([]byte, 1))
	os.Exit(1)
}

// confine leaves the process nothing but its directory and the calls that it needs. The order counts: each step
// takes away what an earlier one needed.
func confine(o order) error {
	// 0. What the server was started with, and did not mean to hand on.
	if err := closeOthers(); err != nil {
		return err
	}
	// 1. The directory is all there is. Its descriptor was rooted there, so ".." ends at it, too.
	if err := syscall.Fchdir(rootFD); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return os.NewSyscallError("chroot", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := syscall.Close(rootFD); err != nil {
		return os.NewSyscallError("close", err)
	}
	// 2. Limits of the kernel's, where a bug would take more.
	for _, l := range []struct {
		what int
		to   uint64
	}{
		{syscall.RLIMIT_CORE, 0},
		{syscall.RLIMIT_NOFILE, 64},
		{syscall.RLIMIT_CPU, cpu},
		{syscall.RLIMIT_FSIZE, uint64(max(o.Limits.Bytes, 1<<20))},
	} {
		if err := syscall.Setrlimit(l.what, &syscall.Rlimit{Cur: l.to, Max: l.to}); err != nil {
			return os.NewSyscallError("setrlimit", err)
		}
	}
	// 3. Rights over owners, modes and capabilities of the directory's files, and no others.
	if err := caps.LimitProcess(kept()); err != nil {
		return err
	}
	// 4. System calls, on all threads. With no_new_privs on this thread the others get it as well.
	program, err := calls().Program(runtime.GOARCH)
	if err != nil {
		return err
	}
	return seccomp.ConfineProcess(program)
}

// closeOthers closes what is open beyond what the worker was given, but for what Go's runtime waits with.
func closeOthers() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range open {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n <= lifeFD {
			continue
		}
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.HasPrefix(to, "anon_inode:") {
			continue // the directory just read, which is closed already
		}
		if err := syscall.Close(n); err != nil {
			return os.NewSyscallError("close", err)
		}
	}
	return nil
}

// kept are the rights that unpacking needs, within the worker's own user namespace.
func kept() caps.Set {
	var s caps.Set
	for _, name := range []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP"} {
		if c, ok := caps.ByName(name); ok {
			s |= caps.Of(c)
		}
	}
	return s
}

// calls is the worker's table.
func calls() filter.Table {
	t := filter.Table{Default: seccomp.Errno(syscall.EPERM)}
	for _, r := range []struct{ reason, calls string }{
		{"the layer, and the files", "read write pread64 pwrite64 close lseek fstat newfstatat statx openat openat2 ftruncate fcntl getdents64 readlinkat"},
		{"to make what an archive says", "mkdirat mknodat symlinkat linkat unlinkat renameat renameat2 fchownat fchmodat fsetxattr flistxattr fremovexattr utimensat"},
		{"Go's runtime: files", "epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2"},
		{"Go's runtime: memory", "mmap munmap mprotect madvise mincore brk mremap prctl"},
		{"Go's runtime: threads and clocks", "clone futex nanosleep clock_nanosleep clock_gettime sched_yield sched_getaffinity gettid getpid tgkill rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack timer_create timer_settime timer_delete set_robust_list rseq membarrier restart_syscall setitimer getrlimit prlimit64 uname"},
		{"random names", "getrandom"},
		{"to end", "exit exit_group"},
	} {
		for call := range strings.FieldsSeq(r.calls) {
			t.Entries = append(t.Entries, filter.Entry{Call: call, Otherwise: seccomp.Allow, Reason: r.reason})
		}
	}
	return t
}
