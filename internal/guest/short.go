package guest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// The short way: most processes that are run live for a few milliseconds and print little. For them the
// thread that starts processes does everything itself: it reads the call, forks, waits, reads the pipes and
// answers, all with plain system calls. That spares some twenty switches between threads, which cost more
// than the rest of the guest's work. What takes longer is handed over to the usual machinery: pumps, reaper,
// a goroutine that follows.
//
// One connection at a time has it: the one that was used last, where the one before has rested for a while.

const (
	// shortLimit is how long a process may take on the short way. Until it ends or that is over, its caller
	// hears nothing, and others that name the process wait.
	shortLimit = 20 * time.Millisecond
	// quietLimit is how long only its end is waited for: less than a pipe holds makes nobody wait.
	quietLimit = time.Millisecond
	// shortOutput is how much it may print. The answer then fits a socket's queue.
	shortOutput = chunkSize
	// restLimit is how long a connection must have rested until another takes its place.
	restLimit = 50 * time.Millisecond
)

// offer gives a connection to the short way, if there is place. Then it is not the caller's any more.
func (g *Guest) offer(nc net.Conn) bool {
	u, ok := nc.(*net.UnixConn)
	now := time.Now().UnixNano()
	last := g.shortUsed.Load()
	if !ok || now-last < int64(restLimit) || !g.shortUsed.CompareAndSwap(last, now) {
		return false
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return false
	}
	s := &short{g: g, fd: -1}
	cerr := raw.Control(func(fd uintptr) {
		// A second descriptor, since closing the first takes the connection from Go's poller.
		s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	})
	if err != nil || cerr != nil {
		return false
	}
	_ = u.Close()
	s.c = guestwire.NewConn(s)
	g.cfg.Spawner.Attend(spawn.Post{FD: s.fd, Ready: s.ready, Relieved: func() { go s.leave(nil) }})
	return true
}

// short is a connection on the short way. As a net.Conn it is used by the spawner's thread alone.
type short struct {
	g  *Guest
	fd int // does not block
	c  *guestwire.Conn
}

// ready serves the call that has come. It reports false where the connection is another's now, or closed.
func (s *short) ready(seat *spawn.Seat) bool {
	s.g.memory.begin()
	defer s.g.memory.end()
	s.g.shortUsed.Store(time.Now().UnixNano())
	call, files, err := s.c.ReadCall()
	if err != nil {
		if !errors.Is(err, io.EOF) {
			_ = s.c.Fail(err)
		}
		_ = s.Close()
		return false
	}
	r, ok := shortRun(call)
	if !ok {
		go s.leave(func(c *guestwire.Conn) bool { return s.g.call(c, call, files) })
		return false
	}
	return s.run(seat, r, call, files)
}

// shortRun returns the request of a call that may take the short way.
func shortRun(call guestwire.Call) (r guestwire.RunProcess, ok bool) {
	if call.Method != guestwire.MethodRun || !call.Keep || guestwire.Unmarshal(call.Body, &r) != nil {
		return r, false
	}
	return r, !r.Start.TTY && r.Start.Stdin == guestwire.StdinNone &&
		(r.Start.TimeoutMS == 0 || r.Start.TimeoutMS > 2*shortLimit.Milliseconds()) &&
		r.Output == guestwire.OutputRequest{ID: r.Output.ID, Follow: true, Hold: r.Output.Hold}
}

// run starts a process and answers with its output and end, or hands it over.
func (s *short) run(seat *spawn.Seat, r guestwire.RunProcess, call guestwire.Call, files []*os.File) bool {
	g := s.g
	p, fresh, err := g.processes.enter(r.Start.ID)
	if err == nil && !fresh {
		go s.leave(func(c *guestwire.Conn) bool { return g.call(c, call, files) })
		return false
	}
	var st *streams
	if err != nil {
		closeFiles(files)
	} else {
		st, err = s.start(seat, p, r.Start, files)
	}
	if err != nil {
		_ = s.c.Fail(err)
		_ = s.Close()
		return false
	}
	started := p.snapshot()
	if !p.await(seat, st, &g.chunks) {
		g.lookAfter(p, st)
		p.limitTime(time.Duration(r.Start.TimeoutMS)*time.Millisecond - time.Since(time.Unix(0, p.info.Started)))
		close(p.ready)
		go s.leave(func(c *guestwire.Conn) bool { return g.tell(c, p, started, r.Output) })
		return false
	}
	close(p.ready)
	s.c.Hold()
	kept := g.tell(s.c, p, started, r.Output)
	if s.c.Flush() != nil || !kept {
		_ = s.Close()
		return false
	}
	return true
}

// start starts the process of a fresh entry. Until ready is closed, nobody else touches it.
func (s *short) start(seat *spawn.Seat, p *process, r guestwire.StartProcess, files []*os.File) (*streams, error) {
	undo := cleanup.New(func() { closeFiles(files) })
	attr, st, err := s.g.prepare(p, &r, files, undo)
	if err == nil {
		p.child, err = s.g.reaper.fork(func() (int, error) { return seat.Start(*attr) })
		if err != nil {
			err = startError(err, &r, attr)
		}
	}
	if err != nil {
		p.err = err
		undo.Run()
		s.g.processes.leave(p)
		close(p.ready)
		return nil, err
	}
	undo.Release()
	p.begun(p.child, st)
	return st, nil
}

