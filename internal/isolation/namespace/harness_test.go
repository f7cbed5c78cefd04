package namespace

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	// The guest is built while the tests run; this tells go test that its answers depend on it.
	_ "casemate.dev/internal/guest"
	_ "casemate.dev/internal/guest/launch"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/testenv"
)

// patience bounds every wait for something that must happen.
const patience = 2 * time.Minute

// host is what the backends of one test share: a run directory, id claims, a server id.
type host struct {
	t   *testing.T
	cfg Config
}

func newHost(t *testing.T, edit ...func(*Config)) *host {
	t.Helper()
	testenv.Root(t)
	run := testenv.RunDir(t)
	cfg := Config{
		ServerID: testenv.ServerID(t), RunDir: filepath.Join(run, "r"), IDDir: filepath.Join(run, "ids"),
		Guest: testenv.Guest(t), Spares: -1, SpareLimits: conformance.Limits(),
	}
	for _, e := range edit {
		e(&cfg)
	}
	h := &host{t: t, cfg: cfg}
	// Runs after every backend was closed: whatever a failed test left goes, so that it harms no other.
	t.Cleanup(func() {
		b, err := New(cfg)
		if err != nil {
			t.Errorf("open for the last sweep: %v", err)
			return
		}
		if _, err := b.Sweep(context.Background(), nil); err != nil {
			t.Errorf("last sweep: %v", err)
		}
		if b.groups != nil {
			if err := b.groups.RemoveAll(context.Background()); err != nil {
				t.Errorf("remove control groups: %v", err)
			}
		}
		_ = b.Close()
	})
	return h
}

func (h *host) backend() *Backend {
	h.t.Helper()
	b, err := New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := b.Close(); err != nil {
			h.t.Errorf("close: %v", err)
		}
	})
	return b
}

// leftovers lists what is on the host of this test's instances.
func (h *host) leftovers() []string { return conformance.Leftovers(h.cfg.ServerID, h.cfg.RunDir) }

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// box is a started and claimed instance.
type box struct {
	t      *testing.T
	inst   *Instance
	client *guestwire.Client
}

func start(t *testing.T, b *Backend, spec isolation.Spec) *box {
	t.Helper()
	x, err := tryStart(t, b, spec)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	return x
}

func tryStart(t *testing.T, b *Backend, spec isolation.Spec) (*box, error) {
	t.Helper()
	ctx := limited(t)
	inst, err := b.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { destroy(t, inst) })
	x := &box{t: t, inst: inst.(*Instance), client: guestwire.NewClient(inst.Dial)}
	if err := x.client.Claim(ctx, guestwire.Claim{Sandbox: spec.ID, Hostname: "box"}); err != nil {
		t.Fatalf("claim: %v", err)
	}
	return x, nil
}

func destroy(t *testing.T, i isolation.Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := i.Destroy(ctx); err != nil {
		t.Errorf("destroy: %v", err)
	}
}

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// result is how a process ended and what it wrote.
type result struct {
	out, err string
	info     guestwire.ProcessInfo
}

func (x *box) run(user string, argv ...string) result {
	x.t.Helper()
	r, err := x.tryRun(user, argv...)
	if err != nil {
		x.t.Fatalf("run %q: %v", argv, err)
	}
	return r
}

func (x *box) tryRun(user string, argv ...string) (result, error) {
	x.t.Helper()
	p := guestwire.StartProcess{ID: id.New(id.Process), Argv: argv, User: user}
	scope, err := x.inst.NewScope(limited(x.t), p.ID)
	if err != nil {
		return result{}, err
	}
	defer func() {
		if err := scope.Close(); err != nil {
			x.t.Errorf("close scope: %v", err)
		}
	}()
	p.Scope = scope.Layout()
	_, s, err := x.client.Run(limited(x.t), guestwire.RunProcess{Start: p, Output: guestwire.OutputRequest{Follow: true}}, scope.Files())
	if err != nil {
		return result{}, err
	}
	defer s.Close()
	var out, errText bytes.Buffer
	for {
		item, err := s.Next()
		if errors.Is(err, io.EOF) {
			return result{out.String(), errText.String(), s.Info()}, nil
		}
		if err != nil {
			return result{}, err
		}
		if item.Stream == guestwire.Stderr {
			errText.Write(item.Data)
		} else {
			out.Write(item.Data)
		}
	}
}

// sh runs a script as the default user and returns what it printed on both streams.
func (x *box) sh(script string) string { return x.shAs("", script) }

func (x *box) shAs(user, script string) string {
	x.t.Helper()
	r := x.run(user, "sh", "-c", script)
	return strings.TrimSpace(r.out + r.err)
}

func recordOf(t *testing.T, i isolation.Instance) record {
	t.Helper()
	var r record
	if err := json.Unmarshal(i.Record(), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func wants(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %q, want %q", what, got, want)
	}
}

func procFile(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }
