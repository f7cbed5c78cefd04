package namespace

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/userns"
)

// readNamespaces reads which namespaces a process is in, as "pid:[4026532000]" and the like by name.
func readNamespaces(pid int) (map[string]string, error) {
	inodes := make(map[string]string, len(namespaces()))
	for name := range namespaces() {
		inode, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/" + name)
		if err != nil {
			return nil, fmt.Errorf("read %s namespace: %w", name, err)
		}
		inodes[name] = inode
	}
	return inodes, nil
}

// observeNamespaces is readNamespaces for a guest, and fails if any of them is the server's own.
func (b *Backend) observeNamespaces(pid int) (map[string]string, error) {
	inodes, err := readNamespaces(pid)
	if err != nil {
		return nil, err
	}
	for name, inode := range inodes {
		if inode == b.own[name] {
			return nil, fmt.Errorf("the guest is in the server's own %s namespace", name)
		}
	}
	return inodes, nil
}

// posture is what the kernel says about a guest, seen from outside.
type posture struct {
	first, count uint32   // the one id range that its user namespace has
	namespaces   []string // names, sorted
	separated    bool     // its memory belongs to the outer user namespace
}

// wallPosture is what the kernel says about the thread that forks the sandbox's processes.
type wallPosture struct {
	noNewPrivs bool
	seccomp    int    // mode; 2 is a filter
	filters    int    // number of filters
	bounding   uint64 // capability bounding set
}

// observe reads a guest's posture from /proc. Nothing of it can change afterwards: id maps are written
// once, and a process can enter no namespace without a descriptor of it or rights in it.
func observe(g *guest) (posture, error) {
	pid := g.proc.PID()
	p := posture{namespaces: make([]string, 0, len(g.inodes))}
	for name := range g.inodes {
		p.namespaces = append(p.namespaces, name)
	}
	slices.Sort(p.namespaces)
	for _, read := range []func(int) ([]userns.Range, error){userns.UIDMap, userns.GIDMap} {
		m, err := read(pid)
		if err != nil {
			return p, fmt.Errorf("read id map: %w", err)
		}
		if len(m) != 1 || m[0] != (userns.Range{Inside: 0, Outside: g.first, Count: rangeSize}) {
			return p, fmt.Errorf("the guest's id map is %v, not its range from %d on", m, g.first)
		}
	}
	p.first, p.count = g.first, rangeSize
	// The files of a process that is not dumpable belong to root of the user namespace that its memory
	// belongs to (task_dump_owner in fs/proc/base.c); the sandbox's own root would be g.first.
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(pid)+"/mem", &st); err != nil {
		return p, fmt.Errorf("look at the guest: %w", err)
	}
	p.separated = st.Uid == 0
	return p, nil
}

// observeWalls finds the guest's thread with the walls among its threads and reads them back. There is
// exactly one: the guest's other threads have none.
func observeWalls(pid int) (wallPosture, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "task")
	tasks, err := os.ReadDir(dir)
	if err != nil {
		return wallPosture{}, err
	}
	// The newest thread first: the walls are the last thing that a launch makes.
	for _, t := range slices.Backward(tasks) {
		status, err := os.ReadFile(filepath.Join(dir, t.Name(), "status"))
		if err != nil {
			continue // ended meanwhile
		}
		w, err := parseWalls(status)
		if err != nil {
			return wallPosture{}, err
		}
		if w.seccomp != 0 || w.noNewPrivs {
			return w, nil
		}
	}
	return wallPosture{}, errors.New("no thread of the guest has walls")
}

func parseWalls(status []byte) (wallPosture, error) {
	var w wallPosture
	for line := range bytes.Lines(status) {
		key, value, ok := strings.Cut(string(line), ":")
		if !ok {
			continue
		}
		value = strings.TrimSpace(value)
		var err error
		switch key {
		case "NoNewPrivs":
			w.noNewPrivs = value == "1"
		case "Seccomp":
			w.seccomp, err = strconv.Atoi(value)
		case "Seccomp_filters":
			w.filters, err = strconv.Atoi(value)
		case "CapBnd":
			w.bounding, err = strconv.ParseUint(value, 16, 64)
		}
		if err != nil {
			return w, fmt.Errorf("status line %q: %w", line, err)
		}
	}
	return w, nil
}
