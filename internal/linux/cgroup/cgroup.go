package cgroup

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"casemate.dev/internal/errs"
)

// Limits bound the payload of one sandbox. A zero field sets no limit.
type Limits struct {
	MemoryBytes int64
	CPUs        float64 // shares of one core's time, as 1.5
	Pids        int
}

// Reserve is what the guest may use beside the payload's limits.
type Reserve struct {
	MemoryBytes int64
	CPUs        float64
	Pids        int
}

// GuestReserve is the reserve that every guest gets. A guest that exceeds it fails alone: its groups
// are siblings of the payload's. Idle it takes 4 MB; the rest is for output that is kept (16 MB), and for
// as many connections as it serves at once while none of their other ends reads (100 KB each).
func GuestReserve() Reserve { return Reserve{MemoryBytes: 160 << 20, CPUs: 0.2, Pids: 128} }

// Usage is what a sandbox has used, by the kernel's accounting.
type Usage struct {
	CPU         time.Duration // guest and payload together
	MemoryBytes int64         // payload, page cache and kernel memory included
	MemoryPeak  int64
	CacheBytes  int64 // of MemoryBytes, what holds files and can be given back
	Pids        int   // payload's threads; on v1 the guest's spawner threads count too
	OOMKills    int64 // processes of the payload that the kernel killed for want of memory
}

// Hierarchy is where this server's groups live. Methods are safe for concurrent use.
type Hierarchy struct {
	serverID string
	driver   hierarchyDriver
}

// hierarchyDriver is what differs between the versions.
type hierarchyDriver interface {
	version() int
	missing() []string
	create(id string, l Limits) (groupDriver, error)
	open(id string) (groupDriver, error)
	list() ([]string, error)
	allowDevice(major, minor uint32) error
	removeRoot() error
	close() error
}

