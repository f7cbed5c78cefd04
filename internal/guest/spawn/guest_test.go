package spawn_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/testenv"
)

// script is what a test asks the guest to do; report is what came of it.
type script struct {
	Walls guestwire.Walls
	Runs  []run
	// Scope gives the roles of inherited files that every process has as its scope. The file with role
	// "join" is a control group that the spawner joins, "freezer" the scope's freezer.state.
	Files  []string
	Bench  int  // start /bin/true that many times and report how long each took
	Freeze bool // start the first run while its scope is frozen
	Stop   bool // and stop it there, as any process of its user might
	Hammer int  // start that many at once, many times, while the collector runs
	Hold   bool // leave the first run running until standard input ends; say "held" then
}

// run is one process. Probe names what the test binary does; else Argv is started as it is.
type run struct {
	Name   string
	Probe  string
	Argv   []string
	Paths  []string
	Dir    string
	UID    uint32
	GID    uint32
	Groups []uint32
	Reach  int
	TTY    bool // a terminal as its standard input and its controlling terminal
	Worker bool
}

type report struct {
	Error   string // of New
	Applied guestwire.WallsApplied
	Output  map[string]string
	Status  map[string]string // "exit 0", "signal 31", or the start's error
	// Spawner and Plain are nanoseconds from a start until the process was reaped, see bench.
	Spawner, Plain []int64
}

// guest is this test binary, run from a sealed descriptor that it may not read, as the real one is, as PID 1
// of namespaces of its own with an id range that nothing else uses.
type guest struct {
	t     testing.TB
	base  int // first host id
	cmd   *exec.Cmd
	stdin io.Closer
	out   bytes.Buffer
	log   *os.File // its standard error, a file
}

func newGuest(t testing.TB, files ...*os.File) *guest { return newGuestOf(t, 0o711, files...) }

// newGuestOf makes a guest whose program has that mode.
func newGuestOf(t testing.TB, mode os.FileMode, files ...*os.File) *guest {
	t.Helper()
	testenv.Root(t)
	g := &guest{t: t, base: 0x7ff00000 + rand.IntN(15)*65536, cmd: exec.Command("/proc/self/fd/3", "play-guest")}
	var err error
	if g.log, err = os.CreateTemp(t.TempDir(), "log"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.log.Close() })
	g.cmd.Stdout, g.cmd.Stderr = &g.out, g.log
	g.cmd.ExtraFiles = append([]*os.File{sealedImage(t, mode)}, files...)
	g.cmd.Env = []string{"PATH=/usr/bin:/bin"}
	g.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET |
			unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: g.base, Size: 65536}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: g.base, Size: 65536}},
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{},
	}
	return g
}

// start gives the guest its script and leaves its standard input open.
func (g *guest) start(s script) {
	g.t.Helper()
	in, err := g.cmd.StdinPipe()
	if err != nil {
		g.t.Fatal(err)
	}
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.stdin = in
	if err := json.NewEncoder(in).Encode(s); err != nil {
		g.t.Fatal(err)
	}
}

// wait ends the guest's standard input and returns its report.
func (g *guest) wait() report {
	g.t.Helper()
	_ = g.stdin.Close()
	timer := time.AfterFunc(2*time.Minute, func() { _ = g.cmd.Process.Kill() })
	defer timer.Stop()
	if err := g.cmd.Wait(); err != nil {
		g.t.Fatalf("guest: %v\n%s%s", err, g.said(), g.out.String())
	}
	var r report
	if err := json.Unmarshal(g.out.Bytes(), &r); err != nil {
		g.t.Fatalf("guest's report: %v\n%s", err, g.out.String())
	}
	return r
}

// said returns what the guest wrote to its standard error so far.
func (g *guest) said() string {
	b, err := io.ReadAll(io.NewSectionReader(g.log, 0, 1<<20))
	if err != nil {
		g.t.Fatal(err)
	}
	return string(b)
}

// inGuest runs a script in a fresh guest.
func inGuest(t testing.TB, s script, files ...*os.File) report {
	t.Helper()
	g := newGuest(t, files...)
	g.start(s)
	return g.wait()
}

// sealedImage returns this test binary as a sealed file of root, open for reading.
func sealedImage(t testing.TB, mode os.FileMode) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "guest")
	defer f.Close() // open for writing it could not be executed (ETXTBSY)
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	if _, err := io.Copy(f, self); err != nil {
		t.Fatal(err)
	}
	if err := f.Chmod(mode); err != nil {
		t.Fatal(err)
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	r, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// profile returns a profile's walls for this host.
func profile(t testing.TB, p isolation.Profile, o walls.Options, v2 bool) guestwire.Walls {
	t.Helper()
	abi, err := landlock.ABI()
	if err != nil {
		t.Fatal(err)
	}
	plan, err := walls.ForProfile(p, walls.Host{Arch: runtime.GOARCH, LandlockABI: abi, CloneIntoCgroup: v2}, o)
	if err != nil {
		t.Fatal(err)
	}
	return plan.Walls
}

// noWalls is the twin: a guest that holds nothing back.
func noWalls() guestwire.Walls {
	w := guestwire.Walls{RootAllowed: true}
	for c := range uint8(41) {
		w.Capabilities = append(w.Capabilities, c)
	}
	return w
}
