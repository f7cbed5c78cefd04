// Package walls decides what holds the processes of a profile: capabilities, no_new_privs, system
// calls, Landlock rules, processors and limits. It is pure: from a profile and what the host can do
// to a guestwire.Walls, which a guest puts in place and a test can compare.
//
// What belongs here: the tables, each row with its reason. What does not: assembling and installing
// (linux/*, guest/spawn), namespaces and mounts (the backends). It is no backend; every backend may
// import it.
package walls

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/seccomp"
)

// MinLandlockABI is the oldest version that a profile accepts: ABI 1 refuses to move files between
// directories, which no toolchain survives. Linux 6.1, the minimum host, has 2.
const MinLandlockABI = 2

// LayerLandlock is the layer's name in isolation.Spec.AllowMissing and isolation.Applied.Missing.
// The other layers here (seccomp, no_new_privs, capabilities) are in every kernel from the minimum
// on, and can't be waived.
const LayerLandlock = "landlock"

// Host is what the walls depend on.
type Host struct {
	Arch string // as runtime.GOARCH
	// LandlockABI is what landlock.ABI returned; 0 for none.
	LandlockABI int
	// CloneIntoCgroup says that processes are born in their control group (cgroup v2), for which the
	// forking thread needs clone3.
	CloneIntoCgroup bool
}

// Options are the caller's choices for one instance.
type Options struct {
	// CPUs is the affinity; see CPUs. Empty leaves all.
	CPUs []int
	// OpenFiles is the limit of open files per process; 0 leaves the guest's.
	OpenFiles int
	// Writable narrows where profile locked may write, beneath these paths only (and /dev and /proc,
	// whose files decide for themselves). Empty: wherever owner and mode allow. Paths that don't exist
	// when the instance starts allow nothing.
	Writable []string
	// AllowMissing names layers that may be absent.
	AllowMissing []string
	// Calls are handed to a listener, but for executions that are marked with ExecMark: for those, see
	// guestwire.Walls.ExecMark.
	Calls    isolation.Calls
	ExecMark uint64
}

// Plan is the outcome: the walls, and what to say about them.
type Plan struct {
	Walls guestwire.Walls
	// Seccomp is the text for isolation.Applied.Seccomp.
	Seccomp string
	// Decide is, where calls are handed to a listener, the filter as it would be without: what it allows, the
	// listener may let go on, and all else it answers as that filter does.
	Decide []byte
	// Missing names layers that the profile wants and Options.AllowMissing waived.
	Missing []string
}

// ForProfile returns the walls of a profile. It fails with errs.Unsupported where the host lacks a
// layer that is not waived, and with errs.InvalidArgument for a profile that is none.
func ForProfile(p isolation.Profile, h Host, o Options) (Plan, error) {
	if p != isolation.Locked && p != isolation.Standard {
		return Plan{}, errs.New(errs.InvalidArgument, "there is no profile %q", p)
	}
	w := guestwire.Walls{
		RootAllowed:  p == isolation.Standard,
		Capabilities: Capabilities(p),
		NoNewPrivs:   p == isolation.Locked,
		CPUs:         slices.Clone(o.CPUs),
		Rlimits:      rlimits(o),
	}
	plan := Plan{Walls: w}
	var err error
	if plan.Walls.Seccomp, err = table(p, h.CloneIntoCgroup, o.Calls, o.ExecMark).Program(h.Arch); err != nil {
		return Plan{}, errs.Wrap(err, errs.Unsupported, "there is no system call filter for %s", h.Arch)
	}
	if o.Calls.Any() {
		plan.Walls.Listen = true
		if plan.Decide, err = table(p, h.CloneIntoCgroup, isolation.Calls{}, 0).Program(h.Arch); err != nil {
			return Plan{}, err
		}
	}
	if h.CloneIntoCgroup {
		if plan.Walls.SeccompExec, err = execTable().Program(h.Arch); err != nil {
			return Plan{}, err
		}
	}
	n, err := table(p, false, isolation.Calls{}, 0).Allowed(h.Arch)
	if err != nil {
		return Plan{}, err
	}
	plan.Seccomp = fmt.Sprintf("allow-list, %d calls", n)
	if h.LandlockABI >= MinLandlockABI {
		plan.Walls.Landlock = rules(p, h.LandlockABI, o.Writable)
		return plan, nil
	}
	if !slices.Contains(o.AllowMissing, LayerLandlock) {
		return Plan{}, errs.New(errs.Unsupported,
			"this host lacks Landlock version %d or newer (it has %d)", MinLandlockABI, h.LandlockABI).
			WithHint("start the kernel with lsm=landlock,… (Linux 6.1 or newer), or allow the layer %q to be missing", LayerLandlock)
	}
	plan.Missing = []string{LayerLandlock}
	return plan, nil
}

// Telling returns a filter that hands over what tells of an attempt, the same in every profile: for a kernel of another
// kind, whose calls no filter of the host's sees.
func Telling(arch string) ([]byte, error) {
	return table(isolation.Standard, false, isolation.Calls{Attempts: true}, 0).Program(arch)
}

