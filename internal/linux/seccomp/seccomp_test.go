package seccomp_test

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/testenv"
)

// program puts instructions {code, jt, jf, k} into the kernel's form.
func program(instructions ...[4]uint32) []byte {
	var out []byte
	for _, i := range instructions {
		out = binary.NativeEndian.AppendUint16(out, uint16(i[0]))
		out = append(out, byte(i[1]), byte(i[2]))
		out = binary.NativeEndian.AppendUint32(out, i[3])
	}
	return out
}

// answering returns a program that answers v to one call and allows all others.
func answering(call uint32, v seccomp.Verdict) []byte {
	return program(
		[4]uint32{unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, 0, 0, 0},
		[4]uint32{unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, 0, 1, call},
		[4]uint32{unix.BPF_RET, 0, 0, uint32(v)},
		[4]uint32{unix.BPF_RET, 0, 0, uint32(seccomp.Allow)},
	)
}

// TestInstall changes one call's answer on one thread.
func TestInstall(t *testing.T) {
	testenv.Root(t) // or no_new_privs, which would stick to the test's threads
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // ends with its goroutine, and the filter with it
		if err := seccomp.Install(answering(unix.SYS_GETPPID, seccomp.Errno(unix.EOWNERDEAD))); err != nil {
			t.Error(err)
			return
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); errno != unix.EOWNERDEAD {
			t.Errorf("filtered: %v", errno)
		}
	}()
	<-done
	if _, _, errno := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); errno != 0 {
		t.Errorf("another thread is filtered: %v", errno)
	}
}

// TestKill runs a victim that makes the call that its filter kills for, and a control without filter.
func TestKill(t *testing.T) {
	testenv.Root(t)
	for victim, want := range map[string]string{"filtered": "signal: bad system call", "control": ""} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestVictim$")
		cmd.Env = append(os.Environ(), "VICTIM="+victim)
		got := ""
		if err := cmd.Run(); err != nil {
			got = err.Error()
		}
		// With a core limit above 0 the text says so too.
		if got != want && got != want+" (core dumped)" {
			t.Errorf("%s: %q, want %q", victim, got, want)
		}
	}
}

// TestVictim is TestKill's child, and does nothing otherwise.
func TestVictim(t *testing.T) {
	switch os.Getenv("VICTIM") {
	case "":
		return
	case "filtered":
		runtime.LockOSThread()
		if err := seccomp.Install(answering(unix.SYS_GETPPID, seccomp.Kill)); err != nil {
			t.Fatal(err)
		}
	}
	unix.Getppid()
}

func TestBadPrograms(t *testing.T) {
	allow := program([4]uint32{unix.BPF_RET, 0, 0, uint32(seccomp.Allow)})
	long := make([]byte, 0, 8*4097)
	for range 4097 {
		long = append(long, allow...)
	}
	for _, p := range [][]byte{nil, {}, allow[:4], append(allow, 0), long} {
		if err := seccomp.Install(p); !errors.Is(err, seccomp.ErrProgram) {
			t.Errorf("%d bytes: %v, want ErrProgram", len(p), err)
		}
	}
	if err := seccomp.Install(make([]byte, 8)); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a load without a return: %v, want EINVAL", err)
	}
}

func TestVerdictString(t *testing.T) {
	for v, want := range map[seccomp.Verdict]string{
		seccomp.Allow: "allow", seccomp.Kill: "kill", seccomp.Errno(unix.EPERM): "EPERM",
		seccomp.Verdict(unix.SECCOMP_RET_TRAP): "0x30000",
	} {
		if got := v.String(); got != want {
			t.Errorf("%#x is %q, want %q", uint32(v), got, want)
		}
	}
}
