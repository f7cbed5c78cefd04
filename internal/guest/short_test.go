package guest_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// warm gives the runner's connection the short way, which takes one process.
func warm(t *testing.T) *runner {
	t.Helper()
	r := newRunner(t, setup{})
	r.sh("true")
	return r
}

// TestShortWay runs what fits it and what does not, one after the other on the same connection: nobody can
// tell the difference.
func TestShortWay(t *testing.T) {
	r := warm(t)
	big := strings.Repeat("0123456789abcdef", 64<<10/16)
	tests := []struct {
		name, script, out, err string
		end                    guestwire.End
		code, signal           int
	}{
		{"nothing", "exit 0", "", "", guestwire.EndExited, 0, 0},
		{"both streams", "echo out; echo err >&2", "out\n", "err\n", guestwire.EndExited, 0, 0},
		{"code", "exit 7", "", "", guestwire.EndExited, 7, 0},
		{"signal", "kill -SEGV $$", "", "", guestwire.EndSignaled, 0, 11},
		{"long", "echo a; sleep 0.1; echo b", "a\nb\n", "", guestwire.EndExited, 0, 0},
		{"silent and long", "sleep 0.1", "", "", guestwire.EndExited, 0, 0},
		{"closes its streams and goes on", "exec >&- 2>&-; sleep 0.05; exit 3", "", "", guestwire.EndExited, 3, 0},
		{"as much as a pipe holds", "head -c 65536 /dev/zero | tr '\\0' x", strings.Repeat("x", 65536), "", guestwire.EndExited, 0, 0},
		{"more than a pipe holds", "for i in 1 2 3 4 5; do printf %s " + big[:16<<10] + "; done", strings.Repeat(big[:16<<10], 5), "", guestwire.EndExited, 0, 0},
		{"reopens its output", "echo a >/dev/stdout; echo b >>/dev/stderr", "a\n", "b\n", guestwire.EndExited, 0, 0},
	}
	for round := range 4 {
		for _, tt := range tests {
			res := r.run(guestwire.StartProcess{Argv: []string{"sh", "-c", tt.script}, Hold: round%2 == 1})
			i := res.info
			if string(res.out) != tt.out || string(res.err) != tt.err || i.End != tt.end || i.Code != tt.code ||
				i.Signal != tt.signal || i.Leftover != 0 || !i.Complete || i.Bytes != int64(len(tt.out)+len(tt.err)) {
				t.Errorf("round %d, %s: %d bytes out, err %q, %+v", round, tt.name, len(res.out), res.err, i)
			}
			r.sh("true") // what was handed over comes back
		}
	}
}

// TestShortWayLeftover lets descendants outlive a short process, with its pipe and without: they are counted
// and reaped, and what they print later is there.
func TestShortWayLeftover(t *testing.T) {
	r := warm(t)
	// Both wait for somebody who opens what they read from, which is done once they were counted.
	r.sh("mkfifo /tmp/first /tmp/second")
	res := r.run(guestwire.StartProcess{ID: "holds", Argv: []string{"sh", "-c", "(read x </tmp/first; echo late) & echo now"}})
	if string(res.out) != "now\n" || res.info.Leftover == 0 || res.info.Code != 0 {
		t.Errorf("%q %+v", res.out, res.info)
	}
	res = r.run(guestwire.StartProcess{ID: "leaves", Argv: []string{"sh", "-c", "cat /tmp/second >/dev/null 2>&1 &"}})
	if res.info.Leftover != 1 {
		t.Errorf("%+v", res.info)
	}
	r.sh("echo >/tmp/first; echo >/tmp/second")
	testenv.Eventually(t, time.Minute, "both have ended", func() bool {
		a, err1 := r.Get(t.Context(), "holds")
		b, err2 := r.Get(t.Context(), "leaves")
		r.sh("true") // meanwhile the reaper and the short way work side by side
		return err1 == nil && err2 == nil && a.Leftover+b.Leftover == 0 && a.Bytes == 9
	})
	r.wantOut("ps -o stat= -A | grep -c Z || true", "0\n")
}

// TestShortWayRefuses keeps an error from ending more than its own call.
func TestShortWayRefuses(t *testing.T) {
	r := warm(t)
	for _, tt := range []struct {
		p    guestwire.StartProcess
		kind errs.Kind
	}{
		{guestwire.StartProcess{Argv: []string{"nonesuch"}}, errs.NotFound},
		{guestwire.StartProcess{Argv: []string{"/etc/passwd"}}, errs.PermissionDenied},
		{guestwire.StartProcess{Argv: []string{"true"}, Dir: "/nonesuch"}, errs.NotFound},
		{guestwire.StartProcess{Argv: []string{"true"}, User: "nobody-here"}, errs.NotFound},
		{guestwire.StartProcess{Argv: nil}, errs.InvalidArgument},
	} {
		for range 2 {
			if _, err := r.try(tt.p); errs.KindOf(err) != tt.kind {
				t.Errorf("%q: %v, want %s", tt.p.Argv, err, tt.kind)
			}
			r.wantOut("echo fine", "fine\n")
		}
	}
}

