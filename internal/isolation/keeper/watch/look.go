package watch

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/seccomp/notify"
)

// The bounds of what is read of a caller's memory.
const (
	maxString = 512
	maxArgv   = 16
	maxArg    = 128
	// Of sandboxes whose own kernel tells: what a thread calls itself is 15 bytes, a struct sockaddr_un 110.
	maxCommand, maxAddress = 64, 128
)

// caller is a thread that waits in a system call, as its files in /proc show it.
type caller struct {
	k    *process
	pid  string
	id   int
	args [6]uint64
}

// kindOf says why a call that goes on was handed over.
func kindOf(call string) isolation.CallKind {
	switch call {
	case "execve", "execveat":
		return isolation.CallExec
	case "connect":
		return isolation.CallConnect
	}
	return isolation.CallOpen
}

// look fills in who calls and what stands behind the call's pointers. It counts only if the call still waits afterwards:
// until then, the pid was the caller's.
func (k *process) look(b *box, c notify.Call, e *isolation.CallEvent) {
	t := caller{k: k, pid: strconv.FormatUint(uint64(c.PID), 10), id: int(c.PID), args: c.Args}
	seen := *e
	t.who(&seen)
	t.what(&seen)
	if notify.Waits(int(b.fd), c.ID) {
		*e = seen
	}
}

// file reads a small file of the thread's.
func (t *caller) file(name string) []byte {
	fd, err := unix.Openat(t.k.proc, t.pid+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	var buf [4096]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return nil
	}
	return bytes.Clone(buf[:n])
}

// who reads the thread's name, its process's id inside, and the scope that it is in.
func (t *caller) who(e *isolation.CallEvent) {
	e.Command = clean(bytes.TrimSuffix(t.file("comm"), []byte("\n")))
	for line := range bytes.Lines(t.file("status")) {
		if ids, ok := bytes.CutPrefix(line, []byte("NStgid:")); ok {
			if fields := strings.Fields(string(ids)); len(fields) > 0 {
				e.PID, _ = strconv.Atoi(fields[len(fields)-1])
			}
			break
		}
	}
	e.Process = scopeOf(t.file("cgroup"))
}

// scopeOf finds the process's scope in what /proc/PID/cgroup says: the group below the payload's, which bears the name of
// the process that the server started.
func scopeOf(text []byte) string {
	for line := range bytes.Lines(text) {
		_, group, ok := strings.Cut(strings.TrimSuffix(string(line), "\n"), "/payload/")
		if ok && group != "" {
			name, _, _ := strings.Cut(group, "/")
			return clean([]byte(path.Base(name)))
		}
	}
	return ""
}

// what reads the call's arguments.
func (t *caller) what(e *isolation.CallEvent) {
	switch e.Call {
	case "execve":
		e.Target, e.Argv = t.text(0), t.list(1)
	case "execveat":
		e.Target, e.Argv = t.text(1), t.list(2)
	case "connect":
		e.Target = t.address(1, 2)
	case "open", "creat", "umount2", "swapon", "swapoff", "acct", "pivot_root":
		e.Target = t.text(0)
	case "openat", "openat2", "name_to_handle_at", "open_tree", "fspick", "mount_setattr":
		e.Target = t.text(1)
	case "mount":
		e.Target, e.Args = t.text(1), []string{t.text(0), t.text(2), hex(t.args[3])}
	case "fsopen":
		e.Target = t.text(0)
	case "mknod":
		e.Target, e.Args = t.text(0), numbers(e.Call, t.args)
	case "mknodat":
		e.Target, e.Args = t.text(1), numbers(e.Call, t.args)
	case "add_key", "request_key":
		e.Target, e.Args = t.text(0), []string{t.text(1)}
	default:
		e.Args = numbers(e.Call, t.args)
	}
}

// numbers says what a call's arguments say by themselves.
func numbers(call string, args [6]uint64) []string {
	switch call {
	case "mknod":
		return []string{mode(args[1]), hex(args[2])}
	case "mknodat":
		return []string{mode(args[2]), hex(args[3])}
	case "clone", "unshare":
		return flags(args[0])
	case "setns":
		return flags(args[1])
	case "socket":
		return socket(args)
	}
	return []string{hex(args[0]), hex(args[1]), hex(args[2])}
}

