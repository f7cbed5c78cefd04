package guest

import (
	"bytes"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// markVariable tells the descendants of a process that has no scope.
const markVariable = "CASEMATE_PROCESS"

// descent is a tree found in /proc: what descends from the first process by parentage, what is in its
// session, and what still carries its mark in the environment.
type descent struct {
	pid    int // set once the first process runs
	parent int // of the first process, where that is not the guest
	mark   string
}

// maxEnviron bounds how much of a process's environment is searched.
const maxEnviron = 256 << 10

func (d *descent) pids() ([]int, error) {
	pids, _, err := d.look()
	return pids, err
}

// look returns the tree's processes, and those of which nobody can tell yet whether they belong to it.
func (d *descent) look() (pids, unclear []int, err error) {
	if d.pid == 0 {
		return nil, nil, nil
	}
	all, err := processes()
	if err != nil {
		return nil, nil, err
	}
	member := d.members(all)
	for _, p := range all {
		in, clear := member[p.pid], true
		if !in {
			in, clear = d.marked(p.pid)
		}
		switch {
		case in:
			pids = append(pids, p.pid)
		case !clear:
			unclear = append(unclear, p.pid)
		}
	}
	return pids, unclear, nil
}

// members follows parentage and session. The number of a session stays taken while the session has
// members, so as long as no process has that pid itself, the session is the first process's.
func (d *descent) members(all []procStat) map[int]bool {
	member := map[int]bool{}
	lead := false
	for _, p := range all {
		if p.pid == d.pid {
			lead = true
			// A zombie that waits for the reaper, or another process that got the number later: that
			// one has a session of its own and another parent than the guest, or no mark.
			member[p.pid] = p.parent == os.Getpid() || d.parent != 0 && p.parent == d.parent
		}
	}
	for grew := true; grew; {
		grew = false
		for _, p := range all {
			in := member[p.parent] || p.session == d.pid && (!lead || member[d.pid])
			if in && !member[p.pid] {
				member[p.pid] = true
				grew = true
			}
		}
	}
	return member
}

// marked reports whether a process carries the mark. It is not clear of one that is just executing a program: between
// the old memory and the new one it has no environment to be read, and no arguments either.
func (d *descent) marked(pid int) (in, clear bool) {
	dir := "/proc/" + strconv.Itoa(pid)
	f, err := os.Open(dir + "/environ")
	if err != nil {
		return false, true
	}
	defer f.Close()
	env, err := io.ReadAll(io.LimitReader(f, maxEnviron))
	if err == nil && len(env) == 0 {
		args, err := os.ReadFile(dir + "/cmdline")
		return false, err != nil || len(args) > 0
	}
	want := []byte(markVariable + "=" + d.mark)
	for v := range bytes.SplitSeq(env, []byte{0}) {
		if bytes.Equal(v, want) {
			return true, true
		}
	}
	return false, true
}

// kill stops everything first, so that less forks away, then ends it, until nothing is found.
func (d *descent) kill() error {
	return killUntilEmpty(func() ([]int, error) {
		pids, err := d.pids()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGSTOP)
		}
		unclear := []int(nil)
		if more, not, err := d.look(); err == nil {
			pids, unclear = more, not
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return append(pids, unclear...), err
	})
}

func (d *descent) close() {}

// procStat is what parentage needs of /proc/PID/stat.
type procStat struct {
	pid, parent, session int
}

// processes lists all processes of the sandbox but the guest itself.
func processes() ([]procStat, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all := make([]procStat, 0, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() {
			continue
		}
		b, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it has ended
		}
		if p, ok := parseStat(b); ok {
			all = append(all, p)
		}
	}
	return all, nil
}

// parseStat reads proc_pid_stat(5). The name of the program is in parentheses and may hold any byte,
// so the fields are counted from the last one that closes. Zombies are left out: they are dead.
func parseStat(b []byte) (procStat, bool) {
	end := bytes.LastIndexByte(b, ')')
	begin := bytes.IndexByte(b, ' ')
	if begin < 0 || end < begin {
		return procStat{}, false
	}
	f := bytes.Fields(b[end+1:])
	if len(f) < 4 || f[0][0] == 'Z' || f[0][0] == 'X' {
		return procStat{}, false
	}
	pid, err1 := strconv.Atoi(string(b[:begin]))
	parent, err2 := strconv.Atoi(string(f[1]))
	session, err3 := strconv.Atoi(string(f[3]))
	return procStat{pid: pid, parent: parent, session: session}, err1 == nil && err2 == nil && err3 == nil
}
