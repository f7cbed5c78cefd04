package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/linux/userns"
	"casemate.dev/internal/oci/layer"
)

// Verb is the program's first argument that makes it a worker.
const Verb = "unpack-layer"

// The descriptors that a worker is given beside standard error.
const (
	blobFD = 3 + iota
	rootFD
	answerFD
	lifeFD // reads as ended when the server has died
)

// ids is how many ids a sandbox has, and so a layer.
const ids = 65536

// Job is one layer to unpack.
type Job struct {
	// Blob is the layer's archive, at its beginning; how far it was read shows as its offset. Size is its length.
	Blob *os.File
	Size int64
	// Root is the directory to fill.
	Root string
	// FirstID is the first of 65,536 ids of the host that nothing else runs as.
	FirstID uint32
	Limits  layer.Limits
	// Free, where it is set, returns what is free on the disk: below Reserve the job ends.
	Free    func() (int64, error)
	Reserve int64
}

// order is what a worker is told, as JSON in its second argument.
type order struct {
	Size   int64        `json:"size"`
	Limits layer.Limits `json:"limits"`
}

// answer is what it says at its end.
type answer struct {
	Result layer.Result `json:"result"`
	// Kind is an error's, by its code; "": there was none.
	Kind  string `json:"kind,omitempty"`
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
	Cause string `json:"cause,omitempty"`
}

// maxAnswer bounds what is read of a worker: the paths of a large layer's directories.
const maxAnswer = 256 << 20

// Unpack unpacks a layer in a process of its own, which ends with ctx.
// Kinds: those of layer.Unpack; Internal where the process died.
func Unpack(ctx context.Context, j Job) (layer.Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	root, err := mapped(ctx, j.Root, j.FirstID)
	if err != nil {
		return layer.Result{}, err
	}
	defer root.Close()
	in, out, err := os.Pipe()
	if err != nil {
		return layer.Result{}, err
	}
	defer in.Close()
	life, alive, err := os.Pipe()
	if err != nil {
		return layer.Result{}, errors.Join(err, out.Close())
	}
	defer alive.Close()
	cmd, said, err := command(ctx, j, root, out, life)
	if err == nil {
		err = cmd.Start()
	}
	_, _ = out.Close(), life.Close()
	if err != nil {
		return layer.Result{}, fmt.Errorf("start the unpacker: %w", err)
	}
	stop := watch(ctx, cancel, j)
	defer stop()
	data, readErr := io.ReadAll(io.LimitReader(in, maxAnswer))
	if err := cmd.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return layer.Result{}, cause
		}
		return layer.Result{}, fmt.Errorf("the unpacker ended: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	if readErr != nil {
		return layer.Result{}, readErr
	}
	return parse(data)
}

// mapped returns a detached copy of the mount at dir, rooted there, whose ids are mapped into the range from
// first on. Nothing in it can be executed, or act as a device.
func mapped(ctx context.Context, dir string, first uint32) (*os.File, error) {
	all := []userns.Range{{Inside: 0, Outside: first, Count: ids}}
	ns, err := userns.New(ctx, all, all)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	m, err := mount.Clone(dir, false)
	if err != nil {
		return nil, err
	}
	err = mount.SetAttr(m, mount.Change{Set: mount.NoSuid | mount.NoDev | mount.NoExec | mount.NoSymFollow, UserNS: ns})
	if err != nil {
		_ = m.Close()
		return nil, errs.Wrap(err, errs.Unsupported, "the data directory's file system has no idmapped mounts").
			WithHint("put the data directory on ext4, XFS or btrfs, with Linux 6.1 or newer")
	}
	return m, nil
}

// command makes the process's command; said is what it prints to standard error.
func command(ctx context.Context, j Job, root, out, life *os.File) (*exec.Cmd, *bytes.Buffer, error) {
	told, err := json.Marshal(order{Size: j.Size, Limits: j.Limits.Filled()})
	if err != nil {
		return nil, nil, err
	}
	maps := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(j.FirstID), Size: ids}}
	said := &bytes.Buffer{}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Verb, string(told))
	// Go's runtime would keep files of the host's control groups open.
	cmd.Env, cmd.Dir = []string{"GOTRACEBACK=single", "GODEBUG=containermaxprocs=0,updatemaxprocs=0"}, "/"
	if tag, ok := os.LookupEnv("CASEMATE_TEST_TAG"); ok {
		cmd.Env = append(cmd.Env, "CASEMATE_TEST_TAG="+tag)
	}
	cmd.ExtraFiles, cmd.Stderr = []*os.File{j.Blob, root, out, life}, said
	cmd.WaitDelay = 10 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET |
			syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP,
		UidMappings: maps, GidMappings: maps,
		Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
		Setsid:     true,
	}
	return cmd, said, nil
}

// lookEvery is how often the disk is looked at: at 1 GB/s half a second's writing is lost of the reserve.
const lookEvery = 500 * time.Millisecond

// watch ends the job when the disk fills up.
func watch(ctx context.Context, cancel context.CancelCauseFunc, j Job) (stop func()) {
	if j.Free == nil {
		return func() {}
	}
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			if free, err := j.Free(); err == nil && free < j.Reserve {
				cancel(errs.New(errs.ResourceExhausted, "the disk of the data directory is nearly full: %d MB are free", free>>20).
					WithHint("make room there; an image takes its unpacked size, and its compressed one"))
				return
			}
			select {
			case <-tick.C:
			case <-done:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

// parse reads an answer. It comes from a process that read hostile bytes: what it says is bounded and checked.
func parse(data []byte) (layer.Result, error) {
	var a answer
	if err := json.Unmarshal(data, &a); err != nil {
		return layer.Result{}, fmt.Errorf("the unpacker's answer: %w", err)
	}
	if a.Kind != "" {
		kind, ok := errs.FromCode(a.Kind)
		if !ok {
			kind = errs.Internal
		}
		if kind == errs.Internal {
			return layer.Result{}, fmt.Errorf("unpack: %s", a.Cause)
		}
		e := errs.Wrap(errors.New(a.Cause), kind, "%s", a.Error)
		if a.Hint != "" {
			e = e.WithHint("%s", a.Hint)
		}
		return layer.Result{}, e
	}
	for _, path := range append(a.Result.Implied, a.Result.Whiteouts...) {
		for name := range strings.SplitSeq(path, "/") {
			if name == "" || name == ".." || name == "." && path != "." {
				return layer.Result{}, fmt.Errorf("the unpacker's answer names the path %q", path)
			}
		}
	}
	if a.Result.Bytes < 0 || a.Result.Files < 0 {
		return layer.Result{}, errors.New("the unpacker's answer counts below nothing")
	}
	return a.Result, nil
}
