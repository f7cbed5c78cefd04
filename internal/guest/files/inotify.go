package files

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// event is struct inotify_event with its name (inotify(7)).
type event struct {
	wd   int32
	mask uint32
	name string
}

// parseEvent takes the first event off b. It returns a nil rest where b is no whole event, which the
// kernel never gives.
func parseEvent(b []byte) (event, []byte) {
	if len(b) < unix.SizeofInotifyEvent {
		return event{}, nil
	}
	n := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
	if n < unix.SizeofInotifyEvent || n > len(b) {
		return event{}, nil
	}
	name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:n], []byte{0})
	return event{
		wd: int32(binary.NativeEndian.Uint32(b)), mask: binary.NativeEndian.Uint32(b[4:]), name: string(name),
	}, b[n:]
}
