package walls

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

var update = flag.Bool("update", false, "write the golden files anew")

func profiles() []isolation.Profile {
	return []isolation.Profile{isolation.Locked, isolation.Standard}
}

// TestGolden compares the walls of each profile, as text, with a stored copy, so that every change of
// them shows in a diff.
func TestGolden(t *testing.T) {
	for _, p := range profiles() {
		for _, arch := range filter.Arches() {
			t.Run(string(p)+"."+arch, func(t *testing.T) {
				got := describe(t, p, arch)
				file := filepath.Join("testdata", string(p)+"."+arch+".golden")
				if *update {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if got != string(want) {
					t.Errorf("the walls differ from %s; see go test -update and git diff. Now:\n%s", file, got)
				}
			})
		}
	}
}

func describe(t *testing.T, p isolation.Profile, arch string) string {
	t.Helper()
	plan, err := ForProfile(p, Host{Arch: arch, LandlockABI: landlock.MaxABI}, Options{OpenFiles: 4096, CPUs: []int{0, 1}})
	if err != nil {
		t.Fatal(err)
	}
	w := plan.Walls
	var b strings.Builder
	fmt.Fprintf(&b, "root allowed: %v\nno_new_privs: %v\ncapabilities: %s\ncpus: %v\n",
		w.RootAllowed, w.NoNewPrivs, strings.Join(caps.Names(w.Capabilities), " "), w.CPUs)
	for _, l := range w.Rlimits {
		fmt.Fprintf(&b, "limit %d: %d\n", l.Resource, l.Max)
	}
	fmt.Fprintf(&b, "landlock: ABI %d, handled %#x, scoped %#x\n", w.Landlock.ABI, w.Landlock.HandledFS, w.Landlock.Scoped)
	for _, r := range w.Landlock.Rules {
		fmt.Fprintf(&b, "  beneath %s: %#x\n", r.Path, r.Access)
	}
	fmt.Fprintf(&b, "seccomp: %s, %d instructions\n", plan.Seccomp, len(w.Seccomp)/8)
	entries := table(p, false, isolation.Calls{}, 0).Entries
	slices.SortFunc(entries, func(a, b filter.Entry) int { return strings.Compare(a.Call, b.Call) })
	for _, e := range entries {
		if _, err := filter.Named(arch, e.Call); err != nil {
			continue
		}
		fmt.Fprintf(&b, "  %s:", e.Call)
		for _, c := range e.Clauses {
			for i, x := range c.When {
				fmt.Fprintf(&b, "%s arg%d&%#x in %#x", []string{"", " and"}[min(i, 1)], x.Arg, x.Mask, x.Values)
			}
			fmt.Fprintf(&b, " → %v;", c.Then)
		}
		fmt.Fprintf(&b, " %v\n", e.Otherwise)
	}
	fmt.Fprintf(&b, "  anything else: %v\n", absent)
	return b.String()
}

// verdict says what a profile's filter answers.
func verdict(t *testing.T, p isolation.Profile, fork bool, arch, call string, args ...uint64) seccomp.Verdict {
	t.Helper()
	program, err := table(p, fork, isolation.Calls{}, 0).Program(arch)
	if err != nil {
		t.Fatal(err)
	}
	v, ok := answer(t, program, arch, call, args...)
	if !ok {
		t.Fatalf("%s has no %s", arch, call)
	}
	return v
}

// TestArguments covers each rule on arguments, on both architectures and in both profiles.
func TestArguments(t *testing.T) {
	const high = 1 << 32 // a bit that the kernel drops
	allow, inval := seccomp.Allow, seccomp.Errno(unix.EINVAL)
	family, protocol := seccomp.Errno(unix.EAFNOSUPPORT), seccomp.Errno(unix.EPROTONOSUPPORT)
	for _, c := range []struct {
		call string
		args []uint64
		want seccomp.Verdict
	}{
		{"clone", []uint64{uint64(unix.SIGCHLD)}, allow},
		{"clone", []uint64{unix.CLONE_VM | unix.CLONE_VFORK | uint64(unix.SIGCHLD)}, allow},
		{"clone", []uint64{0x3d0f00}, allow}, // pthread_create
		{"clone", []uint64{unix.CLONE_NEWUSER}, refused},
		{"clone", []uint64{unix.CLONE_NEWNS | uint64(unix.SIGCHLD)}, refused},
		{"clone", []uint64{unix.CLONE_NEWPID}, refused},
		{"clone", []uint64{unix.CLONE_NEWNET}, refused},
		{"clone", []uint64{unix.CLONE_NEWCGROUP}, refused},
		{"clone", []uint64{unix.CLONE_NEWUTS}, refused},
		{"clone", []uint64{unix.CLONE_NEWIPC}, refused},
		{"clone", []uint64{high | unix.CLONE_NEWUSER}, refused},
		{"clone3", nil, absent},
		{"unshare", []uint64{unix.CLONE_FS | unix.CLONE_FILES}, allow},
		{"unshare", []uint64{unix.CLONE_NEWUSER}, refused},
		{"unshare", []uint64{unix.CLONE_NEWTIME}, refused},
		{"unshare", []uint64{high | unix.CLONE_NEWNS}, refused},
		{"setns", nil, refused},
		{"prlimit64", []uint64{0, unix.RLIMIT_NOFILE}, allow},
		{"prlimit64", []uint64{1, unix.RLIMIT_NOFILE}, refused},
		{"prlimit64", []uint64{high | 1, unix.RLIMIT_NOFILE}, refused},
		{"sched_setscheduler", []uint64{0, unix.SCHED_NORMAL}, allow},
		{"sched_setscheduler", []uint64{0, unix.SCHED_BATCH | unix.SCHED_RESET_ON_FORK}, allow},
		{"sched_setscheduler", []uint64{0, unix.SCHED_FIFO}, refused},
		{"sched_setscheduler", []uint64{0, unix.SCHED_RR | unix.SCHED_RESET_ON_FORK}, refused},
		{"sched_setscheduler", []uint64{0, unix.SCHED_DEADLINE}, refused},
		{"sched_setattr", nil, refused},
		{"personality", []uint64{0xffffffff}, allow},
		{"personality", []uint64{0x0040000}, allow},
		{"personality", []uint64{0x0400000}, refused}, // READ_IMPLIES_EXEC
		{"personality", []uint64{0x0440000}, refused},
		{"personality", []uint64{high | 0x0400000}, refused},
		{"mknodat", []uint64{0, 0, unix.S_IFIFO | 0o600}, allow},
		{"mknodat", []uint64{0, 0, 0o600}, allow},
		{"mknodat", []uint64{0, 0, unix.S_IFSOCK}, allow},
		{"mknodat", []uint64{0, 0, unix.S_IFCHR | 0o600}, refused},
		{"mknodat", []uint64{0, 0, unix.S_IFBLK}, refused},
		{"mknodat", []uint64{0, 0, 1<<16 | unix.S_IFBLK}, refused},
		{"seccomp", []uint64{unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC}, allow},
		{"seccomp", []uint64{unix.SECCOMP_GET_ACTION_AVAIL}, allow},
		{"seccomp", []uint64{unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER}, refused},
		{"ioctl", []uint64{0, unix.TCGETS}, allow},
		{"ioctl", []uint64{0, unix.TIOCSTI}, refused},
		{"ioctl", []uint64{0, high | unix.TIOCSTI}, refused},
		{"ioctl", []uint64{0, unix.TIOCLINUX}, refused},
		{"ioctl", []uint64{0, unix.TIOCSETD}, refused},
		{"ioctl", []uint64{0, unix.TIOCCONS}, refused},
		{"prctl", []uint64{unix.PR_SET_NO_NEW_PRIVS}, allow},
		{"prctl", []uint64{unix.PR_SET_SECCOMP}, allow},
		{"prctl", []uint64{unix.PR_SET_VMA}, allow},
		{"prctl", []uint64{unix.PR_SET_MM}, inval},
		{"prctl", []uint64{unix.PR_SCHED_CORE}, inval},
		{"prctl", []uint64{unix.PR_SET_IO_FLUSHER}, inval},
		{"prctl", []uint64{unix.PR_SET_MEMORY_MERGE}, inval},
		{"prctl", []uint64{9999}, inval},
		{"socket", []uint64{unix.AF_UNIX, unix.SOCK_STREAM}, allow},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_CLOEXEC, 0}, allow},
		{"socket", []uint64{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_TCP}, allow},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_DGRAM | unix.SOCK_NONBLOCK, unix.IPPROTO_UDP}, allow},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP}, allow},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP}, refused},
		{"socket", []uint64{unix.AF_INET6, unix.SOCK_RAW | unix.SOCK_CLOEXEC, 0}, refused},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_PACKET, 0}, refused},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, protocol},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_SEQPACKET, unix.IPPROTO_SCTP}, protocol},
		{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_UDP}, protocol},
		{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, allow},
		{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, protocol},
		{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, protocol},
		{"socket", []uint64{unix.AF_VSOCK, unix.SOCK_STREAM}, family},
		{"socket", []uint64{unix.AF_XDP, unix.SOCK_RAW}, family},
		{"socket", []uint64{unix.AF_ALG, unix.SOCK_SEQPACKET}, family},
		{"socket", []uint64{unix.AF_TIPC, unix.SOCK_RDM}, family},
		{"socket", []uint64{unix.AF_PACKET, unix.SOCK_RAW}, refused},
		{"socket", []uint64{high | unix.AF_VSOCK, unix.SOCK_STREAM}, family},
		{"socketpair", []uint64{unix.AF_UNIX, unix.SOCK_STREAM}, allow},
		{"socketpair", []uint64{unix.AF_TIPC, unix.SOCK_STREAM}, family},
	} {
		for _, p := range profiles() {
			for _, arch := range filter.Arches() {
				if got := verdict(t, p, false, arch, c.call, c.args...); got != c.want {
					t.Errorf("%s, %s: %s%#x: %v, want %v", p, arch, c.call, c.args, got, c.want)
				}
			}
		}
	}
}

