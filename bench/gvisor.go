package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"casemate.dev/client"
)

const gvisorName = "gvisor"

// gvisorSandbox makes a sandbox of isolation gvisor. ok is false where the server has none.
func (b *bench) gvisorSandbox(ctx context.Context) (id string, ok bool, err error) {
	id, err = b.createOn(ctx, gvisorName)
	if client.KindOf(err) == client.Unsupported {
		return "", false, nil
	}
	return id, err == nil, err
}

var noGvisor = Row{Unit: "ms", Note: "the server has no runsc"}

// gvisorRow times a create on gVisor with the first output of a process, in turns with whole runs of runsc, and with runsc's
// own sandboxexec to its first output; and waking: of a frozen one, and of one whose memory is on disk.
func gvisorRow(ctx context.Context, b *bench) (Row, error) {
	var ours, wake, disk, theirs, execs []time.Duration
	runsc := b.peer(runscName)
	own, err := newSandboxExec(ctx, runsc)
	if err != nil {
		return Row{}, err
	}
	defer own.close()
	for range b.rounds(20) {
		begun := time.Now()
		id, ok, err := b.gvisorSandbox(ctx)
		if err != nil || !ok {
			return noGvisor, err
		}
		err = b.hello(ctx, id)
		ours = append(ours, time.Since(begun))
		if err == nil {
			err = b.wakeUp(ctx, id, b.c.Sandboxes.Pause, &wake)
		}
		if err == nil {
			err = b.wakeUp(ctx, id, b.c.Sandboxes.PauseToDisk, &disk)
		}
		if err = errors.Join(err, b.delete(ctx, id)); err != nil {
			return Row{}, err
		}
		if runsc == nil {
			continue
		}
		took, err := repeat(ctx, 1, func() error { return runsc.run(ctx) })
		if err != nil {
			return Row{}, err
		}
		theirs = append(theirs, took...)
		if own == nil {
			continue
		}
		one, err := own.run(ctx)
		if err != nil {
			return Row{}, err
		}
		execs = append(execs, one)
	}
	r := Row{Unit: "ms", Stats: summarize(ours), Peers: map[string]Stats{
		"wake from frozen": summarize(wake), "wake from disk": summarize(disk),
	}}
	r.budget("wake from frozen p50 ≤ 20 ms", r.Peers["wake from frozen"].P50, 20, 0)
	if runsc == nil {
		r.Note = "runsc is not in the PATH, so there is nothing to compare with"
		return r, nil
	}
	r.Peers[runscName] = summarize(theirs)
	if own != nil {
		r.Peers["runsc sandboxexec"] = summarize(execs)
	}
	r.budget("p50 ≤ 1.2 × runsc run", r.P50, 1.2*r.Peers[runscName].P50, r.Peers[runscName].P50)
	return r, nil
}

func (b *bench) peer(name string) *peer {
	for i := range b.peers {
		if b.peers[i].name == name {
			return &b.peers[i]
		}
	}
	return nil
}

// wakeUp pauses a sandbox, and times its resume.
func (b *bench) wakeUp(ctx context.Context, id string, pause func(context.Context, string) (*client.Sandbox, error), all *[]time.Duration) error {
	if _, err := pause(ctx, id); err != nil {
		return err
	}
	begun := time.Now()
	_, err := b.c.Sandboxes.Resume(ctx, id)
	*all = append(*all, time.Since(begun))
	return err
}

// heldBytes is what the Python process of liveFork holds.
const heldBytes = 200 << 20

// holder is a Python program that holds bytes that are not zero, says so, and lives.
func holder(bytes int) string {
	return fmt.Sprintf("import os, time\nb = os.urandom(1 << 20) * %d\nprint(len(b), flush=True)\ntime.sleep(100000)\n", bytes>>20)
}

