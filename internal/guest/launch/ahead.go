package launch

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

// ahead is a runtime that was started before its launch.
type ahead struct {
	launch guestwire.Launch // what it was started with
	*cell
	launched chan struct{} // closed with the launch
}

// startAhead answers MethodAhead. A runtime that ends before its launch takes this process along, so that the server sees it.
func (s *setup) startAhead(control *guestwire.Conn, body []byte, files []*os.File) error {
	a := setup{cell: true, files: files, thread: s.thread, began: time.Now(), micros: map[string]int64{}}
	err := s.prepared
	if err == nil {
		err = guestwire.Unmarshal(body, &a.launch)
	}
	if err == nil && (a.launch.Runtime == nil || a.launch.Runtime.Gate == "") {
		err = errors.New("there is no runtime with a gate to start ahead")
	}
	if err == nil {
		err = a.closeGate(a.launch.Runtime.Gate)
	}
	if err == nil {
		err = a.placeRuntime()
	}
	var c *cell
	if err == nil {
		c, err = a.startRuntime()
	}
	if err != nil {
		return errors.Join(err, control.Fail(err))
	}
	s.thread = nil
	s.ahead = &ahead{launch: a.launch, cell: c, launched: make(chan struct{})}
	go s.ahead.watch(control)
	return control.Reply(struct{}{})
}

// watch gives the control socket up, and so this process, once the runtime has ended without a launch.
func (a *ahead) watch(control *guestwire.Conn) {
	select {
	case err := <-a.ended:
		a.ended <- err // for who asks
		_ = control.Close()
	case <-a.launched:
	}
}

// closeGate makes a pipe that nobody writes to, and lets mounts that are made in the cell from now on show in the mount namespaces that the
// runtime makes for its processes.
func (s *setup) closeGate(gate string) error {
	if err := os.MkdirAll(path.Dir(gate), 0o755); err != nil {
		return err
	}
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		return &os.PathError{Op: "make pipe", Path: gate, Err: err}
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mounts: %w", err)
	}
	return nil
}

// runAhead is runCell where the runtime is there already.
func (s *setup) runAhead() (*cell, error) {
	a := s.ahead
	close(a.launched)
	if !a.fits(&s.launch) {
		return nil, errors.New("the runtime was started ahead for another launch")
	}
	select {
	case <-a.up: // it looked for its root before there was one
		return nil, errors.New("the runtime did not stop at its gate")
	default:
	}
	if err := s.buildCell(); err != nil {
		return nil, fmt.Errorf("build cell: %w", err)
	}
	if _, err := s.keepOnly(nil); err != nil {
		return nil, err
	}
	opened, err := a.openGate()
	if err != nil {
		return nil, err
	}
	return a.cell, s.awaitAfter(a.cell, opened)
}

// awaitAfter is await once the gate is open for good: until then a descriptor of it is.
func (s *setup) awaitAfter(c *cell, opened <-chan struct{}) error {
	if err := s.launchInside(c.inside); err != nil {
		return errors.Join(err, c.failure())
	}
	if err := c.started(); err != nil {
		return err
	}
	<-opened
	return s.arrived()
}

// fits says whether a launch says of the runtime what it was started with.
func (a *ahead) fits(l *guestwire.Launch) bool {
	was, is := a.launch.Runtime, l.Runtime
	return slices.Equal(was.Args, is.Args) && slices.Equal(was.Capabilities, is.Capabilities) && was.Reach == is.Reach && is.Image == nil && is.Trace == "" &&
		maps.EqualFunc(was.Files, is.Files, bytes.Equal) && slices.Equal(a.launch.Rlimits, l.Rlimits) && slices.Equal(a.launch.Walls.CPUs, l.Walls.CPUs)
}

// gateEvery is how often the gate is opened, until the runtime has started: who was about to open it when that was done would else
// stand there for good.
const gateEvery = 2 * time.Millisecond

// openGate lets whoever stands at the gate go on, and those who are still to come find none. It returns what is closed once that is
// over.
func (a *ahead) openGate() (<-chan struct{}, error) {
	gate := a.launch.Runtime.Gate
	fd, err := unix.Open(gate, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: gate, Err: err}
	}
	if err := unix.Unlink(gate); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "remove", Path: gate, Err: err}
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer unix.Close(fd)
		tick := time.NewTicker(gateEvery)
		defer tick.Stop()
		for {
			// For both, which no pipe makes wait (fifo(7)). Closed, readers come to its end.
			if w, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
				unix.Close(w)
			}
			select {
			case <-a.up:
				return
			case err := <-a.ended:
				a.ended <- err
				return
			case <-tick.C:
			}
		}
	}()
	return over, nil
}
