// Package bounds holds a sandbox to its limits where the kernel below has none to hold it to: gVisor's counts
// processes and memory of control groups, but ends nobody for want of memory.
//
// What belongs here: the one control group of all processes of the sandbox, and who dies when it has too much
// memory. What does not: limits that the host's kernel holds (linux/cgroup); they stand around these, and end
// the whole sandbox.
package bounds

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// Group is the control group of all processes of a sandbox. A nil Group holds nothing.
type Group struct {
	tasks               [2]*os.File
	procs, pids, memory *os.File
	limit, kills        atomic.Int64
	changed             chan struct{}
}

// New makes the group with its limits. dir is a directory in which nothing lies; nothing will be left in it. The
// caller must be root of the kernel.
func New(dir string, b guestwire.Bounds) (*Group, error) {
	g := &Group{changed: make(chan struct{}, 1)}
	undo := cleanup.New(func() { _ = g.Close() })
	defer undo.Run()
	// Hierarchies of their own: that is how gVisor has them already.
	if err := g.open(dir, "pids", map[string]**os.File{"tasks": &g.tasks[0], "pids.max": &g.pids}); err != nil {
		return nil, err
	}
	memory := map[string]**os.File{"tasks": &g.tasks[1], "cgroup.procs": &g.procs, "memory.usage_in_bytes": &g.memory}
	if err := g.open(dir, "memory", memory); err != nil {
		return nil, err
	}
	if err := g.Set(b); err != nil {
		return nil, err
	}
	undo.Release()
	return g, nil
}

// open makes the group in one controller's hierarchy and opens files of it. The files keep working when the mount has
// gone, and no process can open any more of them.
func (g *Group) open(dir, controller string, files map[string]**os.File) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer func() { _ = os.Remove(dir) }()
	if err := unix.Mount("cgroup", dir, "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, controller); err != nil {
		return fmt.Errorf("mount control groups of %s: %w", controller, err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	payload := filepath.Join(dir, "payload")
	if err := os.Mkdir(payload, 0o755); err != nil {
		return err
	}
	for name, to := range files {
		flag := os.O_RDONLY
		if name == "tasks" || name == "pids.max" {
			flag = os.O_WRONLY
		}
		var err error
		if *to, err = os.OpenFile(filepath.Join(payload, name), flag, 0); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the group's files.
func (g *Group) Close() error {
	var all []error
	for _, f := range []*os.File{g.tasks[0], g.tasks[1], g.procs, g.pids, g.memory} {
		if f != nil {
			all = append(all, f.Close())
		}
	}
	return errors.Join(all...)
}

// Join returns the files to which a thread writes "0" to be in the group, and with it all that it forks.
func (g *Group) Join() []*os.File { return g.tasks[:] }

// Set changes the limits.
func (g *Group) Set(b guestwire.Bounds) error {
	if b.MemoryBytes <= 0 || b.Pids <= 0 {
		return errs.New(errs.InvalidArgument, "limits of %d bytes and %d processes can't be held", b.MemoryBytes, b.Pids)
	}
	if _, err := g.pids.WriteAt([]byte(strconv.Itoa(b.Pids)), 0); err != nil {
		return fmt.Errorf("limit processes: %w", err)
	}
	g.limit.Store(b.MemoryBytes)
	select {
	case g.changed <- struct{}{}:
	default:
	}
	return nil
}

// Kills counts the processes that were ended for want of memory.
func (g *Group) Kills() int64 {
	if g == nil {
		return 0
	}
	return g.kills.Load()
}

const (
	// fastest is how many bytes a second a sandbox takes at most, for what it may have: by that Watch knows how
	// long it need not look.
	fastest = 2 << 30
	// soonest and latest bound how often Watch looks.
	soonest = 5 * time.Millisecond
	latest  = time.Second
)

// Watch ends the process with the most memory whenever all together have too much, until the program ends.
func (g *Group) Watch() {
	for {
		used, err := readNumber(g.memory)
		limit := g.limit.Load()
		if err == nil && used > limit {
			g.kill()
		}
		left := time.Duration(float64(max(0, limit-used)) / fastest * float64(time.Second))
		t := time.NewTimer(min(max(left, soonest), latest))
		select {
		case <-t.C:
		case <-g.changed:
			t.Stop()
		}
	}
}

// kill ends the process with the most memory.
func (g *Group) kill() {
	b, err := readAll(g.procs)
	if err != nil {
		return
	}
	worst, most := 0, int64(0)
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		pid, err := strconv.Atoi(string(line))
		if err != nil || pid <= 1 {
			continue
		}
		if rss := resident(pid); rss > most {
			worst, most = pid, rss
		}
	}
	if worst != 0 && unix.Kill(worst, unix.SIGKILL) == nil {
		g.kills.Add(1)
		// Its memory is given back as it dies, which takes until it is scheduled.
		<-time.After(10 * time.Millisecond)
	}
}

// resident is a process's memory in pages; 0 where it has ended.
func resident(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0
	}
	fields := bytes.Fields(b)
	if len(fields) < 2 {
		return 0
	}
	n, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// maxFile bounds what is read of a control file.
const maxFile = 1 << 20

func readAll(f *os.File) ([]byte, error) {
	return io.ReadAll(io.NewSectionReader(f, 0, maxFile))
}

func readNumber(f *os.File) (int64, error) {
	b, err := readAll(f)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
}
