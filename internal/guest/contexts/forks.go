package contexts

import (
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// forks are what a zygote has forked: interpreters that are warm from their first instruction, for one
// run each.
//
// A fork's end is told by its zygote, which is its parent. Until the zygote was asked to reap it, it stays
// a zombie, so that its pid means no other process. The zygote runs no code of anybody's, but what runs
// beside it as the same user can kill it: then its forks become the guest's own, and how they end is not
// known.
type forks struct {
	c *interpreter

	// orders is held while an order is written.
	orders sync.Mutex
	// mu guards the fields below.
	mu      sync.Mutex
	zygote  *running
	next    int
	waiting map[int]chan message // by slot; 0 is the answer to "zygote"
	dead    []int                // slots of those that have ended after their run, and are to be reaped
}

const (
	// forkLimit bounds how long a zygote may take to fork, which is a millisecond or few.
	forkLimit = 10 * time.Second
	// reapLimit bounds how long it may take to reap what has ended.
	reapLimit = 10 * time.Second
)

func newForks(c *interpreter) *forks { return &forks{c: c, waiting: make(map[int]chan message)} }

// prepare makes a driver that is up a zygote.
func (f *forks) prepare(d *running, late <-chan time.Time) error {
	f.mu.Lock()
	f.zygote = d
	f.mu.Unlock()
	done := f.expect(0)
	defer f.forget(0)
	if err := f.say(d, order{Op: "zygote", Imports: f.c.req.Imports}, nil); err != nil {
		d.kill("")
		return err
	}
	select {
	case <-done:
		return nil
	case <-d.over:
		return errs.New(errs.FailedPrecondition, "the %s interpreter ended while it imported: %s", f.c.req.Language, f.c.lastWords(d))
	case <-late:
		d.kill("")
		return errs.New(errs.DeadlineExceeded, "the %s interpreter did not import in time", f.c.req.Language)
	}
}

func (f *forks) expect(slot int) <-chan message {
	f.mu.Lock()
	defer f.mu.Unlock()
	ch := make(chan message, 1)
	f.waiting[slot] = ch
	return ch
}

func (f *forks) forget(slot int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.waiting, slot)
}

// answered takes what the zygote says about a slot.
func (f *forks) answered(m message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ch := f.waiting[m.Slot]; ch != nil {
		select {
		case ch <- m:
		default:
		}
	}
}

// say sends an order, with files.
func (f *forks) say(z *running, o order, files []*os.File) error {
	line, err := o.line()
	if err != nil {
		return err
	}
	f.orders.Lock()
	defer f.orders.Unlock()
	_ = z.d.Control.SetWriteDeadline(time.Now().Add(giveLimit))
	if len(files) == 0 {
		_, err = z.d.Control.Write(line)
		return err
	}
	fds := make([]int, len(files))
	for i, file := range files {
		fds[i] = int(file.Fd())
	}
	n, _, err := z.d.Control.WriteMsgUnix(line, syscall.UnixRights(fds...), nil)
	if err == nil && n < len(line) {
		_, err = z.d.Control.Write(line[n:])
	}
	return err
}

// pending is a fork that is under way.
type pending struct {
	c     *interpreter
	d     *running
	slot  int
	ours  *Driver
	files []*os.File // the fork's, in the order that become_child of the driver takes them
}

// fork makes the drivers of contexts by forking the zygote, all by one order: its own work for one costs as much
// as the fork. Each is told to told, or why it was not made.
func (f *forks) fork(all []*interpreter, told func(*interpreter, *running, error)) {
	f.mu.Lock()
	z := f.zygote
	f.mu.Unlock()
	var asked []*pending
	for _, c := range all {
		p := &pending{c: c, d: c.starting()}
		var err error
		if z == nil {
			err = errs.New(errs.FailedPrecondition, "context %s is not ready to be forked", quote(f.c.id))
		} else {
			p.ours, p.files, err = c.set.cfg.Launcher.Ends(z.d.UID)
		}
		if err != nil {
			c.began(p.d, nil, err)
			told(c, p.d, err)
			continue
		}
		asked = append(asked, p)
	}
	if len(asked) == 0 {
		return
	}
	pids, err := f.ask(z, asked)
	for i, p := range asked {
		closeFiles(p.files)
		failed := err
		if i < len(pids) {
			failed = f.enter(z, p, pids[i])
		} else if failed == nil {
			failed = errs.New(errs.ResourceExhausted, "the interpreter could not be forked")
		}
		if failed != nil {
			closeDriver(p.ours)
		}
		p.c.began(p.d, p.ours, failed)
		told(p.c, p.d, failed)
	}
}

