package userns

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNew(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	maps := []Range{{Inside: 0, Outside: 0x7ffe0000, Count: 10}, {Inside: 100, Outside: 5, Count: 1}}
	ns, err := New(t.Context(), maps, maps)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	own, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	var a, b unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &a); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstat(int(own.Fd()), &b); err != nil {
		t.Fatal(err)
	}
	if a.Ino == b.Ino {
		t.Error("it is our own")
	}
	// What a program that enters it sees is what was asked for.
	out, err := exec.CommandContext(t.Context(), "nsenter", "--user=/proc/self/fd/3", "cat", "/proc/self/uid_map", "/proc/self/gid_map").Output()
	if err == nil {
		t.Fatalf("entered without the file: %s", out)
	}
	cmd := exec.CommandContext(t.Context(), "nsenter", "--user=/proc/self/fd/3", "--preserve-credentials", "cat", "/proc/self/uid_map", "/proc/self/gid_map")
	cmd.ExtraFiles = []*os.File{ns}
	if out, err = cmd.Output(); err != nil {
		t.Fatalf("nsenter: %v", err)
	}
	got, err := parseMap(out)
	if err != nil {
		t.Fatal(err)
	}
	if want := slices.Concat(maps, maps); len(got) != len(want) {
		t.Errorf("maps: %v, want %v", got, want)
	}
	// The process that it was born with is gone.
	if _, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); err != unix.ECHILD {
		t.Errorf("a child is left: %v", err)
	}
}

func TestNewRefused(t *testing.T) {
	bad := []Range{{Inside: 0, Outside: 0, Count: 0}}
	if ns, err := New(t.Context(), bad, bad); err == nil {
		_ = ns.Close()
		t.Error("a map of nothing was accepted")
	}
}

func TestUIDMap(t *testing.T) {
	for _, read := range []func(int) ([]Range, error){UIDMap, GIDMap} {
		m, err := read(os.Getpid())
		if err != nil || len(m) == 0 {
			t.Errorf("own map: %v, %v", m, err)
		}
		if _, err := read(1 << 22); err == nil {
			t.Error("map of no process")
		}
	}
}

func TestParseMap(t *testing.T) {
	got, err := parseMap([]byte("         0 1879048192      65536\n 70000 1 2\n"))
	if want := []Range{{0, 1879048192, 65536}, {70000, 1, 2}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"0 1\n", "0 1 2 3\n", "a 1 2\n", "-1 1 2\n", "0 " + strconv.FormatUint(1<<32, 10) + " 1\n"} {
		if got, err := parseMap([]byte(text)); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// TestOwnedBy makes user namespaces: each belongs to the user that it is made for, and the thread is root's again.
func TestOwnedBy(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, want := range []uint32{0x7ffe0102, 0} {
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
		if err := OwnedBy(want, cmd.Start); err != nil {
			t.Fatal(err)
		}
		ns, err := Of(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := unix.IoctlGetUint32(int(ns.Fd()), unix.NS_GET_OWNER_UID); err != nil || got != want {
			t.Errorf("made for user %d, it belongs to %d, %v", want, got, err)
		}
		_ = ns.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if r, e, s := unix.Getresuid(); r != 0 || e != 0 || s != 0 {
			t.Fatalf("the thread is user %d, %d, %d", r, e, s)
		}
	}
}
