package meter

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// story builds the events of a sandbox, at seconds after an hour.
type story struct {
	events []Event
	at     time.Time
}

func newStory() *story {
	return &story{at: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)}
}

// add adds an event after some seconds; facts are observer and JSON in turns.
func (s *story) add(after float64, typ, process string, facts ...string) *story {
	s.at = s.at.Add(time.Duration(after * float64(time.Second)))
	e := Event{Time: s.at, Type: typ, Process: process, Facts: map[string]json.RawMessage{}}
	for i := 0; i < len(facts); i += 2 {
		e.Facts[facts[i]] = json.RawMessage(facts[i+1])
	}
	s.events = append(s.events, e)
	return s
}

func (s *story) begin() *story {
	return s.add(0, "sandbox.created", "", "server", `{"name":"web","template":"base","owner":"key_a"}`).add(0, "sandbox.claimed", "")
}

func (s *story) meter(after float64, cpuMS, byteSeconds int64, over float64, last bool) *story {
	return s.add(after, "usage.metered", "", "kernel", fmt.Sprintf(`{"cpu_us":%d}`, cpuMS*1000),
		"server", fmt.Sprintf(`{"memory_byte_seconds":%d,"over_ms":%d,"last":%v}`, byteSeconds, int64(over*1000), last))
}

func (s *story) used(p Period) (Usage, *Record) {
	r := NewRecord(p)
	for _, e := range s.events {
		r.Add(e)
	}
	return r.Usage(), r
}

const second = int64(1_000_000)

