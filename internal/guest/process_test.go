package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// runner runs commands in a guest.
type runner struct {
	t testing.TB
	*guestwire.Client
	n int
}

func newRunner(t testing.TB, s setup) *runner { return &runner{t: t, Client: start(t, s)} }

// result is what came of a command.
type result struct {
	info           guestwire.ProcessInfo
	out, err, term []byte
	gaps           int64
}

// run runs a process to its end.
func (r *runner) run(p guestwire.StartProcess) result {
	r.t.Helper()
	res, err := r.try(p)
	if err != nil {
		r.t.Fatalf("run %q: %v", p.Argv, err)
	}
	return res
}

func (r *runner) sh(script string) result {
	r.t.Helper()
	return r.run(guestwire.StartProcess{Argv: []string{"sh", "-c", script}})
}

func (r *runner) try(p guestwire.StartProcess) (result, error) {
	r.t.Helper()
	if p.ID == "" {
		p.ID = r.serial()
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 60*time.Second)
	defer cancel()
	_, s, err := r.Run(ctx, guestwire.RunProcess{
		Start: p, Output: guestwire.OutputRequest{Follow: true, Hold: p.Hold},
	}, nil)
	if err != nil {
		return result{}, err
	}
	return collect(s)
}

func collect(s *guestwire.OutputStream) (result, error) {
	defer s.Close()
	var res result
	for {
		item, err := s.Next()
		if err == io.EOF {
			res.info = s.Info()
			return res, nil
		}
		if err != nil {
			return res, err
		}
		res.gaps += item.Gap
		switch item.Stream {
		case guestwire.Stdout:
			res.out = append(res.out, item.Data...)
		case guestwire.Stderr:
			res.err = append(res.err, item.Data...)
		case guestwire.TTY:
			res.term = append(res.term, item.Data...)
		}
	}
}

func (r *runner) wantOut(script, want string) {
	r.t.Helper()
	if res := r.sh(script); string(res.out) != want || res.info.End != guestwire.EndExited || res.info.Code != 0 {
		r.t.Fatalf("%s: out %q, err %q, end %s %d; want %q", script, res.out, res.err, res.info.End, res.info.Code, want)
	}
}

func TestProcessEnds(t *testing.T) {
	r := newRunner(t, setup{})
	tests := []struct {
		script string
		end    guestwire.End
		code   int
		signal int
	}{
		{"true", guestwire.EndExited, 0, 0},
		{"exit 3", guestwire.EndExited, 3, 0},
		{"exit 255", guestwire.EndExited, 255, 0},
		{"kill -TERM $$", guestwire.EndSignaled, 0, 15},
		{"kill -SEGV $$", guestwire.EndSignaled, 0, 11},
		{"kill -KILL $$", guestwire.EndSignaled, 0, 9},
	}
	for _, tt := range tests {
		info := r.sh(tt.script).info
		if info.End != tt.end || info.Code != tt.code || info.Signal != tt.signal || !info.Complete || info.Ended < info.Started {
			t.Errorf("%s: %+v", tt.script, info)
		}
	}
}

func TestProcessStreams(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.sh("echo out; echo err >&2; cat; readlink /proc/self/fd/0")
	if string(res.out) != "out\n/dev/null\n" || string(res.err) != "err\n" {
		t.Fatalf("out %q, err %q", res.out, res.err)
	}
	if res.info.Bytes != int64(len(res.out)+len(res.err)) || res.info.Dropped != 0 {
		t.Fatalf("%+v", res.info)
	}
	// Opened again by name, as tools do (/dev/stdout belongs to the process's user).
	r.wantOut("echo a > /dev/stdout; echo b > /proc/self/fd/1", "a\nb\n")
	// Nothing but the three is open.
	if res := r.run(guestwire.StartProcess{Argv: []string{"ls", "/proc/self/fd"}}); string(res.out) != "0\n1\n2\n3\n" {
		t.Fatalf("open: %q", res.out) // 3 is the directory that ls reads
	}
}

