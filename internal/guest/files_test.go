package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

func at(p string) guestwire.PathRequest { return guestwire.PathRequest{Path: p, Follow: true} }

func by(user, p string) guestwire.PathRequest {
	return guestwire.PathRequest{Asker: guestwire.Asker{User: user}, Path: p, Follow: true}
}

func (r *runner) write(p guestwire.PathRequest, data string) (guestwire.FileInfo, error) {
	return r.Write(r.t.Context(), guestwire.WriteRequest{PathRequest: p, Offset: -1, Size: int64(len(data))}, strings.NewReader(data))
}

func (r *runner) read(p guestwire.PathRequest) (string, error) {
	_, f, err := r.Read(r.t.Context(), guestwire.ReadRequest{PathRequest: p, Length: -1})
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	return string(b), err
}

func (r *runner) list(req guestwire.ListRequest) ([]guestwire.FileInfo, error) {
	s, err := r.ListDir(r.t.Context(), req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all []guestwire.FileInfo
	for {
		f, err := s.Next()
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, f)
	}
}

func TestFileRoundTrip(t *testing.T) {
	r := newRunner(t, setup{})
	for _, size := range []int{0, 1, 18 << 10, 19 << 10, 64 << 10, 20 << 20} { // opensandbox 1016
		data := strings.Repeat("☕\x00\xff\r\n ", size/8+1)[:size]
		info, err := r.write(at("f"), data)
		if err != nil || info.Size != int64(size) || info.Path != "/home/user/f" || info.Name != "f" ||
			info.Type != guestwire.TypeFile || info.UID != 1000 || info.Owner != "user" || info.Group != "user" || info.Mode != 0o644 {
			t.Fatalf("%d bytes: %+v, %v", size, info, err)
		}
		got, err := r.read(at("f"))
		if err != nil || got != data {
			t.Fatalf("%d bytes: %d back, %v", size, len(got), err)
		}
		if out := r.sh("wc -c < f").out; strings.TrimSpace(string(out)) != fmt.Sprint(size) {
			t.Fatalf("inside: %s", out)
		}
	}
}

