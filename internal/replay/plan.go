package replay

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Step is something to do in a fresh sandbox: start a process and wait for its end, or change files through the API.
type Step struct {
	Process *Process
	Call    *Call
}

// Segment is a part of a record that begins with a known state of files: one fresh sandbox is made from it for each run.
type Segment struct {
	// Commit is the one to start from; "": the one, or the template, that the recorded sandbox was made from.
	Commit string
	Steps  []Step
}

// Plan says what is run again.
type Plan struct {
	Segments []Segment
	// Not says why processes that were asked for are not run again, by id.
	Not map[string]string
	// Wanted are the processes that were asked for, in order. Others in segments only make what these begin with.
	Wanted []*Process
}

// Choice says what of a record to run again, and what is at hand for it.
type Choice struct {
	// Processes are ids; none: all.
	Processes []string
	// Env names the variables whose values are known; Workspaces the targets of workspaces whose folders are.
	Env, Workspaces []string
	// Network says that requests are answered from the record; else there is no network.
	Network bool
	// Ran, where it is set, says which processes have been run in which segment's sandbox, and limits the plan to them.
	Ran func(id string) bool
}

// Plan says which processes can be run again, and from where: the last state before each one that is kept, or else the one
// that the sandbox began with.
func (r *Record) Plan(c Choice) Plan {
	r.assign()
	p := planner{
		r: r, c: c, plan: Plan{Not: map[string]string{}}, all: r.general(c),
		ran: map[interpreter]bool{}, spoiled: map[interpreter]string{},
	}
	for _, one := range r.Processes() {
		if len(c.Processes) == 0 || slices.Contains(c.Processes, one.ID) {
			p.plan.Wanted = append(p.plan.Wanted, one)
		}
	}
	for _, s := range r.steps {
		p.take(s)
	}
	p.cut()
	return p.plan
}

// general says why no process of the record can be run again; "": some may.
func (r *Record) general(c Choice) string {
	if why := r.Problem(); why != "" {
		return why
	}
	if left := missing(r.Settings.Env, c.Env); left != "" {
		return "the values of the sandbox's environment are not in the record: give --env " + left
	}
	if left := missing(r.Settings.Workspaces, c.Workspaces); left != "" {
		return "the sandbox had a folder of the host at " + left + ", which is not in the record: give --workspace DIR:" + left
	}
	return ""
}

// missing names what is asked for and not at hand.
func missing(want, have []string) string {
	var out []string
	for _, w := range want {
		if !slices.Contains(have, w) {
			out = append(out, w)
		}
	}
	return strings.Join(out, ", ")
}

type planner struct {
	r    *Record
	c    Choice
	plan Plan
	all  string // why nothing can be run
	lost string // why nobody knows what files are at this point
	open Segment
	// ran are interpreters that have run code in the open segment, and spoiled those that have run some that is not run
	// again, with the reason.
	ran     map[interpreter]bool
	spoiled map[interpreter]string
}

// interpreter is one that keeps what code left in it.
type interpreter struct {
	context *Context
	starts  int
}

func (p *planner) wanted(one *Process) bool { return slices.Contains(p.plan.Wanted, one) }

// cut ends the segment, and keeps it up to the last process that was asked for.
func (p *planner) cut() {
	last := -1
	for i, s := range p.open.Steps {
		if s.Process != nil && p.wanted(s.Process) {
			last = i
		}
	}
	if last >= 0 {
		p.open.Steps = p.open.Steps[:last+1]
		p.plan.Segments = append(p.plan.Segments, p.open)
	}
	p.open = Segment{}
	for i := range p.ran {
		p.spoiled[i] = "its interpreter had run code before, in files that this replay does not begin with"
	}
	clear(p.ran)
}

func (p *planner) take(s *step) {
	switch {
	case s.commit != "":
		// A commit that is not needed is none to depend on: it may be gone.
		if s.taken || p.lost != "" || !p.needed() && len(p.ran) == 0 {
			p.cut()
			p.open.Commit, p.lost = s.commit, ""
		}
	case s.lost != "":
		p.lost = cmp.Or(p.lost, s.lost)
	case s.call != nil:
		p.open.Steps = append(p.open.Steps, Step{Call: s.call})
	case s.process != nil:
		p.process(s.process)
	}
}

// needed reports whether a process that was asked for is in the segment.
func (p *planner) needed() bool {
	return slices.ContainsFunc(p.open.Steps, func(s Step) bool { return s.Process != nil && p.wanted(s.Process) })
}

func (p *planner) process(one *Process) {
	in := interpreter{}
	if one.Code != nil && one.Code.Context != nil {
		in = interpreter{one.Code.Context, one.Code.Starts}
	}
	why := cmp.Or(p.all, p.lost, p.spoiled[in], one.not(p.c))
	if why == "" {
		p.open.Steps = append(p.open.Steps, Step{Process: one})
		if in.context != nil {
			p.ran[in] = true
		}
		return
	}
	if in.context != nil {
		p.spoiled[in] = fmt.Sprintf("%s before it in the same interpreter is not run again", one.ID)
	}
	if p.wanted(one) {
		p.plan.Not[one.ID] = why
	}
	if n := one.changes.count(); n != 0 && !one.unstarted() {
		p.lost = cmp.Or(p.lost, fmt.Sprintf("it began with files that can't be had: %s before it, which is not run again, %s", one.ID, changed(n)))
	}
}

func changed(n int) string {
	switch n {
	case -1:
		return "may have changed files (which ones was not recorded)"
	case 1:
		return "changed a file"
	}
	return fmt.Sprintf("changed %d files", n)
}

// env names the variables that it was given, and its context.
func (p *Process) env() []string {
	if p.Code == nil || p.Code.Context == nil {
		return p.Env
	}
	return append(p.Env[:len(p.Env):len(p.Env)], p.Code.Context.Env...)
}

// unstarted reports whether it could not be started.
func (p *Process) unstarted() bool { return p.Code == nil && p.End == "failed" }

// not says why a process can't be run again; "": it can.
func (p *Process) not(c Choice) string {
	switch {
	case c.Ran != nil && !c.Ran(p.ID):
		return "it was not run again"
	case len(p.unknown) > 0:
		return p.unknown[0]
	case p.tty:
		return "it had a terminal, and what was typed there is not recorded"
	case missing(p.env(), c.Env) != "":
		return "the values of its environment are not in the record: give --env " + missing(p.env(), c.Env)
	case p.End == "":
		return "it has not ended"
	case p.End == "canceled", p.End == "interrupted", p.End == "sandbox_stopped", p.End == "lost":
		return "it was ended from outside (" + p.ending() + "), which is no outcome of its own"
	case p.beside != "":
		return "it ran at the same time as " + p.beside + ", and what they did to each other is not recorded"
	}
	return p.offline(c.Network)
}