func TestProcessEnvironment(t *testing.T) {
	r := newRunner(t, setup{})
	if err := r.Claim(t.Context(), guestwire.Claim{
		Sandbox: "x", Hostname: "box", Env: map[string]string{"LAYER": "claim", "CLAIM": "1"}, Dir: "/tmp",
	}); err != nil {
		t.Fatal(err)
	}
	res := r.run(guestwire.StartProcess{Argv: []string{"/usr/bin/env"}, Env: map[string]string{"LAYER": "process", "BYTES": "\xff"}})
	want := "BYTES=\xff\nCLAIM=1\nFROM=template\nHOME=/home/user\nLAYER=process\nLOGNAME=user\n" +
		"PATH=" + guest.DefaultPath + "\nSHELL=/bin/bash\nUSER=user\n"
	got := string(res.out)
	// The tree of a process without a scope is found by a mark.
	got = strings.Replace(got, guest.MarkVariable+"="+res.info.ID+"\n", "", 1)
	if got != want {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
	r.wantOut("hostname; pwd; id -u; id -G", "box\n/tmp\n1000\n1000 2000\n")
	err := r.Claim(t.Context(), guestwire.Claim{Hostname: "other"})
	if !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("second claim: %v", err)
	}
	r.wantOut("hostname", "box\n")
}

func TestClaimIsAllOrNothing(t *testing.T) {
	r := newRunner(t, setup{})
	for _, bad := range []guestwire.Claim{
		{Hostname: "changed", User: "nobody-here"},
		{Hostname: "changed", Env: map[string]string{"A=B": "x"}},
		{Hostname: "changed", Dir: "relative"},
		{Hostname: strings.Repeat("x", 65)},
	} {
		if err := r.Claim(t.Context(), bad); err == nil {
			t.Fatalf("claim %+v was taken", bad)
		}
	}
	if res := r.sh("hostname"); string(res.out) == "changed\n" {
		t.Fatal("a refused claim changed the host name")
	}
	// One of many at once.
	var wg sync.WaitGroup
	oks := make(chan string, 20)
	for i := range 20 {
		wg.Go(func() {
			name := fmt.Sprintf("box%d", i)
			if r.Claim(t.Context(), guestwire.Claim{Hostname: name}) == nil {
				oks <- name
			}
		})
	}
	wg.Wait()
	close(oks)
	if len(oks) != 1 {
		t.Fatalf("%d claims were taken", len(oks))
	}
	r.wantOut("hostname", <-oks+"\n")
}

func TestProcessUsers(t *testing.T) {
	r := newRunner(t, setup{})
	for user, want := range map[string]string{
		"":      "1000:1000 2000:/home/user:user",
		"root":  "0:0:/root:root",
		"0":     "0:0:/root:root",
		"other": "1001:1001 2000 2001:/home/other:other",
		"1001":  "1001:1001 2000 2001:/home/other:other",
		"4242":  "4242:4242:/:4242",
	} {
		res := r.run(guestwire.StartProcess{
			Argv: []string{"sh", "-c", `echo "$(id -u):$(id -G):$HOME:$USER"`}, User: user, Dir: "/",
		})
		if got := strings.TrimSpace(string(res.out)); got != want {
			t.Errorf("user %q: %s, want %s", user, got, want)
		}
	}
	for _, user := range []string{"nobody-here", "bad", "-1", "4294967295", "99999999999"} {
		if _, err := r.try(guestwire.StartProcess{Argv: []string{"true"}, User: user}); !errs.Is(err, errs.NotFound) {
			t.Errorf("user %q: %v", user, err)
		}
	}
}

func TestSingleUser(t *testing.T) {
	r := newRunner(t, setup{Locked: true})
	for _, user := range []string{"root", "0", "other", "4242"} {
		if _, err := r.try(guestwire.StartProcess{Argv: []string{"true"}, User: user}); !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("process as %q: %v", user, err)
		}
		req := guestwire.PathRequest{Asker: guestwire.Asker{User: user}, Path: "/"}
		if _, err := r.Stat(t.Context(), req); !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("file as %q: %v", user, err)
		}
	}
	if err := r.Claim(t.Context(), guestwire.Claim{User: "root"}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("claim as root: %v", err)
	}
	r.wantOut("id -u", "1000\n")
}

