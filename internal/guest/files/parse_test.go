package files

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func TestAbsolute(t *testing.T) {
	job := Job{Home: "/home/user"}
	for path, want := range map[string]string{
		"/a": "/a", "a": "/home/user/a", "~": "/home/user", "~/a": "/home/user/a", "~x": "/home/user/~x", "a\x00ff": "/home/user/a\xff",
	} {
		if got, err := absolute(job, guestwire.Asker{}, path); err != nil || got != want {
			t.Errorf("%q: %q, %v", path, got, err)
		}
	}
	if got, err := absolute(job, guestwire.Asker{Dir: "~/d"}, "a"); err != nil || got != "/home/user/d/a" {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []struct{ dir, path string }{{"", ""}, {"", "a\x00"}, {"rel", "a"}, {"/\x00", "a"}} {
		if got, err := absolute(job, guestwire.Asker{Dir: bad.dir}, bad.path); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%q: %q, %v", bad, got, err)
		}
	}
}

func TestFaultKeepsItsKind(t *testing.T) {
	for errno, kind := range map[unix.Errno]errs.Kind{
		unix.ENOENT: errs.NotFound, unix.EACCES: errs.PermissionDenied, unix.EDQUOT: errs.ResourceExhausted,
		unix.ENOSPC: errs.ResourceExhausted, unix.EEXIST: errs.AlreadyExists, unix.EIO: errs.Internal,
	} {
		err := fault(errno, "write", "/x")
		if !errs.Is(err, kind) {
			t.Errorf("%v: %v", errno, err)
		}
		if again := fault(err, "other", "/y"); again.Error() != err.Error() {
			t.Errorf("%v became %v", err, again)
		}
	}
	if text, _ := errs.PublicText(fault(unix.ENOENT, "read", "/x")); text != "no such file: /x" {
		t.Errorf("%q", text)
	}
}

func FuzzParseEvent(f *testing.F) {
	e := make([]byte, 32)
	binary.NativeEndian.PutUint32(e[12:], 16)
	copy(e[16:], "name")
	f.Add(e)
	f.Add(e[:15])
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			var rest []byte
			if _, rest = parseEvent(b); rest == nil {
				return
			}
			if len(rest) >= len(b) {
				t.Fatal("no progress")
			}
			b = rest
		}
	})
}

func FuzzParseEntries(f *testing.F) {
	e := make([]byte, 24)
	binary.NativeEndian.PutUint16(e[16:], 24)
	e[18] = unix.DT_DIR
	copy(e[19:], "dir")
	f.Add(e)
	f.Fuzz(func(t *testing.T, b []byte) {
		if n := len(parseEntries(b)); n > len(b)/19 {
			t.Fatalf("%d entries in %d bytes", n, len(b))
		}
	})
}