// TestArchitectureArguments covers the rules of calls that only amd64 has.
func TestArchitectureArguments(t *testing.T) {
	for _, c := range []struct {
		call string
		args []uint64
		want seccomp.Verdict
	}{
		{"mknod", []uint64{0, unix.S_IFIFO}, seccomp.Allow},
		{"mknod", []uint64{0, unix.S_IFBLK}, refused},
		{"arch_prctl", []uint64{0x1002}, seccomp.Allow}, // ARCH_SET_FS, which every C program calls
		{"arch_prctl", []uint64{0x2001}, seccomp.Errno(unix.EINVAL)},
		{"modify_ldt", nil, refused},
		{"iopl", nil, refused},
		{"ioperm", nil, refused},
	} {
		if got := verdict(t, isolation.Locked, false, "amd64", c.call, c.args...); got != c.want {
			t.Errorf("%s%#x: %v, want %v", c.call, c.args, got, c.want)
		}
	}
}

// TestRefusals names what must never be allowed, apart from the tables, so that a slip there shows.
func TestRefusals(t *testing.T) {
	calls := strings.Fields(`mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
		setns ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp bpf perf_event_open userfaultfd io_uring_setup
		io_uring_enter io_uring_register keyctl add_key request_key init_module finit_module delete_module kexec_load
		kexec_file_load reboot open_by_handle_at name_to_handle_at swapon swapoff acct quotactl quotactl_fd settimeofday
		clock_settime clock_adjtime adjtimex sethostname setdomainname syslog sched_setattr fanotify_init vhangup clone3
		statmount listmount memfd_secret process_madvise mbind move_pages migrate_pages`)
	for _, p := range profiles() {
		for _, arch := range filter.Arches() {
			for _, call := range calls {
				for _, arg := range []uint64{0, 1, ^uint64(0)} {
					if v := verdict(t, p, false, arch, call, arg, arg, arg, arg, arg, arg); v == seccomp.Allow {
						t.Errorf("%s, %s: %s(%#x…) is allowed", p, arch, call, arg)
					}
				}
			}
		}
	}
}