// TestPasswdIsHostile replaces the account files with what must not hang or crash the guest. Root
// inside may write them.
func TestPasswdIsHostile(t *testing.T) {
	r := newRunner(t, setup{User: "0"})
	root := func(script string) {
		t.Helper()
		if res := r.run(guestwire.StartProcess{Argv: []string{"sh", "-c", script}, User: "0", Dir: "/"}); res.info.Code != 0 {
			t.Fatalf("%s: %s", script, res.err)
		}
	}
	for _, script := range []string{
		"mkfifo /etc/fifo; mv -f /etc/fifo /etc/passwd",
		"ln -sf /proc/1/environ /etc/passwd",
		"ln -sf /proc/self/fd/0 /etc/passwd",
		"ln -sf /dev/zero /etc/passwd",
		"rm /etc/passwd",
		"mkdir /etc/passwd",
		"rmdir /etc/passwd; head -c 3000000 /dev/zero > /etc/passwd",
		"yes : | head -c 1000000 > /etc/passwd",
	} {
		root(script)
		if _, err := r.try(guestwire.StartProcess{Argv: []string{"true"}, User: "user", Dir: "/"}); !errs.Is(err, errs.NotFound) {
			t.Fatalf("after %s: %v", script, err)
		}
	}
	root("rm -f /etc/passwd; echo 'user:x:1234:1234::/tmp:/bin/sh' > /etc/passwd")
	if res := r.run(guestwire.StartProcess{Argv: []string{"id", "-u"}, User: "user"}); string(res.out) != "1234\n" {
		t.Fatalf("changed passwd: %q", res.out)
	}
}

func TestProcessDirectory(t *testing.T) {
	r := newRunner(t, setup{})
	r.wantOut("pwd", "/home/user\n")
	if res := r.run(guestwire.StartProcess{Argv: []string{"pwd"}, Dir: "~/../other"}); string(res.out) != "/home/other\n" {
		t.Errorf("~/../other: %q", res.out)
	}
	r.sh("ln -s /proc/self/fd/7 /tmp/fd7; ln -s /proc/1/root /tmp/root; ln -s /usr/bin /tmp/good; touch /tmp/file; ln -s loop /tmp/loop")
	if res := r.run(guestwire.StartProcess{Argv: []string{"pwd", "-P"}, Dir: "/tmp/good"}); string(res.out) != "/usr/bin\n" {
		t.Errorf("good link: %q", res.out)
	}
	tests := map[string]errs.Kind{
		"/nowhere": errs.NotFound, "nowhere": errs.NotFound, "/tmp/file": errs.InvalidArgument,
		"/tmp/loop": errs.InvalidArgument, "a\x00b": errs.InvalidArgument,
		"/proc/self/fd/7": 0, "/proc/1/fd/7": 0, "/tmp/fd7": 0, "/tmp/root": 0, "/proc/self/fd/7/../../../..": 0,
		"/proc/1/root": errs.InvalidArgument, "/proc/self/cwd": errs.InvalidArgument,
	}
	for n := range 32 {
		tests[fmt.Sprintf("/proc/self/fd/%d", n)] = 0
		tests[fmt.Sprintf("/proc/self/fd/%d/../..", n)] = 0
	}
	for dir, kind := range tests {
		_, err := r.try(guestwire.StartProcess{Argv: []string{"pwd", "-P"}, Dir: dir})
		if err == nil || kind != 0 && !errs.Is(err, kind) {
			t.Errorf("directory %q: %v", dir, err)
		}
	}
}

