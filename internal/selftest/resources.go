package selftest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// battleLimits are the limits of the sandboxes that the battery makes, small so that they are
// reached soon.
func battleLimits() Limits {
	return Limits{MemoryBytes: 512 << 20, CPUs: 1, Pids: 256, OpenFiles: 1024, DiskBytes: 128 << 20}
}

// keptOutput is more than a server keeps of one process's output.
const keptOutput = 32 << 20

// resourceCases are section D: taking more than one's share, and processes that do not want to end.
func resourceCases() []Case {
	return append(exhaustionCases(), endlessCases()...)
}

func exhaustionCases() []Case {
	return []Case{
		both(Case{
			ID: "D01", Class: PeerDoS, Title: "a fork bomb", Hostile: true, Timeout: 20 * time.Second,
			Python: `
import time
if os.fork() == 0:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2): os.dup2(null, fd)
    os.execv("/bin/sh", ["sh", "-c", "bomb() { bomb | bomb & }; bomb"])
print("lit"); sys.stdout.flush()
time.sleep(600)`,
			Check:     fewProcesses,
			Untwinned: "without a limit it would take the host; D16 has the bounded form",
		}, Want{Match: `^lit`, End: "timed_out"}),
		both(Case{
			ID: "D02", Class: PeerDoS, Title: "8 GB of memory", Hostile: true, Timeout: 10 * time.Minute,
			Python: `n = int(os.environ.get("SIZE", 8 << 30)); x = bytearray(n); print("HAS", len(x))`,
			Twin:   Unlimited, TwinEnv: map[string]string{"SIZE": "629145600"},
		}, Want{End: "oom_killed", Reject: `HAS`}),
		both(Case{
			ID: "D03", Class: PeerDoS, Title: "shared memory and /tmp", Hostile: true, Timeout: 10 * time.Minute,
			Script: `for f in /dev/shm/x /tmp/x; do dd if=/dev/zero of=$f bs=1M count=${COUNT:-99999} 2>&1 | grep -q -E 'No space|quota|Cannot allocate' && echo "stopped at $(($(stat -c %s $f) >> 20)) MiB" || echo UNBOUNDED $f
rm -f $f; done; echo done`,
			Twin: Unlimited, TwinEnv: map[string]string{"COUNT": "160"},
		}, Want{Match: `^done`, Reject: `UNBOUNDED`}),
		both(Case{
			ID: "D04", Class: SelfDoS, Title: "open files", Hostile: true,
			Python: `
files = []
try:
    while len(files) < int(os.environ.get("COUNT", 1 << 20)): files.append(os.open("/dev/null", 0))
    print("UNBOUNDED", len(files))
except OSError as e:
    print("stopped at", len(files), errno.errorcode[e.errno])`,
			Twin: Unlimited, TwinEnv: map[string]string{"COUNT": "1100"},
		}, Want{Match: `stopped at (10\d\d|\d{1,3}) EMFILE`}),
		both(Case{
			ID: "D05", Class: PeerDoS, Title: "files without bytes", Hostile: true, Timeout: 15 * time.Minute,
			// Where bytes limit the files, each is small, so that the disk decides how long this takes.
			Limits: &Limits{MemoryBytes: 256 << 20, CPUs: 1, Pids: 64, OpenFiles: 256, DiskBytes: 32 << 20},
			Python: `
top = "/tmp/many"; os.system("rm -rf " + top); os.mkdir(top); n = 0
try:
    while n < int(os.environ.get("COUNT", 1000000)):
        if n % 2000 == 0:
            d = os.path.join(top, str(n)); os.mkdir(d)
        os.close(os.open(os.path.join(d, str(n)), os.O_CREAT | os.O_WRONLY)); n += 1
    print("UNBOUNDED", n)
except OSError as e:
    print("stopped at", n, errno.errorcode[e.errno])`,
			Check: roomAgain("/tmp/many"), Twin: Unlimited, TwinEnv: map[string]string{"COUNT": "5000"},
		}, Want{Match: `stopped at \d+ E(NOSPC|DQUOT)`}),
		both(Case{
			ID: "D06", Class: PeerDoS, Title: "a full disk", Hostile: true, Timeout: 10 * time.Minute,
			Script: `dd if=/dev/zero of=$HOME/fill bs=1M count=${COUNT:-99999} 2>&1 | grep -q -E 'No space|quota' && echo stopped || echo UNBOUNDED; echo still here; ls $HOME >/dev/null && echo lists`,
			Check:  roomAgain("~/fill"), Twin: Unlimited, TwinEnv: map[string]string{"COUNT": "160"},
		}, Want{Match: `(?s)stopped.*still here.*lists`, Reject: `UNBOUNDED`}),
		both(Case{
			ID: "D07", Class: HostDoS, Title: "2 GB of output", Hostile: true, Timeout: 15 * time.Minute,
			Script: `yes | head -c ${SIZE:-2147483648}; echo; echo last words`,
			Check:  boundedOutput, Twin: Unlimited, TwinEnv: map[string]string{"SIZE": "34000000"},
		}, Want{Match: `^last words`}),
		both(Case{
			ID: "D08", Class: HostDoS, Title: "a line of 200 MB", Hostile: true, Timeout: 10 * time.Minute,
			Script: `head -c ${SIZE:-209715200} /dev/zero | tr '\0' x; echo; echo last words`,
			Check:  boundedOutput, Twin: Unlimited, TwinEnv: map[string]string{"SIZE": "34000000"},
		}, Want{Match: `^last words`}),
		both(Case{
			ID: "D14", Class: SelfDoS, Title: "processors that programs see", Twin: Unlimited,
			Script: `nproc; /usr/bin/python3 -c 'import os; print(len(os.sched_getaffinity(0)))'`,
		}, Want{Match: `^1$`, Reject: `^([2-9]|\d\d)`}),
		both(Case{
			ID: "D15", Class: PeerDoS, Title: "busy loops on all processors", Hostile: true, Timeout: 10 * time.Minute,
			Limits: &Limits{MemoryBytes: 256 << 20, CPUs: 0.2, Pids: 64, OpenFiles: 256, DiskBytes: 64 << 20},
			Script: `echo asked`, Check: takesItsShare, Twin: Unlimited, TwinAgain: true,
			// A machine that has much else to do gives little to an unlimited sandbox, too.
			TwinEnv: map[string]string{"LOOPS": "100"}, TwinLimits: &Limits{CPUs: 0.02},
		}, Want{Match: `asked`}),
		both(Case{
			ID: "D16", Class: PeerDoS, Title: "more processes than allowed", Hostile: true, Timeout: 10 * time.Minute,
			// Few, so that the memory that each takes does not end it sooner.
			Limits: &Limits{MemoryBytes: 512 << 20, CPUs: 1, Pids: 64, OpenFiles: 256, DiskBytes: 64 << 20},
			Python: `
import signal, time
children = []
try:
    while len(children) < 400:
        pid = os.fork()
        if pid == 0: time.sleep(60); os._exit(0)
        children.append(pid)
    print("UNBOUNDED", len(children))
except OSError as e:
    print("stopped at", len(children), errno.errorcode[e.errno])
for c in children: os.kill(c, signal.SIGKILL); os.waitpid(c, 0)`,
			Twin: Unlimited,
		}, Want{Match: `stopped at [1-6]?\d EAGAIN`}),
		both(Case{
			ID: "D17", Class: HostDoS, Title: "a directory tree 5,000 deep", Hostile: true, Timeout: 10 * time.Minute,
			Python: `
os.makedirs("/tmp/deep", exist_ok=True); os.chdir("/tmp/deep")
for _ in range(5000):
    os.mkdir("d"); os.chdir("d")
open("f", "w").close()
print("made")`,
			Check: listsAndRemoves, Untwinned: "nothing is refused: the walks over it must bear it",
		}, Want{Match: `^made`}),
		both(Case{
			ID: "D18", Class: HostDoS, Title: "terminals, watches and listening sockets", Hostile: true, Timeout: 10 * time.Minute,
			Python: kernelObjects, Twin: Unlimited, TwinEnv: map[string]string{"COUNT": "1100"},
		}, Want{Match: `(?s)terminals stopped.*sockets stopped`, Reject: `UNBOUNDED`}),
	}
}

