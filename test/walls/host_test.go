package walls

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/selftest"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/mounts"
)

// TestMain moves into a mount namespace of its own, as a server does: the store and the backend mount
// there.
func TestMain(m *testing.M) { os.Exit(mounts.Main(m)) }

// patience bounds every wait for something that must happen.
const patience = 2 * time.Minute

// host is a store and a backend as a server has them.
type host struct {
	t       *testing.T
	data    string
	store   *rootfs.Store
	backend isolation.Backend
}

var _ selftest.Target = (*host)(nil)

func newHost(t *testing.T) *host { return newHostOf(t, namespaceName) }

// The backends that are tested here.
const (
	namespaceName = "namespace"
	gvisorName    = gvisor.Name
)

// newHostOf is newHost for one of the backends.
func newHostOf(t *testing.T, isolation string) *host {
	t.Helper()
	testenv.Root(t)
	run := testenv.RunDir(t)
	h := &host{t: t, data: filepath.Join(run, "d")}
	var err error
	if h.store, err = rootfs.Open(t.Context(), rootfs.Config{DataDir: h.data, ImageBytes: 1 << 30, Spares: -1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.store.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	h.backend, err = namespace.New(namespace.Config{
		ServerID: testenv.ServerID(t), RunDir: filepath.Join(run, "r"), IDDir: filepath.Join(run, "ids"),
		Guest: testenv.Guest(t), Spares: -1, Cells: isolation == gvisorName,
	})
	if err != nil {
		t.Fatal(err)
	}
	if isolation == gvisorName {
		h.backend = gvisor.New(gvisor.Config{Cells: h.backend, Program: testenv.Runsc(t)})
	}
	t.Cleanup(func() {
		if _, err := h.backend.Sweep(context.Background(), nil); err != nil {
			t.Errorf("sweep: %v", err)
		}
		if err := h.backend.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return h
}

// box is a sandbox of this host.
type box struct {
	host   *host
	inst   isolation.Instance
	client *guestwire.Client
	plan   rootfs.Plan
}

var _ selftest.Sandbox = (*box)(nil)

// Local implements selftest.Target.
func (h *host) Local() bool { return true }

// Create implements selftest.Target.
func (h *host) Create(ctx context.Context, s selftest.Spec) (selftest.Sandbox, error) {
	return h.create(ctx, s)
}

// create makes a sandbox of template host. Its files serve for profile standard too, which only lacks
// sudo there.
func (h *host) create(ctx context.Context, s selftest.Spec) (*box, error) {
	spec := isolation.Spec{ID: id.Sandbox(), Profile: isolation.Profile(s.Profile), Limits: isolation.Limits{
		MemoryBytes: s.Limits.MemoryBytes, CPUs: s.Limits.CPUs, Pids: s.Limits.Pids, OpenFiles: s.Limits.OpenFiles, DiskBytes: s.Limits.DiskBytes,
	}}
	plan, err := h.store.Plan(ctx, rootfs.Request{ID: spec.ID, Template: "host", Profile: string(isolation.Locked), DiskBytes: spec.Limits.DiskBytes})
	if err != nil {
		return nil, err
	}
	spec.Root = plan
	inst, err := h.backend.Start(ctx, spec)
	if err != nil {
		return nil, errors.Join(err, h.store.Release(ctx, spec.ID))
	}
	b := &box{host: h, inst: inst, client: guestwire.NewClient(inst.Dial), plan: plan}
	err = b.client.Claim(ctx, guestwire.Claim{Sandbox: spec.ID, Hostname: "box", Env: s.Env})
	if err != nil {
		return nil, errors.Join(err, b.Delete(ctx))
	}
	return b, nil
}

// start makes a sandbox that goes with the test.
func (h *host) start(t *testing.T, p isolation.Profile) *box {
	t.Helper()
	b, err := h.create(t.Context(), selftest.Spec{Profile: string(p), Limits: selftest.Limits{
		MemoryBytes: 256 << 20, CPUs: 1, Pids: 128, OpenFiles: 256, DiskBytes: 64 << 20,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Delete(context.Background()); err != nil {
			t.Errorf("delete: %v", err)
		}
	})
	testenv.Overdue(t, func() { _ = b.inst.Destroy(context.Background()) })
	return b
}

// ID implements selftest.Sandbox.
func (b *box) ID() string { return b.inst.ID() }

// CPU implements selftest.Sandbox.
func (b *box) CPU(ctx context.Context) (time.Duration, error) {
	u, err := b.inst.Usage(ctx)
	return u.CPU, err
}

// Ended implements selftest.Sandbox.
func (b *box) Ended(context.Context) (string, error) {
	select {
	case <-b.inst.Done():
		e := b.inst.Exit()
		return e.Reason + ": " + e.Detail, nil
	default:
		return "", nil
	}
}

// Delete implements selftest.Sandbox.
func (b *box) Delete(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return errors.Join(b.inst.Destroy(ctx), b.host.store.Release(ctx, b.ID()))
}

// Run implements selftest.Sandbox.
func (b *box) Run(ctx context.Context, c selftest.Command) (selftest.Result, error) {
	p := guestwire.StartProcess{
		ID: id.New(id.Process), Argv: c.Argv, Env: c.Env, Dir: c.Dir, User: c.User, TTY: c.TTY, Rows: 24, Cols: 80,
		TimeoutMS: c.Timeout.Milliseconds(), GraceMS: 500,
	}
	scope, err := b.inst.NewScope(ctx, p.ID)
	if err != nil {
		return selftest.Result{}, err
	}
	p.Scope = scope.Layout()
	before, err := b.inst.Usage(ctx)
	if err != nil {
		return selftest.Result{}, errors.Join(err, scope.Close())
	}
	begun := time.Now()
	_, stream, err := b.client.Run(ctx, guestwire.RunProcess{Start: p, Output: guestwire.OutputRequest{Follow: true}}, scope.Files())
	if err != nil {
		return selftest.Result{}, errors.Join(err, scope.Close())
	}
	defer stream.Close()
	out, err := headAndTail(stream)
	if err != nil {
		return selftest.Result{}, errors.Join(err, scope.Close())
	}
	info := stream.Info()
	if info.Leftover == 0 {
		err = scope.Close()
	}
	end := string(info.End)
	// As the Manager does: the guest saw a kill, the kernel's accounting tells why.
	if after, usageErr := b.inst.Usage(ctx); usageErr == nil && info.Signal == int(syscall.SIGKILL) && after.OOMKills > before.OOMKills {
		end = string(guestwire.EndOOMKilled)
	}
	return selftest.Result{
		End: end, Code: info.Code, Signal: info.Signal, Output: out, Bytes: info.Bytes, Took: time.Since(begun),
	}, err
}

// headAndTail reads a stream to its end and keeps the first MiB and the last piece.
func headAndTail(stream *guestwire.OutputStream) (string, error) {
	var head, tail []byte
	for {
		item, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return string(head) + string(tail), nil
		}
		if err != nil {
			return "", err
		}
		if len(head) < 1<<20 {
			head = append(head, item.Data...)
			continue
		}
		tail = append(tail, item.Data...)
		if over := len(tail) - 64<<10; over > 0 {
			tail = append(tail[:0], tail[over:]...)
		}
	}
}

// List implements selftest.Sandbox.
func (b *box) List(ctx context.Context, path string) ([]string, error) {
	s, err := b.client.ListDir(ctx, guestwire.ListRequest{PathRequest: guestwire.PathRequest{Path: path}, Depth: 1})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var names []string
	for {
		f, err := s.Next()
		if errors.Is(err, io.EOF) {
			return names, nil
		}
		if err != nil {
			return nil, err
		}
		names = append(names, f.Name)
	}
}

// Read implements selftest.Sandbox.
func (b *box) Read(ctx context.Context, path string) ([]byte, error) {
	_, r, err := b.client.Read(ctx, guestwire.ReadRequest{PathRequest: guestwire.PathRequest{Path: path, Follow: true}, Length: -1})
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	return io.ReadAll(io.LimitReader(r, 1<<20))
}
