package worker

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/testenv"
)

// firstID is a range of the host that no server of this machine gives to sandboxes.
const firstID = 0x7f000000

const (
	attackVerb = "attack-confined"
	twinVerb   = "attack-free"
)

func TestMain(m *testing.M) {
	testenv.WithoutCgo()
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case Verb:
			if err := Main(os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		case attackVerb, twinVerb:
			attack(os.Args[1] == attackVerb)
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

func archive(t *testing.T, fill func(w *tar.Writer)) *os.File {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	fill(w)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := t.TempDir() + "/blob"
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func job(t *testing.T, blob *os.File) Job {
	t.Helper()
	testenv.Root(t)
	root := t.TempDir() + "/root"
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	st, err := blob.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return Job{Blob: blob, Size: st.Size(), Root: root, FirstID: firstID}
}

func add(t *testing.T, w *tar.Writer, h tar.Header, body string) {
	t.Helper()
	h.Size, h.Format = int64(len(body)), tar.FormatPAX
	if err := w.WriteHeader(&h); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, body); err != nil {
		t.Fatal(err)
	}
}

// capNetBind is cap_net_bind_service+ep, as setcap writes it.
const capNetBind = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// TestUnpack: what a process without rights over the host makes has the ids that the archive says.
func TestUnpack(t *testing.T) {
	j := job(t, archive(t, func(w *tar.Writer) {
		add(t, w, tar.Header{Name: "d", Typeflag: tar.TypeDir, Mode: 0o2750, Uid: 7, Gid: 65535}, "")
		add(t, w, tar.Header{Name: "d/f", Typeflag: tar.TypeReg, Mode: 0o4755, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": capNetBind, "SCHILY.xattr.user.note": "x",
		}}, "body")
		add(t, w, tar.Header{Name: "d/.wh.gone", Typeflag: tar.TypeReg}, "")
		add(t, w, tar.Header{Name: "d/.wh..wh..opq", Typeflag: tar.TypeReg}, "")
		add(t, w, tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "d/f"}, "")
		add(t, w, tar.Header{Name: "p", Typeflag: tar.TypeFifo, Mode: 0o640, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": capNetBind, "SCHILY.xattr.user.note": "no pipe can have it",
		}}, "")
	}))
	r, err := Unpack(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	if r.Files != 6 || r.Attributes != 1 || r.Bytes != 4 || !slices.Equal(r.Whiteouts, []string{"d/gone"}) || !strings.HasPrefix(r.DiffID, "sha256:") {
		t.Errorf("%+v", r)
	}
	var st syscall.Stat_t
	for path, want := range map[string]string{"d": "42750 7:65535", "d/f": "104755 0:0", "l": "104755 0:0", "d/gone": "20000 0:0"} {
		if err := syscall.Lstat(j.Root+"/"+path, &st); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid); got != want && path != "d/gone" || st.Mode&0o170000 == 0 {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	buf := make([]byte, 64)
	for _, path := range []string{"l", "p"} {
		if n, err := syscall.Getxattr(j.Root+"/"+path, "security.capability", buf); err != nil || string(buf[:n]) != capNetBind {
			t.Errorf("%s: capability %x, %v", path, buf[:max(0, n)], err)
		}
	}
	if n, err := syscall.Getxattr(j.Root+"/d", "user.overlay.opaque", buf); err != nil || string(buf[:n]) != "y" {
		t.Errorf("opaque %q, %v", buf[:max(0, n)], err)
	}
}

func TestUnpackErrors(t *testing.T) {
	bomb := archive(t, func(w *tar.Writer) { add(t, w, tar.Header{Name: "f", Mode: 0o644}, strings.Repeat("x", 4096)) })
	j := job(t, bomb)
	j.Limits = layer.Limits{Bytes: 100}
	_, err := Unpack(t.Context(), j)
	if _, hint := errs.PublicText(err); !errs.Is(err, errs.TooLarge) || !strings.Contains(hint, "--max-image-size") {
		t.Errorf("a bomb: %v", err)
	}
	hostile := archive(t, func(w *tar.Writer) { add(t, w, tar.Header{Name: "../x", Mode: 0o644}, "x") })
	if _, err := Unpack(t.Context(), job(t, hostile)); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a hostile path: %v", err)
	}
	full := job(t, archive(t, func(*tar.Writer) {}))
	r, w, err := os.Pipe() // it waits for its layer
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	full.Blob, full.Reserve, full.Free = r, 10, func() (int64, error) { return 9, nil }
	if _, err := Unpack(t.Context(), full); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("a full disk: %v", err)
	}
}

// waiting starts a worker that waits for its layer, and returns its pid, what ends the wait, and its end.
func waiting(t *testing.T) (pid int, feed *os.File, ended <-chan error, cancel func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
	j := job(t, archive(t, func(*tar.Writer) {}))
	j.Blob = r
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	end := make(chan error, 1)
	go func() {
		_, err := Unpack(ctx, j)
		end <- err
	}()
	testenv.Eventually(t, time.Minute, "a worker behind its walls", func() bool {
		if pid = child(t); pid == 0 {
			return false
		}
		s, err := caps.ReadStatus(fmt.Sprintf("/proc/%d/status", pid))
		return err == nil && s.SeccompMode == 2
	})
	return pid, w, end, stop
}

// child returns the pid of this process's worker; 0: there is none.
func child(t *testing.T) int {
	t.Helper()
	all, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for word := range strings.FieldsSeq(string(text)) {
			line, err := os.ReadFile("/proc/" + word + "/cmdline")
			if err == nil && strings.Contains(string(line), "\x00"+Verb+"\x00") {
				pid, _ := strconv.Atoi(word)
				return pid
			}
		}
	}
	return 0
}