// Open finds the host's control group hierarchies and makes this server's directory in them. It
// creates nothing outside casemate-<serverID>. A second Open with the same id finds the same groups.
//
// Where controllers are missing, Open succeeds and Missing names them: whether a sandbox may do
// without is not decided here. Kinds: Unsupported where no hierarchy can be written at all.
func Open(serverID string) (*Hierarchy, error) {
	if !validName(serverID) {
		return nil, errs.New(errs.InvalidArgument, "server id %q can't name a control group", serverID)
	}
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	own, err := readOwn("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var d hierarchyDriver
	if mounts.hasV1() {
		d, err = openV1(serverID, mounts, own)
	} else {
		d, err = openV2(serverID, mounts, own)
	}
	if err != nil {
		return nil, fmt.Errorf("open cgroup hierarchy: %w", err)
	}
	return &Hierarchy{serverID: serverID, driver: d}, nil
}

// OpenUnified is Open on the v2 hierarchy even where v1 has the controllers, as on a hybrid host:
// freezing, killing and scopes work there, limits show as Missing.
func OpenUnified(serverID string) (*Hierarchy, error) {
	if !validName(serverID) {
		return nil, errs.New(errs.InvalidArgument, "server id %q can't name a control group", serverID)
	}
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	own, err := readOwn("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	d, err := openV2(serverID, mounts, own)
	if err != nil {
		return nil, fmt.Errorf("open cgroup hierarchy: %w", err)
	}
	return &Hierarchy{serverID: serverID, driver: d}, nil
}

// Version is 1 (also on hybrid hosts) or 2.
func (h *Hierarchy) Version() int { return h.driver.version() }

// Missing names the controllers that limits would need and this host lacks or does not let us use:
// of "memory", "cpu", "pids", "freezer", "devices" and "swap" (memory is limited, but swap is not).
func (h *Hierarchy) Missing() []string { return h.driver.missing() }

// Create makes the groups of a sandbox and sets their limits. On error nothing is left behind.
// Kinds: AlreadyExists, InvalidArgument.
func (h *Hierarchy) Create(id string, l Limits) (*Group, error) {
	if !validName(id) {
		return nil, errs.New(errs.InvalidArgument, "sandbox id %q can't name a control group", id)
	}
	d, err := h.driver.create(id, l)
	if err != nil {
		return nil, fmt.Errorf("create cgroup %s: %w", id, err)
	}
	return &Group{id: id, driver: d}, nil
}

// Open takes up the groups of a sandbox that an earlier server created. Kinds: NotFound.
func (h *Hierarchy) Open(id string) (*Group, error) {
	if !validName(id) {
		return nil, errs.New(errs.InvalidArgument, "sandbox id %q can't name a control group", id)
	}
	d, err := h.driver.open(id)
	if err != nil {
		return nil, fmt.Errorf("open cgroup %s: %w", id, err)
	}
	return &Group{id: id, driver: d}, nil
}

// List returns the ids of the sandboxes that have a group in any hierarchy, sorted: also one whose
// creation or removal broke off half way. Open and Remove work on those too.
func (h *Hierarchy) List() ([]string, error) { return h.driver.list() }

// AllowDevice lets this server's groups open one more character device, for reading and writing, as far as they find a node of
// it. Idempotent.
func (h *Hierarchy) AllowDevice(major, minor uint32) error {
	if err := h.driver.allowDevice(major, minor); err != nil {
		return fmt.Errorf("allow device %d:%d: %w", major, minor, err)
	}
	return nil
}

// Close closes what the Hierarchy holds open. Groups stay. Idempotent.
func (h *Hierarchy) Close() error { return h.driver.close() }

// RemoveUnused removes the server's directory where no sandbox has a group in it, so that a server
// that goes down with nothing running leaves nothing. It kills nothing.
func (h *Hierarchy) RemoveUnused() error {
	ids, err := h.List()
	if err != nil || len(ids) > 0 {
		return err
	}
	return h.driver.removeRoot()
}

// RemoveAll kills and removes every group of this server, and the server's directory itself.
func (h *Hierarchy) RemoveAll(ctx context.Context) error {
	ids, err := h.List()
	if err != nil {
		return err
	}
	for _, id := range ids {
		g, err := h.Open(id)
		if err != nil {
			return err
		}
		if err := g.Remove(ctx); err != nil {
			return err
		}
	}
	return h.driver.removeRoot()
}

// Group is the control groups of one sandbox. Methods are safe for concurrent use.
type Group struct {
	id     string
	driver groupDriver

	mu   sync.Mutex // guards the fields below
	idle []*Scope   // empty groups that wait for another process
	over bool       // the Group is closed: no more are kept
}

// maxIdle bounds the scopes that wait. Making and removing one costs more than half of what starting a
// process costs the server otherwise; more of them than processes start at once save nothing.
const maxIdle = 8

// groupDriver is what differs between the versions.
type groupDriver interface {
	inGuest(start func(dirFD int) error) error
	settle(pid int) error
	delegate(uid, gid int) error
	payloadFiles() ([]*os.File, error)
	homeFile() (*os.File, error)
	newScope(id string) (*Scope, error)
	openScope(id string) (*Scope, error)
	scopes() ([]string, error)
	freeze(ctx context.Context, frozen bool) error
	frozen() (bool, error)
	freezeFile() (*os.File, string, error)
	usage() (Usage, error)
	update(l Limits) error
	pids() ([]int, error)
	kill(ctx context.Context) error
	remove(ctx context.Context) error
	close() error
}

// ID returns the sandbox's id.
func (g *Group) ID() string { return g.id }

// InGuest calls start so that the process it forks is born in the guest's groups. start gets the
// descriptor of the group's directory for SysProcAttr.CgroupFD (UseCgroupFD) on v2, and -1 on v1,
// where it runs on another goroutine, locked to a thread that sits in the groups meanwhile. So start
// must fork on the goroutine it is called on, do little else, and not use Pdeathsig.
func (g *Group) InGuest(start func(dirFD int) error) error { return g.driver.inGuest(start) }

// AddGuest moves a running process, with all its threads, into the guest's groups. InGuest is the
// faster way; this one is for a guest that was started elsewhere. It includes Settle.
func (g *Group) AddGuest(pid int) error { return g.driver.settle(pid) }

// Settle ends the guest's birth: call it once the guest has unshared its cgroup namespace. On v2 the
// guest is born in <sandbox> itself, so that its namespace covers guest and payload (a hierarchy
// mounted with nsdelegate lets no process be placed outside the placer's namespace); Settle moves it
// to <sandbox>/guest and switches the limits on. On v1 it does nothing if pid is in place already.
func (g *Group) Settle(pid int) error { return g.driver.settle(pid) }

// Delegate lets the host uid and gid that the guest runs as place processes into scopes: on v2
// CLONE_INTO_CGROUP checks the caller's write permission on cgroup.procs of the scope and of the
// closest common ancestor, which is <sandbox>. Nothing else is handed over: limits stay root's. On
// v1 the right comes with the opened file (kernel commit 1756d7994ad8), and Delegate does nothing.
func (g *Group) Delegate(uid, gid int) error { return g.driver.delegate(uid, gid) }

// PayloadFiles opens the write-only "tasks" files of the payload's memory, pids, cpu, cpuacct and
// devices groups. A thread that writes "0" into each forks into the payload from then on. None on
// v2. A spawner thread that afterwards unshares its cgroup namespace (still with SYS_ADMIN) makes
// its children see "/" as their path. The caller closes the files.
func (g *Group) PayloadFiles() ([]*os.File, error) { return g.driver.payloadFiles() }

// HomeFile opens the write-only freezer "tasks" file of the guest: a spawner thread that sits in a
// scope leaves it by writing "0" here (or by entering the next scope). It must have left before the
// scope is killed or frozen. Nil on v2. The caller closes it.
func (g *Group) HomeFile() (*os.File, error) { return g.driver.homeFile() }

// NewScope makes the group of one process and what it starts. Kinds: AlreadyExists.
func (g *Group) NewScope(id string) (*Scope, error) {
	if !validName(id) {
		return nil, errs.New(errs.InvalidArgument, "process id %q can't name a control group", id)
	}
	if s := g.takeIdle(id); s != nil {
		return s, nil
	}
	s, err := g.driver.newScope(id)
	if err != nil {
		return nil, fmt.Errorf("create scope %s: %w", id, err)
	}
	s.group = g
	return s, nil
}

// takeIdle returns a scope that waits, under a new name: so that after a restart of the server a scope
// is still found by its process's id.
func (g *Group) takeIdle(id string) *Scope {
	g.mu.Lock()
	if len(g.idle) == 0 {
		g.mu.Unlock()
		return nil
	}
	s := g.idle[len(g.idle)-1]
	g.idle = g.idle[:len(g.idle)-1]
	g.mu.Unlock()
	driver, err := s.driver.(renamer).rename(id)
	if err != nil {
		_ = s.Close()
		return nil
	}
	return &Scope{id: id, group: g, driver: driver, layout: s.layout, files: s.files}
}

// mayKeep reports whether there is room for a scope that is empty.
func (g *Group) mayKeep(s *Scope) bool {
	if _, ok := s.driver.(renamer); !ok {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.over && len(g.idle) < maxIdle
}

// keepIdle takes a scope that mayKeep lets in, unless the room has gone meanwhile.
func (g *Group) keepIdle(s *Scope) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over || len(g.idle) >= maxIdle {
		return false
	}
	g.idle = append(g.idle, s)
	return true
}

// dropIdle closes what waits, and no more is kept.
func (g *Group) dropIdle() {
	g.mu.Lock()
	idle := g.idle
	g.idle, g.over = nil, true
	g.mu.Unlock()
	for _, s := range idle {
		closeFiles(s.files)
	}
}

// OpenScope takes up a scope made earlier, also by an earlier server. Kinds: NotFound.
func (g *Group) OpenScope(id string) (*Scope, error) {
	if !validName(id) {
		return nil, errs.New(errs.InvalidArgument, "process id %q can't name a control group", id)
	}
	s, err := g.driver.openScope(id)
	if err != nil {
		return nil, fmt.Errorf("open scope %s: %w", id, err)
	}
	s.group = g
	return s, nil
}

// Scopes lists the ids of the scopes that exist, sorted.
func (g *Group) Scopes() ([]string, error) { return g.driver.scopes() }

// Freeze stops every process in the payload's scopes and returns when they stand still. Idempotent.
func (g *Group) Freeze(ctx context.Context) error { return g.driver.freeze(ctx, true) }

// Thaw lets them go on. Idempotent.
func (g *Group) Thaw(ctx context.Context) error { return g.driver.freeze(ctx, false) }

// FreezeFile opens the file that begins to freeze what Freeze freezes, and returns what to write there. It is for a
// process that may do nothing else with the group.
func (g *Group) FreezeFile() (f *os.File, text string, err error) { return g.driver.freezeFile() }

// Frozen reports whether the payload is frozen or about to be.
func (g *Group) Frozen() (bool, error) { return g.driver.frozen() }

// Usage reads the kernel's accounting.
func (g *Group) Usage() (Usage, error) { return g.driver.usage() }

// Update changes the payload's limits. Lowering memory below what can't be reclaimed fails with
// errs.FailedPrecondition and changes nothing.
func (g *Group) Update(l Limits) error { return g.driver.update(l) }

// Pids lists the host pids of all processes, guest included.
func (g *Group) Pids() ([]int, error) { return g.driver.pids() }

// Kill ends every process, guest included, however fast they fork, and returns when none is left in
// the groups. Zombies don't count: reaping is the parent's. Idempotent.
func (g *Group) Kill(ctx context.Context) error { return g.driver.kill(ctx) }

// Remove kills what is left and removes the groups; Scopes and files of it are of no use afterwards.
// Idempotent: a group that is gone is removed.
func (g *Group) Remove(ctx context.Context) error { return g.driver.remove(ctx) }

// Close closes what the Group holds open; the groups stay. Idempotent.
func (g *Group) Close() error {
	g.dropIdle()
	return g.driver.close()
}
