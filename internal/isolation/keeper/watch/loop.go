package watch

import (
	"cmp"
	"context"
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
	"casemate.dev/internal/linux/seccomp/notify"
)

// keepIdle is how many loops wait for calls once there were more.
const keepIdle = 2

// loop answers calls. There are as many loops as calls are being answered, and one more, which waits: a call costs a few
// microseconds, unless its sandbox makes reading its memory slow, and that is then its own affair.
func (k *process) loop(ctx context.Context) {
	ready := make([]unix.EpollEvent, 1)
	for ctx.Err() == nil {
		n, err := unix.EpollWait(k.epoll, ready, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			k.log.Error("cannot wait for system calls", "err", err)
			return
		}
		if n < 1 {
			continue
		}
		if k.idle.Add(-1) == 0 {
			k.idle.Add(1)
			go k.loop(ctx)
		}
		k.serveBox(ready[0])
		if k.idle.Add(1) > keepIdle {
			k.idle.Add(-1)
			return
		}
	}
}

// serveBox sees to what a sandbox's listener has; until it is heard again, no other loop is told of it.
func (k *process) serveBox(e unix.EpollEvent) {
	k.mu.Lock()
	b := k.boxes[e.Fd]
	k.mu.Unlock()
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	switch {
	case b.gone:
		return
	case b.trace != nil:
		k.hearTrace(b, now)
	case e.Events&unix.EPOLLIN != 0:
		k.receive(b, now)
	case e.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0: // no process has the filter any more
		k.drop(b, now)
	}
	if !b.muted {
		k.hear(b, now)
	}
}

// hear lets a sandbox's next call come. Where that fails, its calls must not wait forever.
func (k *process) hear(b *box, now time.Time) {
	if b.gone {
		return
	}
	if err := k.control(unix.EPOLL_CTL_MOD, b); err != nil {
		k.log.Error("cannot wait for a sandbox's system calls", "sandbox", b.id, "err", err)
		k.drop(b, now)
	}
}

// by sees to it that a sandbox is tended at some time, or before.
func (k *process) by(b *box, t time.Time) {
	if !b.due.IsZero() && !t.Before(b.due) {
		return
	}
	b.due = t
	if b.timer == nil {
		b.timer = time.AfterFunc(time.Until(t), func() { k.tend(b) })
	} else {
		b.timer.Reset(time.Until(t))
	}
}

// tend hears a muted sandbox again, and tells of repeats that are due.
func (k *process) tend(b *box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return
	}
	now := time.Now()
	b.due = time.Time{}
	if b.trace != nil && !b.trace.parted.IsZero() {
		k.part(b, now)
		return
	}
	if b.muted && b.attempts.left(now) >= 1 && b.others.left(now) >= 1 {
		b.muted = false
		k.hear(b, now)
	}
	if b.gone {
		return
	}
	if b.muted {
		k.by(b, now.Add(time.Second/attemptRate))
	}
	k.tellLost(b, now)
	if due := b.notes.flush(now, false, k.events.add); due > 0 {
		k.by(b, now.Add(due))
	}
}

// receive takes a call and answers it. The caller holds the box's mu.
func (k *process) receive(b *box, now time.Time) {
	c, err := notify.Receive(int(b.fd))
	if errors.Is(err, notify.ErrGone) {
		return
	}
	if err != nil {
		k.log.Error("cannot receive a system call", "sandbox", b.id, "err", err)
		k.drop(b, now)
		return
	}
	b.attempts.left(now)
	verdict, err := b.decide.Answer(filter.Call{Arch: c.Arch, Number: c.Number, Args: c.Args})
	if err != nil {
		verdict = seccomp.Errno(unix.EPERM)
	}
	if verdict == seccomp.Allow {
		b.others.has--
		k.goOn(b, c, now)
	} else {
		b.attempts.has--
		k.refuse(b, c, verdict, now)
	}
	if b.attempts.left(now) < 1 || b.others.left(now) < 1 {
		k.mute(b, now)
	}
}

