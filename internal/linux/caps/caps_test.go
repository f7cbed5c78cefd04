package caps_test

import (
	"os"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/testenv"
)

func TestNames(t *testing.T) {
	for c, want := range map[caps.Cap]string{
		unix.CAP_CHOWN: "CHOWN", unix.CAP_SETPCAP: "SETPCAP", unix.CAP_NET_BIND_SERVICE: "NET_BIND_SERVICE",
		unix.CAP_SYS_ADMIN: "SYS_ADMIN", unix.CAP_SETFCAP: "SETFCAP", unix.CAP_BPF: "BPF",
		unix.CAP_CHECKPOINT_RESTORE: "CHECKPOINT_RESTORE", 63: "63",
	} {
		if got := caps.Name(c); got != want {
			t.Errorf("Name(%d) = %s, want %s", c, got, want)
		}
	}
	for c := range caps.Cap(unix.CAP_LAST_CAP + 1) {
		for _, prefix := range []string{"", "CAP_"} {
			if got, ok := caps.ByName(prefix + caps.Name(c)); !ok || got != c {
				t.Errorf("ByName(%s%s) = %d, %v", prefix, caps.Name(c), got, ok)
			}
		}
	}
	if _, ok := caps.ByName("NONE"); ok {
		t.Error("there is a capability NONE")
	}
}

func TestSet(t *testing.T) {
	s := caps.Of(40, 0, 31, 32)
	if want := []caps.Cap{0, 31, 32, 40}; !slices.Equal(s.List(), want) || !s.Has(40) || s.Has(1) {
		t.Errorf("%v, want %v", s.List(), want)
	}
}

// TestLimit drops capabilities of one thread, and looks at what is left of that and of another.
func TestLimit(t *testing.T) {
	testenv.Root(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := caps.ReadStatus("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	bounding, own := caps.Of(unix.CAP_CHOWN, unix.CAP_KILL), caps.Of(unix.CAP_CHOWN, unix.CAP_SETUID)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // ends with its goroutine
		if err := caps.LimitBounding(bounding); err != nil {
			t.Error(err)
		}
		if err := caps.Limit(own); err != nil {
			t.Error(err)
		}
		got, err := caps.ReadStatus("/proc/thread-self/status")
		if err != nil {
			t.Error(err)
		}
		if b, err := caps.Bounding(); err != nil || b != bounding {
			t.Errorf("bounding set %v, %v; want %v", b.List(), err, bounding.List())
		}
		want := before
		want.Bounding, want.Permitted, want.Effective, want.Inheritable, want.Ambient = bounding, own, own, 0, 0
		if got != want {
			t.Errorf("thread: %+v, want %+v", got, want)
		}
		if err := caps.LimitBounding(0); err == nil {
			t.Error("the bounding set changed without SETPCAP")
		}
	}()
	<-done
	after, err := caps.ReadStatus("/proc/thread-self/status")
	if err != nil || after != before {
		t.Errorf("another thread: %+v, %v; before %+v", after, err, before)
	}
}

func TestParseStatus(t *testing.T) {
	const text = "Name:\tcat\nCapInh:\t0000000000000001\nCapPrm:\t0000000000000002\nCapEff:\t0000000000000004\n" +
		"CapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000008\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n"
	want := caps.Status{
		Inheritable: 1, Permitted: 2, Effective: 4, Bounding: 0x1ffffffffff, Ambient: 8,
		NoNewPrivs: true, SeccompMode: 2, SeccompFilters: 3,
	}
	if got, err := caps.ParseStatus(text); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "Name:\tcat\n", "CapBnd:\tzz\n", "CapBnd:\t0\nSeccomp:\tx\n"} {
		if got, err := caps.ParseStatus(bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
	if _, err := caps.ReadStatus("/nowhere"); !os.IsNotExist(err) {
		t.Errorf("no file: %v", err)
	}
}

// FuzzParseStatus holds that a process's name can't fake a line: names with a newline are escaped by
// the kernel, and nothing here panics on any text.
func FuzzParseStatus(f *testing.F) {
	f.Add("CapBnd:\t0\n")
	f.Fuzz(func(_ *testing.T, text string) { _, _ = caps.ParseStatus(text) })
}
