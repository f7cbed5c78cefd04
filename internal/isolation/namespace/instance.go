package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/cgroup"
	"casemate.dev/internal/linux/pidfd"
)

// Instance is one running sandbox.
type Instance struct {
	b      *Backend
	id     string
	name   string
	first  uint32
	proc   *pidfd.Handle
	group  *cgroup.Group // nil where the host has none
	socket string
	record record
	raw    json.RawMessage // record as text; never changes

	done    chan struct{} // closed once the guest has ended
	stop    context.CancelFunc
	watcher sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	applied   isolation.Applied
	tap       *os.File // the other end of the network device, until Device hands it out
	log       *os.File // nil where it could not be taken up again
	exit      isolation.Exit
	destroyed bool // Destroy was called
	cleared   bool // nothing is left
	forgotten bool // the server lets go of it and it runs on
}

var (
	_ isolation.Instance = (*Instance)(nil)
	_ isolation.Holder   = (*Instance)(nil)
)

func newInstance(b *Backend, g *guest, r record, a isolation.Applied) *Instance {
	// The namespace lives on in the instance's processes; the launch used the descriptor up.
	_ = g.userNS.Close()
	g.userNS = nil
	return &Instance{
		b: b, id: r.ID, name: r.Name, first: r.First, proc: g.proc, group: g.group, log: g.log,
		socket: g.socket, record: r, applied: a, done: make(chan struct{}),
	}
}

// setApplied completes what was put in place, before anybody else has the instance.
func (i *Instance) setApplied(missing []string) {
	i.applied.Missing = missing
	a := i.applied
	i.record.Applied = &a
	i.raw, _ = json.Marshal(i.record) // plain data: can't fail
}

// run begins to look after an instance.
func (b *Backend) run(i *Instance) {
	ctx, cancel := context.WithCancel(context.Background())
	i.stop = cancel
	b.mu.Lock()
	b.instances[i.id] = i
	b.mu.Unlock()
	i.watcher.Go(func() { i.watch(ctx) })
}

// watch waits for the guest's end. Whatever else still ran in its pid namespace ends with it.
func (i *Instance) watch(ctx context.Context) {
	st, err := i.proc.Wait(ctx)
	if err != nil {
		if ctx.Err() == nil {
			i.b.logError("wait for guest", err)
		}
		return
	}
	attempt := i.killedBy()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.exit = exitOf(st, i.destroyed, lastWords(i.log))
	if attempt != "" && !i.destroyed {
		i.exit = isolation.Exit{Reason: "attempt", Detail: attempt}
	}
	close(i.done)
}

func exitOf(st pidfd.State, destroyed bool, words string) isolation.Exit {
	e := isolation.Exit{Reason: "guest_exited", Detail: words}
	switch {
	case destroyed:
		return isolation.Exit{Reason: "destroyed"}
	case !st.Known:
		// Not this server's child: it was started by an earlier one.
		e.Reason = "guest_killed"
	case st.Signal != 0:
		e.Reason = "guest_killed"
		e.Detail = strings.TrimSpace(fmt.Sprintf("%v %s", st.Signal, words))
	default:
		e.Detail = strings.TrimSpace(fmt.Sprintf("exit code %d %s", st.Code, words))
	}
	return e
}

// ID implements isolation.Instance.
func (i *Instance) ID() string { return i.id }

// Record implements isolation.Instance.
func (i *Instance) Record() json.RawMessage { return i.raw }

// Applied implements isolation.Instance.
func (i *Instance) Applied() isolation.Applied {
	i.mu.Lock()
	a := i.applied
	i.mu.Unlock()
	a.Calls = i.callsNow(a.Calls)
	return a
}