func TestUsage(t *testing.T) {
	const guest = "guest"
	moment := func(seconds float64) *time.Time {
		at := newStory().at.Add(time.Duration(seconds * float64(time.Second)))
		return &at
	}
	tests := []struct {
		name  string
		story *story
		want  Usage
	}{
		{
			"two at once count once, and idle time does not",
			newStory().begin().add(10, "process.started", "a").add(2, "process.started", "b").add(3, "process.ended", "a", guest, `{}`).
				add(4, "process.ended", "b", guest, `{}`).add(1, "process.started", "c").add(1, "process.ended", "c", guest, `{}`).
				meter(0, 1500, 4000, 21, true).add(0, "sandbox.ended", ""),
			Usage{Sandboxes: 1, ExecutionUS: 10 * second, RunningUS: 21 * second, CPUUS: 1500_000, MemoryByteSeconds: 4000, Processes: 3},
		},
		{
			"a pause is no execution",
			newStory().begin().add(0, "process.started", "a").add(5, "sandbox.paused", "").add(100, "sandbox.resumed", "").
				add(5, "process.ended", "a", guest, `{}`).meter(0, 10, 0, 110, true).add(0, "sandbox.ended", ""),
			Usage{Sandboxes: 1, ExecutionUS: 10 * second, RunningUS: 10 * second, PausedUS: 100 * second, CPUUS: 10_000, Processes: 1},
		},
		{
			"counters begin anew with a new instance",
			newStory().begin().meter(10, 700, 10, 10, false).add(0, "sandbox.paused", "", "server", `{"memory":false}`).
				meter(0, 800, 0, 0, true).add(60, "sandbox.resumed", "", "server", `{"memory":false}`).meter(5, 900, 5, 5, true).
				add(0, "sandbox.ended", ""),
			Usage{Sandboxes: 1, RunningUS: 15 * second, PausedUS: 60 * second, CPUUS: 1_700_000, MemoryByteSeconds: 15},
		},
		{
			"runs of code execute too, and wait for nothing",
			newStory().begin().add(0, "run.started", "", "server", `{"run":"r1"}`).add(1, "run.started", "", "server", `{"run":"r2"}`).
				add(1, "run.ended", "", "server", `{"run":"r1"}`, guest, `{}`).add(1, "run.ended", "", "server", `{"run":"r2"}`, guest, `{}`),
			Usage{Sandboxes: 1, ExecutionUS: 3 * second, RunningUS: 3 * second, Runs: 2, MeteredUntil: moment(0)},
		},
		{
			"what goes on counts up to the last that was seen of it",
			newStory().begin().add(0, "process.started", "a").meter(7, 100, 50, 7, false),
			Usage{Sandboxes: 1, ExecutionUS: 7 * second, RunningUS: 7 * second, CPUUS: 100_000, MemoryByteSeconds: 50, Processes: 1, Open: 1, MeteredUntil: moment(7)},
		},
		{
			"connections count when they end",
			newStory().begin().add(1, "network.opened", "").add(0, "network.opened", "", "server", `{"count":4}`).
				add(1, "network.closed", "", "server", `{"sent":10,"received":200}`).add(1, "network.cut", "", "server", `{"count":2,"sent":1}`),
			Usage{Sandboxes: 1, RunningUS: 3 * second, SentBytes: 11, ReceivedBytes: 200, OpenConnections: 2, MeteredUntil: moment(0)},
		},
		{
			"lost with the server: what nobody saw is told, and not counted",
			newStory().begin().add(0, "process.started", "a").meter(10, 100, 50, 10, false).add(3600, "gap", "").
				add(0, "process.ended", "a", "server", `{"end":"lost"}`).add(0, "sandbox.ended", "", "server", `{"reason":"lost"}`),
			Usage{
				Sandboxes: 1, ExecutionUS: 10 * second, RunningUS: 10 * second, CPUUS: 100_000, MemoryByteSeconds: 50, Processes: 1,
				Gaps: 1, UnmeteredUS: 3600 * second,
			},
		},
		{
			"taken up after a kill of the server: it went on, and only its memory is not known",
			newStory().begin().add(0, "process.started", "a").meter(10, 100, 50, 10, false).add(20, "gap", "").add(1, "sandbox.adopted", "").
				meter(4, 900, 8, 4, false).add(1, "process.ended", "a", guest, `{}`),
			Usage{
				Sandboxes: 1, ExecutionUS: 36 * second, RunningUS: 36 * second, CPUUS: 900_000, MemoryByteSeconds: 58, Processes: 1, Gaps: 1,
				UnmeteredUS: 21 * second, MeteredUntil: moment(35),
			},
		},
		{
			"a sandbox that never came to run",
			newStory().add(0, "sandbox.created", "", "server", `{"template":"base","owner":"key_a"}`).add(3, "sandbox.ended", ""),
			Usage{Sandboxes: 1},
		},
		{
			"others' events and nonsense count as nothing",
			newStory().begin().add(5, "file.written", "").add(0, "network.closed", "", "server", `{"sent":"many"}`).add(0, "process.ended", "never"),
			Usage{Sandboxes: 1, MeteredUntil: moment(0), RunningUS: 5 * second},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, _ := tt.story.used(Period{})
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWhose(t *testing.T) {
	_, r := newStory().begin().used(Period{})
	if r.Name != "web" || r.Template != "base" || r.Principal != "key_a" || r.Ended {
		t.Errorf("got %q, %q, %q, ended %v", r.Name, r.Template, r.Principal, r.Ended)
	}
}

// randomStory is a life at whole seconds, with the seconds in which something executed.
func randomStory(seed uint64) (s *story, executed int64) {
	r := rand.New(rand.NewPCG(seed, 1))
	s = newStory().begin()
	open, n, paused, cpu, unmetered := []string{}, 0, false, int64(0), int64(0)
	step := func() float64 {
		d := int64(r.IntN(4))
		if !paused && len(open) > 0 {
			executed += d
		}
		unmetered += d
		return float64(d)
	}
	for range 5 + r.IntN(60) {
		switch k := r.IntN(12); {
		case k < 4 && !paused:
			n++
			id := fmt.Sprint("p", n)
			s.add(step(), "process.started", id)
			open = append(open, id)
		case k < 8 && len(open) > 0 && !paused:
			i := r.IntN(len(open))
			s.add(step(), "process.ended", open[i], "guest", `{}`)
			open = append(open[:i], open[i+1:]...)
		case k == 8 && !paused:
			s.add(step(), "sandbox.paused", "")
			paused = true
		case k == 9 && paused:
			s.add(step(), "sandbox.resumed", "")
			paused = false
		case k == 10:
			at := step()
			cpu += r.Int64N(1000)
			s.meter(at, cpu, r.Int64N(1e6), float64(unmetered), false)
			unmetered = 0
		default:
			s.add(step(), "network.closed", "", "server", fmt.Sprintf(`{"sent":%d,"received":%d}`, r.IntN(1000), r.IntN(1000)))
		}
	}
	if r.IntN(2) == 0 {
		s.meter(step(), cpu+5, 17, float64(unmetered), true).add(0, "sandbox.ended", "")
	}
	return s, executed
}

// TestExecutionOracle holds executed time against a count of seconds.
func TestExecutionOracle(t *testing.T) {
	for seed := range uint64(2000) {
		s, want := randomStory(seed)
		got, _ := s.used(Period{})
		if got.ExecutionUS != want*second {
			t.Fatalf("seed %d: executed %d µs, want %d s", seed, got.ExecutionUS, want)
		}
	}
}

// TestPeriodsAddUp: parts of a period are together what the whole is, wherever it is cut.
func TestPeriodsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, _ := randomStory(rapid.Uint64().Draw(t, "seed"))
		begin := newStory().at
		long := s.at.Sub(begin).Nanoseconds() + 1
		cuts := rapid.SliceOfN(rapid.Int64Range(0, long), 1, 5).Draw(t, "cuts")
		slices.Sort(cuts)
		bounds := []time.Time{{}}
		for _, c := range slices.Compact(cuts) {
			bounds = append(bounds, begin.Add(time.Duration(c)))
		}
		bounds = append(bounds, time.Time{})
		var sum Usage
		for i := range len(bounds) - 1 {
			part, _ := s.used(Period{Since: bounds[i], Until: bounds[i+1]})
			sum.Add(part)
		}
		whole, _ := s.used(Period{})
		sum.Sandboxes, sum.Open, sum.OpenConnections, sum.MeteredUntil = whole.Sandboxes, whole.Open, whole.OpenConnections, whole.MeteredUntil
		if diff := cmp.Diff(whole, sum); diff != "" {
			t.Fatal(diff)
		}
	})
}
