package contexts

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// Memory bounds what the runs of all contexts said, in bytes. The guest's own memory limit must leave
// room for it, and for a few lines of guestwire.MaxItem.
const Memory = 24 << 20

// Exit is how a driver ended.
type Exit struct {
	End    guestwire.End // exited, signaled or lost
	Code   int
	Signal int
}

// Driver is a started driver.
type Driver struct {
	PID int
	// Dir and User are what the process got, for ContextInfo, and UID is the user's number.
	Dir, User string
	UID       uint32
	// Output and Errors are the nonblocking read ends of its standard streams, Control its socket. Who
	// gets the Driver closes them.
	Output, Errors *os.File
	Control        *net.UnixConn
	// Code is the file that the driver has on its descriptor 5 to take long code from, or nil.
	Code *os.File
	// Signal sends a signal to the process, not to its group: a driver passes on what is to be passed on.
	Signal func(sig unix.Signal) error
}

// Place is where the drivers of one context live: a control group, or what stands for one.
type Place interface {
	// Kill ends everything in it and returns when nothing is left, or after a few seconds.
	Kill() error
	// Close lets go of it. Nothing may be started in it afterwards.
	Close()
}

// Launcher starts drivers.
type Launcher interface {
	// NewPlace makes the place of a context from the files that came with it, which it takes over.
	NewPlace(layout []string, files []*os.File) (Place, error)
	// Launch starts a driver. ended is called once when it has ended, and must not block.
	Launch(r *guestwire.CreateContext, at Place, ended func(Exit)) (*Driver, error)
	// Ends makes what a fork of the user given gets: our ends in a Driver, and the fork's in the order control,
	// output, errors, which the caller closes.
	Ends(uid uint32) (*Driver, []*os.File, error)
	// Door returns the file that a process writes "0" to, to go to a place by itself; nil where there is
	// none. It stays the place's.
	Door(at Place) *os.File
	// Enter puts a fork, a process of the sandbox with the parent given, into a place of its own. Where
	// that has a door it only looks at the parent.
	Enter(pid, parent int, at Place) error
	// Entered returns an error unless a fork is in its place.
	Entered(pid int, at Place) error
}

// Config is what New needs.
type Config struct {
	Launcher Launcher
	// Memory bounds what is kept of all runs; 0 means Memory.
	Memory int64
	// Hangup looks whether the caller closes its connection, on which it sends nothing more for this call.
	Hangup func(*guestwire.Conn) Hangup
}

// Hangup tells of a caller that has left.
type Hangup interface {
	// Gone is closed when the caller has closed its connection.
	Gone() <-chan struct{}
	// Stop ends the looking, so that the connection can carry another call. It fails where the caller sent
	// something meanwhile.
	Stop() error
}

// Set holds the contexts of a sandbox. Its methods are safe for concurrent use.
type Set struct {
	cfg  Config
	pool *pool
	// chunks holds *[chunkSize]byte: what is read into, for as long as a reading takes.
	chunks sync.Pool

	// mu guards the fields below.
	mu    sync.Mutex
	byID  map[string]*interpreter
	order []*interpreter // oldest first
}

// New returns an empty Set.
func New(cfg Config) *Set {
	if cfg.Memory == 0 {
		cfg.Memory = Memory
	}
	return &Set{
		cfg: cfg, pool: newPool(cfg.Memory), byID: make(map[string]*interpreter),
		chunks: sync.Pool{New: func() any { return new([chunkSize]byte) }},
	}
}

const (
	maxID        = 128
	defaultStart = 30 * time.Second
	defaultGrace = 3 * time.Second
)

// create starts a context, or returns the one that has its id. It takes over files.
func (s *Set) create(r guestwire.CreateContext, files []*os.File) (info guestwire.ContextInfo, err error) {
	if err := checkCreate(r); err != nil {
		closeFiles(files)
		return info, err
	}
	c, fresh, err := s.enter(r, nil)
	if err != nil {
		closeFiles(files)
		return info, err
	}
	if !fresh {
		closeFiles(files)
		<-c.ready
		if c.failed != nil {
			return info, c.failed
		}
		info = c.snapshot()
		info.Attached = true
		return info, nil
	}
	c.place, err = s.cfg.Launcher.NewPlace(r.Scope, files)
	if err == nil {
		err = c.launch()
	}
	s.made(c, err)
	return c.snapshot(), err
}

// made lets others find a context that has come up, or with err forgets it.
func (s *Set) made(c *interpreter, err error) {
	c.failed = err
	if err != nil {
		s.leave(c)
		if c.place != nil {
			_ = c.place.Kill()
			c.place.Close()
		}
	}
	close(c.ready)
}

func checkCreate(r guestwire.CreateContext) error {
	switch {
	case r.ID == "" || len(r.ID) > maxID:
		return errs.New(errs.InvalidArgument, "a context's id has 1 to %d characters", maxID)
	case len(r.Driver) > guestwire.MaxDriver:
		return errs.New(errs.InvalidArgument, "the driver has %d bytes, limit %d", len(r.Driver), guestwire.MaxDriver)
	case r.StartMS < 0:
		return errs.New(errs.InvalidArgument, "the start's limit is negative")
	}
	return nil
}

// enter makes the entry of a context, or finds the one that has its id. zygote is what a fork is of.
func (s *Set) enter(r guestwire.CreateContext, zygote *interpreter) (c *interpreter, fresh bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.byID[r.ID]; c != nil {
		return c, false, nil
	}
	same := 0
	for _, c := range s.order {
		if (c.zygote != nil) == (zygote != nil) {
			same++
		}
	}
	switch {
	case zygote != nil && same >= guestwire.MaxForks:
		return nil, false, errs.New(errs.ResourceExhausted, "the sandbox has %d fresh runs already", guestwire.MaxForks).WithHint("wait for one to end")
	case zygote == nil && same >= guestwire.MaxContexts:
		return nil, false, errs.New(errs.ResourceExhausted, "the sandbox has its %d contexts already", guestwire.MaxContexts).
			WithHint("delete one that is not needed")
	}
	c = newInterpreter(s, r, zygote)
	s.byID[r.ID] = c
	s.order = append(s.order, c)
	return c, true, nil
}

func (s *Set) leave(c *interpreter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, c.id)
	if i := slices.Index(s.order, c); i >= 0 {
		s.order = slices.Delete(s.order, i, i+1)
	}
}

// get returns a context that came up.
func (s *Set) get(id string) (*interpreter, error) {
	s.mu.Lock()
	c := s.byID[id]
	s.mu.Unlock()
	if c != nil {
		<-c.ready
		if c.failed == nil {
			return c, nil
		}
	}
	return nil, errs.New(errs.NotFound, "no such context: %s", quote(id))
}

// all returns the contexts that came up, oldest first.
func (s *Set) all() []*interpreter {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*interpreter, 0, len(s.order))
	for _, c := range s.order {
		select {
		case <-c.ready:
			list = append(list, c)
		default:
		}
	}
	return list
}

// remove ends a context and forgets it.
func (s *Set) remove(id string) error {
	c, err := s.get(id)
	if err != nil {
		return err
	}
	s.leave(c)
	c.delete()
	return nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// quote shows what a caller sent, cut to a length that a message can carry.
func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return fmt.Sprintf("%q", s)
}
