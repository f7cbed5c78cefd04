package daemon

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/userns"
	"casemate.dev/internal/testenv"
)

// someone is a user that nothing else on the host runs as.
const someone = 0x7ffe0101

// sleeper starts a helper that sleeps.
func sleeper(t *testing.T) (Spec, *Process) {
	t.Helper()
	testenv.Root(t)
	s := Spec{Dir: t.TempDir(), Name: "helper", Program: "/bin/sh", Args: []string{"-c", "exec sleep 1000"}, UID: someone}
	p, err := s.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, p) })
	return s, p
}

func stop(t *testing.T, p *Process) {
	t.Helper()
	_ = p.Handle.Signal(syscall.SIGKILL)
	_, _ = p.Handle.Wait(t.Context())
	_ = p.Handle.Close()
}

// VULNERABILITY: what the server was started with is open in its helpers.
// ATTACK: a descriptor that an exec does not close.
// VERIFIES: the helper has its socket and its log, and not that. The twin, started before, has it.
func TestNothingElseIsOpen(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Open(secret, syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(fd) }()
	if out, err := exec.CommandContext(t.Context(), "readlink", "/proc/self/fd/"+strconv.Itoa(fd)).Output(); err != nil || strings.TrimSpace(string(out)) != secret {
		t.Errorf("twin: %q, %v", out, err)
	}
	s, p := sleeper(t)
	dir := "/proc/" + strconv.Itoa(p.Handle.PID()) + "/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, e := range entries {
		link, _ := os.Readlink(filepath.Join(dir, e.Name()))
		found = append(found, link)
	}
	if all := strings.Join(found, " "); strings.Contains(all, secret) || !strings.Contains(all, s.Log()) || !strings.Contains(all, "socket:") {
		t.Errorf("the helper has open: %s", all)
	}
	if info, err := os.Stat(s.Socket()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("its socket: %v, %v", info, err)
	}
}

// VULNERABILITY: the next server takes another process for the helper.
// ATTACK: records that name a process that is none: of another boot, another start, another user, and this very process.
// VERIFIES: none is found. The twin is the record as it was.
func TestFind(t *testing.T) {
	s, p := sleeper(t)
	was, err := os.ReadFile(s.path(".json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*record){
		"boot": func(r *record) { r.Boot = "another" }, "start": func(r *record) { r.Start++ },
		"user": func(r *record) { r.UID++ }, "pid": func(r *record) { r.PID = os.Getpid() },
	} {
		var r record
		if err := json.Unmarshal(was, &r); err != nil {
			t.Fatal(err)
		}
		change(&r)
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.path(".json"), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Find(); got != nil || err != nil {
			t.Errorf("another %s: %+v, %v", name, got, err)
		}
	}
	if err := os.WriteFile(s.path(".json"), was, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := s.Find()
	if err != nil || got == nil || got.Handle.PID() != p.Handle.PID() || got.Start != p.Start || got.UID != someone {
		t.Fatalf("twin: %+v, %v", got, err)
	}
	_ = got.Handle.Close()
	stop(t, p)
	if got, err := s.Find(); got != nil || err != nil {
		t.Errorf("ended: %+v, %v", got, err)
	}
}

// ATTACK: another user has got hold of a connection to a helper.
// VERIFIES: it is refused. The twin is root's.
func TestCheckPeer(t *testing.T) {
	testenv.Root(t)
	for uid, want := range map[uint32]errs.Kind{someone: errs.PermissionDenied, 0: 0} {
		var fds [2]int
		err := userns.OwnedBy(uid, func() (err error) {
			fds, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fds[1]) }()
		f := os.NewFile(uintptr(fds[0]), "connection")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if err := CheckPeer(c.(*net.UnixConn)); (err != nil) != (want != 0) || err != nil && !errs.Is(err, want) {
			t.Errorf("user %d: %v", uid, err)
		}
	}
}
