package gvisor

import (
	"encoding/json"
	"fmt"
	"strconv"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/caps"
)

// Where runsc finds and leaves things in the cell's own file system.
const (
	containerID = "c"
	rootDir     = "/run"
	bundleDir   = "/bundle"
	pidFile     = rootDir + "/pid"
	// controlSocket is the Sentry's.
	controlSocket = rootDir + "/runsc-" + containerID + ".sock"
	// frozenFile holds one byte, whether the sandbox is frozen: the Sentry does not tell.
	frozenFile = bundleDir + "/frozen"
	// guestInside is where the guest's program shows in the sandbox: on the file system for devices, which no
	// commit holds.
	guestInside = "/dev/.casemate/guest"
)

// The parts of an OCI runtime specification that this backend uses (opencontainers/runtime-spec, config.md).
type (
	ociSpec struct {
		Version  string     `json:"ociVersion"`
		Process  ociProcess `json:"process"`
		Root     ociRoot    `json:"root"`
		Hostname string     `json:"hostname"`
		Mounts   []ociMount `json:"mounts"`
		Linux    ociLinux   `json:"linux"`
	}
	ociProcess struct {
		User         ociUser         `json:"user"`
		Args         []string        `json:"args"`
		Env          []string        `json:"env"`
		Cwd          string          `json:"cwd"`
		Capabilities ociCapabilities `json:"capabilities"`
	}
	ociUser struct {
		UID uint32 `json:"uid"`
		GID uint32 `json:"gid"`
	}
	ociCapabilities struct {
		Bounding  []string `json:"bounding"`
		Effective []string `json:"effective"`
		Permitted []string `json:"permitted"`
	}
	ociRoot struct {
		Path string `json:"path"`
	}
	ociMount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options,omitempty"`
	}
	ociLinux struct {
		Namespaces    []ociNamespace `json:"namespaces"`
		MaskedPaths   []string       `json:"maskedPaths,omitempty"`
		ReadonlyPaths []string       `json:"readonlyPaths,omitempty"`
	}
	ociNamespace struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
)

// shmShare is the part of the memory limit that /dev/shm may hold.
const shmShare = 2

// guestCapabilities are what the guest holds of gVisor's kernel, which has nothing of the host's to give: what
// becoming its users, the host name, and looking at processes of others and ending them take. The runtime gives the Sentry
// no more than that of the cell's either.
func guestCapabilities() []string {
	names := []string{
		"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
		"NET_BIND_SERVICE", "SYS_CHROOT", "SETFCAP", "SYS_PTRACE", "SYS_ADMIN", "SYS_RESOURCE",
	}
	for i, n := range names {
		names[i] = "CAP_" + n
	}
	return names
}

// bundle is the specification of a sandbox.
func bundle(s isolation.Spec) ([]byte, error) {
	held := guestCapabilities()
	spec := ociSpec{
		Version: "1.2.1",
		Process: ociProcess{
			Args: []string{guestInside, guestwire.InsideArg},
			Env: []string{
				"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
				"GODEBUG=containermaxprocs=0,updatemaxprocs=0",
			},
			Cwd: "/", Capabilities: ociCapabilities{Bounding: held, Effective: held, Permitted: held},
		},
		Root: ociRoot{Path: guestwire.RuntimeRoot}, Hostname: "sandbox",
		Mounts: []ociMount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{
				"nosuid", "nodev", "mode=1777", "size=" + strconv.FormatInt(s.Limits.MemoryBytes/shmShare, 10),
			}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "nodev", "noexec", "ro"}},
			{Destination: guestInside, Type: "bind", Source: guestwire.RuntimeGuest, Options: []string{"bind", "ro", "nosuid", "nodev"}},
			// runsc would put a file system of its own on an empty /tmp, which no commit would hold.
			{Destination: "/tmp", Type: "bind", Source: guestwire.RuntimeRoot + "/tmp", Options: []string{"bind", "rw", "nosuid", "nodev"}},
		},
		Linux: ociLinux{Namespaces: []ociNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}}},
	}
	if s.Network != nil {
		// The cell's own, with the device in it. Without this, runsc would make an empty one.
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, ociNamespace{Type: "network", Path: "/proc/self/ns/net"})
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode the specification: %w", err)
	}
	return data, nil
}

// runscCapabilities is runsc's bounding set in the cell's user namespace: what building its own empty root,
// dropping to less, and taking over the network device takes.
func runscCapabilities() []uint8 {
	var out []uint8
	for _, name := range []string{
		"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
		"NET_BIND_SERVICE", "NET_ADMIN", "NET_RAW", "SYS_CHROOT", "SYS_PTRACE", "SYS_ADMIN", "MKNOD", "SETFCAP",
	} {
		c, ok := caps.ByName(name)
		if ok {
			out = append(out, c)
		}
	}
	return out
}
