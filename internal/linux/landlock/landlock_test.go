package landlock_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/testenv"
)

// need returns the kernel's version, which must be at least abi.
func need(t *testing.T, abi, major, minor int) int {
	t.Helper()
	testenv.Root(t) // or no_new_privs, which would stick to the test's threads
	have := 0
	testenv.Need(t, testenv.Feature{Name: "landlock", Major: major, Minor: minor, Probe: func() (err error) {
		if have, err = landlock.ABI(); err == nil && have < abi {
			return errs.New(errs.Unsupported, "Landlock has version %d, not %d", have, abi)
		}
		return err
	}})
	return have
}

// onThread runs f on a thread of its own, which ends with it, and its domain too.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		f()
	}()
	<-done
}

func everything(abi int) landlock.Access {
	a, _ := landlock.Known(abi)
	return a
}

// TestRestrict denies writing outside one directory, to this thread and no other.
func TestRestrict(t *testing.T) {
	abi := need(t, 2, 5, 19)
	dir := t.TempDir()
	inside, outside := filepath.Join(dir, "inside"), filepath.Join(dir, "outside")
	for _, d := range []string{inside, outside} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(d string) error { return os.WriteFile(filepath.Join(d, "f"), []byte("x"), 0o644) }
	if err := write(outside); err != nil {
		t.Fatalf("without a domain: %v", err)
	}
	onThread(func() {
		absent, err := landlock.Restrict(landlock.Ruleset{Handled: everything(abi), Rules: []landlock.Rule{
			{Path: "/", Access: landlock.ReadFile | landlock.ReadDir | landlock.Execute | landlock.Refer},
			{Path: inside, Access: everything(abi)},
			{Path: filepath.Join(dir, "absent"), Access: landlock.ReadFile, Optional: true},
		}})
		if err != nil || len(absent) != 1 {
			t.Error(absent, err)
			return
		}
		if err := write(inside); err != nil {
			t.Errorf("write where it is allowed: %v", err)
		}
		if err := write(outside); !errors.Is(err, unix.EACCES) {
			t.Errorf("write elsewhere: %v, want EACCES", err)
		}
		if _, err := os.ReadFile(filepath.Join(outside, "f")); err != nil {
			t.Errorf("read elsewhere: %v", err)
		}
		if err := os.Rename(filepath.Join(inside, "f"), filepath.Join(outside, "g")); !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EACCES) {
			t.Errorf("move out: %v, want EXDEV or EACCES", err)
		}
	})
	if err := write(outside); err != nil {
		t.Errorf("another thread is in the domain: %v", err)
	}
}