func TestProcessNotFound(t *testing.T) {
	r := newRunner(t, setup{})
	r.sh("echo 'echo hi' > /tmp/plain; chmod 755 /tmp/plain; printf '#!/no/interpreter\\n' > /tmp/badint; chmod 755 /tmp/badint; touch /tmp/noexec")
	tests := []struct {
		argv []string
		env  map[string]string
		kind errs.Kind
	}{
		{[]string{"no-such-program"}, nil, errs.NotFound},
		{[]string{"/no/such/program"}, nil, errs.NotFound},
		{[]string{"./relative"}, nil, errs.NotFound},
		{[]string{"/tmp/badint"}, nil, errs.NotFound},
		{[]string{"/tmp/noexec"}, nil, errs.PermissionDenied},
		{[]string{"/tmp"}, nil, errs.PermissionDenied},
		{[]string{"/tmp/plain"}, nil, errs.InvalidArgument},
		{[]string{}, nil, errs.InvalidArgument},
		{[]string{""}, nil, errs.InvalidArgument},
		{[]string{"true", strings.Repeat("x", 128<<10)}, nil, errs.InvalidArgument},
		{[]string{"true", "a\x00b"}, nil, errs.InvalidArgument},
		{[]string{"true"}, map[string]string{"A=B": "1"}, errs.InvalidArgument},
		{[]string{"true"}, map[string]string{"": "1"}, errs.InvalidArgument},
		{[]string{"true"}, map[string]string{"PATH": "/nowhere"}, errs.NotFound},
	}
	for _, tt := range tests {
		_, err := r.try(guestwire.StartProcess{Argv: tt.argv, Env: tt.env})
		if !errs.Is(err, tt.kind) {
			t.Errorf("%.60q: %v, want %v", tt.argv, err, tt.kind)
		}
	}
	// The asking process's own PATH counts.
	r.sh("mkdir /tmp/bin; printf '#!/bin/sh\\necho mine\\n' > /tmp/bin/tool; chmod 755 /tmp/bin/tool")
	res := r.run(guestwire.StartProcess{Argv: []string{"tool"}, Env: map[string]string{"PATH": "/nowhere:/tmp/bin"}})
	if string(res.out) != "mine\n" {
		t.Errorf("tool: %q", res.out)
	}
	// A failed start leaves no process and frees its id.
	if list, err := r.List(t.Context()); err != nil || strings.Contains(fmt.Sprint(list), "no-such") {
		t.Errorf("list: %v, %v", list, err)
	}
}

func TestProcessAttach(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "once", Argv: []string{"sh", "-c", "echo $$; echo started >> /tmp/count; sleep 0.3; exit 4"}}
	var wg sync.WaitGroup
	var mu sync.Mutex
	fresh, pids := 0, map[int]bool{}
	for range 20 {
		wg.Go(func() {
			info, err := r.Start(t.Context(), p, nil)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			pids[info.PID] = true
			if !info.Attached {
				fresh++
			}
		})
	}
	wg.Wait()
	if fresh != 1 || len(pids) != 1 {
		t.Fatalf("%d fresh starts, pids %v", fresh, pids)
	}
	res := r.run(p)
	if res.info.Code != 4 || strings.Count(string(res.out), "\n") != 1 {
		t.Fatalf("attached: %q, %+v", res.out, res.info)
	}
	r.wantOut("cat /tmp/count", "started\n")
}

// TestOutputFromAnyOffset reads during and after the run, in pieces and from several readers.
func TestOutputFromAnyOffset(t *testing.T) {
	r := newRunner(t, setup{})
	const n = 300_000 // mastra 19770: the final frame was cut
	want := bytes.Repeat([]byte("☕你好"), n/9)
	p := guestwire.StartProcess{ID: "p", Argv: []string{
		"sh", "-c",
		`i=0; while [ $i -lt 33333 ]; do printf '☕你好'; i=$((i+1)); done`,
	}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, offset := range []int64{0, 1, 100_000, 299_000} {
		wg.Go(func() {
			s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "p", Offset: offset, Follow: true})
			if err != nil {
				t.Error(err)
				return
			}
			res, err := collect(s)
			if err != nil || !bytes.Equal(res.out, want[:33333*9][offset:]) {
				t.Errorf("offset %d: %d bytes, %v", offset, len(res.out), err)
			}
		})
	}
	wg.Wait()
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "p", Offset: 10, Limit: 7})
	if err != nil {
		t.Fatal(err)
	}
	if res, err := collect(s); err != nil || !bytes.Equal(res.out, want[10:17]) {
		t.Fatalf("limit: %q, %v", res.out, err)
	}
	for _, bad := range []guestwire.OutputRequest{{ID: "p", Offset: -1}, {ID: "none"}} {
		s, err := r.Output(t.Context(), bad)
		if err == nil {
			_, err = collect(s)
		}
		if err == nil {
			t.Errorf("%+v was answered", bad)
		}
	}
}

func TestOutputIsBytes(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.sh("head -c 1048576 /dev/urandom | tee /tmp/r")
	sum := r.sh("sha256sum < /tmp/r")
	if got := fmt.Sprintf("%x  -\n", sha256.Sum256(res.out)); got != string(sum.out) {
		t.Fatalf("%d bytes: %s, want %s", len(res.out), got, sum.out)
	}
}