// liveFork forks a sandbox with a process of 200 MB, to the first output of a process in the fork, and resumes one like it
// from disk, in turns with runsc, which restores such a process by itself.
func liveFork(ctx context.Context, b *bench) (row Row, err error) {
	id, ok, err := b.gvisorSandbox(ctx)
	if err != nil || !ok {
		return noGvisor, err
	}
	defer func() { err = errors.Join(err, b.delete(ctx, id), b.forget(ctx, id)) }()
	if err := b.hold(ctx, id); err != nil {
		return Row{}, err
	}
	bare, err := newBareRestore(ctx, b.peer(runscName))
	if err != nil {
		return Row{}, err
	}
	defer bare.close()
	var ours, frozen, disk, theirs []time.Duration
	for range b.rounds(10) {
		took, err := b.answering(ctx, func() (string, error) {
			forks, err := b.c.Commits.Fork(ctx, &client.ForkRequest{Sandbox: id, Live: true})
			if err != nil {
				return "", err
			}
			frozen = append(frozen, forks.GetCommit().GetFrozen().AsDuration())
			if f := forks.GetForks()[0]; f.GetSandbox() == nil {
				return "", errors.New(f.GetError())
			}
			return forks.GetForks()[0].GetSandbox().GetId(), nil
		})
		if err == nil {
			ours = append(ours, took)
			err = b.wakeUp(ctx, id, b.c.Sandboxes.PauseToDisk, &disk)
		}
		if err == nil && bare != nil {
			took, err = bare.restore(ctx)
			theirs = append(theirs, took)
		}
		if err = errors.Join(err, b.forget(ctx, id)); err != nil {
			return Row{}, err
		}
	}
	r := Row{Unit: "ms", Stats: summarize(ours), Peers: map[string]Stats{
		"pause of the parent": summarize(frozen), "wake from disk": summarize(disk),
	}}
	r.budget("pause of the parent p50 ≤ 100 ms", r.Peers["pause of the parent"].P50, 100, 0)
	if bare != nil {
		r.Peers["runsc restore"] = summarize(theirs)
		r.budget("wake from disk p50 ≤ 1.5 × runsc restore", r.Peers["wake from disk"].P50, 1.5*r.Peers["runsc restore"].P50, r.Peers["runsc restore"].P50)
	}
	return r, nil
}

// hold starts a process that holds memory, and waits until it does.
func (b *bench) hold(ctx context.Context, id string) error {
	_, err := b.shell(ctx, id, "python3 -c '"+holder(heldBytes)+"' >/tmp/held 2>&1 & until [ -s /tmp/held ]; do sleep 0.1; done")
	return err
}

// bareRestore is a process in a plain runsc that was saved, to be restored again and again. A nil one restores nothing.
type bareRestore struct {
	dir, bundle string
	serial      int
}

// newBareRestore saves a process of 200 MB.
func newBareRestore(ctx context.Context, runsc *peer) (*bareRestore, error) {
	if runsc == nil {
		return nil, nil
	}
	dir, err := os.MkdirTemp("", "casemate-bench-restore")
	if err != nil {
		return nil, err
	}
	r := &bareRestore{dir: dir}
	if r.bundle, err = makeBundle(dir, "/usr/bin/python3", "-c", holder(heldBytes)); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	err = r.start(ctx, "first", "run", "--detach", "--bundle", r.bundle)
	if err == nil {
		err = r.held(ctx)
	}
	if err == nil {
		err = r.runsc(ctx, "checkpoint", "--image-path", filepath.Join(dir, "image"), "--compression", "none", "first")
	}
	if err = errors.Join(err, r.runsc(ctx, "delete", "--force", "first")); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *bareRestore) args(args ...string) []string {
	return append([]string{"--root", filepath.Join(r.dir, "state"), "--network=none", "--ignore-cgroups"}, args...)
}

func (r *bareRestore) runsc(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, runscName, r.args(args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("runsc %s: %w: %s", args[0], err, out)
	}
	return nil
}