// TellingCalls names the calls of an architecture some of which Telling hands over.
func TellingCalls() []string {
	var out []string
	for _, e := range rawTable(isolation.Standard, false).Entries {
		tell := resolve(e.Otherwise, true) == seccomp.Notify
		for _, c := range e.Clauses {
			tell = tell || resolve(c.Then, true) == seccomp.Notify
		}
		if tell {
			out = append(out, e.Call)
		}
	}
	return out
}

// Remark returns a filter that was made for one ExecMark as it is for another.
func Remark(program []byte, from, to uint64) []byte {
	const size, jump = 8, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	out := slices.Clone(program)
	for i := 0; i+size <= len(out); i += size {
		if binary.LittleEndian.Uint16(out[i:]) != jump {
			continue
		}
		switch k := out[i+4 : i+size]; binary.LittleEndian.Uint32(k) {
		case uint32(from):
			binary.LittleEndian.PutUint32(k, uint32(to))
		case uint32(from >> 32):
			binary.LittleEndian.PutUint32(k, uint32(to>>32))
		}
	}
	return out
}

// Capabilities returns the bounding set of a profile. Locked has none. Standard has what installing
// packages and running services as root takes; NET_ADMIN, NET_RAW, SYS_PTRACE,
// SYS_ADMIN and MKNOD are not among them.
func Capabilities(p isolation.Profile) []uint8 {
	if p != isolation.Standard {
		return nil
	}
	return []uint8{
		unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL, unix.CAP_SETGID,
		unix.CAP_SETUID, unix.CAP_SETPCAP, unix.CAP_NET_BIND_SERVICE, unix.CAP_SYS_CHROOT, unix.CAP_SETFCAP,
	}
}

// CapabilityNames returns the same as text for isolation.Applied.
func CapabilityNames(p isolation.Profile) []string { return caps.Names(Capabilities(p)) }

// rlimits sets what a process may not raise. A piped core_pattern ignores RLIMIT_CORE; the value
// only keeps core files out of the sandbox's disk.
func rlimits(o Options) []guestwire.Rlimit {
	out := []guestwire.Rlimit{
		{Resource: unix.RLIMIT_CORE, Max: 0},
		// The server may have been started with rights that it passes on: realtime, or a better priority
		// than the other sandboxes'.
		{Resource: unix.RLIMIT_RTPRIO, Max: 0},
		{Resource: unix.RLIMIT_NICE, Max: 0},
	}
	if o.OpenFiles > 0 {
		out = append(out, guestwire.Rlimit{Resource: unix.RLIMIT_NOFILE, Max: uint64(o.OpenFiles)})
	}
	return out
}

// rules returns the Landlock domain of a profile, cut down to what the ABI knows.
//
// Landlock can't take away beneath what it allows, so rules name what is allowed: everything on /
// except making devices and ioctl on devices; the latter only beneath /dev. REFER on / is there
// because without a rule for it every rename between directories fails with EXDEV, also where
// nothing handles it. Above all the domain hides PID 1: a process in a domain can't trace, and so
// not open /proc/PID/mem, fd or environ of, one outside of it.
func rules(p isolation.Profile, abi int, writable []string) *guestwire.Landlock {
	abi = min(abi, landlock.MaxABI)
	known, scoped := landlock.Known(abi)
	const devices = landlock.MakeChar | landlock.MakeBlock
	l := &guestwire.Landlock{ABI: abi, HandledFS: uint64(known), Scoped: uint64(scoped)}
	allow := func(path string, a landlock.Access, optional bool) {
		l.Rules = append(l.Rules, guestwire.LandlockRule{Path: path, Access: uint64(a & known), Optional: optional})
	}
	everything := known &^ (devices | landlock.IoctlDev)
	if p != isolation.Locked || len(writable) == 0 {
		allow("/", everything, false)
		allow("/dev", everything|landlock.IoctlDev, false)
		return l
	}
	read := landlock.Execute | landlock.ReadFile | landlock.ReadDir | landlock.Refer
	allow("/", read, false)
	allow("/dev", everything|landlock.IoctlDev, false)
	allow("/proc", read|landlock.WriteFile|landlock.Truncate, false)
	for _, path := range writable {
		allow(path, everything, true)
	}
	return l
}

// CPUs returns the processors for a limit (1.5 takes two), so that nproc shows it: as many of online
// as the limit rounds up to, beginning at a place that the id chooses, so that instances spread out.
// Nil means all of them.
func CPUs(limit float64, online []int, id string) []int {
	n := int(math.Ceil(limit))
	if n < 1 {
		n = 1
	}
	if n >= len(online) {
		return nil
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id)) // never fails
	first := int(h.Sum32() % uint32(len(online)))
	out := make([]int, n)
	for i := range out {
		out[i] = online[(first+i)%len(online)]
	}
	slices.Sort(out)
	return out
}
