package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

// trace is what is known of a sandbox whose own kernel tells of its calls. That kernel does not wait for the keeper, but
// for room in the connection: what is read slowly is called slowly.
type trace struct {
	arch    uint32         // AUDIT_ARCH_*
	mark    uint64         // of executions that the server asked for; 0: none is marked
	marked  map[int32]bool // threads that begin such an execution
	dropped uint32         // how many records the kernel says that it has dropped
	lost    int            // how many of those, and of records that can't be read, are not told of yet
	told    time.Time
	garbled bool      // a record could not be read, and the log says so
	parted  time.Time // when its connection was found closed
}

// The bounds of what is read of a trace at a time.
const (
	traceBatch = 64
	maxRecord  = 64 << 10 // what is longer is cut: arguments of a program
	maxMarked  = 4096
)

// guestGroup is the process that the sandbox's kernel has as its first: the guest, whose own calls nobody asks about. (A
// filter is only on those that it starts.)
const guestGroup = 1

// lossWindow is how often losses are told of.
const lossWindow = time.Second

// partLimit is how long a sandbox whose kernel has closed its trace may take to end.
// partPause is how often it is looked at meanwhile.
const (
	partLimit = 10 * time.Second
	partPause = 100 * time.Millisecond
)

func newTrace(a keeper.Attach, fd int) (*trace, error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return nil, errs.New(errs.InvalidArgument, "the first file is no trace")
	}
	read, err := filter.Named(a.Arch, "read")
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the trace is of %q", a.Arch)
	}
	return &trace{arch: read.Arch, mark: a.ExecMark, marked: map[int32]bool{}}, nil
}

// hearTrace takes what a sandbox's kernel has told. All records are taken at one rate, since none is answered: a program
// that attempts as fast as it can must not fill the connection so long that the kernel drops what others attempt. The
// caller holds the box's mu.
func (k *process) hearTrace(b *box, now time.Time) {
	buf, _ := k.records.Get().(*[maxRecord]byte)
	if buf == nil {
		buf = new([maxRecord]byte)
	}
	defer k.records.Put(buf)
	for range traceBatch {
		if b.others.left(now) < 1 {
			k.mute(b, now)
			return
		}
		n, _, _, _, err := unix.Recvmsg(int(b.fd), buf[:], nil, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			return
		case err != nil || n == 0:
			k.part(b, now)
			return
		}
		b.others.has--
		k.take(b, buf[:n], now)
	}
}

// take tells of one record.
func (k *process) take(b *box, data []byte, now time.Time) {
	t := b.trace
	r, dropped, err := parseRecord(data)
	if err != nil {
		if !t.garbled {
			k.log.Error("cannot read what a sandbox's kernel tells", "sandbox", b.id, "err", err)
		}
		t.garbled = true
		t.lost++
	}
	t.lost += int(dropped - t.dropped) // it wraps around
	t.dropped = dropped
	k.tellLost(b, now)
	if err != nil || r.group == guestGroup {
		return
	}
	call := filter.Name(b.arch, uint32(r.number))
	switch {
	case r.raw && r.exit:
		k.answered(b, call, r, now)
	case r.raw && kindOf(call) == isolation.CallExec:
		t.begins(r)
	case t.known(call, r):
	default:
		e := isolation.CallEvent{Sandbox: b.id, Time: now, Kind: kindOf(call), Call: call}
		if b.mayLook(&e, now) {
			e.PID, e.Command, e.Target, e.Argv = int(r.group), clean([]byte(r.command)), r.target(call), cleaned(r.argv)
			if r.raw {
				e.Note = "of this call the sandbox's kernel does not say which file"
			}
		}
		k.note(b, e, now)
	}
}

// begins takes note of an execution that begins, which a record of what is executed follows.
func (t *trace) begins(r record) {
	if t.mark != 0 && r.args[len(r.args)-1] == t.mark {
		if len(t.marked) >= maxMarked {
			clear(t.marked) // records were lost
		}
		t.marked[r.thread] = true
		return
	}
	delete(t.marked, r.thread)
}

// known reports whether a call is an execution that the server asked for.
func (t *trace) known(call string, r record) bool {
	if kindOf(call) != isolation.CallExec || !t.marked[r.thread] {
		return false
	}
	delete(t.marked, r.thread)
	return true
}

