package namespace

import (
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// A start takes the cell whose runtime it would start itself, else one without; never one that was started for another, which goes
// as soon as something else is expected.
func TestSparesWithRuntimes(t *testing.T) {
	run := func(args ...string) *ahead {
		return &ahead{runtime: isolation.Runtime{Args: args, Files: map[string][]byte{"/config": []byte("{}")}}, cpus: []int{0}}
	}
	b := &Backend{cfg: Config{Spares: 1}}
	s := &b.spares
	names := func() (out []string) {
		for _, g := range s.ready {
			out = append(out, g.name)
		}
		return out
	}
	fill := func(all ...*guest) { s.ready = all }
	plain, none, other := &guest{name: "plain"}, &guest{name: "none", ahead: run("none")}, &guest{name: "other", ahead: run("other")}
	seen := &guest{name: "seen", inReach: true}
	for _, c := range []struct {
		want    *ahead
		inReach bool
		got     *guest
	}{
		{run("none"), false, none},
		{run("other"), false, other},
		{run("third"), false, plain},
		{nil, false, plain},
		{nil, true, seen},
		{run("none"), true, seen},
	} {
		fill(other, plain, none, seen)
		if got := s.take(c.want, c.inReach); got != c.got || len(s.ready) != 3 {
			t.Errorf("%+v: took %v, and %v are left", c.want, got, names())
		}
	}
	fill(other)
	if got := s.take(run("none"), false); got != nil {
		t.Errorf("took %q, whose runtime is another", got.name)
	}
	if next, lacking := b.lackLocked(); next != nil || !lacking {
		t.Errorf("with none that fits all, %v, %v is lacking", next, lacking)
	}
	fill(plain)
	if next, lacking := b.lackLocked(); next != nil || lacking {
		t.Errorf("with nothing expected, %v, %v is lacking", next, lacking)
	}
	s.expect(run("none"), false)
	s.expect(nil, false) // says nothing of a runtime
	if next, lacking := b.lackLocked(); !next.same(run("none")) || !lacking {
		t.Errorf("with one expected, %v, %v is lacking", next, lacking)
	}
	fill(plain, none)
	if next, lacking := b.lackLocked(); next != nil || lacking || s.stale() != nil {
		t.Errorf("with all there, %v, %v is lacking", next, lacking)
	}
	s.expect(run("other"), false)
	if got := s.stale(); got != none {
		t.Errorf("%v is stale", got)
	}
	if got := s.stale(); got != nil {
		t.Errorf("%v is stale, too", got)
	}
	fill(plain)
	s.expect(nil, true)
	if next, lacking := b.lackLocked(); next != nil || !lacking {
		t.Errorf("with none in the keeper's reach, %v, %v is lacking", next, lacking)
	}
	if got := s.stale(); got != plain {
		t.Errorf("%v is stale, and not the one out of reach", got)
	}
	b.cfg.Spares = -1
	if next, lacking := b.lackLocked(); next != nil || lacking {
		t.Errorf("where none is to wait, %v, %v is lacking", next, lacking)
	}
}

// What a runtime was started with must be all the same.
func TestSameRuntime(t *testing.T) {
	plan := func(change func(*ahead)) *ahead {
		a := &ahead{runtime: isolation.Runtime{
			Program: "/runsc", Args: []string{"run"}, Gate: "/gate", Reach: 255, Capabilities: []uint8{1}, Files: map[string][]byte{"/f": []byte("x")},
		}, cpus: []int{0, 1}}
		change(a)
		return a
	}
	one := plan(func(*ahead) {})
	if !one.same(plan(func(*ahead) {})) || !one.same(plan(func(a *ahead) { a.cpus = []int{2, 3} })) || one.same(nil) || (*ahead)(nil).same(one) {
		t.Error("equal ones differ, or one equals none")
	}
	for what, change := range map[string]func(*ahead){
		"program":      func(a *ahead) { a.runtime.Program = "/other" },
		"device":       func(a *ahead) { a.runtime.Device = "/dev/kvm" },
		"arguments":    func(a *ahead) { a.runtime.Args = []string{"run", "more"} },
		"gate":         func(a *ahead) { a.runtime.Gate = "/other" },
		"reach":        func(a *ahead) { a.runtime.Reach = 0 },
		"capabilities": func(a *ahead) { a.runtime.Capabilities = []uint8{1, 2} },
		"files":        func(a *ahead) { a.runtime.Files = map[string][]byte{"/f": []byte("y")} },
		"processors":   func(a *ahead) { a.cpus = []int{0} },
		"all of them":  func(a *ahead) { a.cpus = nil },
		"limits":       func(a *ahead) { a.limits = []guestwire.Rlimit{{Resource: unix.RLIMIT_NOFILE, Max: 1}} },
	} {
		if one.same(plan(change)) {
			t.Errorf("another %s makes no difference", what)
		}
	}
}