func hex(v uint64) string { return "0x" + strconv.FormatUint(v, 16) }

// read reads at most len(buf) bytes at an address of the thread's memory. /proc/PID/mem would not do: its owner is the
// sandbox's user, and to open it takes a capability on the host, which reading does not.
func (t *caller) read(at uint64, buf []byte) []byte {
	if at == 0 || len(buf) == 0 {
		return nil
	}
	// The kernel copies piece by piece: what lies beyond the end of a page may be no memory at all.
	const page = 4096
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(len(buf))
	first := min(len(buf), int(page-at%page))
	remote := []unix.RemoteIovec{{Base: uintptr(at), Len: first}}
	if first < len(buf) {
		remote = append(remote, unix.RemoteIovec{Base: uintptr(at) + uintptr(first), Len: len(buf) - first})
	}
	n, err := unix.ProcessVMReadv(t.id, local, remote, 0)
	if err != nil || n <= 0 {
		return nil
	}
	return buf[:n]
}

// text reads the string that argument n points to.
func (t *caller) text(n int) string {
	var buf [maxString]byte
	return cString(t.read(t.args[n], buf[:]))
}

// list reads the strings that an array of pointers points to.
func (t *caller) list(n int) []string {
	var table [8 * maxArgv]byte
	pointers := t.read(t.args[n], table[:])
	var out []string
	for ; len(pointers) >= 8; pointers = pointers[8:] {
		at := binary.LittleEndian.Uint64(pointers)
		if at == 0 {
			break
		}
		var buf [maxArg]byte
		out = append(out, cString(t.read(at, buf[:])))
	}
	return out
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return clean(b)
}

func clean(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }

// address reads a struct sockaddr.
func (t *caller) address(n, size int) string {
	var buf [128]byte
	return address(t.read(t.args[n], buf[:min(len(buf), int(min(t.args[size], 128)))]))
}

// address says what a struct sockaddr means.
func address(b []byte) string {
	if len(b) < 2 {
		return ""
	}
	switch family := binary.LittleEndian.Uint16(b); {
	case family == unix.AF_INET && len(b) >= 8:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:])).String()
	case family == unix.AF_INET6 && len(b) >= 24:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), binary.BigEndian.Uint16(b[2:])).String()
	case family == unix.AF_UNIX && len(b) > 2 && b[2] == 0:
		return "unix:@" + clean(b[3:])
	case family == unix.AF_UNIX:
		return "unix:" + cString(b[2:])
	default:
		return "family " + strconv.Itoa(int(family))
	}
}

// flags names the namespaces among clone's flags.
func flags(v uint64) []string {
	var out []string
	for _, f := range []struct {
		bit  uint64
		name string
	}{
		{unix.CLONE_NEWUSER, "user"},
		{unix.CLONE_NEWNS, "mnt"},
		{unix.CLONE_NEWPID, "pid"},
		{unix.CLONE_NEWNET, "net"},
		{unix.CLONE_NEWIPC, "ipc"},
		{unix.CLONE_NEWUTS, "uts"},
		{unix.CLONE_NEWCGROUP, "cgroup"},
		{unix.CLONE_NEWTIME, "time"},
	} {
		if v&f.bit != 0 {
			out = append(out, f.name)
		}
	}
	return out
}

func mode(v uint64) string {
	switch v & unix.S_IFMT {
	case unix.S_IFCHR:
		return "character device"
	case unix.S_IFBLK:
		return "block device"
	}
	return "0" + strconv.FormatUint(v, 8)
}

func socket(args [6]uint64) []string {
	family := strconv.FormatUint(args[0], 10)
	for n, name := range map[uint64]string{
		unix.AF_INET: "inet", unix.AF_INET6: "inet6", unix.AF_PACKET: "packet", unix.AF_VSOCK: "vsock", unix.AF_XDP: "xdp",
	} {
		if args[0] == n {
			family = name
		}
	}
	kind := strconv.FormatUint(args[1]&0xf, 10)
	if args[1]&0xf == unix.SOCK_RAW {
		kind = "raw"
	}
	return []string{family, kind, strconv.FormatUint(args[2], 10)}
}
