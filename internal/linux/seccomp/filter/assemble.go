package filter

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"

	"casemate.dev/internal/linux/seccomp"
)

// Offsets in struct seccomp_data.
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

// x32Bit marks calls of amd64's x32 ABI, which shares its architecture number.
const x32Bit = 0x40000000

// leaf is what happens to the numbers from first up to the next leaf's first.
type leaf struct {
	first uint32
	entry Entry // with Call "" the default
}

// assemble lays the program out: first the architecture, then x32, then the number by a search tree.
// The kernel finds calls that are allowed whatever their arguments when the filter is installed, and
// does not run the program for them (kernel/seccomp.c, seccomp_cache_prepare).
func (t Table) assemble(goarch string) ([]bpf.Instruction, error) {
	info, err := arch.GetInfo(goarch)
	if err != nil {
		return nil, err
	}
	leaves, err := t.leaves(goarch)
	if err != nil {
		return nil, err
	}
	tree, err := search(t.spread(leaves))
	if err != nil {
		return nil, err
	}
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(info.ID), SkipTrue: 1},
		ret(seccomp.Kill),
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
	}
	if info.ID == arch.X86_64.ID {
		prog = append(prog,
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: x32Bit, SkipFalse: 1},
			ret(seccomp.Kill))
	}
	return append(prog, tree...), nil
}

// leaves returns one leaf for each entry that the architecture has, by number.
func (t Table) leaves(goarch string) ([]leaf, error) {
	info, err := arch.GetInfo(goarch)
	if err != nil {
		return nil, err
	}
	out := make([]leaf, 0, len(t.Entries))
	for _, e := range t.Entries {
		n, ok := number(info, e.Call)
		if !ok {
			if !known(e.Call) {
				return nil, fmt.Errorf("no architecture has a system call %q", e.Call)
			}
			continue
		}
		if err := e.check(); err != nil {
			return nil, fmt.Errorf("%s: %w", e.Call, err)
		}
		out = append(out, leaf{uint32(n), e})
	}
	slices.SortFunc(out, func(a, b leaf) int { return cmp.Compare(a.first, b.first) })
	for i := 1; i < len(out); i++ {
		if out[i].first == out[i-1].first {
			return nil, fmt.Errorf("%s: listed twice", out[i].entry.Call)
		}
	}
	return out, nil
}

// number returns a call's number. The tables of go-seccomp-bpf spell one call of arm64 by its other
// name (include/uapi/asm-generic/unistd.h has both).
func number(info *arch.Info, call string) (int, bool) {
	n, ok := info.SyscallNames[call]
	if !ok && call == "newfstatat" {
		n, ok = info.SyscallNames["fstatat"]
	}
	return n, ok
}

func known(call string) bool {
	for _, a := range Arches() {
		if info, err := arch.GetInfo(a); err == nil {
			if _, ok := number(info, call); ok {
				return true
			}
		}
	}
	return false
}

func (e Entry) check() error {
	if e.Reason == "" {
		return errors.New("no reason given")
	}
	for _, c := range e.Clauses {
		if len(c.When) == 0 {
			return errors.New("a clause without a test")
		}
		for _, t := range c.When {
			if t.Arg < 0 || t.Arg > 5 {
				return fmt.Errorf("no argument %d", t.Arg)
			}
			if len(t.Values) == 0 || len(t.Values) > 200 { // jumps within a test reach 255
				return fmt.Errorf("argument %d: %d values", t.Arg, len(t.Values))
			}
			for _, v := range t.Values {
				if v&^t.Mask != 0 {
					return fmt.Errorf("argument %d: value %#x never passes mask %#x", t.Arg, v, t.Mask)
				}
			}
		}
	}
	return nil
}

// spread fills the gaps between leaves with the default, and joins neighbours with the same plain
// verdict, so that the leaves cover all numbers from 0 on.
func (t Table) spread(leaves []leaf) []leaf {
	var out []leaf
	add := func(first uint32, e Entry) {
		if n := len(out); n > 0 && len(e.Clauses) == 0 && len(out[n-1].entry.Clauses) == 0 &&
			out[n-1].entry.Otherwise == e.Otherwise {
			return
		}
		out = append(out, leaf{first, e})
	}
	next := uint32(0)
	for _, l := range leaves {
		if l.first > next {
			add(next, Entry{Otherwise: t.Default})
		}
		add(l.first, l.entry)
		next = l.first + 1
	}
	add(next, Entry{Otherwise: t.Default})
	return out
}

// search returns a program that finds the leaf of the number in the accumulator and answers for it.
func search(leaves []leaf) ([]bpf.Instruction, error) {
	if len(leaves) == 1 {
		return leaves[0].entry.program()
	}
	mid := len(leaves) / 2
	low, err := search(leaves[:mid])
	if err != nil {
		return nil, err
	}
	high, err := search(leaves[mid:])
	if err != nil {
		return nil, err
	}
	first := leaves[mid].first
	var head []bpf.Instruction
	if len(low) <= 255 {
		head = []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: first, SkipTrue: uint8(len(low))}}
	} else { // conditional jumps reach no further than 255
		head = []bpf.Instruction{
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: first, SkipFalse: 1},
			bpf.Jump{Skip: uint32(len(low))},
		}
	}
	return slices.Concat(head, low, high), nil
}

// program returns what answers one call. It ends in a return on every path.
func (e Entry) program() ([]bpf.Instruction, error) {
	var out []bpf.Instruction
	for _, c := range e.Clauses {
		p, err := c.program()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Call, err)
		}
		out = append(out, p...)
	}
	return append(out, ret(e.Otherwise)), nil
}

// program returns the verdict if all tests hold; else it runs off its end, into the next clause.
func (c Clause) program() ([]bpf.Instruction, error) {
	out := []bpf.Instruction{ret(c.Then)}
	for _, t := range slices.Backward(c.When) {
		if len(out) > 255 {
			return nil, errors.New("a clause is too long for its jumps")
		}
		out = append(t.program(uint8(len(out))), out...)
	}
	return out, nil
}

// program goes on after its end if the test holds, else skips the miss instructions that follow.
func (t Test) program(miss uint8) []bpf.Instruction {
	// The low half of a 64-bit argument comes first: both architectures are little endian.
	off := offArgs + 8*uint32(t.Arg)
	if t.High {
		off += 4
	}
	out := []bpf.Instruction{bpf.LoadAbsolute{Off: off, Size: 4}}
	if t.Mask != ^uint32(0) {
		out = append(out, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: t.Mask})
	}
	for i, v := range t.Values {
		left := uint8(len(t.Values) - 1 - i)
		j := bpf.JumpIf{Cond: bpf.JumpEqual, Val: v, SkipTrue: left}
		if left == 0 {
			j.SkipFalse = miss
		}
		out = append(out, j)
	}
	return out
}

func ret(v seccomp.Verdict) bpf.Instruction { return bpf.RetConstant{Val: uint32(v)} }

// encode returns struct sock_filter after struct sock_filter, little endian.
func encode(prog []bpf.Instruction) ([]byte, error) {
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, 8*len(raw))
	for _, r := range raw {
		out = binary.LittleEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.LittleEndian.AppendUint32(out, r.K)
	}
	return out, nil
}