// start runs a command that leaves a process behind, whose output goes to a file.
func (r *bareRestore) start(ctx context.Context, id string, args ...string) error {
	f, err := os.Create(filepath.Join(r.dir, "held"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.CommandContext(ctx, runscName, r.args(append(args, id)...)...)
	cmd.Stdout, cmd.Stderr = f, f
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(f.Name())
		return fmt.Errorf("runsc %s: %w: %s", args[0], err, text)
	}
	return nil
}

// held waits until the process has its memory.
func (r *bareRestore) held(ctx context.Context) error {
	for ctx.Err() == nil {
		if info, err := os.Stat(filepath.Join(r.dir, "held")); err == nil && info.Size() > 0 {
			return nil
		}
		<-time.After(10 * time.Millisecond)
	}
	return ctx.Err()
}

// restore times one restore, until runsc says that it is done.
func (r *bareRestore) restore(ctx context.Context) (time.Duration, error) {
	r.serial++
	id := fmt.Sprint("again-", r.serial)
	begun := time.Now()
	err := r.start(ctx, id, "restore", "--detach", "--bundle", r.bundle, "--image-path", filepath.Join(r.dir, "image"))
	took := time.Since(begun)
	return took, errors.Join(err, r.runsc(ctx, "delete", "--force", id))
}

func (r *bareRestore) close() {
	if r == nil {
		return
	}
	removeRunsc(r.dir, "state")
}

// sandboxExec is runsc's own way to run a command in a sandbox that shows the host's /usr, which it leaves running. A nil one
// does not work here.
type sandboxExec struct{ dir, options, out string }

func newSandboxExec(ctx context.Context, runsc *peer) (*sandboxExec, error) {
	if runsc == nil {
		return nil, nil
	}
	dir, err := os.MkdirTemp("", "casemate-bench-exec")
	if err != nil {
		return nil, err
	}
	s := &sandboxExec{dir: dir, options: filepath.Join(dir, "options"), out: filepath.Join(dir, "out")}
	text := fmt.Sprintf("stdout_file: %q\n", s.out)
	for at, from := range map[string]string{"/usr": "/usr", "/lib": "/usr/lib", "/lib64": "/usr/lib64"} {
		text += fmt.Sprintf("mounts { target: %q host_mount { host_path: %q } }\n", at, from)
	}
	if err := os.WriteFile(s.options, []byte(text), 0o600); err != nil {
		s.close()
		return nil, err
	}
	if _, err := s.run(ctx); err != nil { // this release has no such command, or it does not run here
		s.close()
		return nil, ctx.Err()
	}
	return s, nil
}

func (s *sandboxExec) runsc(ctx context.Context, args ...string) ([]byte, error) {
	all := append([]string{"--root", filepath.Join(s.dir, "state"), "--network=none", "--ignore-cgroups"}, args...)
	cmd := exec.CommandContext(ctx, runscName, all...)
	cmd.Env = append(os.Environ(), "TMPDIR="+s.dir)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("runsc %s: %w", args[0], err)
	}
	return out, nil
}

// run times a run until its output is there, and takes it down afterwards.
func (s *sandboxExec) run(ctx context.Context) (took time.Duration, err error) {
	if err := os.Remove(s.out); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	begun := time.Now()
	_, err = s.runsc(ctx, "sandboxexec", "--options", s.options, "/usr/bin/echo", "hello")
	for err == nil {
		if text, rerr := os.ReadFile(s.out); rerr == nil && string(text) == "hello\n" {
			break
		}
		if err = ctx.Err(); err == nil {
			<-time.After(time.Millisecond)
		}
	}
	took = time.Since(begun)
	ids, lerr := s.runsc(context.WithoutCancel(ctx), "list", "--quiet")
	for id := range strings.FieldsSeq(string(ids)) {
		_, derr := s.runsc(context.WithoutCancel(ctx), "delete", "--force", id)
		lerr = errors.Join(lerr, derr)
	}
	return took, errors.Join(err, lerr)
}

func (s *sandboxExec) close() {
	if s == nil {
		return
	}
	removeRunsc(s.dir, "state")
}
