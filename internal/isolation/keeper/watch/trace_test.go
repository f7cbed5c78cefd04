package watch

import (
	"encoding/binary"
	"log/slog"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/seccomp/filter"
)

// message builds a message of numbers and texts by field.
type message []byte

func (m message) number(field protowire.Number, v uint64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), v)
}

func (m message) text(field protowire.Number, v string) message {
	return protowire.AppendString(protowire.AppendTag(m, field, protowire.BytesType), v)
}

// told is a record as a kernel tells it.
func told(kind uint16, dropped uint32, body message) []byte {
	out := binary.LittleEndian.AppendUint16(nil, headerSize)
	out = binary.LittleEndian.AppendUint16(out, kind)
	return append(binary.LittleEndian.AppendUint32(out, dropped), body...)
}

func by(thread, group int, command string) message {
	return message{}.text(1, string(message{}.number(2, uint64(thread)).number(4, uint64(group)).text(9, command)))
}

const mark = 0x1234567890abcdef

// newTraced returns a keeper and a box whose kernel tells of its calls.
func newTraced(t *testing.T) (*process, *box) {
	t.Helper()
	program, err := walls.Telling("amd64")
	if err != nil {
		t.Fatal(err)
	}
	machine, err := filter.NewMachine(program)
	if err != nil {
		t.Fatal(err)
	}
	read, err := filter.Named("amd64", "read")
	if err != nil {
		t.Fatal(err)
	}
	k, b := newNoted()
	k.log = slog.New(slog.DiscardHandler)
	b.arch, b.decide = "amd64", machine
	b.details, b.opens = newBucket(detailRate, detailBurst), newBucket(detailRate, detailBurst)
	b.trace = &trace{arch: read.Arch, mark: mark, marked: map[int32]bool{}}
	t.Cleanup(func() {
		if b.timer != nil {
			b.timer.Stop()
		}
	})
	return k, b
}

func number(t *testing.T, call string) uint64 {
	t.Helper()
	c, err := filter.Named("amd64", call)
	if err != nil {
		t.Fatal(err)
	}
	return uint64(c.Number)
}

// raw is a call with its arguments; errno below 0: it has not been answered.
func raw(t *testing.T, call string, errno int, args ...uint64) message {
	m := by(7, 6, "sh").number(4, number(t, call))
	if errno >= 0 {
		m = m.text(2, string(message{}.number(2, uint64(errno))))
	}
	for i, a := range args {
		m = m.number(protowire.Number(5+i), a)
	}
	return m
}

// TestTraceTellsOfAttempts tells what tells of an attempt from what does not, with what was answered.
func TestTraceTellsOfAttempts(t *testing.T) {
	k, b := newTraced(t)
	now := time.Now()
	k.take(b, told(messageRaw, 0, raw(t, "clone", 0, uint64(unix.SIGCHLD))), now)
	k.take(b, told(messageRaw, 0, raw(t, "socket", 0, unix.AF_INET, unix.SOCK_STREAM)), now)
	k.take(b, told(messageRaw, 0, by(9, guestGroup, "guest").number(4, number(t, "mount"))), now)
	k.take(b, told(messageRaw, 0, raw(t, "unshare", 0, unix.CLONE_NEWCGROUP, 0, 0, 0, 0, mark)), now)
	if got := k.all(t); len(got) != 0 {
		t.Fatalf("what every program does, and what the guest does: %+v", got)
	}
	k.take(b, told(messageRaw, 0, raw(t, "mount", int(unix.EPERM))), now)
	k.take(b, told(messageRaw, 0, raw(t, "unshare", 0, unix.CLONE_NEWUSER)), now)
	k.take(b, told(messageRaw, 0, raw(t, "socket", int(unix.EPERM), unix.AF_PACKET, unix.SOCK_RAW)), now)
	got := k.all(t)
	if len(got) != 3 {
		t.Fatalf("%+v", got)
	}
	if e := got[0]; e.Kind != isolation.CallAttempt || e.Call != "mount" || e.Errno != "EPERM" || e.PID != 6 || e.Command != "sh" || e.Note != "" {
		t.Errorf("%+v", e)
	}
	if e := got[1]; e.Errno != "" || e.Note == "" || !slices.Equal(e.Args, []string{"user"}) {
		t.Errorf("%+v", e)
	}
	if e := got[2]; !slices.Equal(e.Args[:2], []string{"packet", "raw"}) {
		t.Errorf("%+v", e)
	}
}

