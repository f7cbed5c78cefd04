package filter

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"

	"casemate.dev/internal/linux/seccomp"
)

// Call is a system call as a filter sees it (struct seccomp_data).
type Call struct {
	Arch   uint32 // AUDIT_ARCH_*
	Number uint32
	Args   [6]uint64
}

// Named returns the call of an architecture by its names.
func Named(goarch, name string, args ...uint64) (Call, error) {
	info, err := arch.GetInfo(goarch)
	if err != nil {
		return Call{}, err
	}
	n, ok := number(info, name)
	if !ok {
		return Call{}, fmt.Errorf("%s has no system call %q", goarch, name)
	}
	c := Call{Arch: uint32(info.ID), Number: uint32(n)}
	if copy(c.Args[:], args) < len(args) {
		return Call{}, errors.New("more than six arguments")
	}
	return c, nil
}

// Name returns what an architecture calls a number, or "" for one that it has not.
func Name(goarch string, number uint32) string {
	info, err := arch.GetInfo(goarch)
	if err != nil || number >= x32Bit {
		return ""
	}
	return info.SyscallNumbers[int(number)]
}

// Simulate returns what a program answers to a call, without a kernel: for tests, and for explaining
// a refusal.
func Simulate(program []byte, c Call) (seccomp.Verdict, error) {
	m, err := NewMachine(program)
	if err != nil {
		return 0, err
	}
	return m.Answer(c)
}

// Machine answers calls as the kernel would with a program. It is not safe for concurrent use.
type Machine struct {
	vm   *bpf.VM
	data [64]byte
}

// NewMachine reads a program, as Table.Program makes it.
func NewMachine(program []byte) (*Machine, error) {
	raw := make([]bpf.RawInstruction, len(program)/8)
	for i := range raw {
		p := program[8*i:]
		raw[i] = bpf.RawInstruction{Op: binary.LittleEndian.Uint16(p), Jt: p[2], Jf: p[3], K: binary.LittleEndian.Uint32(p[4:])}
	}
	instructions, ok := bpf.Disassemble(raw)
	if !ok {
		return nil, errors.New("an instruction that is none")
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		return nil, err
	}
	return &Machine{vm: vm}, nil
}

// Answer returns the program's verdict on a call.
func (m *Machine) Answer(c Call) (seccomp.Verdict, error) {
	// The machine loads words as packets have them, big endian. The kernel loads a filter's in its own
	// order, so each word is put down the other way round at the place where the kernel has it.
	binary.BigEndian.PutUint32(m.data[offNumber:], c.Number)
	binary.BigEndian.PutUint32(m.data[offArch:], c.Arch)
	for i, a := range c.Args {
		binary.BigEndian.PutUint32(m.data[offArgs+8*i:], uint32(a))
		binary.BigEndian.PutUint32(m.data[offArgs+8*i+4:], uint32(a>>32))
	}
	v, err := m.vm.Run(m.data[:])
	return seccomp.Verdict(v), err
}