// await waits for the process's end and reads what it prints meanwhile. It reports false where that takes
// too long, or too much: then both go on elsewhere.
func (p *process) await(seat *spawn.Seat, st *streams, lend *chunks) bool {
	begun := time.Now()
	pidfd, err := unix.PidfdOpen(p.child.pid, 0)
	if err == nil {
		defer unix.Close(pidfd)
	}
	// Where the reaper was faster the pid is nobody's, and the end is known.
	fds := [3]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}, {Fd: -1}, {Fd: -1}}
	if err == nil {
		seat.Poll(fds[:1], quietLimit)
	}
	buf := lend.get()
	defer lend.put(buf)
	for printed := 0; ; {
		if fds[0].Revents != 0 || err != nil {
			e, ok := p.child.r.take(p.child)
			if ok = ok && p.drain(st, buf, printed); ok {
				p.concludes(e)
			}
			return ok
		}
		for i := range st.ours {
			if fds[1+i].Revents != 0 {
				printed += p.read(&st.ours[i], buf)
			}
			if len(st.ours[i].rest) > 0 {
				return false
			}
			fds[1+i] = unix.PollFd{Fd: int32(st.ours[i].fd), Events: unix.POLLIN}
		}
		left := shortLimit - time.Since(begun)
		if left <= 0 || printed >= shortOutput {
			return false
		}
		seat.Poll(fds[:], left)
	}
}

// concludes makes the end known. Where something may live on, a look at the tree is due, and another thread
// takes it: the walls of this one let it open no control group.
func (p *process) concludes(e exit) {
	if e.alone {
		p.hasEnded(e)
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.hasEnded(e)
	}()
	<-done
}

// drain reads what is left in the pipes of a process that has ended. It reports false where somebody still
// holds one, or where that is much.
func (p *process) drain(st *streams, buf *[chunkSize]byte, printed int) bool {
	for i := range st.ours {
		o := &st.ours[i]
		for o.fd >= 0 && printed <= 2*shortOutput {
			fd := [1]unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLIN}}
			if n, err := unix.Poll(fd[:], 0); err == unix.EINTR {
				continue
			} else if err != nil || n == 0 {
				return false
			}
			printed += p.read(o, buf)
			if len(o.rest) > 0 {
				return false
			}
		}
	}
	return printed <= 2*shortOutput
}

// read reads once from a pipe that has something to tell.
func (p *process) read(o *source, buf *[chunkSize]byte) int {
	n, err := unix.Read(o.fd, buf[:])
	switch {
	case err == unix.EINTR:
		return 0
	case n > 0:
		// Where it had to wait for a reader, a pump does.
		o.rest = bytes.Clone(buf[p.tryPrint(o.kind, buf[:n]):n])
		return n
	}
	o.close()
	p.mu.Lock()
	p.open--
	p.mu.Unlock()
	return 0
}

// leave gives the connection to this goroutine, which serves what then says, and what comes after.
func (s *short) leave(then func(*guestwire.Conn) bool) {
	f := os.NewFile(uintptr(s.fd), "connection")
	nc, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return // no descriptor is left; the server dials again
	}
	if !s.g.links.add(nc) {
		return
	}
	defer s.g.links.remove(nc)
	c := guestwire.NewConn(nc)
	if then != nil {
		s.g.memory.begin()
		kept := then(c)
		s.g.memory.end()
		if !kept {
			_ = nc.Close()
			return
		}
	}
	s.g.converse(c)
}

// Read implements net.Conn.
func (s *short) Read(p []byte) (int, error) {
	n, err := s.retry(unix.POLLIN, func() (int, error) { return unix.Read(s.fd, p) })
	if n == 0 && err == nil && len(p) > 0 {
		err = io.EOF
	}
	return n, err
}

// ReadMsgUnix is net.UnixConn's.
func (s *short) ReadMsgUnix(p, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error) {
	n, err = s.retry(unix.POLLIN, func() (n int, err error) {
		n, oobn, flags, _, err = unix.Recvmsg(s.fd, p, oob, unix.MSG_CMSG_CLOEXEC)
		return n, err
	})
	return n, oobn, flags, nil, err
}

// Write implements net.Conn.
func (s *short) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n, err := s.retry(unix.POLLOUT, func() (int, error) {
			return unix.SendmsgN(s.fd, p[done:], nil, nil, unix.MSG_NOSIGNAL)
		})
		if err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// retry makes a system call until it neither was interrupted nor had to wait. A wait is short: the server
// sends a call whole, and has read all answers when it sends the next.
func (s *short) retry(events int16, call func() (int, error)) (int, error) {
	for {
		n, err := call()
		switch err {
		case unix.EINTR:
		case unix.EAGAIN:
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: events}}, -1)
		default:
			return max(n, 0), err
		}
	}
}

// Close implements net.Conn.
func (s *short) Close() error { return unix.Close(s.fd) }

// LocalAddr, RemoteAddr and the deadlines belong to net.Conn and are not used.
func (s *short) LocalAddr() net.Addr  { return nil }
func (s *short) RemoteAddr() net.Addr { return nil }

// SetDeadline implements net.Conn.
func (s *short) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline implements net.Conn.
func (s *short) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline implements net.Conn.
func (s *short) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