func TestFileNames(t *testing.T) {
	r := newRunner(t, setup{})
	if _, err := r.MakeDir(t.Context(), guestwire.MakeDirRequest{PathRequest: at("d")}); err != nil {
		t.Fatal(err)
	}
	raw := []string{"报告 ü.pdf", "caf\xe9", "-n", "a\nb", "\"quoted\\'", " ", "\xff\xfe", "e\u0301", strings.Repeat("x", 255)}
	for _, name := range raw {
		if _, err := r.write(at("d/"+name), name); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		if got, err := r.read(at("d/" + name)); err != nil || got != name {
			t.Fatalf("%q: %q, %v", name, got, err)
		}
	}
	all, err := r.list(guestwire.ListRequest{PathRequest: at("d")})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range all {
		name, ok := guestwire.Unescape(f.Name)
		if !ok {
			t.Fatalf("%q", f.Name)
		}
		names = append(names, name)
		// The name as it was given leads back to the file.
		if again, err := r.Stat(t.Context(), at(f.Path)); err != nil || again.Name != f.Name {
			t.Fatalf("%q: %+v, %v", f.Path, again, err)
		}
	}
	slices.Sort(raw)
	if !slices.Equal(names, raw) {
		t.Fatalf("got %q\nwant %q", names, raw)
	}
	for _, bad := range []string{"", "a\x00b", strings.Repeat("x", 256), "d/" + strings.Repeat("y/", 3000)} {
		if _, err := r.write(at(bad), "x"); !errs.Is(err, errs.InvalidArgument) && !errs.Is(err, errs.NotFound) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

func TestFileReadRanges(t *testing.T) {
	r := newRunner(t, setup{})
	if _, err := r.write(at("f"), "0123456789"); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		offset, length int64
		want           string
	}{{0, -1, "0123456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, -1, ""}, {99, 5, ""}, {0, 0, ""}}
	for _, tt := range tests {
		_, f, err := r.Read(t.Context(), guestwire.ReadRequest{PathRequest: at("f"), Offset: tt.offset, Length: tt.length})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		_ = f.Close()
		if err != nil || string(got) != tt.want {
			t.Errorf("%d+%d: %q, %v", tt.offset, tt.length, got, err)
		}
	}
	// Files of procfs say that they are empty.
	if got, err := r.read(at("/proc/self/status")); err != nil || !strings.Contains(got, "Uid:\t1000") {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestFileWriteModes(t *testing.T) {
	r := newRunner(t, setup{})
	ctx := t.Context()
	put := func(w guestwire.WriteRequest, data string) guestwire.FileInfo {
		t.Helper()
		info, err := r.Write(ctx, w, strings.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	put(guestwire.WriteRequest{PathRequest: at("f"), Offset: -1, Size: -1, Mode: 0o600}, "hello world")
	put(guestwire.WriteRequest{PathRequest: at("f"), Offset: 6, Size: -1}, "there")
	put(guestwire.WriteRequest{PathRequest: at("f"), Append: true, Offset: -1, Size: -1}, "!")
	put(guestwire.WriteRequest{PathRequest: at("new"), Append: true, Offset: -1, Size: -1, Mode: 0o640}, "x")
	r.wantOut("cat f; stat -c %a f new", "hello there!600\n640\n")
	// Parents belong to the user, replacing keeps mode and owner.
	put(guestwire.WriteRequest{PathRequest: at("a/b/c"), Parents: true, Offset: -1, Size: -1}, "deep")
	r.sh("chmod 755 f; stat -c %U a a/b a/b/c | sort -u")
	info := put(guestwire.WriteRequest{PathRequest: at("f"), Offset: -1, Size: -1, Mode: 0o600}, "again")
	if info.Mode != 0o755 {
		t.Errorf("mode %o", info.Mode)
	}
	info = put(guestwire.WriteRequest{PathRequest: by("root", "/home/user/f"), Offset: -1, Size: -1}, "by root")
	if info.UID != 1000 || info.Mode != 0o755 {
		t.Errorf("%+v", info)
	}
	r.wantOut("stat -c %U a a/b a/b/c | sort -u", "user\n")
	// Through a link, the link stays.
	r.sh("ln -s a/b/c link; ln -s nowhere dangling")
	put(guestwire.WriteRequest{PathRequest: at("link"), Offset: -1, Size: -1}, "linked")
	put(guestwire.WriteRequest{PathRequest: at("dangling"), Offset: -1, Size: -1}, "made")
	r.wantOut("readlink link; cat a/b/c nowhere", "a/b/c\nlinkedmade")
	// Setuid is not given by a write.
	if info := put(guestwire.WriteRequest{PathRequest: at("s"), Offset: -1, Size: -1, Mode: 0o6755}, "x"); info.Mode != 0o755 {
		t.Errorf("mode %o", info.Mode)
	}
}

func TestFileWriteRefuses(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkdir dir; mkfifo fifo; ln -s loop loop; echo x > ro; chmod 444 ro; mkdir rodir; chmod 555 rodir; ln -s f notlink; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'")
	before := string(r.sh("ls -la").out)
	tests := []struct {
		path guestwire.PathRequest
		kind errs.Kind
	}{
		{at("dir"), errs.InvalidArgument},
		{at("dir/"), errs.InvalidArgument},
		{at("fifo"), errs.InvalidArgument},
		{at("sock"), errs.InvalidArgument},
		{at("/dev/null"), errs.InvalidArgument},
		{at("loop"), errs.InvalidArgument},
		{at("."), errs.InvalidArgument},
		{at("dir/.."), errs.InvalidArgument},
		{at("/"), errs.FailedPrecondition},
		{at("ro"), errs.PermissionDenied},
		{at("rodir/f"), errs.PermissionDenied},
		{at("no/such/dir"), errs.NotFound},
		{at("ro/f"), errs.InvalidArgument},
		{at("/etc/passwd"), errs.PermissionDenied},
		{guestwire.PathRequest{Path: "notlink"}, errs.InvalidArgument},
	}
	for _, tt := range tests {
		for _, w := range []guestwire.WriteRequest{
			{PathRequest: tt.path, Offset: -1, Size: -1},
			{PathRequest: tt.path, Offset: -1, Size: -1, Append: true},
		} {
			if _, err := r.Write(t.Context(), w, strings.NewReader("data")); !errs.Is(err, tt.kind) {
				t.Errorf("%+v: %v", w, err)
			}
		}
	}
	// A wrong size, and an upload that breaks off, leave nothing.
	for _, size := range []int64{3, 5} {
		_, err := r.Write(t.Context(), guestwire.WriteRequest{PathRequest: at("half"), Offset: -1, Size: size}, strings.NewReader("data"))
		if !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("size %d: %v", size, err)
		}
	}
	broken := errors.New("broken")
	_, err := r.Write(t.Context(), guestwire.WriteRequest{PathRequest: at("half"), Offset: -1, Size: -1},
		io.MultiReader(strings.NewReader("data"), failing{broken}))
	if !errors.Is(err, broken) {
		t.Errorf("broken upload: %v", err)
	}
	testenv.Eventually(t, 5*time.Second, "nothing is left", func() bool { return string(r.sh("ls -la").out) == before })
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// TestFileIsSeenWhole reads a file over and over while it is replaced.
func TestFileIsSeenWhole(t *testing.T) {
	r := newRunner(t, setup{})
	whole := func(c byte) string { return strings.Repeat(string(c), 200_000) }
	if _, err := r.write(at("f"), whole('a')); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		defer close(stop)
		for i := range 40 {
			if _, err := r.write(at("f"), whole("abcd"[i%4])); err != nil {
				t.Error(err)
			}
		}
	})
	for done := false; !done; {
		select {
		case <-stop:
			done = true
		default:
		}
		got, err := r.read(at("f"))
		if err != nil || len(got) != 200_000 || got != whole(got[0]) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	}
	wg.Wait()
}

// TestFileNeverBlocks opens what would block or notice: FIFOs and devices.
func TestFileNeverBlocks(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkfifo fifo")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, p := range []string{"fifo", "/dev/zero", "/dev/urandom", "/dev/tty", "/dev/null", "/dev/pts/ptmx", "/proc/self/fd", "/home"} {
		if _, _, err := r.Read(ctx, guestwire.ReadRequest{PathRequest: at(p), Length: -1}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("read %s: %v", p, err)
		}
		if _, err := r.Stat(ctx, at(p)); err != nil {
			t.Errorf("stat %s: %v", p, err)
		}
	}
}

// TestFileMagicLinks plants links to everything that a process could have open (HARDENING 1). The
// twin is the sandbox's own cat, which follows them.
func TestFileMagicLinks(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("for n in $(seq 0 40); do ln -s /proc/self/fd/$n fd$n; ln -s /proc/1/fd/$n one$n; ln -s /proc/self/fd/$n/../../.. up$n; done;" +
		"ln -s /proc/self/root selfroot; ln -s /proc/1/root oneroot; ln -s /proc/self/exe exe; ln -s /proc/1/mem mem; ln -s /proc/self/cwd cwd")
	var paths []string
	for n := range 41 {
		paths = append(paths, fmt.Sprint("fd", n), fmt.Sprint("one", n), fmt.Sprint("up", n), fmt.Sprint("up", n, "/etc/passwd"),
			fmt.Sprint("/proc/self/fd/", n), fmt.Sprint("/proc/thread-self/fd/", n, "/x"))
	}
	paths = append(paths, "selfroot/etc/passwd", "oneroot/etc/passwd", "exe", "/proc/self/exe", "cwd/etc/passwd", "/proc/self/root/etc/passwd")
	for _, p := range paths {
		if p[0] != '/' {
			p = "/home/user/" + p
		}
		for _, user := range []string{"", "root"} {
			if got, err := r.read(by(user, p)); err == nil {
				t.Errorf("read %s as %q: %d bytes", p, user, len(got))
			}
			if info, err := r.write(by(user, p), "x"); err == nil {
				t.Errorf("write %s as %q: %+v", p, user, info)
			}
			if _, err := r.list(guestwire.ListRequest{PathRequest: by(user, p)}); err == nil {
				t.Errorf("list %s as %q", p, user)
			}
		}
	}
	if got, err := r.read(by("root", "/home/user/mem")); err == nil {
		t.Errorf("read the guest's memory: %d bytes", len(got))
	}
	// The twin: through the plain kernel the same link leads to the file.
	r.wantOut("cat selfroot/etc/passwd | head -c 5", "root:")
}

// TestFileRace swaps a directory for a link while files are written below it: nothing ever lands
// where the link leads if the user may not write there.
func TestFileRace(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "swap", Argv: []string{"python3", "-c", `
import os
os.mkdir("/tmp/real")
os.symlink("/etc", "/tmp/evil")
while True:
    os.rename("/tmp/real", "/tmp/d"); os.rename("/tmp/d", "/tmp/real")
    os.rename("/tmp/evil", "/tmp/d"); os.rename("/tmp/d", "/tmp/evil")
`}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 150 {
				_, _ = r.write(at(fmt.Sprintf("/tmp/d/race%d-%d", g, i)), "x")
			}
		})
	}
	wg.Wait()
	r.wantOut("ls /etc | grep race || true", "")
}

func TestFileList(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkdir -p d/a/b d/c d/secret; echo 12345 > d/a/f; ln -s a d/link; ln -s / d/root; mkfifo d/p; chmod 000 d/secret; mkdir d/e")
	show := func(req guestwire.ListRequest) string {
		t.Helper()
		all, err := r.list(req)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for _, f := range all {
			fmt.Fprintf(&b, "%s:%s ", strings.TrimPrefix(f.Path, "/home/user/d/"), f.Type)
		}
		return b.String()
	}
	want := "a:dir c:dir e:dir link:symlink p:other root:symlink secret:dir "
	if got := show(guestwire.ListRequest{PathRequest: at("d")}); got != want {
		t.Errorf("depth 1: %s", got)
	}
	want = "a:dir a/b:dir a/f:file c:dir e:dir link:symlink p:other root:symlink secret:dir "
	if got := show(guestwire.ListRequest{PathRequest: at("d/"), Depth: 9}); got != want {
		t.Errorf("depth 9: %s", got)
	}
	info, err := r.Stat(t.Context(), guestwire.PathRequest{Path: "d/link"})
	if err != nil || info.Target != "a" || info.Type != guestwire.TypeSymlink {
		t.Errorf("%+v, %v", info, err)
	}
	for p, kind := range map[string]errs.Kind{"no": errs.NotFound, "d/a/f": errs.InvalidArgument, "d/secret": errs.PermissionDenied} {
		if _, err := r.list(guestwire.ListRequest{PathRequest: at(p)}); !errs.Is(err, kind) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if _, err := r.list(guestwire.ListRequest{PathRequest: at("d"), Depth: 100000}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("depth: %v", err)
	}
	// A caller that goes away, and ten thousand entries.
	r.sh("mkdir many; cd many; seq 10000 | xargs touch")
	if all, err := r.list(guestwire.ListRequest{PathRequest: at("many")}); err != nil || len(all) != 10000 {
		t.Errorf("%d, %v", len(all), err)
	}
}

func TestFileRemove(t *testing.T) {
	r := newRunner(t, setup{})
	rm := func(p string, recursive bool) error {
		return r.Remove(t.Context(), guestwire.RemoveRequest{PathRequest: guestwire.PathRequest{Path: p}, Recursive: recursive})
	}
	r.sh("mkdir -p full/sub empty keep; touch full/f keep/f file; ln -s ../keep full/link; ln -s keep link")
	for p, kind := range map[string]errs.Kind{"full": errs.FailedPrecondition, "no": errs.NotFound, "/": errs.FailedPrecondition, "full/..": errs.InvalidArgument} {
		if err := rm(p, p == "/"); !errs.Is(err, kind) {
			t.Errorf("%s: %v", p, err)
		}
	}
	for _, p := range []string{"file", "empty", "link"} {
		if err := rm(p, false); err != nil {
			t.Errorf("%s: %v", p, err)
		}
	}
	if err := rm("full", true); err != nil {
		t.Error(err)
	}
	r.wantOut("ls -A; ls keep", "keep\nf\n")
	// 5,000 levels deep, and 20,000 files in one directory.
	r.sh(`python3 -c '
import os
for i in range(5000):
    os.mkdir("d"); os.chdir("d")
'; mkdir -p wide; cd wide; seq 20000 | xargs touch`)
	for _, p := range []string{"d", "wide"} {
		begun := time.Now()
		if err := rm(p, true); err != nil {
			t.Errorf("%s: %v", p, err)
		}
		t.Logf("%s: %v", p, time.Since(begun))
	}
	r.wantOut("ls -A", "keep\n")
	// What the user may not remove stays, and says so.
	if err := rm("/etc", true); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("/etc: %v", err)
	}
	r.wantOut("test -e /etc/passwd && echo there", "there\n")
}

func TestFileMove(t *testing.T) {
	r := newRunner(t, setup{})
	mv := func(from, to string, over bool) error {
		_, err := r.Move(t.Context(), guestwire.MoveRequest{PathRequest: guestwire.PathRequest{Path: from}, To: to, Overwrite: over})
		return err
	}
	r.sh("echo a > a; echo b > b; mkdir d full; touch full/x; chmod 640 a")
	if err := mv("a", "b", false); !errs.Is(err, errs.AlreadyExists) {
		t.Errorf("no overwrite: %v", err)
	}
	if err := mv("a", "b", true); err != nil {
		t.Error(err)
	}
	if err := mv("d", "e", false); err != nil {
		t.Error(err)
	}
	if err := mv("e", "full", true); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("onto a full directory: %v", err)
	}
	if err := mv("b", "full", true); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a file onto a directory: %v", err)
	}
	if err := mv("no", "x", false); !errs.Is(err, errs.NotFound) {
		t.Errorf("missing: %v", err)
	}
	// To another file system.
	if err := mv("b", "/dev/shm/b", false); err != nil {
		t.Error(err)
	}
	if err := mv("full", "/dev/shm/full", false); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a directory to another file system: %v", err)
	}
	r.wantOut("ls; cat /dev/shm/b; stat -c '%a %U' /dev/shm/b", "e\nfull\na\n640 user\n")
}

