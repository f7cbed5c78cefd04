package namespace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/cgroup"
)

// launchTimeout bounds a launch: a guest that does not answer is killed. It takes milliseconds, and on a machine that has
// far more to do than it can, many seconds.
const launchTimeout = time.Minute

// restoreTimeout is launchTimeout where a runtime reads a memory image, which may hold gigabytes.
const restoreTimeout = 2 * time.Minute

// shmShare is the part of the memory limit that /dev/shm may hold. Its pages count as memory anyway.
const shmShare = 2

// guestFiles is how many descriptors the guest itself may have open at least, where the server may
// have as many: a few for each process that it looks after.
const guestFiles = 16384

func groupLimits(l isolation.Limits) cgroup.Limits {
	return cgroup.Limits{MemoryBytes: l.MemoryBytes, CPUs: l.CPUs, Pids: l.Pids}
}

// Start implements isolation.Backend.
func (b *Backend) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	if err := checkPlan(s); err != nil {
		return nil, err
	}
	if err := b.checkRuntime(s); err != nil {
		return nil, err
	}
	if b.instance(s.ID) != nil {
		return nil, errs.New(errs.AlreadyExists, "sandbox %s is running already", s.ID)
	}
	missing, err := b.require(ctx, s)
	if err != nil {
		return nil, err
	}
	if err := b.allowDevice(s); err != nil {
		return nil, err
	}
	cpus := walls.CPUs(s.Limits.CPUs, b.cpus, s.ID)
	if err := b.checkCalls(s.Calls, s.Runtime); err != nil {
		return nil, err
	}
	wall, err := b.walls(s, cpus)
	if wall.own != nil {
		defer func() { _ = wall.own.Close() }() // the guest has read it by then
	}
	if err != nil {
		return nil, err
	}
	defer b.refill()
	want := b.aheadOf(s, cpus)
	i, ahead, err := b.startIn(ctx, s, wall, cpus, want)
	if err != nil && ahead && ctx.Err() == nil {
		// What waited may have come to harm meanwhile, which is no reason for a start to fail.
		b.logError("start in a cell whose runtime waited", err)
		i, _, err = b.startIn(ctx, s, wall, cpus, nil)
	}
	if err != nil {
		return nil, err
	}
	i.setApplied(append(missing, wall.missing...))
	b.spares.expect(want, b.inReach(s))
	b.run(i)
	return i, nil
}

// startIn starts an instance in a guest that waits, or in a new one. ahead says that its runtime had been started already.
func (b *Backend) startIn(ctx context.Context, s isolation.Spec, wall wallPlan, cpus []int, want *ahead) (i *Instance, ahead bool, err error) {
	g, err := b.takeGuest(groupLimits(s.Limits), want, b.inReach(s))
	if err != nil {
		return nil, false, err
	}
	if g.ahead != nil {
		cpus, wall.walls.CPUs = g.ahead.cpus, g.ahead.cpus
	}
	// From here on every error takes the guest along, and with it its namespaces, mounts, processes
	// and groups: there is nothing else to undo.
	// Its record goes last: as long as it lives it must be found.
	undo := cleanup.New(
		func() { b.logError("remove record", removeFile(b.recordPath(g.name))) },
		func() { b.logError("discard guest", b.discard(g)) },
	)
	defer undo.Run()
	if i, err = b.launch(ctx, s, g, wall, cpus); err != nil {
		return nil, g.ahead != nil, fmt.Errorf("start %s: %w", s.ID, err)
	}
	undo.Release()
	return i, g.ahead != nil, nil
}

// Restore implements isolation.Backend.
func (*Backend) Restore(context.Context, isolation.Spec, string) (isolation.Instance, error) {
	return nil, isolation.NoMemoryImages(Name)
}

// launchLimit is how long a launch may take.
func launchLimit(s isolation.Spec) time.Duration {
	if s.Runtime != nil && s.Runtime.Image != "" {
		return restoreTimeout
	}
	return launchTimeout
}

func bounded(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, errs.New(errs.DeadlineExceeded, "the guest did not come up within %s", limit))
}