// TestShortWayIsNoBottleneck runs long, short and many processes at once.
func TestShortWayIsNoBottleneck(t *testing.T) {
	r := warm(t)
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			for i := range 30 {
				script, want := "echo x", "x\n"
				if (c+i)%6 == 0 {
					script, want = "sleep 0.05; echo y", "y\n"
				}
				_, s, err := r.Run(t.Context(), guestwire.RunProcess{
					Start:  guestwire.StartProcess{ID: fmt.Sprintf("c%d-%d", c, i), Argv: []string{"sh", "-c", script}},
					Output: guestwire.OutputRequest{Follow: true},
				}, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if res, err := collect(s); err != nil || string(res.out) != want {
					t.Errorf("%q, %v", res.out, err)
				}
			}
		})
	}
	wg.Wait()
	if st, err := r.Status(t.Context()); err != nil || st.Open > 40 {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestShortWayAttaches runs an id twice: the second finds the first.
func TestShortWayAttaches(t *testing.T) {
	r := warm(t)
	for i := range 3 {
		res := r.run(guestwire.StartProcess{ID: "once", Argv: []string{"sh", "-c", "echo $$"}})
		if res.info.PID == 0 || !bytes.Equal(bytes.TrimSpace(res.out), fmt.Append(nil, res.info.PID)) {
			t.Errorf("run %d: %q, %+v", i, res.out, res.info)
		}
	}
	if all, err := r.List(t.Context()); err != nil || len(all) != 2 {
		t.Errorf("%d processes, %v", len(all), err)
	}
}

// TestShortWayIsProdded stops, over and over, whatever its user may stop: also children that have become this
// user and not executed yet, for which the thread waits. Whoever is stopped later is told to go on by the same.
func TestShortWayIsProdded(t *testing.T) {
	r := warm(t)
	stop := guestwire.StartProcess{ID: "stopper", Argv: []string{
		"bash", "-c", "end=$((SECONDS+3)); while [ $SECONDS -lt $end ]; do kill -STOP -1; kill -CONT -1; done 2>/dev/null",
	}}
	if _, err := r.Start(t.Context(), stop, nil); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		if _, err := r.try(guestwire.StartProcess{Argv: []string{"true"}}); err != nil {
			t.Fatal(err)
		}
		if info, err := r.Get(t.Context(), "stopper"); err != nil || info.End != guestwire.EndNone {
			if err != nil || i == 0 {
				t.Fatalf("after %d starts: %+v, %v", i, info, err)
			}
			return
		}
	}
}

// TestShortWayWaitsForNobody has one process fill what the guest keeps, for a reader that does not read, and
// another one print for a reader of its own: it has to wait, and nobody else.
func TestShortWayWaitsForNobody(t *testing.T) {
	r := newRunner(t, setup{Output: guestwire.MinBuffer})
	r.sh("true")
	hog := guestwire.StartProcess{ID: "hog", Argv: []string{"sh", "-c", "head -c 4000000 /dev/zero"}, Hold: true}
	if _, err := r.Start(t.Context(), hog, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "it has filled the pool", func() bool {
		a, err := r.Get(t.Context(), "hog")
		b, _ := r.Get(t.Context(), "hog")
		return err == nil && a.Bytes > 64<<10 && a.Bytes == b.Bytes
	})
	r.sh("true") // the connection has the short way again
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{
		Start:  guestwire.StartProcess{ID: "waits", Argv: []string{"head", "-c", "30000", "/dev/zero"}, Hold: true},
		Output: guestwire.OutputRequest{Follow: true, Hold: true},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.sh("true") // before the hog's reader has come
	// The hog's reader comes, late, and takes all.
	out, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "hog", Follow: true, Hold: true})
	if err != nil {
		t.Fatal(err)
	}
	if res, err := collect(out); err != nil || res.gaps+int64(len(res.out)) != 4000000 {
		t.Errorf("the hog: %d bytes and %d lost, %v", len(res.out), res.gaps, err)
	}
	if res, err := collect(s); err != nil || res.gaps+int64(len(res.out)) != 30000 {
		t.Errorf("%d bytes and %d lost, %v", len(res.out), res.gaps, err)
	}
}
