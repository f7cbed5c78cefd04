package namespace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/cgroup"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/pidfd"
	"casemate.dev/internal/linux/probe"
)

// Name is the backend's name.
const Name = "namespace"

// DefaultIDDir is where all servers of a host claim id ranges.
const DefaultIDDir = "/run/casemate/uids"

// DefaultSpares is how many guests wait for their launch unless Config says otherwise.
const DefaultSpares = 4

// endTimeout bounds how long the end of a killed process is waited for.
const endTimeout = 10 * time.Second

// Config says how a Backend works. Guest, RunDir and ServerID must be set.
type Config struct {
	// ServerID tells this server's control groups and id claims from those of others on the host.
	ServerID string
	// RunDir holds sockets and records of running instances. It must be this server's alone, on a
	// file system that is empty after a restart of the machine or not; 0700 suffices.
	RunDir string
	// IDDir is where all servers of the host claim id ranges; default DefaultIDDir.
	IDDir string
	// Guest is the guest's program.
	Guest []byte
	// Spares is how many guests are started ahead of time; 0 is DefaultSpares, negative is none. The
	// first Start sets them off: before it, nothing runs that nobody asked for.
	Spares int
	// SpareLimits are the limits that spares get ahead of time. A Start with the same ones is
	// faster by the time that changing them takes.
	SpareLimits isolation.Limits
	// Cells makes a backend of cells: every instance holds a runtime (isolation.Runtime), and none is without.
	Cells bool
	// Keeper is the program that becomes the keeper, the process that observes system calls; this very one. "":
	// none are observed.
	Keeper string
	// Observer is the keeper of another backend of this server, which this one shares and does not close; in place of
	// Keeper.
	Observer *keeper.Keeper
	// Log takes what goes wrong in the background; default slog.Default().
	Log *slog.Logger

	// fail is called at each step that may fail in a test; see failpoint.
	fail func(step string) error
}

// Backend starts sandboxes in namespaces of their own. Methods are safe for concurrent use.
type Backend struct {
	cfg      Config
	boot     string
	own      map[string]string // this process's namespaces
	env      []string
	null     *os.File
	allCaps  []uintptr // every capability that this kernel knows
	program  *program
	inside   string // where cells' copy of the guest's program lies
	ids      *idPool
	groups   *cgroup.Hierarchy // nil where the host has none
	probes   *probe.Set
	cpus     []int  // that this server may use
	abi      int    // of Landlock
	maxFiles uint64 // that this server, and so a guest, may have open
	spares   spares
	keeper   *keeper.Keeper // nil where Config.Keeper names none
	owner    uint32         // the user that the user namespaces of observed guests belong to: the keeper's; 0 where there is none
	execMark uint64         // what stands in the filters of wallCache where each instance has its own

	// telling is the filter that knows what tells of an attempt, for cells.
	telling func() ([]byte, error)

	closing  sync.Once
	closeErr error

	mu        sync.Mutex // guards the fields below
	instances map[string]*Instance
	names     map[string]bool // every guest that is made, waits or runs
	wallCache map[wallKey]wallPlan
}

var (
	_ isolation.Backend  = (*Backend)(nil)
	_ isolation.Observer = (*Backend)(nil)
)