// TestHugeOutput prints 2 GB, and a line of 200 MB: memory stays flat, and what is missing is said.
func TestHugeOutput(t *testing.T) {
	c, pid := startPID(t, setup{})
	r := &runner{t: t, Client: c}
	p := guestwire.StartProcess{ID: "yes", Argv: []string{"sh", "-c", "yes | head -c 2147483648"}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	info, err := r.Wait(t.Context(), "yes")
	if err != nil || info.Bytes != 2<<30 || info.End != guestwire.EndExited || info.Dropped < 2<<30-2<<20 {
		t.Fatalf("%+v, %v", info, err)
	}
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "yes"})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || res.gaps != info.Dropped || int64(len(res.out))+res.gaps != 2<<30 {
		t.Fatalf("%d bytes, gaps %d, %v", len(res.out), res.gaps, err)
	}
	res = r.sh("head -c 209715200 /dev/zero | tr '\\0' x")
	if int64(len(res.out))+res.gaps != 200<<20 {
		t.Fatalf("a line of 200 MB: %d bytes, gaps %d", len(res.out), res.gaps)
	}
	if peak := statusKB(t, pid, "VmHWM"); peak > 40<<10 {
		t.Errorf("the guest used %d KB", peak)
	}
}

func statusKB(t *testing.T, pid int, field string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		var kb int
		if n, _ := fmt.Sscanf(line, field+": %d kB", &kb); n == 1 {
			return kb
		}
	}
	t.Fatalf("no %s", field)
	return 0
}

// TestHoldLosesNothing follows a process that prints more than its buffer, slowly.
func TestHoldLosesNothing(t *testing.T) {
	r := newRunner(t, setup{})
	const n = 20 << 20
	res := r.run(guestwire.StartProcess{
		Argv: []string{"sh", "-c", "head -c 20971520 /dev/zero"}, Buffer: 1, Hold: true,
	})
	if len(res.out) != n || res.gaps != 0 || res.info.Dropped == 0 {
		t.Fatalf("%d bytes, gaps %d, %+v", len(res.out), res.gaps, res.info)
	}
	// One that stops reading does not stop the process for ever: it goes when its connection does.
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{
		Start:  guestwire.StartProcess{ID: "held", Argv: []string{"sh", "-c", "head -c 20971520 /dev/zero"}, Buffer: 1},
		Output: guestwire.OutputRequest{Follow: true, Hold: true},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	if info, err := r.Get(t.Context(), "held"); err != nil || info.End != guestwire.EndNone {
		t.Fatalf("%+v, %v: it did not wait", info, err)
	}
	s.Close()
	if info, err := r.Wait(t.Context(), "held"); err != nil || info.Bytes != n {
		t.Fatalf("%+v, %v", info, err)
	}
}

func TestInput(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "cat", Argv: []string{"cat"}, Stdin: guestwire.StdinPipe}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	in := func(offset int64, data string, closeIt bool) int64 {
		t.Helper()
		a, err := r.Input(t.Context(), guestwire.InputRequest{ID: "cat", Offset: offset, Close: closeIt}, strings.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return a.Offset
	}
	if n := in(-1, "hello ", false); n != 6 {
		t.Fatalf("offset %d", n)
	}
	if n := in(0, "hello world", false); n != 11 { // a repeat writes nothing twice
		t.Fatalf("offset %d", n)
	}
	_, err := r.Input(t.Context(), guestwire.InputRequest{ID: "cat", Offset: 99}, strings.NewReader("x"))
	if !errs.Is(err, errs.InvalidArgument) {
		t.Fatalf("offset beyond: %v", err)
	}
	big := strings.Repeat("x", 300_000)
	in(11, big, true)
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "cat", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || string(res.out) != "hello world"+big || res.info.Code != 0 {
		t.Fatalf("%d bytes, %+v, %v", len(res.out), res.info, err)
	}
	for _, id := range []string{"cat", "none"} {
		_, err = r.Input(t.Context(), guestwire.InputRequest{ID: id, Offset: -1}, strings.NewReader("x"))
		if !errs.Is(err, errs.FailedPrecondition) && !errs.Is(err, errs.NotFound) {
			t.Fatalf("input of %s: %v", id, err)
		}
	}
	// Without standard input a reader sees the end at once (E2B 927).
	if res := r.run(guestwire.StartProcess{Argv: []string{"cat"}}); len(res.out) != 0 || res.info.Code != 0 {
		t.Fatalf("%+v", res)
	}
}

// TestInputNotRead fills the pipe of a process that does not read: the call blocks, and ends with
// its caller; the process goes on and input can be resumed where it stands.
func TestInputNotRead(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "slow", Argv: []string{"sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.01; done; wc -c"}, Stdin: guestwire.StdinPipe}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("y"), 500_000)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := r.Input(ctx, guestwire.InputRequest{ID: "slow", Offset: 0}, bytes.NewReader(data))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("input: %v", err)
	}
	r.sh("touch /tmp/go")
	a, err := r.Input(t.Context(), guestwire.InputRequest{ID: "slow", Offset: 0, Close: true}, bytes.NewReader(data))
	if err != nil || a.Offset != int64(len(data)) {
		t.Fatalf("%+v, %v", a, err)
	}
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "slow", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if res, err := collect(s); err != nil || string(res.out) != "500000\n" {
		t.Fatalf("%q, %v", res.out, err)
	}
}