// TestFuture holds that calls of a kernel to come are absent.
func TestFuture(t *testing.T) {
	for _, arch := range filter.Arches() {
		program, err := table(isolation.Standard, false, isolation.Calls{}, 0).Program(arch)
		if err != nil {
			t.Fatal(err)
		}
		c, err := filter.Named(arch, "read")
		if err != nil {
			t.Fatal(err)
		}
		for n := uint32(468); n < 2000; n++ {
			c.Number = n
			if v, err := filter.Simulate(program, c); err != nil || v != absent {
				t.Fatalf("%s: call %d: %v, %v", arch, n, v, err)
			}
		}
	}
}

// TestChroot is the one call in which the profiles differ.
func TestChroot(t *testing.T) {
	if v := verdict(t, isolation.Locked, false, "amd64", "chroot"); v != refused {
		t.Errorf("locked: %v", v)
	}
	if v := verdict(t, isolation.Standard, false, "amd64", "chroot"); v != seccomp.Allow {
		t.Errorf("standard: %v", v)
	}
}

// TestFork covers the pair of filters where processes are born in their control group: together they
// allow what the single one does.
func TestFork(t *testing.T) {
	for _, arch := range filter.Arches() {
		if v := verdict(t, isolation.Locked, true, arch, "clone3"); v != seccomp.Allow {
			t.Errorf("%s: the forking thread can't call clone3: %v", arch, v)
		}
		second, err := execTable().Program(arch)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range table(isolation.Locked, true, isolation.Calls{}, 0).Entries {
			c, err := filter.Named(arch, e.Call)
			if err != nil {
				continue
			}
			v, err := filter.Simulate(second, c)
			if err != nil || (v == seccomp.Allow) == (e.Call == "clone3") {
				t.Errorf("%s: the second filter answers %v, %v to %s", arch, v, err, e.Call)
			}
		}
		c, err := filter.Named(arch, "read")
		if err != nil {
			t.Fatal(err)
		}
		c.Arch = 1
		if v, err := filter.Simulate(second, c); err != nil || v != seccomp.Kill {
			t.Errorf("%s: the second filter answers %v, %v to a foreign architecture", arch, v, err)
		}
	}
	plan, err := ForProfile(isolation.Locked, Host{Arch: "amd64", LandlockABI: 7}, Options{})
	if err != nil || plan.Walls.SeccompExec != nil {
		t.Errorf("without CloneIntoCgroup there is a second filter (%v)", err)
	}
}

