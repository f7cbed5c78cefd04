package launch

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// listenerSink is where the listener of the system call filter goes: the server's end of a socket. A guest must never
// keep it, since whoever has it may let refused calls through.
type listenerSink struct{ f *os.File }

// listenerSink takes the socket out of the files of the call.
func (s *setup) listenerSink() (listenerSink, error) {
	if !s.launch.Walls.Listen {
		return listenerSink{}, nil
	}
	f, err := s.file(s.launch.Listener)
	if err != nil {
		return listenerSink{}, err
	}
	s.files[s.launch.Listener] = nil
	return listenerSink{f}, nil
}

func (l listenerSink) send(listener *os.File) error {
	if l.f == nil {
		return errors.New("no socket takes the filter's listener")
	}
	return os.NewSyscallError("sendmsg", unix.Sendmsg(int(l.f.Fd()), []byte{0}, unix.UnixRights(int(listener.Fd())), nil, 0))
}

func (l listenerSink) close() {
	if l.f != nil {
		_ = l.f.Close()
	}
}