func TestTerminalProcess(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{
		ID: "tty", TTY: true, Rows: 30, Cols: 100,
		Argv: []string{"bash", "--norc", "-c", "stty size; tty; echo $TERM; read x; stty size; echo got:$x; read y; echo end"},
	}
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{Start: p, Output: guestwire.OutputRequest{Follow: true}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var seen string
	until := func(want string) {
		t.Helper()
		for !strings.Contains(seen, want) {
			item, err := s.Next()
			if err != nil {
				t.Fatalf("%v after %q, want %q", err, seen, want)
			}
			if item.Stream != guestwire.TTY {
				t.Fatalf("stream %d", item.Stream)
			}
			seen += string(item.Data)
		}
	}
	until("30 100\r\n/dev/pts/0\r\n" + guest.DefaultTerm)
	if err := r.Resize(t.Context(), guestwire.ResizeRequest{ID: "tty", Rows: 50, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Input(t.Context(), guestwire.InputRequest{ID: "tty", Offset: -1}, strings.NewReader("hello\n")); err != nil {
		t.Fatal(err)
	}
	until("50 120\r\ngot:hello")
	if _, err := r.Input(t.Context(), guestwire.InputRequest{ID: "tty", Offset: -1, Close: true}, nil); err != nil {
		t.Fatal(err)
	}
	until("end\r\n")
	if _, err := s.Next(); err != io.EOF || s.Info().Code != 0 || !s.Info().TTY {
		t.Fatalf("%v, %+v", err, s.Info())
	}
	if err := r.Resize(t.Context(), guestwire.ResizeRequest{ID: "none"}); !errs.Is(err, errs.NotFound) {
		t.Fatal(err)
	}
}

// TestTerminalHangup ends the first process of a terminal: what it left behind gets SIGHUP, and the
// output is complete.
func TestTerminalHangup(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.run(guestwire.StartProcess{TTY: true, Argv: []string{"bash", "-c", "sleep 300 & echo hi"}})
	if !strings.Contains(string(res.term), "hi") || !res.info.Complete {
		t.Fatalf("%q, %+v", res.term, res.info)
	}
}

func TestTimeout(t *testing.T) {
	r := newRunner(t, setup{})
	tests := []struct {
		name, script   string
		timeout, grace int64
		under          time.Duration
	}{
		{"plain", "echo begun; sleep 300", 200, 0, time.Second},
		{"ignores SIGTERM", "trap '' TERM; while :; do sleep 0.05; done", 200, 300, 2 * time.Second},
		{"descendants", "sleep 301 & sleep 302 & wait", 200, 0, time.Second},
		{"setsid", "setsid sleep 303 & setsid sh -c 'trap \"\" TERM; sleep 304; sleep 305' & sleep 306", 200, 0, 2 * time.Second},
		{"stopped", "kill -STOP $$; sleep 307", 200, 300, 2 * time.Second},
		{"orphans", "(setsid sh -c 'sleep 308 & sleep 309' &) ; sleep 310", 200, 0, 2 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			begun := time.Now()
			res := r.run(guestwire.StartProcess{
				Argv: []string{"sh", "-c", tt.script}, TimeoutMS: tt.timeout, GraceMS: tt.grace,
			})
			if res.info.End != guestwire.EndTimedOut || res.info.Code != 0 {
				t.Errorf("%+v", res.info)
			}
			if took := time.Since(begun); took > tt.under {
				t.Errorf("took %v", took)
			}
			testenv.Eventually(t, 2*time.Second, "nothing survives", func() bool {
				return strings.TrimSpace(string(r.sh("pgrep -x sleep || true").out)) == ""
			})
		})
	}
}

func TestCancel(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "c", Argv: []string{"sh", "-c", "trap '' TERM; setsid sleep 311 & sleep 312; sleep 313"}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "both sleep", func() bool {
		return len(strings.Fields(string(r.sh("pgrep -x sleep || true").out))) == 2
	})
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	info, err := r.Wait(t.Context(), "c")
	if err != nil || info.End != guestwire.EndCanceled || info.Leftover != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	r.wantOut("pgrep -x sleep || true", "")
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 15}); !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("signal after the end: %v", err)
	}
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 77}); !errs.Is(err, errs.InvalidArgument) {
		t.Fatalf("signal 77: %v", err)
	}
}

