package sandbox

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

// model is what one sandbox must look like.
type model struct {
	id      string
	state   State
	reason  EndReason
	expires time.Time     // zero: never
	idle    time.Duration // 0: none
	used    time.Time
	parent  string
	procs   map[string]End
}

// machine compares the Manager with a plain model, over any order of calls, passing time, faults,
// restarts and crashes.
type machine struct {
	s     *server
	clock *fakeClock
	boxes []*model
	serie int
}

func (m *machine) any(r *rapid.T) *model {
	if len(m.boxes) == 0 {
		r.Skip("no sandbox")
	}
	return rapid.SampledFrom(m.boxes).Draw(r, "sandbox")
}

func (m *machine) ends(b *model, why EndReason) {
	if b.state == Stopped {
		return
	}
	b.state, b.reason = Stopped, why
	for id, end := range b.procs {
		if end == EndNone {
			b.procs[id] = EndSandboxStopped
		}
	}
	for _, c := range m.boxes {
		if c.parent == b.id {
			m.ends(c, EndParent)
		}
	}
}

func (m *machine) use(b *model) { b.used = m.clock.Now() }

// want checks that a call succeeded exactly if it had to.
func want(r *rapid.T, what string, err error, ok bool) {
	if ok && err != nil {
		r.Fatalf("%s: %v", what, err)
	}
	if !ok && !errs.Is(err, errs.FailedPrecondition) {
		r.Fatalf("%s: %v, want failed_precondition", what, err)
	}
}

func (m *machine) create(r *rapid.T) {
	if len(m.boxes) > 12 {
		r.Skip("enough")
	}
	b := &model{state: Running, procs: map[string]End{}}
	spec := Spec{Lifetime: -1, Limits: Limits{CPUs: 0.5}}
	if rapid.Bool().Draw(r, "lifetime") {
		spec.Lifetime = time.Duration(rapid.IntRange(1, 100).Draw(r, "seconds")) * time.Second
		b.expires = wall(m.clock.Now()).Add(spec.Lifetime)
	}
	if rapid.Bool().Draw(r, "idle") {
		b.idle = time.Duration(rapid.IntRange(1, 100).Draw(r, "idle seconds")) * time.Second
		spec.Idle = b.idle
	}
	p := alice
	if len(m.boxes) > 0 && rapid.Bool().Draw(r, "child") {
		parent := m.any(r)
		p = Principal{ID: "sandbox:" + parent.id, Sandbox: parent.id}
		if parent.state != Running {
			_, err := m.s.Create(context.Background(), p, spec, CreateOptions{})
			want(r, "child of "+string(parent.state), err, false)
			return
		}
		b.parent = parent.id
	}
	if rapid.IntRange(0, 5).Draw(r, "fault") == 0 {
		m.s.backend.SetFaults(fake.Faults{FailAt: fake.StepClone, Debris: true})
		_, err := m.s.Create(context.Background(), p, spec, CreateOptions{})
		m.s.backend.SetFaults(fake.Faults{})
		if !errs.Is(err, errs.Internal) {
			r.Fatalf("a failing create: %v", err)
		}
		return
	}
	sb, err := m.s.Create(context.Background(), p, spec, CreateOptions{})
	if err != nil {
		r.Fatal(err)
	}
	b.id = sb.ID
	m.use(b)
	m.boxes = append(m.boxes, b)
}

func (m *machine) remove(r *rapid.T) {
	b := m.any(r)
	if _, err := m.s.Delete(context.Background(), alice, b.id); err != nil {
		r.Fatal(err)
	}
	m.ends(b, EndDeleted)
}

func (m *machine) freeze(r *rapid.T) {
	b, to, call := m.any(r), Paused, m.s.Pause
	if rapid.Bool().Draw(r, "resume") {
		to, call = Running, m.s.Resume
	}
	_, err := call(context.Background(), alice, b.id)
	want(r, string(to), err, b.state != Stopped)
	if b.state != Stopped && b.state != to {
		b.state = to
		m.use(b)
	}
}

func (m *machine) renew(r *rapid.T) {
	b := m.any(r)
	life := time.Duration(rapid.IntRange(-1, 100).Draw(r, "seconds")) * time.Second
	if life < 0 {
		life = -1
	}
	_, err := m.s.Update(context.Background(), alice, b.id, Update{Lifetime: &life})
	want(r, "renew", err, b.state != Stopped)
	if b.state == Stopped {
		return
	}
	b.expires = time.Time{}
	if life > 0 {
		b.expires = wall(m.clock.Now()).Add(life)
	}
	m.use(b)
}

func (m *machine) start(r *rapid.T) {
	b := m.any(r)
	m.serie++
	id := fmt.Sprint("p", m.serie)
	_, err := m.s.StartProcess(context.Background(), alice, b.id, ProcessSpec{ID: id, Argv: []string{"sleep", "1000"}}, "")
	want(r, "start", err, b.state == Running)
	if b.state == Running {
		b.procs[id] = EndNone
		m.use(b)
	}
}

func (m *machine) execute(r *rapid.T) {
	b := m.any(r)
	m.serie++
	id := fmt.Sprint("p", m.serie)
	got, err := m.s.Execute(context.Background(), alice, b.id, ProcessSpec{ID: id, Argv: []string{"echo", id}}, RunOptions{})
	want(r, "execute", err, b.state == Running)
	if b.state == Running {
		if string(got.Stdout) != id+"\n" || got.Process.End != EndExited {
			r.Fatalf("execute: %+v", got)
		}
		b.procs[id] = EndExited
		m.use(b)
	}
}