func TestFileMakeDirAndChmod(t *testing.T) {
	r := newRunner(t, setup{})
	mk := func(p string, mode uint32, parents bool) error {
		_, err := r.MakeDir(t.Context(), guestwire.MakeDirRequest{PathRequest: at(p), Mode: mode, Parents: parents})
		return err
	}
	if err := mk("x/y/z", 0o700, false); !errs.Is(err, errs.NotFound) {
		t.Errorf("no parents: %v", err)
	}
	for range 2 {
		if err := mk("x/y/z", 0o777, true); err != nil {
			t.Error(err)
		}
	}
	if err := mk("x", 0, false); !errs.Is(err, errs.AlreadyExists) {
		t.Errorf("exists: %v", err)
	}
	r.sh("touch f")
	if err := mk("f", 0, true); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a file: %v", err)
	}
	r.wantOut("stat -c '%a %U' x x/y x/y/z", "755 user\n755 user\n777 user\n")
	mode := uint32(0o4711)
	info, err := r.Chmod(t.Context(), guestwire.ChmodRequest{PathRequest: at("f"), Mode: &mode, UID: -1, GID: -1})
	if err != nil || info.Mode != mode || info.UID != 1000 {
		t.Errorf("%+v, %v", info, err)
	}
	_, err = r.Chmod(t.Context(), guestwire.ChmodRequest{PathRequest: at("f"), UID: 0, GID: -1})
	if !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("give away: %v", err)
	}
	info, err = r.Chmod(t.Context(), guestwire.ChmodRequest{PathRequest: by("root", "/home/user/f"), Mode: &mode, UID: 1001, GID: 2000})
	if err != nil || info.UID != 1001 || info.GID != 2000 || info.Mode != mode || info.Owner != "other" || info.Group != "extra" {
		t.Errorf("%+v, %v", info, err)
	}
}