// TestLeftover lets a child keep the pipe open: the caller is not held up, the child lives on and is
// counted, what it prints later is there, and it can be ended.
func TestLeftover(t *testing.T) {
	r := newRunner(t, setup{})
	begun := time.Now()
	res := r.run(guestwire.StartProcess{ID: "l", Argv: []string{
		"sh", "-c",
		"(while [ ! -e /tmp/go ]; do sleep 0.02; done; echo late; sleep 314) & echo early",
	}})
	took := time.Since(begun)
	if string(res.out) != "early\n" || res.info.Leftover == 0 || !res.info.Complete || took > guest.LateGrace {
		t.Fatalf("%q, %+v after %v", res.out, res.info, took)
	}
	r.sh("touch /tmp/go")
	testenv.Eventually(t, 5*time.Second, "late output is there", func() bool {
		s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "l", Offset: res.info.Bytes})
		if err != nil {
			t.Fatal(err)
		}
		late, err := collect(s)
		return err == nil && string(late.out) == "late\n"
	})
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "l", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	info, err := r.Get(t.Context(), "l")
	if err != nil || info.Leftover != 0 || info.End != guestwire.EndExited || info.Code != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	// One that prints for ever holds nobody up either.
	res = r.sh("yes & sleep 0.1")
	if !res.info.Complete {
		t.Fatalf("%+v", res.info)
	}
	r.sh("pkill -x yes")
	// And leftovers that end by themselves are noticed.
	res = r.run(guestwire.StartProcess{ID: "brief", Argv: []string{"sh", "-c", "sleep 0.5 >/dev/null 2>&1 &"}})
	if res.info.Leftover != 1 {
		t.Fatalf("%+v", res.info)
	}
	testenv.Eventually(t, 5*time.Second, "leftover is gone", func() bool {
		info, err := r.Get(t.Context(), "brief")
		return err == nil && info.Leftover == 0
	})
}

func TestReaper(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.sh("i=0; while [ $i -lt 2000 ]; do (sleep 0.01 &) ; i=$((i+1)); done; echo made")
	if string(res.out) != "made\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	testenv.Eventually(t, 10*time.Second, "no zombie and no sleep is left", func() bool {
		return strings.TrimSpace(string(r.sh("ps -eo stat,comm | grep -E '^Z|sleep' || true").out)) == ""
	})
}

