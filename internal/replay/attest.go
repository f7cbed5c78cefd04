package replay

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// The labels of a sandbox that was made to run the processes of another one again: which one's, and in which run, from 1.
const (
	LabelOf  = "casemate.replay.of"
	LabelRun = "casemate.replay.run"
)

// VariedEnv is the variable that the second run sets to vary how times are written, where the record does not, and
// VariedZone its value: a time zone in a form that needs no file, variedOffset east of UTC.
const (
	VariedEnv    = "TZ"
	VariedZone   = "CHK-12:45"
	variedOffset = 12*time.Hour + 45*time.Minute
)

// Accept sorts records of sandboxes in which processes of r were run again into runs, and returns the plan that they carried
// out. The error says what of them is no replay of r: it was made otherwise, from another state, or with other steps.
func (r *Record) Accept(replays []*Record) (Plan, []Run, error) {
	var runs []Run
	ran := map[string]bool{}
	for _, one := range replays {
		n, err := r.accept(one)
		if err != nil {
			return Plan{}, nil, fmt.Errorf("sandbox %s: %w", one.Sandbox, err)
		}
		for len(runs) < n {
			runs = append(runs, nil)
		}
		runs[n-1] = append(runs[n-1], one)
		for id := range one.byID {
			ran[id] = true
		}
	}
	if i := slices.IndexFunc(runs, func(run Run) bool { return len(run) == 0 }); i >= 0 {
		return Plan{}, nil, fmt.Errorf("there is nothing of run %d", i+1)
	}
	c := r.having(func(id string) bool { return ran[id] })
	for i, one := range replays {
		if c.Network = one.answering(); c.Network != replays[0].answering() {
			return Plan{}, nil, fmt.Errorf("sandbox %s: it had another network than that of run %s", replays[i].Sandbox, replays[0].Settings.Labels[LabelRun])
		}
	}
	return r.Plan(c), runs, nil
}

// Runs is how often everything is run again. Another run is none that verdicts look at, so that none is taken.
const Runs = 2

// having is the choice of whoever carried out a replay: everything that the record lacks was at hand.
func (r *Record) having(ran func(string) bool) Choice {
	env := slices.Clone(r.Settings.Env)
	for _, p := range r.byID {
		env = append(env, p.env()...)
	}
	slices.Sort(env)
	return Choice{Ran: ran, Env: slices.Compact(env), Workspaces: r.Settings.Workspaces}
}

// accept checks one replay, and returns which run it belongs to.
func (r *Record) accept(one *Record) (int, error) {
	if why := one.Problem(); why != "" {
		return 0, fmt.Errorf("%s", why)
	}
	if of := one.Settings.Labels[LabelOf]; of != r.Sandbox {
		return 0, fmt.Errorf("it is no replay of sandbox %s", r.Sandbox)
	}
	n, err := strconv.Atoi(one.Settings.Labels[LabelRun])
	if err != nil || n < 1 || n > Runs {
		return 0, fmt.Errorf("it does not say which run it is of")
	}
	if err := r.answered(one); err != nil {
		return 0, err
	}
	if what := r.Settings.differs(one.Settings); what != "" {
		return 0, fmt.Errorf("it was made with another %s than the recorded sandbox", what)
	}
	var did []Step
	for _, s := range one.steps {
		switch {
		case s.lost != "":
			return 0, fmt.Errorf("%s", s.lost)
		case s.taken:
			return 0, fmt.Errorf("something else was done in it (event %d)", s.seq)
		case s.process != nil, s.call != nil:
			did = append(did, Step{Process: s.process, Call: s.call})
		}
	}
	return n, r.follows(one, did)
}