// TestFileUsers lets each user see what it may: the worker is that user's.
func TestFileUsers(t *testing.T) {
	r := newRunner(t, setup{})
	if _, err := r.write(by("other", "~/mine"), "x"); err != nil {
		t.Fatal(err)
	}
	mode := uint32(0o600)
	if _, err := r.Chmod(t.Context(), guestwire.ChmodRequest{PathRequest: by("other", "mine"), Mode: &mode, UID: -1, GID: -1}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.read(at("/home/other/mine")); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("another user's file: %v", err)
	}
	if got, err := r.read(by("root", "/home/other/mine")); err != nil || got != "x" {
		t.Errorf("root: %q, %v", got, err)
	}
	if _, err := r.write(by("nobody-here", "x"), "x"); !errs.Is(err, errs.NotFound) {
		t.Errorf("no such user: %v", err)
	}
	// Relative to the request's directory.
	p := guestwire.PathRequest{Asker: guestwire.Asker{Dir: "/tmp"}, Path: "rel", Follow: true}
	if info, err := r.write(p, "x"); err != nil || info.Path != "/tmp/rel" {
		t.Errorf("%+v, %v", info, err)
	}
}

// TestFileWorkerDies kills and stops the worker, as its user can: the next call has another one.
func TestFileWorkerDies(t *testing.T) {
	r := newRunner(t, setup{})
	for _, sig := range []string{"KILL", "STOP", "TERM", "SEGV"} {
		if _, err := r.write(at("f"), sig); err != nil {
			t.Fatal(err)
		}
		r.sh("pkill -" + sig + " -f '[c]asemate-guest files'")
		testenv.Eventually(t, 10*time.Second, "files work again after SIG"+sig, func() bool {
			got, err := r.read(at("f"))
			return err == nil && got == sig
		})
	}
	// It holds nothing but its sockets, and is not to be traced.
	res := r.sh("for p in $(pgrep -f '[c]asemate-guest files'); do ls -l /proc/$p/fd; done 2>&1")
	t.Logf("%s", res.out)
}

