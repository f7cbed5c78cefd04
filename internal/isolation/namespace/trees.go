package namespace

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/mount"
)

// trees makes what sandboxes see on /dev and /sys: one small file system each, filled once and then
// given to every sandbox as a read-only copy of its mount. That is three calls per sandbox instead
// of some fifty, and nothing in them can be replaced from inside.
//
// A mount can be copied only in the mount namespace that it is in (open_tree(2)), and on kernels
// before 6.15 only while it is attached. So a thread with a mount namespace of its own holds them;
// they go with the process, however it ends.
type trees struct {
	requests chan treeRequest
	done     chan struct{}
	close    sync.Once
}

type treeRequest struct {
	name  string
	cpus  []int // for sys
	reply chan treeReply
}

type treeReply struct {
	f   *os.File
	err error
}

func newTrees() (*trees, error) {
	t := &trees{requests: make(chan treeRequest), done: make(chan struct{})}
	ready := make(chan error)
	go offMainThread(func() { t.serve(ready) })
	if err := <-ready; err != nil {
		<-t.done
		return nil, err
	}
	return t, nil
}

// dev returns a new detached copy of the tree for /dev.
func (t *trees) dev() (*os.File, error) { return t.ask(treeRequest{name: "dev"}) }

// sys returns a new detached copy of the tree for /sys that shows the given CPUs.
func (t *trees) sys(cpus []int) (*os.File, error) {
	return t.ask(treeRequest{name: "sys-" + cpuList(cpus), cpus: cpus})
}

// empty returns a new detached copy of an empty directory.
func (t *trees) empty() (*os.File, error) { return t.ask(treeRequest{name: "empty"}) }

func (t *trees) ask(r treeRequest) (*os.File, error) {
	r.reply = make(chan treeReply, 1)
	select {
	case t.requests <- r:
		a := <-r.reply
		return a.f, a.err
	case <-t.done:
		return nil, errors.New("the trees are closed")
	}
}

// stop ends the thread, and with it the namespace and what is mounted in it.
func (t *trees) stop() {
	t.close.Do(func() { close(t.requests) })
	<-t.done
}

// offMainThread runs f locked to a thread that ends with it. Never the main one: that can't end, and
// /proc/self shows its namespaces as the whole process's.
func offMainThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	// While the main thread is held here, another goroutine gets another one.
	held := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(held)
		f()
	}()
	<-held
	runtime.UnlockOSThread()
}

// serve answers requests until stop.
func (t *trees) serve(ready chan<- error) {
	defer close(t.done)
	err := enterTreeNamespace()
	ready <- err
	if err != nil {
		return
	}
	made := map[string]bool{}
	for r := range t.requests {
		f, err := tree(r, made)
		r.reply <- treeReply{f, err}
	}
}

// enterTreeNamespace leaves the thread with a mount namespace that holds an empty tmpfs as working
// directory. CLONE_FS is implied: root and working directory are the thread's own from here on.
func enterTreeNamespace() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	// Nothing goes out, but unmounts come in: else this copy would keep the server's file systems busy.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("cut mounts off: %w", err)
	}
	// /proc surely exists, and nothing on this thread needs it.
	if err := unix.Mount("trees", "/proc", "tmpfs", 0, "mode=700"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	return os.NewSyscallError("chdir", unix.Chdir("/proc"))
}

func tree(r treeRequest, made map[string]bool) (*os.File, error) {
	if !made[r.name] {
		if err := makeTree(r); err != nil {
			return nil, fmt.Errorf("make tree %s: %w", r.name, err)
		}
		made[r.name] = true
	}
	m, err := mount.Clone(r.name, false)
	if err != nil {
		return nil, err
	}
	set := mount.ReadOnly | mount.NoSuid | mount.NoExec
	if r.name != "dev" {
		set |= mount.NoDev
	}
	if err := mount.SetAttr(m, mount.Change{Set: set}); err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

func makeTree(r treeRequest) error {
	if err := unix.Mkdir(r.name, 0o755); err != nil {
		return os.NewSyscallError("mkdir", err)
	}
	// mode 755, not tmpfs's usual 1777: in a sticky directory that everybody may write to,
	// "> /dev/null" fails (fs.protected_regular; HARDENING 8).
	if err := unix.Mount("tmpfs", r.name, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	switch r.name {
	case "dev":
		return makeDev(r.name)
	case "empty":
		return nil
	}
	return makeSys(r.name, r.cpus)
}

// makeDev makes the devices that every program expects and no sandbox can harm with.
func makeDev(dir string) error {
	devices := []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}
	for _, d := range devices {
		name := path.Join(dir, d.name)
		if err := unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return &os.PathError{Op: "mknod", Path: d.name, Err: err}
		}
		// The umask took its part.
		if err := unix.Chmod(name, 0o666); err != nil {
			return &os.PathError{Op: "chmod", Path: d.name, Err: err}
		}
	}
	links := []struct{ name, to string }{
		{"fd", "/proc/self/fd"},
		{"stdin", "/proc/self/fd/0"},
		{"stdout", "/proc/self/fd/1"},
		{"stderr", "/proc/self/fd/2"},
		{"ptmx", "pts/ptmx"},
	}
	for _, l := range links {
		if err := unix.Symlink(l.to, path.Join(dir, l.name)); err != nil {
			return &os.PathError{Op: "symlink", Path: l.name, Err: err}
		}
	}
	return makeDirs(dir, "pts", "shm")
}

// makeSys makes what programs look up in /sys: which CPUs there are, and directories that they list.
// CPUs are counted by the directories' names, too (glibc before 2.34).
func makeSys(dir string, cpus []int) error {
	err := makeDirs(dir, "block", "bus", "class", "class/net", "dev", "devices", "devices/system",
		"devices/system/cpu", "devices/system/node", "fs", "fs/cgroup", "kernel", "kernel/mm",
		"kernel/mm/transparent_hugepage", "module", "power")
	if err != nil {
		return err
	}
	for _, cpu := range cpus {
		if err := makeDirs(dir, "devices/system/cpu/cpu"+strconv.Itoa(cpu)); err != nil {
			return err
		}
	}
	list := cpuList(cpus) + "\n"
	files := []struct{ name, text string }{
		{"devices/system/cpu/online", list},
		{"devices/system/cpu/possible", list},
		{"devices/system/cpu/present", list},
		{"devices/system/node/online", "0\n"},
		// Go's runtime and jemalloc read it; with "never" they need no page size.
		{"kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"},
	}
	for _, f := range files {
		p := path.Join(dir, f.name)
		if err := os.WriteFile(p, []byte(f.text), 0o444); err != nil {
			return err
		}
		if err := unix.Chmod(p, 0o444); err != nil {
			return &os.PathError{Op: "chmod", Path: f.name, Err: err}
		}
	}
	return nil
}

func makeDirs(dir string, names ...string) error {
	for _, name := range names {
		p := path.Join(dir, name)
		if err := unix.Mkdir(p, 0o755); err != nil {
			return &os.PathError{Op: "mkdir", Path: name, Err: err}
		}
		if err := unix.Chmod(p, 0o755); err != nil {
			return &os.PathError{Op: "chmod", Path: name, Err: err}
		}
	}
	return nil
}

// cpuList formats CPUs as the kernel does: "0-2,5".
func cpuList(cpus []int) string {
	var b strings.Builder
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(cpus[i]))
		if j > i {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(cpus[j]))
		}
		i = j + 1
	}
	return b.String()
}
