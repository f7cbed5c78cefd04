package keeper_test

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/seccomp/filter"
	"casemate.dev/internal/testenv"
)

// patience bounds waiting for what comes of itself.
const patience = 2 * time.Minute

func TestMain(m *testing.M) { conformance.Main(m) }

// open returns a handle on a keeper, and where its record is.
func open(t *testing.T) (*keeper.Keeper, string) {
	t.Helper()
	testenv.Root(t)
	dir := filepath.Join(testenv.RunDir(t), "r")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	k, err := keeper.New(keeper.Config{
		RunDir: dir, Program: "/proc/self/exe", UID: func() (uint32, error) { return 0x70000000 + uint32(os.Getpid()), nil },
		KeepUID: func(uint32) {}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return k, dir
}

// kernel plays a sandbox whose own kernel tells of its calls. Its first process is this one.
type kernel struct {
	member keeper.Member
	tells  *os.File
}

func newKernel(t *testing.T) *kernel {
	t.Helper()
	decide, err := walls.Telling(runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	x := &kernel{tells: os.NewFile(uintptr(fds[1]), "tells"), member: keeper.Member{
		ID: id.Sandbox(), Calls: isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord}, Arch: runtime.GOARCH, Decide: decide, Trace: true,
		Listener: os.NewFile(uintptr(fds[0]), "heard"), Guest: os.NewFile(uintptr(self), "guest"),
	}}
	t.Cleanup(func() {
		for _, f := range []*os.File{x.tells, x.member.Listener, x.member.Guest} {
			_ = f.Close()
		}
	})
	return x
}

// mounts tells of a mount that was refused.
func (x *kernel) mounts(t *testing.T) {
	t.Helper()
	mount, err := filter.Named(runtime.GOARCH, "mount")
	if err != nil {
		t.Fatal(err)
	}
	number := func(b []byte, field protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
	}
	exit := number(nil, 2, uint64(unix.EPERM))
	record := binary.LittleEndian.AppendUint64(nil, 8|6<<16) // a header, and the message's type
	record = protowire.AppendBytes(protowire.AppendTag(record, 2, protowire.BytesType), exit)
	err = unix.Sendmsg(int(x.tells.Fd()), number(record, 4, uint64(mount.Number)), nil, nil, unix.MSG_NOSIGNAL)
	if err != nil && !errors.Is(err, unix.EPIPE) { // whoever heard has ended, and that is told of
		t.Errorf("%s: tell: %v", x.member.ID, err)
	}
}

// check waits until a sandbox that was attached is seen, or is told of as lost.
func (x *kernel) check(t *testing.T, k *keeper.Keeper, s *conformance.Seen) (lost bool) {
	t.Helper()
	lost = k.Lost(x.member.ID)
	if !lost {
		x.mounts(t)
	}
	s.Await(t, "a sandbox that was attached", func(e isolation.CallEvent) bool {
		lost = e.Kind == isolation.CallGap && e.Lost
		return e.Sandbox == x.member.ID && (lost || e.Call == "mount")
	})
	return lost
}

// VULNERABILITY: a keeper ends after it was given a sandbox and before it has answered, and nobody watches that sandbox.
// ATTACK: the keeper stands still while it is asked, and is killed then.
// VERIFIES: the next one is given the same files, and sees what is done. TWIN: one that goes on sees it, too.
func TestKeeperEndsWhileASandboxAttaches(t *testing.T) {
	k, dir := open(t)
	var s conformance.Seen
	s.Follow(t, k, "")
	twin := newKernel(t)
	if err := k.Attach(t.Context(), twin.member); err != nil {
		t.Fatal(err)
	}
	if twin.check(t, k, &s) {
		t.Error("twin: it is lost")
	}
	first := conformance.KeeperPID(t, dir)
	if err := syscall.Kill(first, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	x := newKernel(t)
	done := make(chan error, 1)
	go func() { done <- k.Attach(t.Context(), x.member) }()
	// Whether it was asked already when it dies is not known; that it has not answered is.
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Receive(t, "the sandbox is attached", done); err != nil {
		t.Fatal(err)
	}
	if second := conformance.KeeperPID(t, dir); second == first {
		t.Fatal("there is no other keeper")
	}
	if x.check(t, k, &s) {
		t.Error("it is lost, and Attach said otherwise")
	}
	s.Await(t, "the sandbox that the first had", func(e isolation.CallEvent) bool { return e.Sandbox == twin.member.ID && e.Lost })
}

// VULNERABILITY: that a sandbox is watched no longer is told while nothing can be recorded, and nobody hears of it.
// ATTACK: the keeper is killed, recording fails several times, and the next keeper has nothing to tell.
// VERIFIES: it is told again, until it is recorded. TWIN: TestKeeperEndsWhileASandboxAttaches, where that succeeds at once.
func TestLossIsToldUntilItIsRecorded(t *testing.T) {
	k, dir := open(t)
	x := newKernel(t)
	if err := k.Attach(t.Context(), x.member); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(conformance.KeeperPID(t, dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := k.Attach(t.Context(), newKernel(t).member); err != nil { // starts the next one
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told, done := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(done)
		refused := 0
		k.Follow(ctx, "", func(list []isolation.CallEvent, _ string) error {
			if refused++; refused <= 5 {
				return errors.New("the disk is full")
			}
			for _, e := range list {
				if e.Lost {
					select {
					case told <- e.Sandbox:
					default:
					}
				}
			}
			return nil
		})
	}()
	if got := testenv.Receive(t, "the loss is told", told); got != x.member.ID {
		t.Errorf("%s is told of, not %s", got, x.member.ID)
	}
	cancel()
	testenv.Receive(t, "following ends", done)
}

// VULNERABILITY: between two keepers a sandbox is watched by none, and nobody knows.
// ATTACK: many sandboxes attach at once while one keeper after the other is killed.
// VERIFIES: each that was attached is seen or told of as lost, whatever came first; where Attach failed, the sandbox would
// not have started. TWIN: at the end, with nobody killing, none is refused and none lost.
func TestAttachWhileKeepersDie(t *testing.T) {
	k, dir := open(t)
	var s conformance.Seen
	s.Follow(t, k, "")
	const kills, each, at = 4, 6, 4
	if err := k.Attach(t.Context(), newKernel(t).member); err != nil { // so that there is a keeper to kill
		t.Fatal(err)
	}
	round := func(kills int) (lost int) {
		var mu sync.Mutex // guards attached
		var attached []*kernel
		var wg sync.WaitGroup
		refused := t.Logf
		if kills == 0 {
			refused = t.Errorf
		}
		for range at {
			list := make([]*kernel, each)
			for i := range list {
				list[i] = newKernel(t)
			}
			wg.Go(func() {
				for _, x := range list {
					if err := k.Attach(t.Context(), x.member); err != nil {
						refused("refused: %v", err)
						continue
					}
					mu.Lock()
					attached = append(attached, x)
					mu.Unlock()
				}
			})
		}
		last := 0
		for range kills {
			testenv.Eventually(t, patience, "another keeper", func() bool {
				pid := conformance.KeeperPID(t, dir)
				if pid == last {
					return false
				}
				last = pid
				return true
			})
			if err := syscall.Kill(last, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Error(err)
			}
			if err := k.Attach(t.Context(), newKernel(t).member); err != nil { // or nobody would start the next
				t.Logf("refused: %v", err)
			}
		}
		wg.Wait()
		for _, x := range attached {
			if x.check(t, k, &s) {
				lost++
			}
		}
		return lost
	}
	t.Logf("%d were lost, and told of", round(kills))
	if lost := round(0); lost != 0 {
		t.Errorf("twin: %d are lost though no keeper died", lost)
	}
}
