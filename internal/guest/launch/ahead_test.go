package launch

import (
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

// A runtime that was started before its launch serves only one that says of it what it was started with, and none that restores an
// image; what else the launch says, it may.
func TestAheadFits(t *testing.T) {
	launch := func(change func(*guestwire.Launch)) *guestwire.Launch {
		l := &guestwire.Launch{
			Rlimits: []guestwire.Rlimit{{Resource: unix.RLIMIT_CORE}}, Walls: guestwire.Walls{CPUs: []int{1}},
			Runtime: &guestwire.Runtime{Args: []string{"run"}, Reach: 255, Capabilities: []uint8{1}, Files: map[string][]byte{"/f": []byte("x")}},
		}
		change(l)
		return l
	}
	a := ahead{launch: *launch(func(*guestwire.Launch) {})}
	if !a.fits(launch(func(l *guestwire.Launch) { l.Hostname, l.Env, l.Runtime.Guest = "box", map[string]string{"A": "b"}, 7 })) {
		t.Error("what says the same of the runtime does not fit")
	}
	for what, change := range map[string]func(*guestwire.Launch){
		"arguments":    func(l *guestwire.Launch) { l.Runtime.Args = []string{"run", "more"} },
		"capabilities": func(l *guestwire.Launch) { l.Runtime.Capabilities = nil },
		"reach":        func(l *guestwire.Launch) { l.Runtime.Reach = 0 },
		"files":        func(l *guestwire.Launch) { l.Runtime.Files = map[string][]byte{"/f": []byte("y")} },
		"image":        func(l *guestwire.Launch) { l.Runtime.Image = new(int) },
		"trace":        func(l *guestwire.Launch) { l.Runtime.Trace = "/trace" },
		"limits":       func(l *guestwire.Launch) { l.Rlimits = nil },
		"processors":   func(l *guestwire.Launch) { l.Walls.CPUs = []int{0} },
	} {
		if a.fits(launch(change)) {
			t.Errorf("another %s fits", what)
		}
	}
}