// TestPosture: what the kernel says of a worker.
func TestPosture(t *testing.T) {
	pid, feed, ended, _ := waiting(t)
	dir := fmt.Sprintf("/proc/%d/", pid)
	s, err := caps.ReadStatus(dir + "status")
	if err != nil {
		t.Fatal(err)
	}
	if s.Effective != kept() || s.Permitted != kept() || s.Inheritable != 0 || s.Ambient != 0 || !s.NoNewPrivs || s.SeccompMode != 2 {
		t.Errorf("rights: %+v", s)
	}
	status, err := os.ReadFile(dir + "status")
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", firstID); !strings.Contains(string(status), want) {
		t.Errorf("it does not run as %d:\n%s", firstID, status)
	}
	for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		own, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		if its, err := os.Readlink(dir + "ns/" + ns); err != nil || its == own {
			t.Errorf("namespace %s: %s, %v", ns, its, err)
		}
	}
	entries, err := os.ReadDir(dir + "root/")
	if err != nil || len(entries) != 0 {
		t.Errorf("its root holds %v, %v", entries, err)
	}
	fds, err := os.ReadDir(dir + "fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fds {
		if to, err := os.Readlink(dir + "fd/" + f.Name()); err == nil && strings.HasPrefix(to, "/") && to != "/dev/null" && to != "/" {
			t.Errorf("descriptor %s is %s", f.Name(), to)
		}
	}
	if err := feed.Close(); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Receive(t, "the worker ends", ended); err != nil {
		t.Errorf("an empty layer: %v", err)
	}
}

func TestCancel(t *testing.T) {
	pid, _, ended, cancel := waiting(t)
	cancel()
	if err := testenv.Receive(t, "the worker ends", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the worker is still there: %v", err)
	}
}

func TestKilled(t *testing.T) {
	pid, _, ended, _ := waiting(t)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Receive(t, "the worker ends", ended); !errs.Is(err, errs.Internal) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("%v", err)
	}
}

// attack is what code does that took over a worker: it tries what would lead out, and prints what worked.
func attack(confined bool) {
	if confined {
		if err := confine(order{}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	} else if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		fmt.Fprintln(os.Stderr, err) // what it mounts must not show on the host
		os.Exit(1)
	}
	worked := map[string]bool{}
	try := func(what string, f func() error) { worked[what] = f() == nil }
	try("read the host's files", func() error { _, err := os.ReadFile("/etc/passwd"); return err })
	try("leave by ..", func() error {
		return errors.Join(os.Chdir("../../../../.."), func() error { _, err := os.Stat("etc/passwd"); return err }())
	})
	try("open a socket", func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			_ = l.Close()
		}
		return err
	})
	try("mount", func() error { return syscall.Mount("none", "/", "tmpfs", syscall.MS_RDONLY, "") })
	try("make a namespace", func() error { return syscall.Unshare(syscall.CLONE_NEWNS) })
	try("change the root", func() error { return syscall.Chroot("/") })
	try("execute", func() error {
		_, err := syscall.ForkExec("/proc/self/exe", []string{"x", "-test.list=^$"}, &syscall.ProcAttr{})
		return err
	})
	try("signal others", func() error { return syscall.Kill(-1, 0) })
	try("become another user", func() error { return syscall.Setuid(1) })
	_ = json.NewEncoder(os.NewFile(answerFD, "answer")).Encode(worked)
}

// run starts this program as a worker is started, with another verb, and returns what it says.
func run(t *testing.T, verb string) map[string]bool {
	t.Helper()
	j := job(t, archive(t, func(*tar.Writer) {}))
	root, err := mapped(t.Context(), j.Root, j.FirstID)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	cmd, said, err := command(t.Context(), j, root, out, out)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args[1] = verb
	if verb == twinVerb { // the host's namespaces and rights, as a part of the server would have them
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	}
	err = cmd.Start()
	_ = out.Close()
	if err != nil {
		t.Fatal(err)
	}
	var worked map[string]bool
	err = json.NewDecoder(in).Decode(&worked)
	if err := errors.Join(err, cmd.Wait()); err != nil { // after which nobody writes what it said
		t.Errorf("%v: %s", err, said)
	}
	return worked
}

// TestWalls: nothing that code in a worker tries leads out, and each works where the walls are not.
func TestWalls(t *testing.T) {
	confined, free := run(t, attackVerb), run(t, twinVerb)
	for what, worked := range confined {
		if worked {
			t.Errorf("a worker can %s", what)
		}
		if !free[what] {
			t.Errorf("twin: without walls nobody can %s", what)
		}
	}
	if len(confined) != len(free) || len(free) < 9 {
		t.Errorf("tried %d and %d things", len(confined), len(free))
	}
}

// TestAnswersAreChecked: what a worker says that was taken over.
func TestAnswersAreChecked(t *testing.T) {
	for _, said := range []string{
		"", "{", `{"result":{"implied":["../x"]}}`, `{"result":{"whiteouts":["a/../../b"]}}`, `{"result":{"implied":["/etc"]}}`,
		`{"result":{"bytes":-1}}`, `{"result":{"implied":["a/./b"]}}`, `{"kind":"nonsense","error":"x"}`,
	} {
		if _, err := parse([]byte(said)); err == nil {
			t.Errorf("%q was believed", said)
		}
	}
	if _, err := parse([]byte(`{"result":{"implied":[".","a/b"]}}`)); err != nil {
		t.Error(err)
	}
}