// launch turns a waiting guest into an instance.
func (b *Backend) launch(ctx context.Context, s isolation.Spec, g *guest, wall wallPlan, cpus []int) (*Instance, error) {
	ctx, cancel := bounded(ctx, launchLimit(s))
	defer cancel()

	// The record comes first: from the launch on, the guest no longer ends with the server.
	r := b.newRecord(g, s)
	if err := b.writeRecord(r); err != nil {
		return nil, err
	}
	if err := b.failpoint("recorded"); err != nil {
		return nil, err
	}
	if limits := groupLimits(s.Limits); g.group != nil && g.limits != limits {
		if err := g.group.Update(limits); err != nil {
			return nil, err
		}
		g.limits = limits
	}
	if err := b.failpoint("limited"); err != nil {
		return nil, err
	}
	build := &builder{spec: s, first: g.first, userNS: g.userNS}
	defer build.close()
	door, err := newDoor(s.Calls.Any())
	if err != nil {
		return nil, err
	}
	defer door.close()
	if err := b.build(ctx, build, g, wall, cpus); err != nil {
		return nil, err
	}
	door.join(build)
	if err := b.failpoint("built"); err != nil {
		return nil, err
	}
	// The device needs the network namespace alone, so it is made while the guest builds the root. A launch
	// that fails takes it along.
	device := startDevice(g, s.Network)
	if s.Runtime != nil {
		device = already(device()) // a runtime takes the device over as it starts
	}
	reply, err := g.launch(ctx, build.launch, build.files)
	made, derr := device()
	undo := cleanup.New(made.close)
	defer undo.Run()
	if err != nil {
		return nil, b.explainLaunch(ctx, g, err)
	}
	if derr != nil {
		return nil, derr
	}
	if s.Network != nil {
		r.NetIndex, r.NetName = made.index, s.Network.Device
	}
	watched, err := b.watchCalls(ctx, s, g, wall, door)
	if err != nil {
		return nil, err
	}
	undo.Add(func() { b.unwatch(watched, s.ID) })
	b.cfg.Log.DebugContext(ctx, "launched", "sandbox", s.ID, "guest", g.name, "micros", reply.Micros)
	if err := b.failpoint("launched"); err != nil {
		return nil, err
	}
	if g.group != nil {
		if err := g.group.Settle(g.proc.PID()); err != nil {
			return nil, err
		}
	}
	if err := b.failpoint("settled"); err != nil {
		return nil, err
	}
	applied, err := b.verify(s, g, wall, reply)
	if err != nil {
		return nil, err
	}
	if err := b.failpoint("verified"); err != nil {
		return nil, err
	}
	if err := watched.wait(); err != nil {
		return nil, err
	}
	undo.Release()
	i := newInstance(b, g, r, applied)
	i.tap = made.end
	return i, nil
}

// build fills in the launch.
func (b *Backend) build(ctx context.Context, build *builder, g *guest, wall wallPlan, cpus []int) error {
	s := build.spec
	build.launch = guestwire.Launch{
		Profile:  string(s.Profile),
		Suid:     s.Profile == isolation.Standard,
		ShmBytes: s.Limits.MemoryBytes / shmShare,
		Walls:    wall.walls,
		Rlimits:  b.guestLimits(s),
		Hostname: "sandbox",
		Env:      s.Root.Env, User: s.Root.User, Dir: s.Root.Dir,
	}
	if err := build.root(ctx); err != nil {
		return err
	}
	if s.Runtime != nil {
		if err := build.runtime(b.inside, g); err != nil {
			return err
		}
	}
	for _, f := range s.Files {
		content, err := sealedFile("casemate-file", f.Content)
		if err != nil {
			return err
		}
		build.launch.Files = append(build.launch.Files, guestwire.LaunchFile{Target: f.Path, File: build.add(content)})
	}
	build.launch.Sys = guestwire.Prepared
	if len(cpus) > 0 && s.Runtime == nil { // fewer than all
		sys, err := newSys(cpus)
		if err != nil {
			return fmt.Errorf("make /sys: %w", err)
		}
		build.launch.Sys = build.add(sys)
	}
	for _, f := range wall.filters {
		build.launch.Filters = append(build.launch.Filters, build.lend(f))
	}
	if g.group == nil || s.Runtime != nil {
		return nil
	}
	join, err := g.group.PayloadFiles()
	if err != nil {
		return err
	}
	for _, f := range join {
		build.launch.Join = append(build.launch.Join, build.add(f))
	}
	return nil
}

// guestLimits are the guest's own.
func (b *Backend) guestLimits(s isolation.Spec) []guestwire.Rlimit {
	return []guestwire.Rlimit{
		// Some of what walls asks for processes: what the guest has, they begin with.
		{Resource: unix.RLIMIT_CORE, Max: 0},
		{Resource: unix.RLIMIT_RTPRIO, Max: 0},
		{Resource: unix.RLIMIT_NICE, Max: 0},
		{Resource: unix.RLIMIT_NOFILE, Max: min(b.maxFiles, max(guestFiles, uint64(s.Limits.OpenFiles)))},
	}
}

