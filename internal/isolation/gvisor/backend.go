package gvisor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// Name is the backend's name.
const Name = "gvisor"

// Config says how a Backend works. Cells must be set.
type Config struct {
	// Cells makes the cells that runsc runs in.
	Cells isolation.Backend
	// Program is the path of runsc. Empty: there is none, and every start says so.
	Program string
	// Platform is Auto, Systrap or KVM; "" is Auto.
	Platform string
	// Dev is where the host's devices lie; default /dev.
	Dev string
}

// Backend starts sandboxes with gVisor's kernel. Methods are safe for concurrent use.
type Backend struct {
	cells   isolation.Backend
	program *program
	refused error // why there is no platform

	// mu guards the fields below.
	mu       sync.Mutex
	platform platform
	proven   bool // a sandbox has started on it, or it was asked for by name
}

var (
	_ isolation.Backend  = (*Backend)(nil)
	_ isolation.Observer = (*Backend)(nil)
)

// New returns the backend. It starts nothing, and does not fail where runsc is missing: Capabilities tells.
func New(cfg Config) *Backend {
	b := &Backend{cells: cfg.Cells, program: &program{path: cfg.Program}}
	b.platform, b.refused = choosePlatform(cfg.Platform, cmp.Or(cfg.Dev, "/dev"), askKVM)
	b.proven = cfg.Platform == KVM
	return b
}

// Spares returns how many cells wait for a runsc, and how many are wanted.
func (b *Backend) Spares() (ready, wanted int) {
	if cells, ok := b.cells.(interface{ Spares() (ready, wanted int) }); ok {
		return cells.Spares()
	}
	return 0, 0
}

// Name returns "gvisor".
func (b *Backend) Name() string { return Name }

// hostWalls are layers of the cells' backend that stand before system calls of processes, none of which reach the
// host's kernel here.
func hostWalls(layer string) bool {
	return layer == "landlock" || strings.HasPrefix(layer, "seccomp")
}

// Capabilities implements isolation.Backend.
func (b *Backend) Capabilities(ctx context.Context) []isolation.Capability {
	runsc := b.runsc(ctx)
	images := isolation.Capability{Name: isolation.MemoryImages, OK: runsc.OK, Detail: runsc.Detail, Remedy: runsc.Remedy}
	if images.OK {
		images.Detail = "processes can be saved and restored, by the runsc that saved them"
	}
	out := []isolation.Capability{runsc, images}
	for _, c := range b.cells.Capabilities(ctx) {
		if !hostWalls(c.Name) {
			out = append(out, c)
		}
	}
	return out
}

// runsc says whether there is one that can be used, with a platform.
func (b *Backend) runsc(ctx context.Context) isolation.Capability {
	c := isolation.Capability{Name: "runsc", Required: true}
	version, err := b.check(ctx)
	if err != nil {
		text, hint := errs.PublicText(err)
		c.Detail, c.Remedy = text, cmp.Or(hint, remedy)
		return c
	}
	p, _ := b.chosen()
	c.OK, c.Detail = true, fmt.Sprintf("%s at %s, platform %s", version, b.program.path, p.name)
	if p.why != "" {
		c.Detail += " (" + p.why + ")"
	}
	return c
}

// check returns the version of runsc, if one can be used.
func (b *Backend) check(ctx context.Context) (string, error) {
	if b.refused != nil {
		return "", b.refused
	}
	return b.program.check(ctx)
}

// Start implements isolation.Backend.
func (b *Backend) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	version, err := b.check(ctx)
	if err != nil {
		return nil, err
	}
	config, err := bundle(s)
	if err != nil {
		return nil, err
	}
	kept := record{Version: version, Bundle: config, Mark: newMark()}
	inst, err := b.onPlatform(ctx, func(p platform) (isolation.Instance, error) {
		kept.Platform = p.name
		spec, err := b.cell(s, kept, p)
		if err != nil {
			return nil, err
		}
		spec.Runtime.Args, spec.Runtime.GroupNamespaces, spec.Runtime.Gate = runArgs(s, p), true, gate(version)
		return b.cells.Start(ctx, spec)
	})
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { destroyQuietly(ctx, inst) })
	defer undo.Run()
	i, err := newInstance(inst, kept, s)
	if err == nil {
		err = i.checkTraced(ctx, s.Calls)
	}
	if err != nil {
		return nil, err
	}
	undo.Release()
	return i, nil
}