// VULNERABILITY: a worker is a process of its user, whose programs can stop it.
// ATTACK: SIGSTOP to everything, in the middle of an upload.
// VERIFIES: the upload ends well. The twin is a process that nobody prods: it stays stopped.
func TestFileWorkerIsStopped(t *testing.T) {
	r := newRunner(t, setup{})
	pr, pw := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		_, err := r.Write(t.Context(), guestwire.WriteRequest{PathRequest: at("/tmp/up"), Offset: -1, Size: -1}, pr)
		wrote <- err
	}()
	if _, err := pw.Write([]byte("first ")); err != nil {
		t.Fatal(err)
	}
	r.sh("sleep 1000 >/dev/null 2>&1 & kill -STOP -1")
	if _, err := pw.Write([]byte("second")); err != nil {
		t.Fatal(err)
	}
	_ = pw.Close()
	select {
	case err := <-wrote:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the upload hangs")
	}
	if got, err := r.read(at("/tmp/up")); err != nil || got != "first second" {
		t.Errorf("%q %v", got, err)
	}
	if got := string(r.sh("ps -eo stat,args | grep '[s]leep 1000'; pkill -KILL -x sleep").out); !strings.HasPrefix(got, "T") {
		t.Errorf("twin: %q", got)
	}
}

func TestFileWorkersMany(t *testing.T) {
	r := newRunner(t, setup{})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			user := fmt.Sprint(3000 + i)
			for j := range 4 {
				if _, err := r.write(by(user, fmt.Sprintf("/tmp/u%d-%d", i, j)), user); err != nil {
					t.Errorf("user %s: %v", user, err)
				}
			}
		})
	}
	wg.Wait()
	testenv.Eventually(t, 10*time.Second, "few workers are left", func() bool {
		return len(strings.Fields(string(r.sh("pgrep -f '[c]asemate-guest files' || true").out))) <= guest.MaxWorkers
	})
}