// New returns the backend of one server. It makes the server's directory of control groups and claims
// the id ranges that the server had before, and starts nothing.
//
// The process should be in a mount namespace of its own (mount.EnterPrivate).
// Kinds: Unsupported where not even the attempt makes sense (not root, no memory files).
func New(cfg Config) (*Backend, error) {
	if err := rootOnly(); err != nil {
		return nil, err
	}
	cfg = withDefaults(cfg)
	b := &Backend{
		cfg: cfg, instances: map[string]*Instance{}, names: map[string]bool{}, wallCache: map[wallKey]wallPlan{},
		env: guestEnv(), probes: probe.NewSet(), cpus: onlineCPUs(),
	}
	b.telling = sync.OnceValues(func() ([]byte, error) { return walls.Telling(runtime.GOARCH) })
	b.spares.stop = make(chan struct{})
	// Two words that stand nowhere else in a filter: above every system call's number, flag and errno.
	b.execMark = 0x7ca5e3a1_7ca5e3a2
	if err := b.open(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func withDefaults(cfg Config) Config {
	if cfg.IDDir == "" {
		cfg.IDDir = DefaultIDDir
	}
	if cfg.Spares == 0 {
		cfg.Spares = DefaultSpares
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	return cfg
}

// guestEnv is the guest program's own environment; nothing of the server's comes along. In tests a mark
// does, by which leaks are found.
func guestEnv() []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		// Looking after processes takes little. The rest keeps the runtime from reading control groups and
		// the whole mount table at its start all the same, and again every few seconds.
		"GOMAXPROCS=2",
		"GODEBUG=containermaxprocs=0,updatemaxprocs=0",
	}
	if tag, ok := os.LookupEnv("CASEMATE_TEST_TAG"); ok {
		env = append(env, "CASEMATE_TEST_TAG="+tag)
	}
	return env
}

func (b *Backend) open() (err error) {
	if err := os.MkdirAll(b.cfg.RunDir, 0o700); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	if b.boot, err = pidfd.BootID(); err != nil {
		return err
	}
	if b.own, err = readNamespaces(os.Getpid()); err != nil {
		return err
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	b.maxFiles = files.Max
	if b.allCaps, err = caps.All(); err != nil {
		return err
	}
	if b.null, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
		return err
	}
	if b.program, err = newProgram(b.cfg.Guest); err != nil {
		return err
	}
	if b.cfg.Cells {
		if err := b.placeInside(); err != nil {
			return err
		}
	}
	if b.ids, err = openIDPool(b.cfg.IDDir, b.cfg.ServerID); err != nil {
		return err
	}
	if err = b.openKeeper(); err != nil {
		return err
	}
	if b.abi, err = landlock.ABI(); err != nil && !errs.Is(err, errs.Unsupported) {
		return err
	}
	if b.groups, err = cgroup.Open(b.cfg.ServerID); err != nil && !errs.Is(err, errs.Unsupported) {
		return err
	}
	return nil
}

// Name returns "namespace".
func (b *Backend) Name() string { return Name }

// Close ends the spares and releases what the backend holds. Running instances go on. Idempotent.
func (b *Backend) Close() error {
	b.closing.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.stopSpares()
	b.mu.Lock()
	running := make([]*Instance, 0, len(b.instances))
	for _, i := range b.instances {
		running = append(running, i)
	}
	b.mu.Unlock()
	var all []error
	for _, i := range running {
		all = append(all, i.forget())
	}
	if b.groups != nil {
		all = append(all, b.groups.RemoveUnused(), b.groups.Close())
	}
	if b.ids != nil {
		b.ids.close()
	}
	for _, w := range b.wallCache {
		w.close()
	}
	if b.keeper != nil && b.cfg.Observer == nil {
		all = append(all, b.keeper.Close())
	}
	if b.program != nil {
		all = append(all, b.program.close())
	}
	if b.null != nil {
		all = append(all, b.null.Close())
	}
	return errors.Join(all...)
}

func (b *Backend) logError(what string, err error) {
	if err != nil {
		b.cfg.Log.Error(what, "backend", Name, "err", err)
	}
}

// failpoint lets tests fail a step that otherwise never does.
func (b *Backend) failpoint(step string) error {
	if b.cfg.fail == nil {
		return nil
	}
	return b.cfg.fail(step)
}

func (b *Backend) removeGroup(g *cgroup.Group) error {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	return errors.Join(g.Remove(ctx), g.Close())
}

// known notes that a name is in use, so that no sweep takes it for left over.
func (b *Backend) known(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.names[name] = true
}

// unknown is called when nothing of that name is left.
func (b *Backend) unknown(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.names, name)
}

func (b *Backend) instance(id string) *Instance {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.instances[id]
}
