package guest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guest"
	"casemate.dev/internal/guest/files"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/landlock"
	"casemate.dev/internal/testenv"
)

// initArg makes the test binary the first process of a sandbox.
const initArg = "guest-init"

// setup tells the first process what to be.
type setup struct {
	Locked bool // profile locked instead of standard
	Output int64
	User   string
	Walls  guestwire.Walls
	// home is the control group of version 2 that the guest is born in, "" for none.
	home string
}

// walled returns the walls of a profile as the server makes them.
func walled(t testing.TB, locked, v2 bool) guestwire.Walls {
	t.Helper()
	abi, err := landlock.ABI()
	if err != nil {
		t.Fatal(err)
	}
	profile := isolation.Standard
	if locked {
		profile = isolation.Locked
	}
	plan, err := walls.ForProfile(profile, walls.Host{Arch: runtime.GOARCH, LandlockABI: abi, CloneIntoCgroup: v2}, walls.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return plan.Walls
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case initArg:
			fail(runInit())
		case files.Arg:
			fail(files.Main())
		}
	}
	os.Exit(m.Run())
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// hostUID is the first of the uids that test sandboxes use.
const hostUID = 900_000_000

// start runs a guest in new namespaces with a small root of its own, and returns a client of it.
func start(t testing.TB, s setup) *guestwire.Client {
	c, _ := startPID(t, s)
	return c
}

func startPID(t testing.TB, s setup) (*guestwire.Client, int) {
	t.Helper()
	testenv.Root(t)
	dir := testenv.RunDir(t)
	path := filepath.Join(dir, "g")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	lf, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	s.Walls = walled(t, s.Locked, s.home != "")
	conf, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(fmt.Sprint("/proc/self/fd/", sealed().Fd()), initArg, string(conf), root)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	// Else the runtime keeps files of the control groups open that this test's host has.
	cmd.Env = []string{"GODEBUG=containermaxprocs=0,updatemaxprocs=0"}
	cmd.ExtraFiles = []*os.File{lf}
	ids := []syscall.SysProcIDMap{{HostID: hostUID, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS |
			unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, Pdeathsig: syscall.SIGKILL,
	}
	if s.home != "" {
		home, err := os.Open(s.home)
		if err != nil {
			t.Fatal(err)
		}
		defer home.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(home.Fd())
	}
	// Pdeathsig is about the thread that forked.
	forked := make(chan error)
	stop := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		forked <- cmd.Start()
		<-stop
	}()
	if err := <-forked; err != nil {
		t.Fatal(err)
	}
	_ = lf.Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		close(stop)
	})
	c := guestwire.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	})
	testenv.Eventually(t, 10*time.Second, "guest answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Status(ctx)
		return err == nil
	})
	return c, cmd.Process.Pid
}

// sealed returns the test binary as the server passes the guest: in memory, executable by all and
// readable by root of the host only.
var sealed = sync.OnceValue(func() *os.File {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		panic(err)
	}
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if err != nil {
		panic(err)
	}
	f := os.NewFile(uintptr(fd), "guest")
	if _, err := f.Write(b); err != nil {
		panic(err)
	}
	if err := f.Chmod(0o711); err != nil {
		panic(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		panic(err)
	}
	return f
})

// runInit builds a root and serves.
func runInit() error {
	var s setup
	if err := json.Unmarshal([]byte(os.Args[2]), &s); err != nil {
		return err
	}
	// What the test's own parents left open must not reach the processes.
	if err := unix.CloseRange(4, 1<<30, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	if err := buildRoot(os.Args[3]); err != nil {
		return fmt.Errorf("build root: %w", err)
	}
	lf := os.NewFile(3, "listener")
	l, err := net.FileListener(lf)
	_ = lf.Close()
	if err != nil {
		return err
	}
	user := s.User
	if user == "" {
		user = "user"
	}
	spawner, err := spawn.New(s.Walls, nil)
	if err != nil {
		return err
	}
	return guest.Serve(context.Background(), l, guest.Config{
		Spawner: spawner, SingleUser: s.Locked, User: user, Output: s.Output,
		Env: map[string]string{"FROM": "template", "LAYER": "template"},
	})
}

const passwd = `root:x:0:0:root:/root:/bin/sh
user:x:1000:1000:User:/home/user:/bin/bash
other:x:1001:1001::/home/other:
broken line
bad:x:notanumber:0::/:/bin/sh
`

const group = `root:x:0:
user:x:1000:
tty:x:5:
extra:x:2000:other,user
nobody-in:x:2001:other
`

// buildRoot makes a root of tmpfs with the host's programs, and makes it the process's own.
func buildRoot(root string) error {
	if err := loopback(); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, d := range []string{"usr", "etc", "dev", "proc", "tmp", "root", "home", "home/user", "home/other", "run", "old"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	steps := []error{
		os.Chmod(filepath.Join(root, "tmp"), 0o1777),
		os.Chown(filepath.Join(root, "home/user"), 1000, 1000),
		os.Chown(filepath.Join(root, "home/other"), 1001, 1001),
		os.WriteFile(filepath.Join(root, "etc/passwd"), []byte(passwd), 0o644),
		os.WriteFile(filepath.Join(root, "etc/group"), []byte(group), 0o644),
		unix.Mount("/usr", filepath.Join(root, "usr"), "", unix.MS_BIND|unix.MS_REC, ""),
		unix.Mount("proc", filepath.Join(root, "proc"), "proc", 0, ""),
		os.Symlink("/proc/self/fd", filepath.Join(root, "dev/fd")),
		os.Symlink("/proc/self/fd/0", filepath.Join(root, "dev/stdin")),
		os.Symlink("/proc/self/fd/1", filepath.Join(root, "dev/stdout")),
		os.Symlink("/proc/self/fd/2", filepath.Join(root, "dev/stderr")),
		os.Symlink("pts/ptmx", filepath.Join(root, "dev/ptmx")),
		os.Mkdir(filepath.Join(root, "dev/pts"), 0o755),
		os.Mkdir(filepath.Join(root, "dev/shm"), 0o755),
		unix.Mount("tmpfs", filepath.Join(root, "dev/shm"), "tmpfs", 0, "mode=1777,size=16m"),
	}
	for _, link := range []string{"bin", "sbin", "lib", "lib64"} {
		steps = append(steps, os.Symlink("usr/"+link, filepath.Join(root, link)))
	}
	for _, dev := range []string{"null", "zero", "urandom", "tty"} {
		p := filepath.Join(root, "dev", dev)
		steps = append(steps, os.WriteFile(p, nil, 0o666), unix.Mount("/dev/"+dev, p, "", unix.MS_BIND, ""))
	}
	steps = append(steps,
		unix.Mount("devpts", filepath.Join(root, "dev/pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=0620,gid=5"),
		unix.PivotRoot(root, filepath.Join(root, "old")),
		os.Chdir("/"),
		unix.Unmount("/old", unix.MNT_DETACH),
		os.Remove("/old"),
	)
	return errors.Join(steps...)
}

func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// serial numbers process ids.
func (r *runner) serial() string {
	return "p" + strconv.FormatInt(r.n.Add(1), 10)
}