// goOn lets a call go on. It is looked at first: afterwards its thread is somewhere else.
func (k *process) goOn(b *box, c notify.Call, now time.Time) {
	call := filter.Name(b.arch, c.Number)
	e := isolation.CallEvent{Sandbox: b.id, Time: now, Kind: kindOf(call), Call: call}
	if b.mayLook(&e, now) {
		k.look(b, c, &e)
	}
	if err := notify.Continue(int(b.fd), c.ID); err != nil && !errors.Is(err, notify.ErrGone) {
		k.log.Error("cannot let a system call go on", "sandbox", b.id, "err", err)
	}
	k.note(b, e, now)
}

// mayLook reports whether a call that goes on is told of by itself, and notes it in the event where not.
func (b *box) mayLook(e *isolation.CallEvent, now time.Time) bool {
	budget := &b.details
	if e.Kind == isolation.CallOpen {
		budget = &b.opens
	}
	if budget.take(now) {
		return true
	}
	e.Note = "more than are looked at one by one"
	return false
}

// refuse answers an attempt as the filter would, after what it is to bring about has been done.
func (k *process) refuse(b *box, c notify.Call, v seccomp.Verdict, now time.Time) {
	errno := unix.EPERM
	if uint32(v)&unix.SECCOMP_RET_ACTION_FULL == unix.SECCOMP_RET_ERRNO {
		errno = unix.Errno(uint32(v) & unix.SECCOMP_RET_DATA)
	}
	e := isolation.CallEvent{
		Sandbox: b.id, Time: now, Kind: isolation.CallAttempt, Call: filter.Name(b.arch, c.Number), Errno: unix.ErrnoName(errno),
	}
	k.look(b, c, &e)
	k.react(b, &e)
	if e.Reaction != isolation.ReactKill || e.Note != "" {
		if err := notify.Refuse(int(b.fd), c.ID, errno); err != nil && !errors.Is(err, notify.ErrGone) {
			k.log.Error("cannot refuse a system call", "sandbox", b.id, "err", err)
		}
	}
	k.note(b, e, now)
}

// react does what an attempt is to bring about, and says so in the event; where it can't, the server has to.
func (k *process) react(b *box, e *isolation.CallEvent) {
	switch b.calls.OnAttempt {
	case isolation.ReactKill:
		e.Reaction = isolation.ReactKill
		k.remember(b.id, cmp.Or(e.String(), e.Note))
		// The first process takes all others along.
		if err := unix.PidfdSendSignal(int(b.guest.Fd()), syscall.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			e.Note = "the sandbox could not be killed from outside: " + err.Error()
		}
	case isolation.ReactPause:
		e.Reaction = isolation.ReactPause
		k.mu.Lock()
		b.held = true
		k.mu.Unlock()
		if b.trace != nil {
			return // the server does it: the runtime must let its processes stand still itself
		}
		if b.freezer == nil {
			e.Note = "the sandbox has no control group to freeze"
		} else if _, err := b.freezer.Write(b.freeze); err != nil {
			e.Note = "the sandbox could not be frozen from outside: " + err.Error()
		}
	}
}

func (k *process) remember(id, attempt string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.killed[id] == "" {
		k.order = append(k.order, id)
	}
	k.killed[id] = attempt
	if len(k.order) > keepKilled {
		delete(k.killed, k.order[0])
		k.order = k.order[1:]
	}
}

// mute lets a sandbox wait: what it calls stays in the kernel until its buckets have something again.
func (k *process) mute(b *box, now time.Time) {
	b.muted = true
	k.by(b, now.Add(time.Second/attemptRate))
}

// drop forgets a sandbox whose processes have ended.
func (k *process) drop(b *box, now time.Time) {
	b.gone = true
	if b.timer != nil {
		b.timer.Stop()
	}
	k.mu.Lock()
	delete(k.boxes, b.key)
	delete(k.byID, b.id)
	k.mu.Unlock()
	k.tellLost(b, now)
	b.notes.flush(now, true, k.events.add)
	b.close() // takes it out of the epoll, too
}