// busyLoops keeps more processors busy than a sandbox has.
const busyLoops = `
import os, time
children = []
for _ in range(int(os.environ.get("LOOPS", 16))):
    try:
        pid = os.fork()
    except OSError: # the limit of processes
        break
    if pid == 0:
        end = time.monotonic() + 3
        while time.monotonic() < end: pass
        os._exit(0)
    children.append(pid)
for c in children: os.waitpid(c, 0)
print("looped")`

// takesItsShare compares what the host counts with what the case's limit allows. A sandbox's own count is not asked: a kernel
// of its own takes for its processes' time what the host gave to others.
func takesItsShare(ctx context.Context, a *attack) error {
	before, err := a.box.CPU(ctx)
	if err != nil {
		return err
	}
	begun := time.Now()
	r, err := a.box.Run(ctx, Command{Argv: []string{python, "-c", busyLoops}, Env: a.c.Env, User: a.user, Timeout: 10 * time.Minute})
	if err != nil || r.Output != "looped\n" {
		return errors.Join(fmt.Errorf("the loops ended as %s, printed %s", r.End, excerpt(r.Output)), err)
	}
	took := time.Since(begun)
	after, err := a.box.CPU(ctx)
	if err != nil {
		return err
	}
	cpus := a.c.Bounds().CPUs
	if share := float64(after-before) / float64(took); share > 1.5*cpus { // what serves the sandbox takes some
		return fmt.Errorf("it took %.2f processors, of which it may have %.2f", share, cpus)
	}
	return nil
}

