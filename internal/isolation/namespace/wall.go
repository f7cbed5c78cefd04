package namespace

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
)

// wallKey is what the expensive part of the walls depends on.
type wallKey struct {
	profile isolation.Profile
	waived  bool
	calls   isolation.Calls // without the reaction
}

// wallPlan is a walls.Plan whose filters lie in files, ready to be passed.
type wallPlan struct {
	walls   guestwire.Walls // without the filters
	filters []*os.File      // in the order of guestwire.Launch.Filters
	seccomp string
	missing []string
	// decide is walls.Plan.Decide, program the filter where it is to be marked, and own that of one instance alone.
	decide, program []byte
	own             *os.File
}

func (w wallPlan) close() {
	for _, f := range w.filters {
		_ = f.Close()
	}
}

// walls returns the walls for a spec.
func (b *Backend) walls(s isolation.Spec, cpus []int) (wallPlan, error) {
	if s.Runtime != nil {
		return b.cellWalls(s, cpus)
	}
	key := wallKey{profile: s.Profile, waived: slices.Contains(s.AllowMissing, walls.LayerLandlock), calls: s.Calls}
	key.calls.OnAttempt = ""
	w, err := b.baseWalls(key)
	if err != nil {
		return w, err
	}
	if s.Calls.Exec {
		if err := b.markExecs(&w); err != nil {
			return w, err
		}
	}
	w.walls.CPUs = cpus
	w.walls.Rlimits = append(slices.Clone(w.walls.Rlimits),
		guestwire.Rlimit{Resource: unix.RLIMIT_NOFILE, Max: uint64(s.Limits.OpenFiles)})
	return w, nil
}

// markExecs gives an instance's filter and guest a mark of their own for what the guest executes itself. Whoever knew it
// could execute unseen, so no other guest's is the same.
func (b *Backend) markExecs(w *wallPlan) error {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand.Read
	w.walls.ExecMark = binary.LittleEndian.Uint64(random[:]) | 1
	f, err := filterFile(walls.Remark(w.program, b.execMark, w.walls.ExecMark))
	if err != nil {
		return err
	}
	w.own, w.filters = f, append([]*os.File{f}, w.filters[1:]...)
	return nil
}

// baseWalls returns what is the same for all instances of a kind: assembling the filters costs more
// than a start.
func (b *Backend) baseWalls(key wallKey) (wallPlan, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w, ok := b.wallCache[key]; ok {
		return w, nil
	}
	host := walls.Host{Arch: runtime.GOARCH, LandlockABI: b.abi}
	host.CloneIntoCgroup = b.groups != nil && b.groups.Version() == 2
	o := walls.Options{Calls: key.calls, ExecMark: b.execMark}
	if key.waived {
		o.AllowMissing = []string{walls.LayerLandlock}
	}
	plan, err := walls.ForProfile(key.profile, host, o)
	if err != nil {
		return wallPlan{}, err
	}
	w := wallPlan{walls: plan.Walls, seccomp: plan.Seccomp, missing: plan.Missing, decide: plan.Decide, program: plan.Walls.Seccomp}
	for _, program := range [][]byte{plan.Walls.Seccomp, plan.Walls.SeccompExec} {
		if len(program) == 0 {
			break // the second comes only with the first
		}
		f, err := filterFile(program)
		if err != nil {
			w.close()
			return wallPlan{}, err
		}
		w.filters = append(w.filters, f)
	}
	w.walls.Seccomp, w.walls.SeccompExec = nil, nil
	b.wallCache[key] = w
	return w, nil
}

// filterFile puts a filter into a sealed file in memory: guests share it, and none may change it for
// the next.
func filterFile(program []byte) (*os.File, error) { return sealedFile("casemate-filter", program) }

// sealedFile is a file in memory that nobody can change.
func sealedFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = f.Write(content); err == nil {
		const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("seal %s: %w", name, err)
	}
	return f, nil
}
