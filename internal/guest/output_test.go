package guest_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/guestwire"
)

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

// TestOutputBursts is about reports of others: output that was cut where it came in one burst and the
// reader was slow, where a code point was split between chunks, and where a here-document hung.
func TestOutputBursts(t *testing.T) {
	r := newRunner(t, setup{})
	t.Run("4 MB at once", func(t *testing.T) { // openai/codex 45540
		res := r.run(guestwire.StartProcess{
			Argv: []string{"python3", "-c", "import os; b = b'x' * (4 << 20)\nwhile b: b = b[os.write(1, b):]"}, Hold: true,
		})
		if len(res.out) != 4<<20 || res.gaps != 0 {
			t.Fatalf("%d bytes, gaps %d", len(res.out), res.gaps)
		}
	})
	t.Run("cut mid-character", func(t *testing.T) { // elizaOS 29883
		res := r.run(guestwire.StartProcess{Argv: []string{
			"python3", "-c",
			"import os, time\nb = '☕你好'.encode() * 22000\nos.write(1, b[:100001])\ntime.sleep(0.05)\nb = b[100001:]\nwhile b: b = b[os.write(1, b):]",
		}, Hold: true})
		if want := strings.Repeat("☕你好", 22000); string(res.out) != want {
			t.Fatalf("%d bytes, want %d", len(res.out), len(want))
		}
	})
	t.Run("here-document", func(t *testing.T) { // cloudflare 30
		r.wantOut("cat > f <<'E'\nline\nE\ncat f", "line\n")
		r.wantOut("echo ok", "ok\n")
	})
	t.Run("both streams to their end", func(t *testing.T) { // mastra 19770
		res := r.sh("head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2; exit 7")
		if len(res.out) != 300000 || len(res.err) != 300000 || res.info.Code != 7 {
			t.Fatalf("%d, %d, %+v", len(res.out), len(res.err), res.info)
		}
	})
	t.Run("silence, then output", func(t *testing.T) { // opensandbox 950
		r.wantOut("sleep 2; echo 10", "10\n")
	})
}
