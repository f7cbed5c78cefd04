package mount

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/userns"
)

const insideVariable = "CASEMATE_TEST_PRIVATE"

// TestMain runs the tests in a mount namespace of their own, by what they test.
func TestMain(m *testing.M) {
	if os.Geteuid() == 0 && os.Getenv(insideVariable) == "" {
		before, _ := os.Readlink("/proc/self/ns/mnt")
		if os.Getenv(privateVariable) == "" {
			_ = os.Setenv("CASEMATE_TEST_BEFORE", before)
		}
		if err := EnterPrivate(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		_ = os.Setenv(insideVariable, "1")
	}
	os.Exit(m.Run())
}

func TestEnterPrivate(t *testing.T) {
	now, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if before := os.Getenv("CASEMATE_TEST_BEFORE"); before == "" || before == now {
		t.Errorf("mount namespace before %q, now %q", before, now)
	}
	if _, marked := os.LookupEnv(privateVariable); marked {
		t.Error("children would inherit the mark")
	}
	// What is mounted here shows nowhere outside.
	dir := t.TempDir()
	if err := unix.Mount("private", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	for _, pid := range []string{"self", "1"} {
		b, err := os.ReadFile("/proc/" + pid + "/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		if shows := strings.Contains(string(b), dir); shows != (pid == "self") {
			t.Errorf("process %s sees the mount: %v", pid, shows)
		}
	}
}

func attach(t *testing.T, m *os.File, dir string) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := Attach(m, fd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

func TestNewAndAttach(t *testing.T) {
	m, err := New("tmpfs", ReadOnly|NoSuid|NoDev, Option{Key: "mode", Value: "711"}, Option{Key: "size", Value: "64k"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	dir := t.TempDir()
	attach(t, m, dir)
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Mode&0o777 != 0o711 {
		t.Errorf("mode %o, %v", st.Mode&0o777, err)
	}
	flags, err := Flags(int(m.Fd()))
	if want := int64(unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV); err != nil || flags&want != want {
		t.Errorf("flags %#x, %v", flags, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write: %v", err)
	}
}

func TestNewTellsWhatTheKernelSaid(t *testing.T) {
	for _, tt := range []struct {
		fs   string
		o    Option
		want string
	}{
		{"nosuchfs", Option{}, "nosuchfs"},
		{"tmpfs", Option{Key: "nosuchoption", Value: "x"}, "nosuchoption"},
		{"tmpfs", Option{Key: "size", Value: "much"}, "size"},
	} {
		m, err := New(tt.fs, 0, tt.o)
		if err == nil {
			_ = m.Close()
			t.Errorf("%s %v was accepted", tt.fs, tt.o)
			continue
		}
		if !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %v: %v", tt.fs, tt.o, err)
		}
	}
}

// A copy ends at its root, and carries what was asked for.
func TestClone(t *testing.T) {
	base, err := New("tmpfs", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	dir := t.TempDir()
	attach(t, base, dir)
	for _, d := range []string{"a/b", "below"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	below, err := New("tmpfs", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer below.Close()
	attach(t, below, filepath.Join(dir, "below"))
	if err := os.WriteFile(filepath.Join(dir, "below/f"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, recursive := range []bool{false, true} {
		m, err := Clone(dir, recursive)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.Faccessat(int(m.Fd()), "below/f", unix.F_OK, 0)
		if recursive != (err == nil) {
			t.Errorf("recursive %v: the mount below shows: %v", recursive, err)
		}
		_ = m.Close()
	}
	m, err := Clone(filepath.Join(dir, "a/b"), false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var own, up unix.Stat_t
	if err := unix.Fstatat(int(m.Fd()), ".", &own, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstatat(int(m.Fd()), "../..", &up, 0); err != nil || own.Ino != up.Ino {
		t.Errorf("'..' of a copy leads to inode %d, not its own %d, %v", up.Ino, own.Ino, err)
	}
	// Twin: of the directory itself it leads out.
	if err := unix.Stat(filepath.Join(dir, "a/b/../.."), &up); err != nil || own.Ino == up.Ino {
		t.Errorf("twin: '..' of the directory leads nowhere: %v", err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("a", link); err != nil {
		t.Fatal(err)
	}
	if l, err := Clone(link, false); err == nil {
		var st unix.Stat_t
		if err := unix.Fstat(int(l.Fd()), &st); err != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
			t.Errorf("a link was followed: mode %o, %v", st.Mode, err)
		}
		_ = l.Close()
	}
}

// Ids stored as inside show as outside.
func TestIDMap(t *testing.T) {
	const outside = 0x7ffd0000
	ranges := []userns.Range{{Inside: 0, Outside: outside, Count: 1 << 16}}
	ns, err := userns.New(context.Background(), ranges, ranges)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	base, err := New("tmpfs", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	dir := t.TempDir()
	attach(t, base, dir)
	name := filepath.Join(dir, "f")
	if err := os.WriteFile(name, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(name, 1000, 0); err != nil {
		t.Fatal(err)
	}
	m, err := Clone(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := SetAttr(m, Change{Set: NoExec | NoSymFollow, UserNS: ns}); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(int(m.Fd()), "f", &st, 0); err != nil || st.Uid != outside+1000 || st.Gid != outside {
		t.Errorf("owner %d:%d, %v", st.Uid, st.Gid, err)
	}
	if err := SetAttr(m, Change{UserNS: ns}); err == nil {
		t.Error("mapped twice")
	}
}

// A program started from here is in the private namespace, and has no mark.
func TestChildrenShareTheNamespace(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "readlink /proc/self/ns/mnt; echo $"+privateVariable).Output()
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != own {
		t.Errorf("a child has %q, this process %q", got, own)
	}
}