// cell is the cell of a sandbox, but for the arguments that make its runsc start or restore it.
func (b *Backend) cell(s isolation.Spec, kept record, p platform) (isolation.Spec, error) {
	spec := s
	spec.AllowMissing = append(slices.Clone(s.AllowMissing), "landlock")
	spec.Limits = CellLimits(s.Limits)
	spec.Runtime = &isolation.Runtime{
		Program: b.program.path, Inside: s.Limits, Device: p.device, Reach: lastStdio, Capabilities: runscCapabilities(),
		ExecMark: kept.Mark,
		Files:    map[string][]byte{bundleDir + "/config.json": kept.Bundle, frozenFile: {thawedByte}},
	}
	return spec, traced(s.Calls, spec.Runtime)
}

// What runsc takes beside the sandbox's own: its heap and stacks, the gofer, and threads of the host for the
// sandbox's.
const (
	reserveBytes = 256 << 20
	reservePids  = 256
	pidsPerPid   = 4
)

// CellLimits are the limits of the cell of a sandbox with limits l. They are a wall around those that the guest inside holds: what gets past
// the guest ends the whole sandbox.
func CellLimits(l isolation.Limits) isolation.Limits {
	l.MemoryBytes += reserveBytes
	l.Pids = l.Pids*pidsPerPid + reservePids
	return l
}

// runArgs are runsc's arguments that start a sandbox, whose guest finds its control socket as standard input.
func runArgs(s isolation.Spec, p platform) []string {
	return append(globalArgs(s, p), "run", "--detach", "--bundle="+bundleDir, "--pid-file="+pidFile, containerID)
}

// globalArgs are the arguments of every runsc.
func globalArgs(s isolation.Spec, p platform) []string {
	args := append([]string{"--root=" + rootDir}, p.args()...)
	if s.Network != nil {
		args = append(args, "--network=sandbox")
	} else {
		// A network namespace is among what takes longest to make, and to take down. That of a cell without device is as empty as
		// one that the gofer would get for itself.
		args = append(args, "--network=none", "--gofer-network-namespace=host")
	}
	if s.Calls.Any() {
		args = append(args, "--pod-init-config="+traceConfig)
	}
	return append(args,
		"--host-settings=ignore", // the cell can change none
		"--ignore-cgroups",       // the cell has its own
		// Of version 1 each controller has a hierarchy of its own, and then six forks of seven pass a limit of pids.
		"--in-sandbox-cgroup=v2",
		"--overlay2=none", // what is written must lie in the layer that commits read
		"--host-uds=none", "--host-fifo=none", "--oci-seccomp=false", "--net-raw=false",
		"--allow-suid="+strconv.FormatBool(s.Profile == isolation.Standard), // else sudo is nobody there
	)
}

// gate is where a runsc can be held up before it looks at the root, "" where it is not known for that. Each of its programs asks for
// the time zone when it begins: the Sentry before it leaves the cell's root behind, the gofer right before it binds the
// sandbox's root (runsc/cli/cli.go and runsc/cmd/sandboxsetup/gofer_mount.go).
func gate(version string) string {
	if release(version) == gatedRelease {
		return "/etc/localtime"
	}
	return ""
}

// gatedRelease is the release that gate was tried with, and make runsc builds.
const gatedRelease = "20260905"

// lastStdio is the highest descriptor that the Sentry takes: it moves standard files to 253 and above, so that they have the same
// numbers when it is restored (startingStdioFD in runsc/boot/loader.go). It has threads by then, and the kernel would let it
// wait for the larger table.
const lastStdio = 255

// Adopt implements isolation.Backend.
func (b *Backend) Adopt(ctx context.Context, raw json.RawMessage) (isolation.Instance, error) {
	r, err := decodeRecord(raw)
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the sandbox's record can't be read")
	}
	inst, err := b.cells.Adopt(ctx, r.Cell)
	if err != nil {
		return nil, err
	}
	i, err := adopted(inst, r)
	if err != nil {
		return nil, err
	}
	return i, i.noted()
}

// Sweep implements isolation.Backend. Whatever is left over lies in cells.
func (b *Backend) Sweep(ctx context.Context, keep map[string]bool) ([]string, error) {
	return b.cells.Sweep(ctx, keep)
}

// Close implements isolation.Backend.
func (b *Backend) Close() error { return b.cells.Close() }
