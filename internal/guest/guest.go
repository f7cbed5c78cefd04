package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/account"
	"casemate.dev/internal/guest/bounds"
	"casemate.dev/internal/guest/contexts"
	"casemate.dev/internal/guest/output"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guest/signals"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// Spawner starts processes inside the walls. Package spawn has the one that holds; tests have others.
type Spawner interface {
	Start(spawn.Attr) (pid int, err error)
	StartWorker(spawn.Worker) (pid int, err error)
	// Attend gives p the thread that starts processes.
	Attend(p spawn.Post)
}

// DefaultOutput is how much output the guest keeps of all processes together. The guest's own memory
// limit must leave room for it.
const DefaultOutput = 16 << 20

// headroom is what the guest needs beside output and its garbage.
const headroom = 8 << 20

// Config is what a guest needs to serve.
type Config struct {
	Spawner Spawner
	// SingleUser refuses every user but the default one: profile locked.
	SingleUser bool
	// User, Dir and Env are the template's. A claim may replace the first two and add to the last.
	User string
	Dir  string
	Env  map[string]string
	// Bounds holds the limits that the kernel below does not; nil where it does.
	Bounds *bounds.Group
	// Images says that the kernel below can save the sandbox with its processes in a memory image.
	Images bool
	// Output bounds the output kept of all processes; 0 means DefaultOutput.
	Output int64
}

// Guest is the state of a served sandbox.
type Guest struct {
	cfg       Config
	reaper    *reaper
	processes *table
	pool      *output.Pool
	chunks    chunks
	book      account.Book
	workers   *workers
	contexts  *contexts.Set
	memory    *memory
	null      int          // a descriptor of /dev/null, never closed
	dials     atomic.Int32 // connections to and from ports
	accepted  accepted     // connections from inside that wait for the server
	links     links        // the server's connections
	own       []string     // what /proc/PID/fd shows of files of the host that a memory image may hold
	wide      atomic.Int32 // connections that carry much
	shortUsed atomic.Int64 // when the short way was taken last, in Unix nanoseconds

	// mu guards the fields below.
	mu sync.RWMutex
	id identity
}

// identity is what a claim gives.
type identity struct {
	claimed bool
	claim   guestwire.Claim
	user    string
	dir     string
}

// or returns the user asked for, or the default one.
func (i *identity) or(user string) string {
	if user == "" {
		return i.user
	}
	return user
}

// Serve answers calls on l until ctx ends, and closes it. It takes over this process: it shields
// itself from signals and reaps every child. The caller must be PID 1 of its namespace.
func Serve(ctx context.Context, l net.Listener, cfg Config) error {
	if err := signals.Shield(); err != nil {
		return fmt.Errorf("shield signals: %w", err)
	}
	// Standard input of processes that have none. Opened once, before anything runs inside that could
	// put something else in its place.
	null, err := resolve.Open(unix.AT_FDCWD, "/dev/null", unix.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	g := &Guest{
		cfg: cfg, processes: newTable(), null: null,
		pool: output.NewPool(orDefault(cfg.Output, DefaultOutput)),
		id:   identity{user: cfg.User, dir: cfg.Dir},
	}
	if cfg.Images { // before any connection is there
		if g.own, err = hostFiles("self"); err != nil {
			return err
		}
	}
	g.reaper = newReaper(g.processes.orphaned)
	g.workers = newWorkers(g)
	g.contexts = contexts.New(contexts.Config{Launcher: launcher{g}, Hangup: func(c *guestwire.Conn) contexts.Hangup { return newHangup(c) }})
	g.memory = newMemory(2*orDefault(cfg.Output, DefaultOutput) + contexts.Memory + headroom)
	go g.reaper.run()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	return g.accept(ctx, l)
}

func orDefault(v, d int64) int64 {
	if v == 0 {
		return d
	}
	return v
}

// maxConnections bounds the calls at one time; more wait in the socket's queue.
const maxConnections = 1024

func (g *Guest) accept(ctx context.Context, l net.Listener) error {
	slots := make(chan struct{}, maxConnections)
	for {
		slots <- struct{}{}
		c, err := l.Accept()
		if err != nil {
			<-slots
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return ctx.Err()
			}
			// No descriptor or no memory: that passes, and a guest that ends ends the sandbox.
			<-time.After(acceptPause)
			continue
		}
		g.links.open()
		go func() {
			defer func() { <-slots }()
			g.converse(guestwire.NewConn(c))
		}()
	}
}

// acceptPause keeps a guest that has run out of something from spinning.
const acceptPause = 10 * time.Millisecond

// converse serves the calls of a connection, one after the other.
func (g *Guest) converse(c *guestwire.Conn) {
	if !g.links.add(c.Conn) {
		return
	}
	defer g.links.remove(c.Conn)
	for {
		method, kept := g.answer(c)
		if !kept {
			_ = c.Close()
			return
		}
		// A connection of code contexts carries nothing that the short way could do.
		if !contexts.Serves(method) && g.offer(c.Conn) {
			return
		}
	}
}