// answered tells of a call that tells of an attempt, which the sandbox's kernel has answered.
func (k *process) answered(b *box, call string, r record, now time.Time) {
	if t := b.trace; t.mark != 0 && r.args[len(r.args)-1] == t.mark {
		return // the guest's, on the way to what it was asked to execute
	}
	v, err := b.decide.Answer(filter.Call{Arch: b.trace.arch, Number: uint32(r.number), Args: r.args})
	if err != nil || v != seccomp.Notify {
		return
	}
	e := isolation.CallEvent{
		Sandbox: b.id, Time: now, Kind: isolation.CallAttempt, Call: call, PID: int(r.group), Command: clean([]byte(r.command)),
		Args: numbers(call, r.args),
	}
	if r.errno != 0 {
		e.Errno = unix.ErrnoName(unix.Errno(r.errno))
	} else {
		e.Note = "the sandbox's own kernel allowed it"
	}
	k.react(b, &e)
	k.note(b, e, now)
}

// tellLost tells how many records were lost, now and then.
func (k *process) tellLost(b *box, now time.Time) {
	t := b.trace
	if t == nil || t.lost == 0 {
		return
	}
	if left := t.told.Add(lossWindow).Sub(now); left > 0 && !b.gone {
		k.by(b, now.Add(left))
		return
	}
	k.events.add(isolation.CallEvent{
		Sandbox: b.id, Time: now, Kind: isolation.CallGap, Count: t.lost, Note: "the sandbox's kernel could not tell of all system calls",
	})
	t.lost, t.told = 0, now
}

// part is called when a sandbox's kernel tells nothing any more. One that has ended, or does so soon, is dropped; one that
// lives on is watched no longer, and that is told. The caller holds the box's mu.
func (k *process) part(b *box, now time.Time) {
	t := b.trace
	if t.parted.IsZero() {
		t.parted = now
	}
	switch {
	case ended(b.guest, 0):
		k.drop(b, now)
	case now.Sub(t.parted) > partLimit:
		k.unheard(b, now)
		k.drop(b, now)
	default:
		b.muted = true
		k.by(b, now.Add(partPause))
	}
}

// unheard tells that a sandbox's calls are not told of any more, and does what that is to bring about.
func (k *process) unheard(b *box, now time.Time) {
	e := isolation.CallEvent{
		Sandbox: b.id, Time: now, Kind: isolation.CallGap, Lost: true,
		Note: "the sandbox's kernel stopped telling of its system calls: from here on none is recorded",
	}
	k.react(b, &e)
	k.events.add(e)
}

// record is what a sandbox's kernel tells of one call: gVisor's messages Syscall, Open, Connect and Execve
// (pkg/sentry/seccheck/points/*.proto).
type record struct {
	raw, exit     bool
	number        uint64
	args          [6]uint64 // where raw
	errno         int64     // where exit
	thread, group int32
	command       string
	path          string
	address       []byte
	argv          []string
}

// Types of messages (pkg/sentry/seccheck/points/common.proto).
const (
	messageRaw     = 6
	messageOpen    = 7
	messageConnect = 10
	messageExecve  = 11
)

// headerSize is that of the header before a message (pkg/sentry/seccheck/sinks/remote/wire): its size, the message's
// type, and how many were dropped, in the machine's byte order.
const headerSize = 8

func parseRecord(data []byte) (r record, dropped uint32, err error) {
	if len(data) < headerSize {
		return r, 0, fmt.Errorf("a record of %d bytes", len(data))
	}
	size, kind := int(binary.LittleEndian.Uint16(data)), binary.LittleEndian.Uint16(data[2:])
	dropped = binary.LittleEndian.Uint32(data[4:])
	if size < headerSize || size > len(data) {
		return r, dropped, fmt.Errorf("a header of %d bytes", size)
	}
	message := data[size:]
	switch kind {
	case messageRaw:
		r.raw = true
		r.fields(message, 4, r.rawField)
	case messageOpen, messageConnect, messageExecve:
		r.fields(message, 3, r.typedField(kind))
	default:
		return r, dropped, fmt.Errorf("a message of type %d", kind)
	}
	return r, dropped, nil
}

func (r *record) target(call string) string {
	if kindOf(call) == isolation.CallConnect {
		return address(r.address)
	}
	return clean([]byte(r.path))
}

// cleaned makes texts of arguments.
func cleaned(argv []string) []string {
	for i, a := range argv {
		argv[i] = clean([]byte(a))
	}
	return argv
}