// TestTraceTellsOfExecutions tells of those that nobody outside asked for.
func TestTraceTellsOfExecutions(t *testing.T) {
	k, b := newTraced(t)
	now := time.Now()
	exec := by(7, 6, "sh").number(3, number(t, "execve")).text(6, "/bin/echo").text(7, "echo").text(7, "deep")
	begin := func(mark uint64) { k.take(b, told(messageRaw, 0, raw(t, "execve", -1, 0, 0, 0, 0, 0, mark)), now) }
	begin(mark)
	k.take(b, told(messageExecve, 0, exec), now)
	if got := k.all(t); len(got) != 0 {
		t.Fatalf("what the server asked for: %+v", got)
	}
	begin(mark) // whose other record is lost
	begin(mark + 1)
	k.take(b, told(messageExecve, 0, exec), now)
	got := k.all(t)
	if len(got) != 1 || got[0].Kind != isolation.CallExec || got[0].Target != "/bin/echo" || !slices.Equal(got[0].Argv, []string{"echo", "deep"}) {
		t.Fatalf("%+v", got)
	}
	address := []byte{unix.AF_INET, 0, 1, 187, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0}
	k.take(b, told(messageConnect, 0, by(7, 6, "curl").number(3, number(t, "connect")).text(6, string(address))), now)
	k.take(b, told(messageOpen, 0, by(7, 6, "cat").number(3, number(t, "openat")).text(6, "/etc/hostname")), now)
	k.take(b, told(messageRaw, 0, raw(t, "openat2", -1)), now)
	got = k.all(t)
	if len(got) != 3 || got[2].Kind != isolation.CallOpen || got[2].Note == "" || got[0].Target != "192.0.2.1:443" || got[1].Kind != isolation.CallOpen || got[1].Target != "/etc/hostname" {
		t.Fatalf("%+v", got)
	}
}

// VULNERABILITY: what the connection has no room for is lost, and nobody knows.
// ATTACK: a kernel that has dropped records, also where its count wraps around, and one that tells nonsense.
// VERIFIES: a gap says how many. TWIN: where none is dropped there is none.
func TestTraceGaps(t *testing.T) {
	k, b := newTraced(t)
	now := time.Now()
	fine := raw(t, "getpid", 0)
	k.take(b, told(messageRaw, 0, fine), now)
	if got := k.all(t); len(got) != 0 {
		t.Fatalf("twin: %+v", got)
	}
	lost := func(want int) {
		t.Helper()
		got := k.all(t)
		if len(got) != 1 || got[0].Kind != isolation.CallGap || got[0].Count != want {
			t.Errorf("%+v, want a gap of %d", got, want)
		}
	}
	k.take(b, told(messageRaw, 5, fine), now)
	lost(5)
	b.trace.dropped = ^uint32(0) - 1
	k.take(b, told(messageRaw, 1, fine), now)
	now = now.Add(lossWindow)
	k.take(b, told(99, 1, nil), now)
	lost(4)
}

// VULNERABILITY: who has taken over a sandbox's kernel gives up its connection, and nobody knows.
// ATTACK: the kernel closes it, and its sandbox lives on.
// VERIFIES: soon it is watched no longer, and that is told of, with what is to be done about it. TWIN: where the sandbox ends
// with its connection, nothing is.
func TestSilentKernel(t *testing.T) {
	for _, lives := range []bool{true, false} {
		k, b := newTraced(t)
		b.calls = isolation.Calls{Attempts: true, OnAttempt: isolation.ReactPause}
		ours, theirs, err := os.Pipe() // in the place of the connection, and of the first process's handle
		if err != nil {
			t.Fatal(err)
		}
		b.listener, b.guest = theirs, ours
		if !lives {
			if err := b.listener.Close(); err != nil { // makes the other end readable, as the end of a process does its handle
				t.Fatal(err)
			}
		}
		now := time.Now()
		k.part(b, now)
		if b.gone != !lives {
			t.Fatalf("lives: %v; at once, forgotten: %v", lives, b.gone)
		}
		now = now.Add(partLimit + time.Second)
		if lives {
			k.part(b, now)
		}
		got := k.all(t)
		told := len(got) == 1 && got[0].Kind == isolation.CallGap && got[0].Lost && got[0].Reaction == isolation.ReactPause
		if !b.gone || told != lives || !lives && len(got) > 0 {
			t.Errorf("lives: %v; forgotten: %v, told: %+v", lives, b.gone, got)
		}
	}
}

// FuzzTrace reads what a kernel that was taken over may tell.
func FuzzTrace(f *testing.F) {
	f.Add(told(messageExecve, 0, by(7, 6, "sh").number(3, 59).text(6, "/bin/echo").text(7, "echo")))
	f.Add(told(messageRaw, 3, by(7, 6, "sh").number(4, 165)))
	f.Add([]byte{8, 0, 6, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r, _, err := parseRecord(data)
		if err == nil && len(r.argv) > maxArgv {
			t.Errorf("%d arguments", len(r.argv))
		}
	})
}
