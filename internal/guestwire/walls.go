package guestwire

// Walls is what holds every process of the payload: decided by the server (package
// isolation/walls), put in place by the guest (package guest/spawn). It is data only; the zero value
// is no wall at all, except that it refuses root.
type Walls struct {
	// RootAllowed lets processes start as uid 0 of the sandbox. Without it (profile locked) a start
	// as uid 0 is an error.
	RootAllowed bool `json:"root_allowed,omitempty"`
	// Capabilities is the bounding set: exactly what a process of uid 0 holds. Others hold nothing.
	Capabilities []uint8 `json:"capabilities,omitempty"`
	// NoNewPrivs sets no_new_privs, so that no setuid file or file capability has any effect.
	NoNewPrivs bool `json:"no_new_privs,omitempty"`
	// Seccomp is the system call filter of all processes: struct sock_filter as the kernel reads it
	// (8 bytes each, little endian), made by linux/seccomp. Empty means none.
	Seccomp []byte `json:"seccomp,omitempty"`
	// SeccompExec is a second filter, which each child takes itself just before it executes. It refuses
	// what Seccomp must leave to the spawner: clone3, the only way to be born in a cgroup of version 2.
	SeccompExec []byte `json:"seccomp_exec,omitempty"`
	// Listen installs Seccomp with a listener, which goes out by Launch.Listener before anything runs.
	Listen bool `json:"listen,omitempty"`
	// ExecMark is the last argument of every execve and execveat that the guest itself makes, and of the unshare for
	// OwnGroup, which the kernel ignores and who observes calls may tell from others. It is the guest's secret; 0: none.
	ExecMark uint64 `json:"exec_mark,omitempty"`
	// Landlock is the domain that all processes of the payload share. Nil means none.
	Landlock *Landlock `json:"landlock,omitempty"`
	// Emulated says that a runtime's kernel stands below, which has no timer slack to set, and in which the guest is in no
	// group of the payload's.
	Emulated bool `json:"emulated,omitempty"`
	// OwnGroup gives each process a control group namespace that begins at its own group (version 2): whoever mounts groups
	// sees no other, and can't leave it. It takes a scope for each start.
	OwnGroup bool `json:"own_group,omitempty"`
	// CPUs is the affinity of all processes, which is what nproc shows. Empty leaves it as it is.
	CPUs []int `json:"cpus,omitempty"`
	// Rlimits are set for each process, not for the guest, which needs more descriptors than they.
	Rlimits []Rlimit `json:"rlimits,omitempty"`
}

// Rlimit is one resource limit, soft and hard alike.
type Rlimit struct {
	Resource int    `json:"resource"` // RLIMIT_* of the architecture
	Max      uint64 `json:"max"`
}

// Landlock is a ruleset. Access bits are the kernel's LANDLOCK_ACCESS_FS_*, already cut down by the
// server to what ABI knows, so that guest and kernel either take all of them or fail.
type Landlock struct {
	// ABI is the version that the bits below are cut down to.
	ABI int `json:"abi"`
	// HandledFS names the accesses that are refused unless a rule allows them.
	HandledFS uint64 `json:"handled_fs"`
	// Scoped holds LANDLOCK_SCOPE_* bits (ABI 6): who is out of reach for signals and abstract sockets.
	Scoped uint64 `json:"scoped,omitempty"`
	// Rules allow access beneath paths of the sandbox.
	Rules []LandlockRule `json:"rules"`
}

// LandlockRule allows Access beneath Path.
type LandlockRule struct {
	Path   string `json:"path"`
	Access uint64 `json:"access"`
	// Optional says that Path may be absent; nothing is allowed there then. Any other rule whose path
	// is absent stops the start of the instance.
	Optional bool `json:"optional,omitempty"`
}

// WallsApplied is what was really put in place. The guest reads everything back from the kernel, on
// the thread that forks, except where it says otherwise; for the server it is the guest's word until
// it has looked at a process from outside.
type WallsApplied struct {
	Capabilities []uint8 `json:"capabilities"` // bounding set
	NoNewPrivs   bool    `json:"no_new_privs"`
	SeccompMode  int     `json:"seccomp_mode"` // 0: none, 2: filter
	// SeccompExec says that each child takes a second filter (not read back: it has no process yet).
	SeccompExec bool `json:"seccomp_exec,omitempty"`
	// LandlockABI is the version whose rules hold, 0 for none (the kernel shows no domain in /proc, so
	// this is the fact that landlock_restrict_self returned success).
	LandlockABI int `json:"landlock_abi"`
	// LandlockAbsent names optional rules whose path was not there.
	LandlockAbsent []string `json:"landlock_absent,omitempty"`
	CPUs           []int    `json:"cpus,omitempty"`
	// Joined counts the control groups of version 1 that the forking thread sits in.
	Joined int `json:"joined,omitempty"`
}