func TestFileDiskFull(t *testing.T) {
	r := newRunner(t, setup{})
	_, err := r.Write(t.Context(), guestwire.WriteRequest{PathRequest: at("/dev/shm/big"), Offset: -1, Size: -1},
		io.LimitReader(zeros{}, 64<<20))
	if !errs.Is(err, errs.ResourceExhausted) {
		t.Fatalf("full disk: %v", err)
	}
	r.wantOut("ls -A /dev/shm; echo ok", "ok\n")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestWatch(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("mkdir -p w/sub; ln -s /tmp w/link")
	for _, recursive := range []bool{false, true} {
		s, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at("w"), Recursive: recursive})
		if err != nil {
			t.Fatal(err)
		}
		events := make(chan guestwire.WatchEvent, 1000)
		go func() {
			defer close(events)
			for {
				e, err := s.Next()
				if err != nil {
					return
				}
				events <- e
			}
		}()
		expect := func(want ...string) {
			t.Helper()
			got := map[string]bool{}
			deadline := time.After(time.Minute)
			for _, w := range want {
				for !got[w] {
					select {
					case e := <-events:
						got[e.Op+" "+strings.TrimPrefix(e.Path, "/home/user/w/")] = true
					case <-deadline:
						t.Fatalf("no %q; got %v", w, got)
					}
				}
			}
		}
		r.sh("cd w; echo x > 'ü\xff'; chmod 600 ü*; mv ü* b; rm b")
		expect("create ü\x00ff", "write ü\x00ff", "chmod ü\x00ff", "rename ü\x00ff", "create b", "remove b")
		if recursive {
			r.sh("cd w; echo x > sub/f; mkdir -p n/m/o; echo y > n/m/o/p")
			expect("create sub/f", "create n", "create n/m/o", "create n/m/o/p") // before it has another name
			r.sh("cd w; mv n n2; echo z > n2/m/o/q; touch /tmp/unseen")
			expect("rename n", "create n2", "create n2/m/o/q")
			// However fast they come after their directory, files are told as written.
			for i := range 20 {
				dir := "quick" + strconv.Itoa(i)
				r.sh("cd w; mkdir " + dir + "; echo x > " + dir + "/f")
				expect("create "+dir, "create "+dir+"/f", "write "+dir+"/f")
			}
		}
		s.Close()
		for e := range events {
			if strings.Contains(e.Path, "unseen") {
				t.Errorf("a link was followed: %+v", e)
			}
		}
	}
	for p, kind := range map[string]errs.Kind{"no": errs.NotFound, "/etc/passwd": errs.InvalidArgument, "/proc/self/fd": errs.InvalidArgument} {
		s, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at(p)})
		if err == nil {
			s.Close()
		}
		if p != "/proc/self/fd" && !errs.Is(err, kind) {
			t.Errorf("%s: %v", p, err)
		}
	}
	// The watch ends with its directory.
	s, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at("w"), Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	r.sh("rm -rf w")
	for {
		e, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		_ = e
	}
}

