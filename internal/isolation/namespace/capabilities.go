package namespace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/probe"
)

// The minimum host.
const minMajor, minMinor = 6, 1

// features are the kernel features that every profile needs.
func (b *Backend) features() []probe.Feature {
	return []probe.Feature{
		probe.Kernel(minMajor, minMinor), probe.UserNamespaces(), probe.IdmappedMounts(b.cfg.probeDir()),
		probe.FileSystem("overlay", "5.11"), probe.VisibleProc(), probe.SeccompFilters(),
	}
}

// probeDir is where idmapped mounts are tried: the run directory is often a tmpfs, which has them
// only from Linux 6.3 on, so the root's file system speaks for the data directory. A plan whose file
// system has none fails at Start and says so.
func (Config) probeDir() string { return "/" }

// Capabilities implements isolation.Backend.
func (b *Backend) Capabilities(_ context.Context) []isolation.Capability {
	out := make([]isolation.Capability, 0, 16)
	for _, f := range b.features() {
		out = append(out, capability(f, b.probes.Check(f)))
	}
	return append(append(out, b.landlockCapability()), b.groupCapabilities()...)
}

func capability(f probe.Feature, err error) isolation.Capability {
	c := isolation.Capability{Name: f.Name, OK: err == nil, Required: true, Detail: "works"}
	if err != nil {
		c.Detail, c.Remedy = err.Error(), f.Remedy
	}
	return c
}

func (b *Backend) landlockCapability() isolation.Capability {
	c := isolation.Capability{
		Name: walls.LayerLandlock, OK: b.abi >= walls.MinLandlockABI, Required: true,
		Detail: "ABI " + strconv.Itoa(b.abi),
	}
	if !c.OK {
		c.Detail = fmt.Sprintf("ABI %d, at least %d is needed", b.abi, walls.MinLandlockABI)
		c.Remedy = "start the kernel with lsm=landlock,… (Linux 6.1 or newer)"
	}
	return c
}

// groupCapabilities tells which limits hold, one capability each, so that each can be waived alone.
func (b *Backend) groupCapabilities() []isolation.Capability {
	names := []string{"memory", "cpu", "pids", "freezer", "devices", "swap"}
	out := make([]isolation.Capability, 0, len(names))
	var missing []string
	detail := "no writable control group hierarchy"
	if b.groups != nil {
		missing = b.groups.Missing()
		detail = "version " + strconv.Itoa(b.groups.Version())
	}
	for _, name := range names {
		c := isolation.Capability{
			Name: "cgroup-" + name, OK: b.groups != nil && !slices.Contains(missing, name),
			// Without its accounting swap can't be limited; without device groups the mounts and the
			// capabilities still keep devices away.
			Required: name != "swap" && name != "devices",
			Detail:   detail,
		}
		if !c.OK {
			c.Remedy = "mount the control group controller " + name + ", or boot with it enabled"
			if b.groups != nil {
				c.Detail += ", without this controller"
			}
		}
		out = append(out, c)
	}
	return out
}

// waivable reports whether a layer may be missing where the caller says so. Namespaces, id maps and
// the filter may not: without them there is no sandbox.
func waivable(layer string) bool {
	return layer == walls.LayerLandlock || strings.HasPrefix(layer, "cgroup-")
}

// explainFork names what a host lacks when the guest can't be started.
func explainFork(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return errs.Wrap(err, errs.Unsupported, "this host has no more namespaces").
			WithHint("raise the sysctls user.max_user_namespaces and user.max_*_namespaces")
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return errs.Wrap(err, errs.ResourceExhausted, "this host has no room for another process")
	}
	return err
}

// onlineCPUs returns the processors that this server may run on.
func onlineCPUs() []int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil {
		cpus := make([]int, 0, set.Count())
		for cpu := 0; len(cpus) < set.Count(); cpu++ {
			if set.IsSet(cpu) {
				cpus = append(cpus, cpu)
			}
		}
		return cpus
	}
	cpus := make([]int, runtime.NumCPU())
	for i := range cpus {
		cpus[i] = i
	}
	return cpus
}

// rootOnly fails where the process is not root of the host.
func rootOnly() error {
	if os.Geteuid() != 0 {
		return errs.New(errs.Unsupported, "isolation namespace needs root").WithHint("start the server as root")
	}
	return nil
}
