package fake

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake/script"
)

// A memory image of the fake is one file with what a machine's processes are. Those that ran begin anew when it is restored,
// under the ids that they had and behind the output that they had; count goes on from the number that it printed last. What they hold
// otherwise, files above all, is in no image.

// imageFile is the file of an image in its directory.
const imageFile = "image.json"

type image struct {
	Backend   string            `json:"backend"`
	Profile   isolation.Profile `json:"profile"`
	Claim     *guestwire.Claim  `json:"claim"`
	Processes []processImage    `json:"processes"`
	NextPID   int               `json:"next_pid"`
}

type processImage struct {
	Request guestwire.StartProcess `json:"request"`
	Info    guestwire.ProcessInfo  `json:"info"`
	Output  []chunkImage           `json:"output"`
}

type chunkImage struct {
	Stream guestwire.Stream `json:"stream"`
	Offset int64            `json:"offset"`
	Data   []byte           `json:"data"`
}

// images says whether the backend was said to have memory images.
func (b *Backend) images() bool {
	return slices.ContainsFunc(b.capabilities, func(c isolation.Capability) bool {
		return c.Name == isolation.MemoryImages && c.OK
	})
}

// Checkpoint implements isolation.Instance, where the capabilities name isolation.MemoryImages.
func (i *instance) Checkpoint(_ context.Context, dir string) (time.Duration, error) {
	if !i.backend.images() {
		return 0, isolation.NoMemoryImages(i.backend.name)
	}
	i.backend.mu.Lock()
	fail := i.backend.faults.FailCheckpoint
	i.backend.mu.Unlock()
	if fail != nil {
		return 0, fail
	}
	i.machine.cut()
	if err := i.machine.freeze(true); err != nil {
		return 0, err
	}
	data, err := json.Marshal(i.machine.image(i.backend.name))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, imageFile), data, 0o600)
	}
	if err != nil {
		return 0, errors.Join(err, i.machine.freeze(false))
	}
	return 0, nil
}

// cut closes all connections.
func (m *machine) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		_ = c.Close()
	}
}

// image returns what the machine, which is frozen, is.
func (m *machine) image(backend string) image {
	m.mu.Lock()
	img := image{Backend: backend, Profile: m.spec.Profile, Claim: m.claim, NextPID: m.nextPID}
	order := slices.Clone(m.order)
	m.mu.Unlock()
	for _, id := range order {
		if p := m.process(id); p != nil {
			img.Processes = append(img.Processes, p.image())
		}
	}
	return img
}

func (p *process) image() processImage {
	i := processImage{Info: p.snapshot(), Request: p.request}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	for _, c := range p.out.chunks {
		i.Output = append(i.Output, chunkImage{c.stream, c.offset, c.data})
	}
	return i
}

// Restore implements isolation.Backend, where the capabilities name isolation.MemoryImages.
func (b *Backend) Restore(ctx context.Context, s isolation.Spec, dir string) (isolation.Instance, error) {
	if !b.images() {
		return nil, isolation.NoMemoryImages(b.name)
	}
	data, err := os.ReadFile(filepath.Join(dir, imageFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap(err, errs.NotFound, "there is no memory image")
	}
	var img image
	if err == nil {
		err = json.Unmarshal(data, &img)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "the memory image can't be read")
	}
	if img.Backend != b.name || img.Profile != s.Profile {
		return nil, errs.New(errs.FailedPrecondition, "the memory image is of isolation %s and profile %s", img.Backend, img.Profile)
	}
	inst, err := b.Start(ctx, s)
	if err != nil {
		return nil, err
	}
	i, ok := inst.(*instance)
	if !ok {
		return nil, errs.New(errs.Internal, "the fake started a %T", inst)
	}
	i.machine.restore(img)
	return i, nil
}

// restore gives a new machine the processes of an image.
func (m *machine) restore(img image) {
	m.mu.Lock()
	m.claim, m.nextPID = img.Claim, max(m.nextPID, img.NextPID)
	m.mu.Unlock()
	for _, pi := range img.Processes {
		m.restoreProcess(pi)
	}
}

func (m *machine) restoreProcess(pi processImage) {
	u, err := m.user(pi.Request.User)
	if err != nil {
		return
	}
	p := m.newProcess(pi.Request, u)
	p.info = pi.Info
	p.out.mu.Lock()
	p.out.end, p.out.dropped = pi.Info.Bytes, pi.Info.Dropped
	for _, c := range pi.Output {
		p.out.chunks = append(p.out.chunks, chunk{c.Stream, c.Offset, c.Data})
	}
	p.out.mu.Unlock()
	runs := pi.Info.End == guestwire.EndNone
	var sh *script.Shell
	if runs {
		t, err := m.newTask(p)
		if err != nil {
			return
		}
		p.main, p.info.PID, p.tasks[t] = t, t.pid, true
		sh = p.shell(t, pi.Request, u)
	} else {
		p.info.Complete = false // complete says so again
		close(p.done)
		p.complete()
	}
	m.mu.Lock()
	m.processes[pi.Info.ID] = p
	m.order = append(m.order, pi.Info.ID)
	m.mu.Unlock()
	if runs {
		go func() { p.ended(p.main, sh.Call(pi.Request.Argv)) }()
	}
}

// identify takes up the life of an image: with a new identity, or the one that it has.
func (m *machine) identify(r guestwire.Restored) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Claim != nil {
		m.claim = r.Claim
	}
}

// countEvery is how long count waits between two numbers.
const countEvery = 5 * time.Millisecond

// runCounter is the program count: it prints 1, 2, 3 … for ever, and goes on where it was when it is restored.
func runCounter(sh *script.Shell, _ []string) int {
	t := taskOf(sh)
	tick := time.NewTicker(countEvery)
	defer tick.Stop()
	for n := t.process.lastNumber() + 1; ; n++ {
		if out(sh, "%d\n", n) != 0 {
			return 128
		}
		select {
		case <-tick.C:
		case <-t.ctx.Done():
			return 128
		}
	}
}

// lastNumber returns the number that the process printed last, each as one line in one piece; 0: none.
func (p *process) lastNumber() int64 {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	if len(p.out.chunks) == 0 {
		return 0
	}
	last := p.out.chunks[len(p.out.chunks)-1]
	n, _ := strconv.ParseInt(strings.TrimSpace(string(last.data)), 10, 64)
	return n
}