// enter takes what the zygote calls its fork for the driver of p, after it was looked at.
func (f *forks) enter(z *running, p *pending, pid int) error {
	if err := p.c.set.cfg.Launcher.Enter(pid, z.d.PID, p.c.place); err != nil {
		return errs.Wrap(err, errs.Internal, "the fork could not be placed: %v", err)
	}
	watch, err := openPidfd(pid)
	if err != nil {
		return err
	}
	p.ours.PID, p.ours.Dir, p.ours.User, p.ours.UID = pid, z.d.Dir, z.d.User, z.d.UID
	k := &forked{f: f, z: z, c: p.c, slot: p.slot, pid: pid}
	p.ours.Signal = k.signal
	go k.follow(watch, p.d.ended)
	return nil
}

// ask has the zygote fork, and returns the pids, as many as it could. The forks go through the door by
// themselves where there is one: for a process that moves another one the kernel stops all that fork and end,
// and waits until every processor has noticed, which takes milliseconds (kernel/cgroup/cgroup.c,
// cgroup_attach_lock).
func (f *forks) ask(z *running, asked []*pending) ([]int, error) {
	o := order{Op: "fork"}
	var files []*os.File
	f.mu.Lock()
	for _, p := range asked {
		f.next++
		p.slot = f.next
		o.Slots = append(o.Slots, p.slot)
		files = append(files, p.files...)
		if door := p.c.set.cfg.Launcher.Door(p.c.place); door != nil {
			files, o.Place = append(files, door), true
		}
	}
	o.Forget, f.dead = f.dead, nil
	f.mu.Unlock()
	o.Slot = o.Slots[0]
	answer := f.expect(o.Slot)
	defer f.forget(o.Slot)
	if err := f.say(z, o, files); err != nil {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "the interpreter that is to be forked has ended")
	}
	late := time.NewTimer(forkLimit)
	defer late.Stop()
	select {
	case m := <-answer:
		if m.Ev != evForked || len(m.PIDs) > len(asked) || slices.ContainsFunc(m.PIDs, func(pid int) bool { return pid < 2 }) {
			return nil, errs.New(errs.Internal, "the interpreter that is to be forked broke its protocol")
		}
		if len(m.PIDs) < len(asked) {
			return m.PIDs, errs.New(errs.ResourceExhausted, "the interpreter could not be forked: %s", m.Error)
		}
		return m.PIDs, nil
	case <-z.gone:
		return nil, errs.New(errs.FailedPrecondition, "the interpreter that is to be forked has ended")
	case <-late.C:
		return nil, errs.New(errs.DeadlineExceeded, "the interpreter did not fork within %s", forkLimit)
	}
}

func closeDriver(d *Driver) {
	_ = d.Output.Close()
	_ = d.Errors.Close()
	_ = d.Control.Close()
}

// forked is one process that a zygote has forked.
type forked struct {
	f    *forks
	z    *running
	c    *interpreter
	slot int
	pid  int

	// mu guards reaped, and is held while the pid is in use.
	mu     sync.Mutex
	reaped bool
}

func (p *forked) signal(sig unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return errs.New(errs.FailedPrecondition, "the process has ended")
	}
	return unix.Kill(p.pid, sig)
}

// follow waits for the process's end, has it reaped, and tells how it was.
func (p *forked) follow(watch *os.File, ended func(Exit)) {
	awaitEnd(watch)
	_ = watch.Close()
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
	if p.c.spent() {
		p.f.bury(p.slot)
		ended(Exit{End: guestwire.EndLost}) // nobody is told: its run has had its end
		return
	}
	answer := p.f.expect(p.slot)
	defer p.f.forget(p.slot)
	exit := Exit{End: guestwire.EndLost}
	if p.f.say(p.z, order{Op: "reap", Slot: p.slot}, nil) == nil {
		late := time.NewTimer(reapLimit)
		defer late.Stop()
		select {
		case m := <-answer:
			switch {
			case m.Ev != evReaped || m.PID != p.pid:
			case m.Signal > 0:
				exit = Exit{End: guestwire.EndSignaled, Signal: m.Signal}
			default:
				exit = Exit{End: guestwire.EndExited, Code: m.Code}
			}
		case <-p.z.gone:
		case <-late.C:
		}
	}
	ended(exit)
}

// bury has a fork that has ended reaped, together with others.
func (f *forks) bury(slot int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = append(f.dead, slot)
}

// reapAll has all reaped that are to be.
func (f *forks) reapAll() {
	f.mu.Lock()
	z, dead := f.zygote, f.dead
	f.dead = nil
	f.mu.Unlock()
	if z != nil && len(dead) > 0 {
		_ = f.say(z, order{Op: "forget", Forget: dead}, nil) // a zygote that is gone leaves them to the guest
	}
}

// openPidfd returns a file that becomes readable when the process has ended.
func openPidfd(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// awaitEnd waits until a process has ended; a file that can't be waited for counts as its end.
func awaitEnd(watch *os.File) {
	raw, err := watch.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		set := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // descriptors are small
		n, err := unix.Poll(set, 0)
		return n != 0 || err != nil && err != unix.EINTR
	})
}