func (m *machine) cancel(r *rapid.T) {
	b := m.any(r)
	var open []string
	for id, end := range b.procs {
		if end == EndNone {
			open = append(open, id)
		}
	}
	if len(open) == 0 {
		r.Skip("nothing runs")
	}
	slices.Sort(open)
	id := rapid.SampledFrom(open).Draw(r, "process")
	err := m.s.Signal(context.Background(), alice, b.id, id, 9, true)
	want(r, "cancel", err, b.state == Running)
	if b.state != Running {
		return
	}
	if p := m.s.wait(b.id, id); p.End != EndCanceled {
		r.Fatalf("canceled: %+v", p)
	}
	b.procs[id] = EndCanceled
	m.use(b)
}

func (m *machine) kill(r *rapid.T) {
	b := m.any(r)
	m.s.w.host.Kill(b.id)
	m.ends(b, EndGuestDied)
	testenv.Eventually(m.s.w.t, soon, "the end of a killed one", func() bool { return m.s.state(b.id) == Stopped })
}

func (m *machine) advance(r *rapid.T) {
	// Second by second, so that the model need not know which of two ends came first.
	for range rapid.IntRange(1, 60).Draw(r, "seconds") {
		m.clock.advance(time.Second)
		alive := m.alive()
		for _, b := range alive {
			if m.expired(b) || m.idled(b) {
				m.ends(b, EndLifetime)
			}
		}
		for _, b := range alive {
			if b.state == Stopped {
				m.endedInTime(r, b)
			}
		}
	}
}

func (m *machine) alive() []*model {
	return slices.DeleteFunc(slices.Clone(m.boxes), func(b *model) bool { return b.state == Stopped })
}

func (m *machine) expired(b *model) bool {
	return !b.expires.IsZero() && !wall(m.clock.Now()).Before(b.expires)
}

func (m *machine) idled(b *model) bool {
	return b.state != Paused && b.idle > 0 && !wall(m.clock.Now()).Before(wall(b.used).Add(b.idle))
}

// endedInTime takes the reason for an end within the last second, of which several may be true.
func (m *machine) endedInTime(r *rapid.T, b *model) {
	testenv.Eventually(m.s.w.t, soon, "an end by time", func() bool { return m.s.state(b.id) == Stopped })
	parent := slices.IndexFunc(m.boxes, func(p *model) bool { return p.id == b.parent })
	b.reason = m.s.endReason(b.id)
	switch {
	case b.reason == EndLifetime && m.expired(b):
	case b.reason == EndIdle && m.idled(b):
	case b.reason == EndParent && parent >= 0 && m.boxes[parent].state == Stopped:
	default:
		r.Fatalf("%+v ended without a reason", b)
	}
}

func (m *machine) restart(r *rapid.T) {
	if rapid.Bool().Draw(r, "crash") {
		m.s = m.s.crash()
	} else {
		m.s.stop(false)
		m.s = m.s.w.serve()
	}
	for _, b := range m.boxes {
		if b.state != Stopped {
			m.use(b)
		}
	}
}

func (m *machine) check(r *rapid.T) {
	var alive []string
	for _, b := range m.boxes {
		sb, err := m.s.Get(context.Background(), alice, b.id)
		if err != nil || sb.State != b.state || sb.State == Stopped && sb.EndReason != b.reason {
			r.Fatalf("sandbox %+v, %v, want %+v", sb, err, b)
		}
		if b.state != Stopped {
			alive = append(alive, b.id)
		}
		for id, end := range b.procs {
			p, err := m.s.GetProcess(context.Background(), alice, b.id, id)
			if err != nil || p.End != end {
				r.Fatalf("process %+v, %v, want %q", p, err, end)
			}
		}
		events, err := m.s.Events(context.Background(), alice, b.id, 0, 100_000)
		if err == nil {
			err = checkHistory(events)
		}
		if err != nil {
			r.Fatalf("history of %s: %v", b.id, err)
		}
		if n := len(events); b.state == Stopped && events[n-1].Type != journal.SandboxEnded {
			r.Fatalf("the last event of a stopped sandbox is %s", events[n-1].Type)
		}
	}
	slices.Sort(alive)
	if got := m.s.w.host.Instances(); !slices.Equal(got, alive) {
		r.Fatalf("instances %v, want %v", got, alive)
	}
	if got := m.s.w.roots.writable(); !slices.Equal(got, alive) {
		r.Fatalf("layers %v, want %v", got, alive)
	}
}

func TestManagerBehavesLikeItsModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		w := newWorld(t)
		c := newFakeClock()
		w.clock = c
		m := &machine{s: w.serve(), clock: c}
		defer func() { m.s.stop(true) }()
		r.Repeat(map[string]func(*rapid.T){
			"create": m.create, "delete": m.remove, "freeze": m.freeze, "renew": m.renew, "start": m.start,
			"execute": m.execute, "cancel": m.cancel, "kill the guest": m.kill, "advance": m.advance,
			"restart": m.restart, "": m.check,
		})
	})
}