// Dial implements isolation.Instance. The connection is a *net.UnixConn.
func (i *Instance) Dial(ctx context.Context) (net.Conn, error) {
	select {
	case <-i.done:
		return nil, errs.New(errs.Unavailable, "the sandbox has ended")
	default:
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", i.socket)
	if err != nil {
		return nil, errs.Wrap(err, errs.Unavailable, "the sandbox does not answer")
	}
	return c, nil
}

// NewScope implements isolation.Instance.
func (i *Instance) NewScope(_ context.Context, processID string) (isolation.Scope, error) {
	if i.group == nil {
		return noScope{}, nil
	}
	s, err := i.group.NewScope(processID)
	if err != nil {
		return nil, err
	}
	return &scope{s, i}, nil
}

// OpenScope implements isolation.Instance.
func (i *Instance) OpenScope(processID string) (isolation.Scope, error) {
	if i.group == nil {
		return noScope{}, nil
	}
	s, err := i.group.OpenScope(processID)
	if err != nil {
		return nil, err
	}
	return &scope{s, i}, nil
}

func (i *Instance) needGroup(what string) error {
	if i.group == nil {
		return errs.New(errs.Unsupported, "cannot %s the sandbox: this host has no control groups", what)
	}
	return nil
}

// Freeze implements isolation.Instance.
func (i *Instance) Freeze(ctx context.Context) error {
	if err := i.needGroup("freeze"); err != nil {
		return err
	}
	return i.group.Freeze(ctx)
}

// Thaw implements isolation.Instance.
func (i *Instance) Thaw(ctx context.Context) error {
	if err := i.needGroup("thaw"); err != nil {
		return err
	}
	if i.Held(ctx) {
		return nil
	}
	if err := i.group.Thaw(ctx); err != nil || !i.Held(ctx) {
		return err
	}
	// An attempt that had been made before the freezing was answered in between.
	return i.group.Freeze(ctx)
}

// Checkpoint implements isolation.Instance.
func (*Instance) Checkpoint(context.Context, string) (time.Duration, error) {
	return 0, isolation.NoMemoryImages(Name)
}

// Usage implements isolation.Instance.
func (i *Instance) Usage(_ context.Context) (isolation.Usage, error) {
	if err := i.needGroup("measure"); err != nil {
		return isolation.Usage{}, err
	}
	u, err := i.group.Usage()
	if err != nil {
		return isolation.Usage{}, err
	}
	used, err := i.record.Disk.used()
	if err != nil {
		return isolation.Usage{}, err
	}
	return isolation.Usage{
		CPU: u.CPU, MemoryBytes: u.MemoryBytes, MemoryPeak: u.MemoryPeak, CacheBytes: u.CacheBytes, Pids: u.Pids,
		DiskBytes: used, OOMKills: u.OOMKills, ObservedByHost: true,
	}, nil
}

// Update implements isolation.Instance. Memory, CPU time and pids change at once. The disk's limit is
// held by the store, and files and visible CPUs by the walls, which stand once for all.
func (i *Instance) Update(_ context.Context, l isolation.Limits) error {
	if err := i.needGroup("limit"); err != nil {
		return err
	}
	if err := i.group.Update(groupLimits(l)); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	a := &i.applied.Limits
	a.MemoryBytes, a.CPUs, a.Pids = l.MemoryBytes, min(l.CPUs, float64(len(i.b.cpus))), l.Pids
	return nil
}

// Done implements isolation.Instance.
func (i *Instance) Done() <-chan struct{} { return i.done }

// Exit implements isolation.Instance.
func (i *Instance) Exit() isolation.Exit {
	select {
	case <-i.done:
	default:
		return isolation.Exit{}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.exit
}

// Destroy implements isolation.Instance. Killing PID 1 ends the pid namespace with every process, and
// the last process takes the other namespaces and their mounts along.
func (i *Instance) Destroy(ctx context.Context) error {
	i.mu.Lock()
	if i.cleared {
		i.mu.Unlock()
		return nil
	}
	if i.forgotten {
		i.mu.Unlock()
		return i.destroyForgotten()
	}
	i.destroyed = true
	i.mu.Unlock()

	if err := i.proc.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	if err := i.waitKilled(ctx); err != nil {
		return err
	}
	if i.group != nil {
		if err := i.group.Remove(ctx); err != nil {
			return err
		}
	}
	return i.clear()
}

// thawDelay is how long a killed sandbox may take to end before something in it is taken for frozen. To
// look for that costs much: freezing even one group makes the kernel change its code on every processor
// (freezer_active in kernel/freezer.c).
const thawDelay = 100 * time.Millisecond

// waitKilled waits for the end of a killed sandbox. PID 1 stays until every process of its namespace
// has ended, and a frozen one does not end: with the signal on them already, they are thawed and run
// no instruction more.
func (i *Instance) waitKilled(ctx context.Context) error {
	delay := thawDelay
	if i.group != nil {
		if paused, err := i.group.Frozen(); err == nil && paused {
			delay = 0
		}
	}
	soon := time.NewTimer(delay)
	defer soon.Stop()
	select {
	case <-i.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-soon.C:
	}
	if i.group != nil {
		if err := i.group.Kill(ctx); err != nil {
			return err
		}
	}
	select {
	case <-i.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// destroyForgotten says what can be said after the backend was closed: whether it is gone.
func (i *Instance) destroyForgotten() error {
	proc, err := i.b.find(i.record)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err == nil {
		err = proc.Close()
	}
	return errors.Join(err, errs.New(errs.Unavailable, "the sandbox runs on and belongs to the next server"))
}

// clear frees what an instance without processes and groups still holds. The record goes last but one:
// as long as it is there, a sweep finishes what is broken off here.
func (i *Instance) clear() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.cleared {
		return nil
	}
	if err := errors.Join(removeFile(i.socket), removeFile(i.b.recordPath(i.name))); err != nil {
		return err
	}
	i.b.ids.release(i.first)
	if i.b.keeper != nil {
		i.b.keeper.Forget(i.id)
	}
	i.cleared = true
	i.b.mu.Lock()
	delete(i.b.instances, i.id)
	delete(i.b.names, i.name)
	i.b.mu.Unlock()
	return i.closeLocked()
}

// forget lets go of an instance that runs on.
func (i *Instance) forget() error {
	i.mu.Lock()
	if i.cleared || i.forgotten {
		i.mu.Unlock()
		return nil
	}
	i.forgotten = true
	i.mu.Unlock()
	i.stop()
	i.watcher.Wait()
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.closeLocked()
}

func (i *Instance) closeLocked() error {
	i.stop()
	var all []error
	if i.tap != nil {
		all = append(all, i.tap.Close())
		i.tap = nil
	}
	if i.log != nil {
		all = append(all, i.log.Close())
		i.log = nil
	}
	if i.group != nil {
		all = append(all, i.group.Close())
	}
	return errors.Join(append(all, i.proc.Close())...)
}

// scope is a control group's scope that knows its instance.
type scope struct {
	*cgroup.Scope
	i *Instance
}

// Close implements isolation.Scope. Once the backend was closed, the process and its group belong to
// the next server, and only the files are closed.
func (s *scope) Close() error {
	if !s.forgotten() {
		return s.Scope.Close()
	}
	for _, f := range s.Files() {
		_ = f.Close()
	}
	return nil
}

// Recycle implements isolation.Scope.
func (s *scope) Recycle() bool { return !s.forgotten() && s.Scope.Recycle() }

func (s *scope) forgotten() bool {
	s.i.mu.Lock()
	defer s.i.mu.Unlock()
	return s.i.forgotten
}

// noScope stands in where the host has no control groups.
type noScope struct{}

func (noScope) Files() []*os.File          { return nil }
func (noScope) Layout() []string           { return nil }
func (noScope) Empty() (bool, error)       { return true, nil }
func (noScope) Kill(context.Context) error { return nil }
func (noScope) Recycle() bool              { return false }
func (noScope) Close() error               { return nil }

func (b *Backend) socketPath(name string) string { return filepath.Join(b.cfg.RunDir, name+".sock") }
