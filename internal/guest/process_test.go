package guest_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest"
	"casemate.dev/internal/guestwire"
)

// runner runs commands in a guest.
type runner struct {
	t testing.TB
	*guestwire.Client
	n atomic.Int64
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
