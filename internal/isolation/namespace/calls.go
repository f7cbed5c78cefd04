package namespace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/linux/seccomp/notify"
)

// Keeper is the handle on the process that observes system calls; nil where Config names none.
func (b *Backend) Keeper() *keeper.Keeper { return b.keeper }

// openKeeper finds the keeper of an earlier server, or reserves a user for a new one.
func (b *Backend) openKeeper() (err error) {
	if b.cfg.Observer != nil {
		b.keeper, b.owner = b.cfg.Observer, b.cfg.Observer.UID()
		return nil
	}
	if b.cfg.Keeper == "" {
		return nil
	}
	b.keeper, err = keeper.New(keeper.Config{
		RunDir: b.cfg.RunDir, Program: b.cfg.Keeper, UID: b.ids.acquire, KeepUID: b.ids.take, Log: b.cfg.Log,
	})
	if err != nil {
		return err
	}
	b.owner = b.keeper.UID()
	return nil
}

// Observes implements isolation.Observer.
func (b *Backend) Observes() isolation.Calls {
	on := b.keeper != nil
	return isolation.Calls{Attempts: on, Exec: on, Connect: on, Open: on}
}

// checkCalls refuses to observe what nobody could.
func (b *Backend) checkCalls(c isolation.Calls, r *isolation.Runtime) error {
	switch {
	case !c.Any():
		return nil
	case b.keeper == nil:
		return errs.New(errs.Unsupported, "this server observes no system calls: it has no keeper").
			WithHint("create the sandbox with --calls none")
	case r != nil && r.Trace == "":
		return errs.New(errs.Internal, "the sandbox's runtime tells of no system calls")
	}
	return nil
}

// door is the socket through which the filter's listener leaves a guest.
type door struct{ ours, theirs *os.File }

