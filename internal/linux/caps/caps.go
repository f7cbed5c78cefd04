// Package caps reads and drops Linux capabilities of the calling thread, and names them.
//
// What belongs here: capability numbers and names, the bounding set, capset, and the sets that
// /proc/<pid>/status shows. What does not: which capabilities a profile holds (isolation/walls).
//
// Capabilities belong to threads (capabilities(7)). Callers that mean one thread lock it first
// (runtime.LockOSThread).
package caps

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cap is the number of a capability.
type Cap = uint8

// names is indexed by capability number, as include/uapi/linux/capability.h counts them.
const names = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP " +
	"LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE " +
	"SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME " +
	"SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG " +
	"WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"

// Name returns the name of c without "CAP_", or its number if it has no name here.
func Name(c Cap) string {
	if n := strings.Fields(names); int(c) < len(n) {
		return n[c]
	}
	return strconv.Itoa(int(c))
}

// Names returns the names of cs, in their order.
func Names(cs []Cap) []string {
	out := make([]string, len(cs))
	for i, c := range cs {
		out[i] = Name(c)
	}
	return out
}

// ByName returns the capability with that name, with or without "CAP_".
func ByName(name string) (Cap, bool) {
	i := slices.Index(strings.Fields(names), strings.TrimPrefix(name, "CAP_"))
	return Cap(max(i, 0)), i >= 0
}

// Set is a set of capabilities, bit c for capability c.
type Set uint64

// Of returns the set of cs.
func Of(cs ...Cap) Set {
	var s Set
	for _, c := range cs {
		s |= 1 << c
	}
	return s
}

// Has reports whether c is in s.
func (s Set) Has(c Cap) bool { return s>>c&1 != 0 }

// List returns the members of s in ascending order.
func (s Set) List() []Cap {
	out := make([]Cap, 0, bits.OnesCount64(uint64(s)))
	for c := Cap(0); c < 64; c++ {
		if s.Has(c) {
			out = append(out, c)
		}
	}
	return out
}

// LimitBounding drops every capability from the calling thread's bounding set that is not in keep:
// what it executes as root holds no more than that (capabilities(7), "Transformation of capabilities
// during execve"). It can't be undone. It needs CAP_SETPCAP and changes no other set.
func LimitBounding(keep Set) error {
	for c := Cap(0); c < 64; c++ {
		if keep.Has(c) {
			continue
		}
		// EINVAL is the first number that this kernel does not know; it knows none above it.
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("drop %s from the bounding set: %w", Name(c), err)
		}
	}
	return nil
}

// Bounding reads the calling thread's bounding set.
func Bounding() (Set, error) {
	var s Set
	for c := Cap(0); c < 64; c++ {
		held, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
		switch {
		case errors.Is(err, unix.EINVAL): // beyond the last that this kernel knows
			return s, nil
		case err != nil:
			return 0, fmt.Errorf("read the bounding set: %w", err)
		case held == 1:
			s |= Of(c)
		}
	}
	return s, nil
}

// Limit cuts the calling thread's permitted and effective sets down to keep, and empties its
// inheritable and ambient sets, so that nothing but the bounding set decides what an executed
// program of root holds, and other users' programs hold nothing.
func Limit(keep Set) error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // pid 0: the calling thread
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	for i := range data {
		data[i].Permitted &= uint32(keep >> (32 * i))
		data[i].Effective = data[i].Permitted
		data[i].Inheritable = 0
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	return nil
}

// Status is what /proc/<pid>/status shows of a thread's privileges.
type Status struct {
	Inheritable, Permitted, Effective, Bounding, Ambient Set

	NoNewPrivs     bool
	SeccompMode    int // 0 none, 1 strict, 2 filter
	SeccompFilters int // number of filters; 0 where the kernel does not tell
}

// ReadStatus reads a status file, as "/proc/self/status" or "/proc/thread-self/status".
func ReadStatus(path string) (Status, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Status{}, err
	}
	s, err := ParseStatus(string(b))
	if err != nil {
		return Status{}, fmt.Errorf("read %s: %w", path, err)
	}
	return s, nil
}

// ParseStatus reads the text of a status file. Lines that a kernel lacks leave their field zero,
// except CapBnd, without which it is no status file.
func ParseStatus(text string) (Status, error) {
	var s Status
	seen := false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		var err error
		switch key {
		case "CapInh":
			err = parseSet(value, &s.Inheritable)
		case "CapPrm":
			err = parseSet(value, &s.Permitted)
		case "CapEff":
			err = parseSet(value, &s.Effective)
		case "CapBnd":
			seen = true
			err = parseSet(value, &s.Bounding)
		case "CapAmb":
			err = parseSet(value, &s.Ambient)
		case "NoNewPrivs":
			s.NoNewPrivs = value == "1"
		case "Seccomp":
			s.SeccompMode, err = strconv.Atoi(value)
		case "Seccomp_filters":
			s.SeccompFilters, err = strconv.Atoi(value)
		}
		if err != nil {
			return Status{}, fmt.Errorf("line %s: %w", key, err)
		}
	}
	if !seen {
		return Status{}, fmt.Errorf("no line CapBnd")
	}
	return s, nil
}

func parseSet(hex string, s *Set) error {
	n, err := strconv.ParseUint(hex, 16, 64)
	*s = Set(n)
	return err
}
