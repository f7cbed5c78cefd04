// Package filter assembles system call filters from tables.
//
// What belongs here: the form of a table, and its translation into a BPF program for an
// architecture. What does not: which calls a table allows (isolation/walls), and loading (package
// seccomp, which the guest links; this package it does not).
//
// Names and numbers of system calls come from github.com/elastic/go-seccomp-bpf. Its own assembler
// is not used, for three reasons: it gives a call of a foreign architecture the default action
// instead of killing; it compares arguments as 64 bits where the kernel takes 32 (then
// ioctl(fd, 1<<32|TIOCSTI) passes a rule on TIOCSTI, CVE-2019-10063); and it compares numbers one
// after the other. The kernel runs a program once for every number when it is installed, to find
// calls that it need not filter at all, so with a search tree the installation takes 0.12 ms instead
// of 0.5, on the path of every new sandbox. The tests use it as the oracle for tables without
// arguments.
package filter

import (
	"fmt"
	"slices"

	"casemate.dev/internal/linux/seccomp"
)

// Table is a filter before it is assembled. The zero Default would kill, as the kernel's zero does;
// tables state it.
type Table struct {
	Entries []Entry
	// Default answers every call that no entry names, and those that no kernel has yet.
	Default seccomp.Verdict
}

// Entry says what becomes of one system call.
type Entry struct {
	// Call is the kernel's name. An architecture that lacks it skips the entry, but at least one of
	// those in Arches must have it.
	Call string
	// Clauses are looked at in order; the first whose tests all hold decides.
	Clauses []Clause
	// Otherwise decides where no clause does.
	Otherwise seccomp.Verdict
	// Reason says why, for whoever reviews the table.
	Reason string
}

// Clause is a verdict under conditions.
type Clause struct {
	When []Test
	Then seccomp.Verdict
}

// Test holds if the low 32 bits of an argument, masked, equal one of the values. The kernel takes
// what is tested here as int, unsigned int or umode_t, or refuses bits above (unshare), and drops the
// rest: looking at it would let a caller hide a value behind bits that don't count.
type Test struct {
	Arg    int    // 0 to 5
	Mask   uint32 // applied before comparing
	Values []uint32
	// High looks at the upper 32 bits instead: for arguments that the kernel ignores.
	High bool
}

// Arches are the architectures that tables are made for, by Go's names.
func Arches() []string { return []string{"amd64", "arm64"} }

// Program returns the table's program for an architecture, as package seccomp installs it.
func (t Table) Program(arch string) ([]byte, error) {
	prog, err := t.assemble(arch)
	if err != nil {
		return nil, fmt.Errorf("assemble filter for %s: %w", arch, err)
	}
	return encode(prog)
}

// Allowed counts the calls of an architecture that the table allows, always or under conditions.
func (t Table) Allowed(arch string) (int, error) {
	leaves, err := t.leaves(arch)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, l := range leaves {
		if l.entry.allows() {
			n++
		}
	}
	return n, nil
}

func (e Entry) allows() bool {
	return e.Otherwise == seccomp.Allow ||
		slices.ContainsFunc(e.Clauses, func(c Clause) bool { return c.Then == seccomp.Allow })
}
