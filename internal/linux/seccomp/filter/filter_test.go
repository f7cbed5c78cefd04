package filter_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	elastic "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/seccomp"
	"casemate.dev/internal/linux/seccomp/filter"
)

var (
	absent  = seccomp.Errno(unix.ENOSYS)
	refused = seccomp.Errno(unix.EPERM)
)

func entry(call string, v seccomp.Verdict, clauses ...filter.Clause) filter.Entry {
	return filter.Entry{Call: call, Otherwise: v, Clauses: clauses, Reason: "test"}
}

func program(t testing.TB, table filter.Table, goarch string) []byte {
	t.Helper()
	p, err := table.Program(goarch)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func simulate(t testing.TB, p []byte, c filter.Call) seccomp.Verdict {
	t.Helper()
	v, err := filter.Simulate(p, c)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func named(t testing.TB, goarch, name string, args ...uint64) filter.Call {
	t.Helper()
	c, err := filter.Named(goarch, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestForeignArchitectures asks for an allowed call's number under every other architecture.
func TestForeignArchitectures(t *testing.T) {
	foreign := []uint32{
		0, ^uint32(0), unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_ARM, unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_AARCH64,
		unix.AUDIT_ARCH_RISCV64, unix.AUDIT_ARCH_PPC64LE, unix.AUDIT_ARCH_S390X, unix.AUDIT_ARCH_MIPS64,
	}
	// Allowing by default is what makes a missing check fatal.
	for _, table := range []filter.Table{
		{Default: seccomp.Allow, Entries: []filter.Entry{entry("mount", refused)}},
		{Default: absent, Entries: []filter.Entry{entry("getpid", seccomp.Allow)}},
	} {
		for _, goarch := range filter.Arches() {
			p := program(t, table, goarch)
			own := named(t, goarch, "getpid")
			if v := simulate(t, p, own); v != seccomp.Allow {
				t.Errorf("%s: getpid: %v", goarch, v)
			}
			for _, a := range foreign {
				if a == own.Arch {
					continue
				}
				for n := range uint32(500) {
					if v := simulate(t, p, filter.Call{Arch: a, Number: n}); v != seccomp.Kill {
						t.Fatalf("%s: call %d of architecture %#x: %v, want kill", goarch, n, a, v)
					}
				}
			}
		}
	}
}

// TestX32 asks for calls of amd64's second table, and for the number -1.
func TestX32(t *testing.T) {
	p := program(t, filter.Table{Default: seccomp.Allow, Entries: []filter.Entry{entry("mount", refused)}}, "amd64")
	for _, n := range []uint32{1 << 30, 1<<30 | 39, 1<<30 | 520, 1<<31 - 1, 1 << 31, ^uint32(0)} {
		if v := simulate(t, p, filter.Call{Arch: unix.AUDIT_ARCH_X86_64, Number: n}); v != seccomp.Kill {
			t.Errorf("number %#x: %v, want kill", n, v)
		}
	}
	if v := simulate(t, p, filter.Call{Arch: unix.AUDIT_ARCH_X86_64, Number: 1<<30 - 1}); v != seccomp.Allow {
		t.Errorf("the number below x32: %v", v)
	}
}

// TestAgainstOracle compares tables without arguments with go-seccomp-bpf's assembler, for all numbers.
func TestAgainstOracle(t *testing.T) {
	for _, goarch := range filter.Arches() {
		info, err := arch.GetInfo(goarch)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for name := range info.SyscallNames {
			names = append(names, name)
		}
		slices.Sort(names)
		rng := rand.New(rand.NewPCG(1, 2))
		for round := range 20 {
			var allow, deny []string
			table := filter.Table{Default: refused}
			for _, name := range names {
				switch rng.IntN(3) {
				case 0:
					allow = append(allow, name)
					table.Entries = append(table.Entries, entry(name, seccomp.Allow))
				case 1:
					deny = append(deny, name)
					table.Entries = append(table.Entries, entry(name, seccomp.Verdict(elastic.ActionTrap)))
				}
			}
			p, oracle := program(t, table, goarch), elasticVM(t, goarch, allow, deny)
			for n := range uint32(600) {
				want := refused
				if goarch == "amd64" || n < 500 {
					want = oracle(n)
				}
				if got := simulate(t, p, filter.Call{Arch: uint32(info.ID), Number: n}); got != want {
					t.Fatalf("%s, round %d, number %d: %v, the oracle says %v", goarch, round, n, got, want)
				}
			}
		}
	}
}

// elasticVM returns the other assembler's verdicts. It assembles for the machine that it runs on, so
// for another architecture its own logic stands in: the lists by number.
func elasticVM(t *testing.T, goarch string, allow, trap []string) func(uint32) seccomp.Verdict {
	t.Helper()
	info, err := arch.GetInfo(goarch)
	if err != nil {
		t.Fatal(err)
	}
	native, err := arch.GetInfo("")
	if err != nil {
		t.Fatal(err)
	}
	if info.ID != native.ID {
		return func(n uint32) seccomp.Verdict {
			name := info.SyscallNumbers[int(n)]
			switch {
			case slices.Contains(allow, name):
				return seccomp.Allow
			case slices.Contains(trap, name):
				return seccomp.Verdict(elastic.ActionTrap)
			}
			return refused
		}
	}
	policy := elastic.Policy{DefaultAction: elastic.ActionErrno, Syscalls: []elastic.SyscallGroup{
		{Names: allow, Action: elastic.ActionAllow}, {Names: trap, Action: elastic.ActionTrap},
	}}
	instructions, err := policy.Assemble()
	if err != nil {
		t.Fatal(err)
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	return func(n uint32) seccomp.Verdict {
		data := make([]byte, 64)
		data[0], data[1], data[2], data[3] = byte(n>>24), byte(n>>16), byte(n>>8), byte(n)
		id := uint32(info.ID)
		data[4], data[5], data[6], data[7] = byte(id>>24), byte(id>>16), byte(id>>8), byte(id)
		v, err := vm.Run(data)
		if err != nil {
			t.Fatal(err)
		}
		return seccomp.Verdict(v)
	}
}

// TestClauses covers order, masks, several values, and bits that don't count.
func TestClauses(t *testing.T) {
	is := func(arg int, mask uint32, values ...uint32) filter.Test {
		return filter.Test{Arg: arg, Mask: mask, Values: values}
	}
	table := filter.Table{Default: absent, Entries: []filter.Entry{
		entry("socket", absent,
			filter.Clause{Then: seccomp.Allow, When: []filter.Test{is(0, ^uint32(0), 1, 3, 5), is(1, 0xf, 2)}},
			filter.Clause{Then: refused, When: []filter.Test{is(0, ^uint32(0), 3)}},
			filter.Clause{Then: seccomp.Kill, When: []filter.Test{is(5, 0xf0, 0x10, 0x20)}}),
	}}
	for _, goarch := range filter.Arches() {
		p := program(t, table, goarch)
		for _, c := range []struct {
			args [6]uint64
			want seccomp.Verdict
		}{
			{[6]uint64{1, 2}, seccomp.Allow},
			{[6]uint64{3, 2}, seccomp.Allow},
			{[6]uint64{5, 0xff2}, seccomp.Allow},
			{[6]uint64{3, 1}, refused},
			{[6]uint64{1, 1}, absent},
			{[6]uint64{5, 3, 0, 0, 0, 0x1f}, seccomp.Kill},
			{[6]uint64{5, 3, 0, 0, 0, 0x2f}, seccomp.Kill},
			{[6]uint64{5, 3, 0, 0, 0, 0x3f}, absent},
			{[6]uint64{2, 2}, absent},
			// The kernel drops the high half, so it must not change the answer.
			{[6]uint64{1<<32 | 1, 1<<63 | 2}, seccomp.Allow},
			{[6]uint64{1<<40 | 3, 1}, refused},
		} {
			if got := simulate(t, p, named(t, goarch, "socket", c.args[:]...)); got != c.want {
				t.Errorf("%s: socket%v: %v, want %v", goarch, c.args, got, c.want)
			}
		}
	}
}

// TestBadTables covers what is refused before a kernel sees it.
func TestBadTables(t *testing.T) {
	long := make([]uint32, 201)
	test := func(x filter.Test) filter.Entry {
		return entry("read", absent, filter.Clause{Then: seccomp.Allow, When: []filter.Test{x}})
	}
	for _, c := range []struct {
		entries []filter.Entry
		want    string
	}{
		{[]filter.Entry{entry("no_such_call", absent)}, `no architecture has a system call "no_such_call"`},
		{[]filter.Entry{entry("read", absent), entry("read", seccomp.Allow)}, "read: listed twice"},
		{[]filter.Entry{{Call: "read"}}, "read: no reason given"},
		{[]filter.Entry{entry("read", absent, filter.Clause{Then: seccomp.Allow})}, "read: a clause without a test"},
		{[]filter.Entry{test(filter.Test{Arg: 6, Values: []uint32{0}})}, "read: no argument 6"},
		{[]filter.Entry{test(filter.Test{Arg: 0})}, "read: argument 0: 0 values"},
		{[]filter.Entry{test(filter.Test{Arg: 0, Values: long})}, "read: argument 0: 201 values"},
		{[]filter.Entry{test(filter.Test{Arg: 0, Mask: 1, Values: []uint32{2}})}, "read: argument 0: value 0x2 never passes mask 0x1"},
	} {
		_, err := filter.Table{Default: absent, Entries: c.entries}.Program("amd64")
		if err == nil || !strings.HasSuffix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if _, err := (filter.Table{}).Program("pdp11"); err == nil {
		t.Error("there is a filter for a PDP-11")
	}
}

// TestAllowed counts conditional calls once, and not those that an architecture lacks.
func TestAllowed(t *testing.T) {
	table := filter.Table{Default: absent, Entries: []filter.Entry{
		entry("read", seccomp.Allow), entry("mount", refused), entry("stat", seccomp.Allow),
		entry("socket", absent, filter.Clause{Then: seccomp.Allow, When: []filter.Test{{Arg: 0, Mask: 1, Values: []uint32{1}}}}),
	}}
	for goarch, want := range map[string]int{"amd64": 3, "arm64": 2} { // arm64 has no stat
		if n, err := table.Allowed(goarch); err != nil || n != want {
			t.Errorf("%s: %d, %v; want %d", goarch, n, err, want)
		}
	}
}

// FuzzSimulate holds that no program makes the simulation panic.
func FuzzSimulate(f *testing.F) {
	f.Add([]byte{6, 0, 0, 0, 0, 0, 255, 127}, uint32(1), uint32(2), uint64(3))
	f.Add(program(f, filter.Table{Default: absent, Entries: []filter.Entry{entry("read", seccomp.Allow)}}, "amd64"), uint32(0xc000003e), uint32(0), uint64(0))
	f.Fuzz(func(_ *testing.T, program []byte, a, n uint32, arg uint64) {
		_, _ = filter.Simulate(program, filter.Call{Arch: a, Number: n, Args: [6]uint64{arg}})
	})
}