// kernelObjects takes objects that the kernel keeps for a process, each until it is refused.
const kernelObjects = `
import socket, gc, resource
most = int(os.environ.get("COUNT", 10000))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
def take(name, make):
    held, n = [], 0
    try:
        while n < most:
            held.append(make()); n += 1
        print(name, "UNBOUNDED", n)
    except OSError as e:
        print(name, "stopped at", n, errno.errorcode[e.errno])
    for h in held:
        if isinstance(h, tuple):
            for f in h: os.close(f)
        elif isinstance(h, int): os.close(h)
        else: h.close()
def listening():
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(1); return s
take("terminals", os.openpty)
def watch():
    fd = libc.inotify_init()
    if fd < 0: raise OSError(ctypes.get_errno(), "inotify_init")
    return fd
take("watches", watch)
take("sockets", listening)
print("done")`

func endlessCases() []Case {
	return []Case{
		both(Case{
			ID: "D09", Class: SelfDoS, Title: "2,000 orphans", Hostile: true, Timeout: 10 * time.Minute,
			Script: `for i in $(seq 2000); do (true &); done; for i in $(seq 50); do z=$(grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l); [ $z = 0 ] && break; sleep 0.1; done; echo zombies $z`,
			Twin:   Unlimited,
		}, Want{Match: `^zombies 0$`}),
		both(Case{
			ID: "D10", Class: SelfDoS, Title: "a session of its own outlives the timeout", Hostile: true, Timeout: time.Second,
			Script: `setsid sleep 31337.5 & (setsid sleep 31337.5 &); sleep 31337.5`,
			Check:  noneLeft("31337.5"), Twin: Shared,
		}, Want{End: "timed_out"}),
		both(Case{
			ID: "D11", Class: SelfDoS, Title: "a process that ignores SIGTERM", Hostile: true, Timeout: time.Second,
			Script: `trap "" TERM INT HUP; sleep 31338.5 & while true; do sleep 31338.5; done`,
			Check:  endsSoon(time.Minute, "31338.5"), Untwinned: "what a timeout by SIGTERM alone does is seen in D10's twin",
		}, Want{End: "timed_out"}),
		both(Case{
			ID: "D12", Class: SelfDoS, Title: "a child that keeps the output open", Hostile: true, Timeout: 5 * time.Minute,
			Script: `sleep 31339.5 & echo parent done`, Check: endsSoon(time.Minute, ""),
			Untwinned: "nothing is refused: the caller must not wait for the child",
		}, Want{Match: `^parent done`}),
		both(Case{
			ID: "D13", Class: HostDoS, Title: "killing everything that has a number", Hostile: true, Timeout: 10 * time.Minute,
			Script: `kill -STOP 1 2>/dev/null; for p in $(seq 2 5000); do [ $p = $$ ] || kill -9 $p 2>/dev/null; done; kill -9 -1 2>/dev/null; echo mine remain`,
			Check:  stillAnswers, Untwinned: "in the host's pid namespace it would end the host's processes",
		}, Want{End: "exited or signaled or canceled"}),
		both(Case{
			ID: "D20", Class: Compat, Title: "a here-document",
			Script: "cat > /tmp/here <<'E'\none\ntwo\nE\nwc -l < /tmp/here; rm /tmp/here", Check: stillAnswers,
			Untwinned: "nothing is defended: it must work",
		}, Want{Match: `^2$`}),
	}
}