// explainLaunch adds to a failed launch what the guest left behind.
func (b *Backend) explainLaunch(ctx context.Context, g *guest, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("launch: %w", context.Cause(ctx))
	}
	if errs.Is(err, errs.Unavailable) {
		// The connection broke: the guest is dead, and what it wrote last says why.
		_ = g.proc.Signal(syscall.SIGKILL)
		return errs.Wrap(fmt.Errorf("%w; guest's last words: %q", err, lastWords(g.log)), errs.Internal, "the sandbox's first process ended while it started")
	}
	return fmt.Errorf("launch: %w", err)
}

// verify compares what the kernel says about the guest with what was asked for, and returns what is
// really in place. Anything less than asked for is an error: nothing here is best effort.
func (b *Backend) verify(s isolation.Spec, g *guest, wall wallPlan, reply guestwire.LaunchReply) (isolation.Applied, error) {
	if s.Runtime != nil {
		return b.verifyCell(s, g, reply)
	}
	p := g.posture
	w, err := observeWalls(g.proc.PID())
	if err != nil {
		return isolation.Applied{}, err
	}
	switch {
	case !p.separated || !reply.Separated:
		err = errors.New("PID 1 is not separated from the sandbox")
	case w.seccomp != seccompFilter || w.filters < 1:
		err = fmt.Errorf("the processes' thread has seccomp mode %d with %d filters", w.seccomp, w.filters)
	case w.noNewPrivs != wall.walls.NoNewPrivs:
		err = fmt.Errorf("the processes' thread has no_new_privs %v, not %v", w.noNewPrivs, wall.walls.NoNewPrivs)
	case w.bounding != capMask(wall.walls.Capabilities):
		err = fmt.Errorf("the processes' thread has the bounding set %x, not %x", w.bounding, capMask(wall.walls.Capabilities))
	case wall.walls.Landlock != nil && reply.Walls.LandlockABI != wall.walls.Landlock.ABI:
		err = fmt.Errorf("the guest applied Landlock version %d, not %d", reply.Walls.LandlockABI, wall.walls.Landlock.ABI)
	}
	if err != nil {
		return isolation.Applied{}, err
	}
	version := 0
	if b.groups != nil {
		version = b.groups.Version()
	}
	return isolation.Applied{
		Backend: Name, Profile: s.Profile, HostUID: p.first, UIDCount: p.count, Namespaces: p.namespaces,
		Capabilities: walls.CapabilityNames(s.Profile), NoNewPrivs: w.noNewPrivs, Seccomp: wall.seccomp,
		LandlockABI: reply.Walls.LandlockABI, CgroupVersion: version, Limits: b.limitsApplied(s, g),
		Disk: s.Root.Disk.Mechanism, Network: networkApplied(s.Network), GuestSeparated: p.separated,
		Calls: coverage(s.Calls), Observed: observers(),
	}, nil
}

const seccompFilter = 2 // SECCOMP_MODE_FILTER

func capMask(set []uint8) uint64 {
	var m uint64
	for _, c := range set {
		m |= 1 << c
	}
	return m
}

// limitsApplied leaves out what nothing holds.
func (b *Backend) limitsApplied(s isolation.Spec, g *guest) isolation.Limits {
	l := s.Limits
	l.DiskBytes, l.Inodes = s.Root.Disk.Bytes, s.Root.Disk.Inodes
	l.CPUs = min(l.CPUs, float64(len(b.cpus)))
	if g.group == nil {
		l.MemoryBytes, l.CPUs, l.Pids = 0, 0, 0
		return l
	}
	for _, c := range b.groups.Missing() {
		switch c {
		case "memory":
			l.MemoryBytes = 0
		case "cpu":
			l.CPUs = 0
		case "pids":
			l.Pids = 0
		}
	}
	return l
}

// observers says who saw what: HARDENING 4.
func observers() map[string]string {
	return map[string]string{
		"host_uid": "kernel", "uid_count": "kernel", "namespaces": "kernel", "no_new_privs": "kernel",
		"capabilities": "kernel", "seccomp": "kernel", "guest_separated": "kernel",
		"landlock_abi": "guest", // the kernel tells nobody
		"limits":       "server", "cgroup_version": "server", "disk": "server", "network": "server", "calls": "server",
	}
}

// require checks what the profile needs of the host. It returns the layers that are missing and that
// the spec allows to be.
func (b *Backend) require(ctx context.Context, s isolation.Spec) ([]string, error) {
	var missing []string
	for _, c := range b.Capabilities(ctx) {
		if c.OK || !c.Required {
			continue
		}
		if !waivable(c.Name) || !slices.Contains(s.AllowMissing, c.Name) {
			return nil, errs.New(errs.Unsupported, "this host lacks %s, which profile %s needs: %s", c.Name, s.Profile, c.Detail).
				WithHint("%s", c.Remedy)
		}
		if c.Name != walls.LayerLandlock { // the walls' plan names that one
			missing = append(missing, c.Name)
		}
	}
	return missing, nil
}