// answer serves the next call of a connection. It reports whether another may follow.
func (g *Guest) answer(c *guestwire.Conn) (guestwire.Method, bool) {
	call, files, err := c.ReadCall()
	g.memory.begin()
	defer g.memory.end()
	if errors.Is(err, io.EOF) {
		return "", false
	}
	if err != nil {
		_ = c.Fail(err)
		return "", false
	}
	return call.Method, g.call(c, call, files)
}

// call serves a call. It reports whether another may follow on the connection.
func (g *Guest) call(c *guestwire.Conn, call guestwire.Call, files []*os.File) bool {
	if err := g.serve(c, call, files); err != nil {
		// If the connection is gone, nobody hears it.
		_ = c.Fail(err)
		return false
	}
	return call.Keeps() && c.Ended()
}

// serve answers a call, or returns why it can't. It takes over files.
func (g *Guest) serve(c *guestwire.Conn, call guestwire.Call, files []*os.File) error {
	if call.Method == guestwire.MethodStart || call.Method == guestwire.MethodRun {
		return g.serveStart(c, call, files)
	}
	if contexts.Serves(call.Method) {
		return g.contexts.Serve(c, call, files)
	}
	closeFiles(files)
	switch call.Method {
	case guestwire.MethodClaim:
		return ask(c, call, g.claim)
	case guestwire.MethodStatus:
		return c.Reply(g.status())
	case guestwire.MethodEnv:
		return c.Reply(guestwire.Environment{Env: g.identity().claim.Env})
	case guestwire.MethodSync:
		return okay(c, syncFiles())
	case guestwire.MethodPrepare:
		return g.prepareImage(c)
	case guestwire.MethodRestored:
		return ask(c, call, g.restored)
	case guestwire.MethodOutput:
		return g.serveOutput(c, call)
	case guestwire.MethodInput:
		var r guestwire.InputRequest
		if err := guestwire.Unmarshal(call.Body, &r); err != nil {
			return badBody(err)
		}
		return g.feed(c, r)
	case guestwire.MethodSignal:
		return ask(c, call, g.signal)
	case guestwire.MethodResize:
		return ask(c, call, g.resize)
	case guestwire.MethodTree:
		return g.serveTree(c, call)
	case guestwire.MethodBound:
		return ask(c, call, g.bound)
	case guestwire.MethodGet, guestwire.MethodWait, guestwire.MethodForget:
		return g.serveRef(c, call)
	case guestwire.MethodList:
		return g.list(c)
	case guestwire.MethodStat, guestwire.MethodListDir, guestwire.MethodRead, guestwire.MethodWrite,
		guestwire.MethodMakeDir, guestwire.MethodMove, guestwire.MethodRemove, guestwire.MethodChmod,
		guestwire.MethodUnpack, guestwire.MethodWatch:
		return g.workers.hand(c, call)
	case guestwire.MethodDial:
		return g.dial(c, call)
	case guestwire.MethodListen:
		return g.listen(c, call)
	case guestwire.MethodTake:
		return g.take(c, call)
	case guestwire.MethodListenings:
		ports, err := listenings()
		if err != nil {
			return err
		}
		return c.Reply(guestwire.PortList{Ports: ports})
	}
	return errs.New(errs.Unsupported, "the guest knows no method %s", quote(string(call.Method)))
}

func badBody(err error) error {
	return errs.Wrap(err, errs.InvalidArgument, "the request's body is malformed: %v", err)
}

// ask decodes the body, calls f, and replies with nothing.
func ask[T any](c *guestwire.Conn, call guestwire.Call, f func(T) error) error {
	var r T
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	return okay(c, f(r))
}

func okay(c *guestwire.Conn, err error) error {
	if err != nil {
		return err
	}
	return c.Reply(nil)
}

func (g *Guest) identity() identity {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.id
}

// user looks up who a process or a file operation acts as.
func (g *Guest) user(who string) (account.User, error) {
	u, err := g.book.Lookup(who)
	only := g.identity().user
	if err != nil || !g.cfg.SingleUser || who == only {
		return u, err
	}
	own, err := g.book.Lookup(only)
	if err != nil {
		return u, err
	}
	if u.UID != own.UID {
		return u, errs.New(errs.PermissionDenied, "everything in this sandbox runs as user %s, not %s", own, u).
			WithHint("profile standard has other users")
	}
	return u, nil
}

func (g *Guest) status() guestwire.Status {
	fds, _ := os.ReadDir("/proc/self/fd")
	alive := 0
	if g.cfg.Bounds != nil {
		all, _ := processes()
		alive = len(all) + 1 // the guest itself
	}
	return guestwire.Status{
		Alive: alive, Version: guestwire.Version, Claimed: g.identity().claimed,
		Processes: len(g.processes.all()), Open: len(fds), OOMKills: g.cfg.Bounds.Kills(),
	}
}

// bound changes the limits that the guest holds the sandbox to.
func (g *Guest) bound(b guestwire.Bounds) error {
	if g.cfg.Bounds == nil {
		return errs.New(errs.Unsupported, "the guest holds the sandbox to no limits: its kernel does")
	}
	return g.cfg.Bounds.Set(b)
}