// TestLandlock covers what the version decides.
func TestLandlock(t *testing.T) {
	for _, c := range []struct {
		abi    int
		access landlock.Access // on /
		scoped landlock.Scope
	}{
		{2, known(2) &^ (landlock.MakeChar | landlock.MakeBlock), 0},
		{3, known(3) &^ (landlock.MakeChar | landlock.MakeBlock), 0},
		{5, known(5) &^ (landlock.MakeChar | landlock.MakeBlock | landlock.IoctlDev), 0},
		{6, known(6) &^ (landlock.MakeChar | landlock.MakeBlock | landlock.IoctlDev), landlock.ScopeSignal | landlock.ScopeAbstractUnix},
		{99, known(7) &^ (landlock.MakeChar | landlock.MakeBlock | landlock.IoctlDev), landlock.ScopeSignal | landlock.ScopeAbstractUnix},
	} {
		plan, err := ForProfile(isolation.Locked, Host{Arch: "amd64", LandlockABI: c.abi}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		l := plan.Walls.Landlock
		if l.Rules[0].Path != "/" || l.Rules[0].Access != uint64(c.access) || l.Scoped != uint64(c.scoped) || l.ABI > landlock.MaxABI {
			t.Errorf("ABI %d: %+v, want access %#x on /", c.abi, l, c.access)
		}
		for _, r := range l.Rules {
			if r.Access&^l.HandledFS != 0 {
				t.Errorf("ABI %d: rule on %s allows %#x, which is not handled", c.abi, r.Path, r.Access&^l.HandledFS)
			}
		}
	}
}

// TestWritable narrows locked; standard takes no notice.
func TestWritable(t *testing.T) {
	for _, p := range profiles() {
		plan, err := ForProfile(p, Host{Arch: "arm64", LandlockABI: 7}, Options{Writable: []string{"/tmp"}})
		if err != nil {
			t.Fatal(err)
		}
		var paths []string
		for _, r := range plan.Walls.Landlock.Rules {
			paths = append(paths, r.Path)
			if writes := r.Access&uint64(landlock.MakeReg) != 0; p == isolation.Locked && writes != (r.Path == "/tmp" || r.Path == "/dev") {
				t.Errorf("%s: %s allows %#x", p, r.Path, r.Access)
			}
		}
		if want := map[isolation.Profile]int{isolation.Locked: 4, isolation.Standard: 2}[p]; len(paths) != want {
			t.Errorf("%s: rules on %v", p, paths)
		}
	}
}

// TestFailsClosed covers hosts and profiles that there are no walls for.
func TestFailsClosed(t *testing.T) {
	host := Host{Arch: "amd64", LandlockABI: 1}
	_, err := ForProfile(isolation.Locked, host, Options{})
	if text, hint := errs.PublicText(err); !errs.Is(err, errs.Unsupported) || text == "" || hint == "" {
		t.Errorf("old Landlock: %v", err)
	}
	plan, err := ForProfile(isolation.Locked, host, Options{AllowMissing: []string{LayerLandlock}})
	if err != nil || plan.Walls.Landlock != nil || !slices.Equal(plan.Missing, []string{LayerLandlock}) || len(plan.Walls.Seccomp) == 0 {
		t.Errorf("old Landlock, waived: %+v, %v", plan, err)
	}
	if _, err = ForProfile("loose", Host{Arch: "amd64", LandlockABI: 7}, Options{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("unknown profile: %v", err)
	}
	if _, err = ForProfile(isolation.Locked, Host{Arch: "riscv64", LandlockABI: 7}, Options{}); !errs.Is(err, errs.Unsupported) {
		t.Errorf("unknown architecture: %v", err)
	}
}

func TestCPUs(t *testing.T) {
	online := []int{0, 1, 2, 3, 8, 9, 10, 11}
	for _, c := range []struct {
		limit float64
		want  int // 0: all
	}{{0.2, 1}, {1, 1}, {1.5, 2}, {7, 7}, {7.1, 0}, {8, 0}, {64, 0}} {
		got := CPUs(c.limit, online, "sandbox")
		if len(got) != c.want || !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Errorf("CPUs(%v) = %v", c.limit, got)
		}
		for _, n := range got {
			if !slices.Contains(online, n) {
				t.Errorf("CPUs(%v) = %v: %d is not online", c.limit, got, n)
			}
		}
	}
	seen := map[int]bool{}
	for i := range 64 {
		seen[CPUs(1, online, fmt.Sprint("sandbox", i))[0]] = true
	}
	if len(seen) < 6 {
		t.Errorf("64 instances use %d processors of 8", len(seen))
	}
}

func known(abi int) landlock.Access {
	a, _ := landlock.Known(abi)
	return a
}