// TestReaperKeepsUp ends processes before their start has returned, many at once.
func TestReaperKeepsUp(t *testing.T) {
	r := newRunner(t, setup{})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 60 {
				id := fmt.Sprintf("k%d-%d", g, i)
				_, s, err := r.Run(t.Context(), guestwire.RunProcess{
					Start:  guestwire.StartProcess{ID: id, Argv: []string{"/usr/bin/true"}},
					Output: guestwire.OutputRequest{Follow: true},
				}, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if res, err := collect(s); err != nil || res.info.End != guestwire.EndExited || res.info.Code != 0 {
					t.Errorf("%+v, %v", res.info, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestGuestSurvives sends to PID 1 what root inside can send (HARDENING 3).
func TestGuestSurvives(t *testing.T) {
	r := newRunner(t, setup{})
	root := func(script string) result {
		return r.run(guestwire.StartProcess{Argv: []string{"bash", "-c", script}, User: "root", Dir: "/"})
	}
	root("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; true")
	root("kill -STOP 1; kill -9 1; true")
	// si_code other than SI_USER makes Go's runtime take the signal for its own fault.
	res := root(`python3 -c '
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
for s in list(range(1, 65)):
    for _ in range(3):
        libc.sigqueue(1, s, 7)
print("sent")'`)
	if string(res.out) != "sent\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	res = root(`python3 -c '
import fcntl, os, signal
for s in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGTERM):
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, 1)
    fcntl.fcntl(r, 10, int(s))  # F_SETSIG
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(w, b"x")
print("sent")'`)
	if string(res.out) != "sent\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	root("kill -9 -1")
	r.wantOut("echo alive", "alive\n")
	if st, err := r.Status(t.Context()); err != nil || st.Version != guestwire.Version {
		t.Fatalf("%+v, %v", st, err)
	}
}

func TestListAndForget(t *testing.T) {
	r := newRunner(t, setup{})
	for _, id := range []string{"a", "b"} {
		r.run(guestwire.StartProcess{ID: id, Argv: []string{"echo", id}})
	}
	if _, err := r.Start(t.Context(), guestwire.StartProcess{ID: "c", Argv: []string{"sleep", "315"}}, nil); err != nil {
		t.Fatal(err)
	}
	list, err := r.List(t.Context())
	if err != nil || len(list) != 3 || list[0].ID != "a" || list[2].End != guestwire.EndNone {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := r.Forget(t.Context(), "c"); !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("forget a running one: %v", err)
	}
	if err := r.Forget(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get(t.Context(), "a"); !errs.Is(err, errs.NotFound) {
		t.Fatalf("get a forgotten one: %v", err)
	}
}

// TestRetention starts more than are kept: the oldest go, descriptors and memory do not grow.
func TestRetention(t *testing.T) {
	r := newRunner(t, setup{})
	var before guestwire.Status
	for i := range guest.MaxEnded + 100 {
		if _, err := r.Start(t.Context(), guestwire.StartProcess{ID: fmt.Sprint("r", i), Argv: []string{"/usr/bin/true"}}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Wait(t.Context(), fmt.Sprint("r", i)); err != nil {
			t.Fatal(err)
		}
		if i == 10 {
			before, _ = r.Status(t.Context())
		}
	}
	after, err := r.Status(t.Context())
	if err != nil || after.Processes > guest.MaxEnded+1 || after.Open > before.Open+8 {
		t.Fatalf("before %+v, after %+v, %v", before, after, err)
	}
	if _, err := r.Get(t.Context(), "r0"); !errs.Is(err, errs.NotFound) {
		t.Fatalf("the oldest: %v", err)
	}
	if info, err := r.Get(t.Context(), fmt.Sprint("r", guest.MaxEnded+99)); err != nil || info.End != guestwire.EndExited {
		t.Fatalf("the youngest: %+v, %v", info, err)
	}
}

func TestSync(t *testing.T) {
	r := newRunner(t, setup{})
	if err := r.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestIdleMemory has a guest work and then rest: what it holds by itself is what every idle sandbox
// costs.
func TestIdleMemory(t *testing.T) {
	c, pid := startPID(t, setup{})
	r := &runner{t: t, Client: c}
	for range 50 {
		r.sh("head -c 3000000 /dev/zero")
	}
	list, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		if err := r.Forget(t.Context(), p.ID); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 15*time.Second, "memory below 4 MB", func() bool {
		kb := anonymousKB(t, pid)
		t.Log(kb, "KB")
		return kb < 4<<10
	})
}

func anonymousKB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for line := range strings.SplitSeq(string(b), "\n") {
		var kb int
		if n, _ := fmt.Sscanf(line, "Pss_Anon: %d kB", &kb); n == 1 {
			sum += kb
		}
	}
	return sum
}
