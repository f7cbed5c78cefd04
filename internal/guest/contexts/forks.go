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
}

const (
	// forkLimit bounds how long a zygote may take to fork, which is a millisecond or few.
	forkLimit = 10 * time.Second
	// reapLimit bounds how long it may take to reap what has ended.
	reapLimit = 2 * time.Second
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

// fork makes a driver for c by forking the zygote.
func (f *forks) fork(c *interpreter, d *running) (*Driver, error) {
	f.mu.Lock()
	z := f.zygote
	f.next++
	slot := f.next
	f.mu.Unlock()
	if z == nil {
		return nil, errs.New(errs.FailedPrecondition, "context %s is not ready to be forked", quote(f.c.id))
	}
	ours, theirs, err := c.set.cfg.Launcher.Ends()
	if err != nil {
		return nil, err
	}
	pid, err := f.ask(z, slot, theirs, c.set.cfg.Launcher.Door(c.place))
	closeFiles(theirs)
	if err == nil {
		if err = c.set.cfg.Launcher.Enter(pid, z.d.PID, c.place); err != nil {
			err = errs.Wrap(err, errs.Internal, "the fork could not be placed: %v", err)
		}
	}
	var watch *os.File
	if err == nil {
		watch, err = openPidfd(pid)
	}
	if err != nil {
		closeDriver(ours)
		return nil, err
	}
	ours.PID, ours.Dir, ours.User = pid, z.d.Dir, z.d.User
	p := &forked{f: f, z: z, slot: slot, pid: pid}
	ours.Signal = p.signal
	go p.follow(watch, d.ended)
	return ours, nil
}

// ask has the zygote fork, and returns the pid. The fork goes through the door by itself where there is
// one: for a process that moves another one the kernel stops all that fork and end, and waits until
// every processor has noticed, which takes milliseconds (kernel/cgroup/cgroup.c, cgroup_attach_lock).
func (f *forks) ask(z *running, slot int, files []*os.File, door *os.File) (int, error) {
	answer := f.expect(slot)
	defer f.forget(slot)
	if door != nil {
		files = append(slices.Clip(files), door)
	}
	if err := f.say(z, order{Op: "fork", Slot: slot, Place: door != nil}, files); err != nil {
		return 0, errs.Wrap(err, errs.FailedPrecondition, "the interpreter that is to be forked has ended")
	}
	late := time.NewTimer(forkLimit)
	defer late.Stop()
	select {
	case m := <-answer:
		if m.Ev != evForked || m.PID < 2 {
			return 0, errs.New(errs.ResourceExhausted, "the interpreter could not be forked: %s", m.Error)
		}
		return m.PID, nil
	case <-z.gone:
		return 0, errs.New(errs.FailedPrecondition, "the interpreter that is to be forked has ended")
	case <-late.C:
		return 0, errs.New(errs.DeadlineExceeded, "the interpreter did not fork within %s", forkLimit)
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