// TestRefer shows why rules name REFER: without it no file moves between directories, even where
// everything else is allowed.
func TestRefer(t *testing.T) {
	abi := need(t, 2, 5, 19)
	for _, c := range []struct {
		access landlock.Access
		want   error
	}{{everything(abi), nil}, {everything(abi) &^ landlock.Refer, unix.EXDEV}} {
		dir := t.TempDir()
		for _, d := range []string{"a", "b"} {
			if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "a", "f"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		onThread(func() {
			if _, err := landlock.Restrict(landlock.Ruleset{Handled: everything(abi), Rules: []landlock.Rule{{Path: "/", Access: c.access}}}); err != nil {
				t.Error(err)
				return
			}
			if err := os.Rename(filepath.Join(dir, "a", "f"), filepath.Join(dir, "b", "f")); !errors.Is(err, c.want) {
				t.Errorf("access %#x: %v, want %v", c.access, err, c.want)
			}
		})
	}
}

// TestDevices denies making devices, also the whiteout, which takes no capability. Linux 6.1 lets that one through:
// nothing rests on it, since overlayfs itself refuses to make one (ovl_mknod).
func TestDevices(t *testing.T) {
	abi := need(t, 2, 5, 19)
	path := filepath.Join(t.TempDir(), "whiteout")
	if err := unix.Mknod(path+"0", unix.S_IFCHR, 0); err != nil {
		t.Fatalf("without a domain: %v", err)
	}
	onThread(func() {
		rules := landlock.Ruleset{Handled: everything(abi), Rules: []landlock.Rule{
			{Path: "/", Access: everything(abi) &^ (landlock.MakeChar | landlock.MakeBlock)},
		}}
		if _, err := landlock.Restrict(rules); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mknod(path+"1", unix.S_IFCHR, int(unix.Mkdev(1, 3))); !errors.Is(err, unix.EACCES) {
			t.Errorf("%v, want EACCES", err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR, 0); !errors.Is(err, unix.EACCES) && (abi >= landlock.MaxABI || err != nil) {
			t.Errorf("a whiteout: %v, want EACCES", err)
		}
		if err := unix.Mkfifo(path+"2", 0o600); err != nil {
			t.Errorf("FIFO: %v", err)
		}
	})
}

// TestScope keeps a thread's signals inside its domain.
func TestScope(t *testing.T) {
	need(t, 6, 6, 12)
	pid := os.Getpid()
	if err := unix.Kill(1, 0); err != nil {
		t.Fatalf("without a domain: %v", err)
	}
	onThread(func() {
		if _, err := landlock.Restrict(landlock.Ruleset{
			Handled: landlock.Execute, Scoped: landlock.ScopeSignal,
			Rules: []landlock.Rule{{Path: "/", Access: landlock.Execute}},
		}); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Kill(1, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("signal to a stranger: %v, want EPERM", err)
		}
		if err := unix.Kill(pid, 0); err != nil {
			t.Errorf("signal to the own process: %v", err)
		}
	})
}

// TestRuleOnFile cuts a rule on a file down to what files have, which the kernel insists on.
func TestRuleOnFile(t *testing.T) {
	abi := need(t, 2, 5, 19)
	onThread(func() {
		rules := landlock.Ruleset{Handled: everything(abi), Rules: []landlock.Rule{{Path: "/dev/null", Access: everything(abi)}}}
		if _, err := landlock.Restrict(rules); err != nil {
			t.Error(err)
			return
		}
		if err := os.WriteFile("/dev/null", nil, 0); err != nil {
			t.Errorf("/dev/null: %v", err)
		}
		if _, err := os.Stat("/etc"); err != nil {
			t.Errorf("stat is no access that Landlock knows: %v", err)
		}
		if _, err := os.ReadDir("/etc"); !errors.Is(err, unix.EACCES) {
			t.Errorf("/etc: %v, want EACCES", err)
		}
	})
}

// TestErrors covers rulesets that can't be, after which the thread is in no domain.
func TestErrors(t *testing.T) {
	abi := need(t, 2, 5, 19)
	scoped := unix.EINVAL
	if abi < 6 { // it knows no scopes at all
		scoped = unix.E2BIG
	}
	for _, c := range []struct {
		rules landlock.Ruleset
		want  error
	}{
		{landlock.Ruleset{Handled: landlock.ReadDir, Rules: []landlock.Rule{{Path: "/nowhere", Access: landlock.ReadDir}}}, unix.ENOENT},
		{landlock.Ruleset{Handled: landlock.ReadDir, Rules: []landlock.Rule{{Path: "/", Access: landlock.ReadFile}}}, unix.EINVAL},
		{landlock.Ruleset{Handled: 1 << 63}, unix.EINVAL},
		{landlock.Ruleset{Scoped: 1 << 63}, scoped},
		{landlock.Ruleset{}, unix.ENOMSG},
	} {
		onThread(func() {
			if _, err := landlock.Restrict(c.rules); !errors.Is(err, c.want) {
				t.Errorf("%+v: %v, want %v", c.rules, err, c.want)
			}
			if _, err := os.ReadDir("/etc"); err != nil {
				t.Errorf("after %v: %v", c.want, err)
			}
		})
	}
}

// TestKnown compares the table with the kernel: what it says an ABI knows, the kernel takes.
func TestKnown(t *testing.T) {
	abi := need(t, 1, 5, 13)
	for v := 1; v <= min(abi, landlock.MaxABI); v++ {
		access, scoped := landlock.Known(v)
		onThread(func() {
			if _, err := landlock.Restrict(landlock.Ruleset{Handled: access, Scoped: scoped}); err != nil {
				t.Errorf("ABI %d: %v", v, err)
			}
		})
		if less, _ := landlock.Known(v - 1); less&^access != 0 {
			t.Errorf("ABI %d lacks what %d has", v, v-1)
		}
	}
	if a, s := landlock.Known(0); a != 0 || s != 0 {
		t.Errorf("no Landlock knows %#x, %#x", a, s)
	}
}
