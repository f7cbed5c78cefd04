package spawn_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guest/signals"
	"casemate.dev/internal/guest/spawn"
)

// stage is what the guest has when the play begins.
type stage struct {
	sp     *spawn.Spawner
	scope  spawn.Scope
	thaw   *os.File // the scope's freezer.state
	report report
}

// guestMain is PID 1: it builds a little root, puts up the walls, and runs the script.
func guestMain() {
	runtime.LockOSThread()                 // still on the main thread; see below
	signal.Notify(make(chan os.Signal, 1)) // as the real guest: handlers for everything
	var s script
	must(json.NewDecoder(os.Stdin).Decode(&s))
	imageFile := os.NewFile(3, "image")
	image, err := io.ReadAll(io.NewSectionReader(imageFile, 0, 1<<30)) // by descriptor: the file is not readable inside
	must(err)
	must(imageFile.Close())
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount("proc", "/proc", "proc", 0, ""))
	must(unix.Mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777"))
	must(unix.Mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620,gid=5"))
	must(os.WriteFile("/tmp/probe", image, 0o755))
	must(os.WriteFile("/tmp/int80", int80(), 0o755))
	must(os.WriteFile("/tmp/plain", nil, 0o644))
	must(os.Mkdir("/tmp/private", 0o700))

	st := &stage{report: report{Output: map[string]string{}, Status: map[string]string{}}}
	var join []*os.File
	for i, role := range s.Files {
		unix.CloseOnExec(4 + i)
		f := os.NewFile(uintptr(4+i), role)
		switch role {
		case "join":
			join = append(join, f)
		case "freezer":
			st.thaw = f
		default:
			st.scope.Layout = append(st.scope.Layout, role)
			st.scope.Files = append(st.scope.Files, f)
		}
	}
	// As the guest does: else what whoever started the test ignores, say SIGINT, is ignored inside.
	must(signals.Shield())
	// With one processor, and this goroutine on the main thread, the next goroutine to run gets the main
	// thread: the spawner's, which must not take it.
	processors := runtime.GOMAXPROCS(1)
	runtime.UnlockOSThread()
	st.sp, err = spawn.New(s.Walls, join)
	runtime.GOMAXPROCS(processors)
	if err != nil {
		st.report.Error = err.Error()
	} else {
		st.play(s)
		must(st.sp.Close())
	}
	must(json.NewEncoder(os.Stdout).Encode(st.report))
	os.Exit(0)
}

func (st *stage) play(s script) {
	st.report.Applied = st.sp.Applied()
	switch {
	case s.Freeze:
		st.frozen(s.Runs[0], s.Stop)
	case s.Hold:
		st.hold(s.Runs)
	default:
		for _, x := range s.Runs {
			st.one(x)
		}
	}
	st.hammer(s.Hammer)
	st.bench(s.Bench)
}

// attr returns what x means, with its output going to w.
func (st *stage) attr(x run, w *os.File) spawn.Attr {
	a := spawn.Attr{
		Paths: x.Paths, Argv: x.Argv, Dir: x.Dir, UID: x.UID, GID: x.GID, Groups: x.Groups,
		Env: []string{"PATH=/usr/bin:/bin", "GOMAXPROCS=1"}, Setsid: true, Ctty: -1, Scope: st.scope,
		Files: []uintptr{w.Fd(), w.Fd(), w.Fd()}, Reach: x.Reach,
	}
	if x.Probe != "" {
		a.Argv, a.Paths = []string{"probe", "play-probe", x.Probe}, []string{"/tmp/probe"}
	}
	return a
}

// one starts a process, reads all it says, and waits for it.
func (st *stage) one(x run) {
	pr, pw, err := os.Pipe()
	must(err)
	a := st.attr(x, pw)
	if x.TTY {
		master, slave := openTTY()
		defer master.Close()
		defer slave.Close()
		a.Files[0], a.Ctty = slave.Fd(), 0
	}
	var pid int
	if x.Worker {
		pid, err = st.sp.StartWorker(spawn.Worker{Args: []string{"play-worker"}, Socket: pw, UID: x.UID, GID: x.GID, Scope: st.scope})
	} else {
		pid, err = st.sp.Start(a)
	}
	must(pw.Close())
	defer pr.Close()
	if err != nil {
		st.report.Status[x.Name] = err.Error()
		var e *spawn.Error
		if errors.As(err, &e) && e.Step != spawn.StepCheck && e.Step != spawn.StepFork {
			must2(unix.Wait4(-1, nil, 0, nil)) // the child that failed, which nobody else may have waited for
		}
		return
	}
	out, err := io.ReadAll(pr)
	must(err)
	st.report.Output[x.Name] = strings.TrimSpace(string(out))
	st.report.Status[x.Name] = waitFor(pid)
}

func waitFor(pid int) string {
	var ws unix.WaitStatus
	must2(unix.Wait4(pid, &ws, 0, nil))
	if ws.Signaled() {
		return fmt.Sprintf("signal %d", ws.Signal())
	}
	return fmt.Sprintf("exit %d", ws.ExitStatus())
}

// frozen starts x into a scope that is frozen: the child stops between fork and exec. Meanwhile the
// collector must get through, which stops every goroutine that holds a processor.
func (st *stage) frozen(x run, stop bool) {
	must2(st.thaw.WriteString("FROZEN"))
	done := make(chan int)
	go func() {
		pid, err := st.sp.Start(st.attr(x, os.Stderr))
		must(err)
		done <- pid
	}()
	for range 20 {
		time.Sleep(time.Millisecond) // not to order anything: only to let the start get into the kernel
		runtime.GC()
	}
	select {
	case <-done:
		st.report.Status["while frozen"] = "started"
	default:
		st.report.Status["while frozen"] = "stuck, and the collector ran"
	}
	if stop {
		must(unix.Kill(-1, unix.SIGSTOP)) // all but PID 1 itself, which is the child alone
	}
	must2(st.thaw.WriteString("THAWED"))
	st.report.Status[x.Name] = waitFor(<-done)
}

// hold starts the runs, says so, and ends them when standard input ends.
func (st *stage) hold(runs []run) {
	var pids []int
	for _, x := range runs {
		pid, err := st.sp.Start(st.attr(x, os.Stderr))
		must(err)
		pids = append(pids, pid)
	}
	fmt.Fprintln(os.Stderr, "held")
	must2(io.Copy(io.Discard, os.Stdin))
	for i, pid := range pids {
		must(unix.Kill(pid, unix.SIGKILL))
		st.report.Status[runs[i].Name] = waitFor(pid)
	}
}

// hammer starts processes from many goroutines at once while the collector runs without a break and
// preempts by signals.
func (st *stage) hammer(n int) {
	if n == 0 {
		return
	}
	stop := make(chan struct{})
	var wg, gc sync.WaitGroup
	gc.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	var mu sync.Mutex
	for g := range n {
		wg.Go(func() {
			for i := range 25 {
				x := run{Paths: []string{"/bin/nothing", "/bin/sh"}, Argv: []string{"sh", "-c", fmt.Sprintf("exit %d", g+i)}, UID: 1000, GID: 1000}
				pid, err := st.sp.Start(st.attr(x, os.Stderr))
				must(err)
				got := waitFor(pid)
				mu.Lock()
				if want := fmt.Sprintf("exit %d", g+i); got != want {
					st.report.Status["hammer"] = fmt.Sprintf("%s, want %s", got, want)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	close(stop)
	gc.Wait()
}

// bench starts /bin/true n times, one after the other, and in turns with them by the standard
// library's fork and exec, from PID 1 itself and without any walls.
func (st *stage) bench(n int) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	must(err)
	a := st.attr(run{Paths: []string{"/bin/true"}, Argv: []string{"true"}, UID: 1000, GID: 1000}, null)
	for range n {
		start := time.Now()
		pid, err := st.sp.Start(a)
		must(err)
		waitFor(pid)
		st.report.Spawner = append(st.report.Spawner, time.Since(start).Nanoseconds())
		start = time.Now()
		pid, err = syscall.ForkExec(a.Paths[0], a.Argv, &syscall.ProcAttr{
			Files: a.Files, Env: a.Env, Sys: &syscall.SysProcAttr{Setsid: true},
		})
		must(err)
		waitFor(pid)
		st.report.Plain = append(st.report.Plain, time.Since(start).Nanoseconds())
	}
}

func openTTY() (master, slave *os.File) {
	m, err := unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	must(err)
	must(unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetUint32(m, unix.TIOCGPTN)
	must(err)
	s, err := unix.Open(fmt.Sprintf("/dev/pts/%d", n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	must(err)
	return os.NewFile(uintptr(m), "ptmx"), os.NewFile(uintptr(s), "pts")
}

func must(err error) {
	if err != nil {
		for i := 1; i < 4; i++ {
			_, file, line, _ := runtime.Caller(i)
			fmt.Fprintf(os.Stderr, "%s:%d\n", file, line)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}

func must2[T any](_ T, err error) { must(err) }