func TestPorts(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "echo", Argv: []string{"python3", "-c", `
import socket, threading
def serve(family, addr):
    s = socket.socket(family); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(addr); s.listen()
    while True:
        c, _ = s.accept()
        def talk(c):
            data = b""
            while True:
                b = c.recv(65536)
                if not b: break
                data += b
            c.sendall(data[::-1]); c.close()
        threading.Thread(target=talk, args=(c,)).start()
threading.Thread(target=serve, args=(socket.AF_INET, ("127.0.0.1", 8001))).start()
serve(socket.AF_INET6, ("::1", 8002))
`}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "both ports listen", func() bool {
		ports, err := r.Listenings(t.Context())
		return err == nil && slices.Equal(ports, []int{8001, 8002})
	})
	data := bytes.Repeat([]byte("0123456789"), 100_000)
	want := slices.Clone(data)
	slices.Reverse(want)
	for _, port := range []int{8001, 8002} {
		c, err := r.DialPort(t.Context(), guestwire.DialRequest{Network: "tcp", Port: port})
		if err != nil {
			t.Fatal(err)
		}
		// The answer comes only after our half is closed.
		if _, err := c.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		_ = c.Close()
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("port %d: %d bytes, %v", port, len(got), err)
		}
	}
	for _, bad := range []guestwire.DialRequest{{Port: 9}, {Port: 0}, {Port: 70000}, {Port: 80, Host: "localhost"}, {Port: 80, Network: "udp"}} {
		c, err := r.DialPort(t.Context(), bad)
		if err == nil {
			_ = c.Close()
			t.Errorf("%+v was dialled", bad)
		}
	}
	before, _ := r.Status(t.Context())
	for range 50 {
		c, err := r.DialPort(t.Context(), guestwire.DialRequest{Port: 8001})
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	testenv.Eventually(t, 5*time.Second, "connections are let go", func() bool {
		st, err := r.Status(t.Context())
		return err == nil && st.Open <= before.Open+1
	})
}