// roomAgain removes what filled the disk and wants that writing works again.
func roomAgain(path string) func(context.Context, *attack) error {
	return func(ctx context.Context, a *attack) error {
		if _, err := a.box.List(ctx, "/tmp"); err != nil {
			return fmt.Errorf("the file API fails on a full disk: %w", err)
		}
		r, err := a.box.Run(ctx, Command{
			Argv: []string{"/bin/sh", "-c", `rm -rf ` + path + `; for i in $(seq 100); do head -c 100000 /dev/zero > /tmp/again 2>/dev/null && break; sleep 0.1; done; rm -f /tmp/again && echo again`},
			User: a.user, Timeout: 10 * time.Minute,
		})
		if err != nil {
			return fmt.Errorf("no process starts on a full disk: %w", err)
		}
		if !strings.HasSuffix(r.Output, "again\n") {
			return fmt.Errorf("no room after what filled the disk was removed: %s", excerpt(r.Output))
		}
		return nil
	}
}

// fewProcesses wants that a whole tree is gone, as it is when its timeout has struck.
func fewProcesses(ctx context.Context, a *attack) error {
	const script = `for i in $(seq 50); do n=$(ls -d /proc/[0-9]* 2>/dev/null | wc -l); [ $n -lt 10 ] && break; sleep 0.1; done; echo $n`
	r, err := a.box.Run(ctx, Command{Argv: []string{"/bin/sh", "-c", script}, User: a.user, Timeout: 5 * time.Minute})
	if err != nil {
		return err
	}
	if n, err := strconv.Atoi(strings.TrimSpace(r.Output)); err != nil || n >= 10 {
		return fmt.Errorf("%s processes are left", strings.TrimSpace(r.Output))
	}
	return nil
}

// boundedOutput wants that all output was counted and not all of it kept.
func boundedOutput(_ context.Context, a *attack) error {
	if n := len(a.result.Output); n > keptOutput {
		return fmt.Errorf("%d bytes of output were kept", n)
	}
	if a.result.Bytes < keptOutput {
		return fmt.Errorf("%d bytes of output were counted", a.result.Bytes)
	}
	return nil
}

func listsAndRemoves(ctx context.Context, a *attack) error {
	if _, err := a.box.List(ctx, "/tmp/deep"); err != nil {
		return fmt.Errorf("list it: %w", err)
	}
	r, err := a.box.Run(ctx, Command{Argv: []string{"/bin/sh", "-c", "rm -rf /tmp/deep && echo removed"}, User: a.user, Timeout: 10 * time.Minute})
	if err != nil {
		return fmt.Errorf("remove it: %w", err)
	}
	if r.Output != "removed\n" {
		return fmt.Errorf("remove it: ended as %s, printed %s", r.End, excerpt(r.Output))
	}
	return nil
}

// noneLeft wants that no process inside sleeps that many seconds.
func noneLeft(seconds string) func(context.Context, *attack) error {
	script := `for i in $(seq 30); do n=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -o '[s]leep ` + seconds + `' | wc -l); [ $n = 0 ] && break; sleep 0.1; done; echo $n`
	return func(ctx context.Context, a *attack) error {
		r, err := a.box.Run(ctx, Command{Argv: []string{"/bin/sh", "-c", script}, User: a.user, Timeout: 5 * time.Minute})
		if err != nil {
			return err
		}
		// The pattern's brackets keep the script from finding its own text.
		if n, err := strconv.Atoi(strings.TrimSpace(r.Output)); err != nil || n > 0 {
			return fmt.Errorf("%s processes of the tree are left", strings.TrimSpace(r.Output))
		}
		return nil
	}
}

func endsSoon(limit time.Duration, seconds string) func(context.Context, *attack) error {
	return func(ctx context.Context, a *attack) error {
		if a.result.Took > limit {
			return fmt.Errorf("it took %v to end", a.result.Took.Round(time.Millisecond))
		}
		if seconds == "" {
			return nil
		}
		return noneLeft(seconds)(ctx, a)
	}
}