// follows checks that what was done in a replay is a segment of a plan for r, from its beginning.
func (r *Record) follows(one *Record, did []Step) error {
	c := r.having(func(id string) bool { return one.byID[id] != nil })
	c.Network = one.answering()
	for id := range one.byID {
		c.Processes = append(c.Processes, id)
	}
	p := r.Plan(c)
	for id, why := range p.Not {
		return fmt.Errorf("%s could not be run again: %s", id, why)
	}
	if len(p.Segments) != 1 {
		return fmt.Errorf("what was done in it is no part of the record")
	}
	begin := p.Segments[0]
	if want := cmp.Or(begin.Commit, r.Settings.Commit); one.Settings.Commit != want {
		return fmt.Errorf("it began with other files (commit %q) than the record (commit %q)", one.Settings.Commit, want)
	}
	if len(did) != len(begin.Steps) {
		return fmt.Errorf("%d steps were done in it, and the record has %d", len(did), len(begin.Steps))
	}
	for i, want := range begin.Steps {
		if what := want.differs(did[i]); what != "" {
			return fmt.Errorf("its step %d is another one than that of the record: %s", i+1, what)
		}
	}
	return nil
}

// differs says in which setting two sandboxes differ that must not. Of the second run's limits, the CPUs may.
func (s Settings) differs(t Settings) string {
	s.Limits.CPUs, t.Limits.CPUs = 0, 0
	for _, one := range []struct {
		what string
		same bool
	}{
		{"template", s.Template == t.Template},
		{"isolation", s.Isolation == t.Isolation},
		{"profile", s.Profile == t.Profile},
		{"user", s.User == t.User},
		{"directory", s.Dir == t.Dir},
		{"limits", s.Limits == t.Limits},
		{"environment", sameSet(s.given(t), t.Env)},
		{"network", t.sealed(s.Network)},
		{"workspaces", sameSet(s.Workspaces, t.Workspaces)},
		{"recording of files", s.Changes() == t.Changes()},
	} {
		if !one.same {
			return one.what
		}
	}
	return ""
}

// sealed reports whether a sandbox is one that a replay of a sandbox with network n can be made in: with no network or one that
// refuses everything, or with the same rules and answers of a record.
func (s Settings) sealed(n *Network) bool {
	return s.Network == nil || len(s.Network.Rules) == 0 || s.Network.Recorded && n != nil && slices.Equal(n.Rules, s.Network.Rules)
}

// given names the variables of a sandbox in which t's processes are run again: with stand-ins for placeholders, where nothing
// of it leaves.
func (s Settings) given(t Settings) []string {
	if t.Network == nil || !t.Network.Recorded {
		return s.Env
	}
	return slices.Concat(s.Env, s.Placeholders)
}

func sameSet(a, b []string) bool {
	x, y := slices.Clone(a), slices.Clone(b)
	slices.Sort(x)
	slices.Sort(y)
	return slices.Equal(x, y)
}

// differs says in what a step that was done differs from what was to be done.
func (s Step) differs(did Step) string {
	switch {
	case (s.Process == nil) != (did.Process == nil):
		return "it is of another kind"
	case s.Call != nil:
		a, b := s.Call, did.Call
		if a.Type != b.Type || a.Path != b.Path || a.To != b.To || a.User != b.User || a.Mode != b.Mode || !bytes.Equal(a.Data, b.Data) {
			return "another change of files"
		}
		return ""
	}
	p, q := s.Process, did.Process
	env := q.Env
	if !slices.Contains(p.Env, VariedEnv) {
		env = slices.DeleteFunc(slices.Clone(env), func(name string) bool { return name == VariedEnv })
	}
	switch {
	case p.ID != q.ID:
		return "another process"
	case !p.Code.same(q.Code):
		return "other code, or elsewhere"
	case !slices.Equal(p.Argv, q.Argv):
		return "other arguments"
	case p.Dir != q.Dir || p.User != q.User:
		return "another directory or user"
	case !sameSet(p.Env, env):
		return "another environment"
	case !bytes.Equal(p.Stdin, q.Stdin):
		return "other input"
	}
	return ""
}

// same reports whether two runs executed the same, in an interpreter that was made in the same way.
func (c *Code) same(d *Code) bool {
	if c == nil || d == nil {
		return c == d
	}
	a, b := c.Context, d.Context
	if (a == nil) != (b == nil) || c.Text != d.Text || c.Language != d.Language || c.Starts != d.Starts {
		return false
	}
	return a == nil || a.ID == b.ID && a.Language == b.Language && a.Dir == b.Dir && a.User == b.User && sameSet(a.Env, b.Env)
}
