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

// Simulate returns what a program answers to a call, without a kernel: for tests, and for explaining
// a refusal.
func Simulate(program []byte, c Call) (seccomp.Verdict, error) {
	raw := make([]bpf.RawInstruction, len(program)/8)
	for i := range raw {
		p := program[8*i:]
		raw[i] = bpf.RawInstruction{Op: binary.LittleEndian.Uint16(p), Jt: p[2], Jf: p[3], K: binary.LittleEndian.Uint32(p[4:])}
	}
	instructions, ok := bpf.Disassemble(raw)
	if !ok {
		return 0, errors.New("an instruction that is none")
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		return 0, err
	}
	// The machine loads words as packets have them, big endian. The kernel loads a filter's in its own
	// order, so each word is put down the other way round at the place where the kernel has it.
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[offNumber:], c.Number)
	binary.BigEndian.PutUint32(data[offArch:], c.Arch)
	for i, a := range c.Args {
		binary.BigEndian.PutUint32(data[offArgs+8*i:], uint32(a))
		binary.BigEndian.PutUint32(data[offArgs+8*i+4:], uint32(a>>32))
	}
	v, err := vm.Run(data)
	return seccomp.Verdict(v), err
}