func newDoor(wanted bool) (*door, error) {
	if !wanted {
		return &door{}, nil
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	return &door{os.NewFile(uintptr(fds[0]), "door"), os.NewFile(uintptr(fds[1]), "door")}, nil
}

// join adds the guest's end to a launch.
func (d *door) join(build *builder) {
	if d.theirs != nil {
		build.launch.Listener = build.lend(d.theirs)
	}
}

func (d *door) close() {
	for _, f := range []*os.File{d.ours, d.theirs} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// take takes what a launched guest has sent, of which is says whether it is what it should be.
func (d *door) take(is func(fd int) bool) (*os.File, error) {
	// No waiting: what was not sent before the launch was answered never comes.
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(d.ours.Fd()), make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err != nil {
		return nil, os.NewSyscallError("recvmsg", err)
	}
	list, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(list) != 1 {
		return nil, errors.Join(errors.New("the guest sent nothing to hear calls by"), err)
	}
	fds, err := unix.ParseUnixRights(&list[0])
	if err != nil || len(fds) != 1 {
		for _, fd := range fds { // the message has room for a second one
			_ = unix.Close(fd)
		}
		return nil, errors.Join(errors.New("the guest sent nothing to hear calls by"), err)
	}
	f := os.NewFile(uintptr(fds[0]), "listener")
	if !is(fds[0]) {
		return nil, errors.Join(errors.New("what the guest sent is nothing to hear calls by"), f.Close())
	}
	return f, nil
}

// watching is the handing over of what calls are heard by; nil: none are.
type watching struct {
	cancel context.CancelFunc
	done   chan struct{} // closed once err is set
	err    error
}

// wait waits for the end of the handing over.
func (w *watching) wait() error {
	if w == nil {
		return nil
	}
	<-w.done
	w.cancel()
	return w.err
}

// unwatch undoes watchCalls, whether it has come to its end or not.
func (b *Backend) unwatch(w *watching, id string) {
	if w == nil {
		return
	}
	w.cancel()
	<-w.done
	b.keeper.Forget(id)
}

// watchCalls begins to hand a launched guest's listener to the keeper. That takes as long as the keeper takes to run, which
// the start need not wait for before it has to: until then, calls wait.
func (b *Backend) watchCalls(ctx context.Context, s isolation.Spec, g *guest, wall wallPlan, d *door) (*watching, error) {
	if !s.Calls.Any() {
		return nil, nil
	}
	m := keeper.Member{ID: s.ID, Calls: s.Calls, Arch: runtime.GOARCH, Decide: wall.decide}
	closeFiles := func() {
		for _, f := range []*os.File{m.Listener, m.Guest, m.Freezer} {
			if f != nil {
				_ = f.Close()
			}
		}
	}
	undo := cleanup.New(closeFiles)
	defer undo.Run()
	is := notify.IsListener
	if s.Runtime != nil {
		is, m.Trace, m.ExecMark = isTrace, true, s.Runtime.ExecMark
	}
	var err error
	if m.Listener, err = d.take(is); err != nil {
		return nil, fmt.Errorf("take what calls are heard by: %w", err)
	}
	if m.Guest, err = pidfdFile(g.proc.PID()); err != nil {
		return nil, err
	}
	// What runs a runtime must not be frozen from outside: the runtime lets its processes stand still itself.
	if g.group != nil && s.Runtime == nil && s.Calls.OnAttempt == isolation.ReactPause {
		if m.Freezer, m.Freeze, err = g.group.FreezeFile(); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &watching{cancel: cancel, done: make(chan struct{})}
	undo.Release()
	go func() {
		defer close(w.done)
		defer closeFiles()
		w.err = b.keeper.Attach(ctx, m)
	}()
	return w, nil
}

// isTrace reports whether a descriptor is a connection that keeps messages apart.
func isTrace(fd int) bool {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	return err == nil && kind == unix.SOCK_SEQPACKET
}

// pidfdFile opens a handle on the guest, which is not reaped before this server lets go of it, so that its pid is its own.
func pidfdFile(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	return os.NewFile(uintptr(fd), "guest"), nil
}

// What coverage says of a kind of call.
const (
	callsRecorded = "recorded"
	callsOff      = "off"
	callsLost     = "lost: the keeper ended, and these calls fail with ENOSYS unrecorded"
)

// coverage says what is observed of which calls.
func coverage(c isolation.Calls) map[string]string {
	say := func(on bool) string {
		if on {
			return callsRecorded
		}
		return callsOff
	}
	out := map[string]string{
		"attempts": say(c.Attempts), "exec": say(c.Exec), "connect": say(c.Connect), "open": say(c.Open),
	}
	if c.Attempts {
		out["on_attempt"] = string(c.OnAttempt)
	}
	return out
}

// callsNow corrects what is observed for a keeper that has ended.
func (i *Instance) callsNow(calls map[string]string) map[string]string {
	if i.b.keeper == nil || !i.b.keeper.Lost(i.id) {
		return calls
	}
	out := make(map[string]string, len(calls))
	for k, v := range calls {
		if v == callsRecorded {
			v = callsLost
		}
		out[k] = v
	}
	return out
}

// adoptCalls takes up the observing of an adopted instance. One that is not observed any more is told of by the keeper's
// handle.
func (i *Instance) adoptCalls(ctx context.Context) {
	if i.record.Owner != 0 {
		i.b.ids.take(i.record.Owner) // that no sandbox's root may have, while it is the owner of another's namespace
	}
	if !i.record.Calls.Any() || i.b.keeper == nil {
		return
	}
	if err := i.b.keeper.Adopt(ctx, i.id, i.record.Calls); err != nil {
		i.b.cfg.Log.Warn("cannot ask the keeper about an adopted sandbox", "sandbox", i.id, "err", err)
	}
}

// Held implements isolation.Holder.
func (i *Instance) Held(ctx context.Context) bool {
	if i.b.keeper == nil || i.record.Calls.OnAttempt != isolation.ReactPause {
		return false
	}
	s, err := i.b.keeper.State(ctx, i.id)
	return err == nil && s.Held
}

// Release implements isolation.Holder.
func (i *Instance) Release(ctx context.Context) error {
	if i.b.keeper == nil || i.record.Calls.OnAttempt != isolation.ReactPause || i.b.keeper.Lost(i.id) {
		return nil
	}
	return i.b.keeper.Release(ctx, i.id)
}

// killedBy asks which attempt ended the instance; "": none did.
func (i *Instance) killedBy() string {
	if i.b.keeper == nil || i.record.Calls.OnAttempt != isolation.ReactKill {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return i.b.EndedBy(ctx, i.id)
}

// EndedBy implements isolation.Observer.
func (b *Backend) EndedBy(ctx context.Context, id string) string {
	if b.keeper == nil {
		return ""
	}
	s, err := b.keeper.State(ctx, id)
	if err != nil {
		return ""
	}
	return s.Killed
}
