package replay

import (
	"fmt"
	"slices"
	"strings"
)

// Verdict says what came of running a process again.
type Verdict string

// The verdicts.
const (
	// Reproduced: the outcome is the recorded one, byte for byte. Normalised: it is but for differences that
	// normalisers explain, which are named.
	Reproduced Verdict = "reproduced"
	Normalised Verdict = "normalised"
	// Diverged: both runs had another outcome than the recorded one, and the same. Unstable: the runs differ from
	// each other where they differ from the record, so that nothing can be said about the record.
	Diverged Verdict = "diverged"
	Unstable Verdict = "unstable"
	// NotAttempted: it was not run again, for a reason.
	NotAttempted Verdict = "not attempted"
)

// Result is the verdict about one process.
type Result struct {
	Process string   `json:"process"`
	Event   uint64   `json:"event"` // that of its start
	Argv    []string `json:"argv,omitempty"`
	Code    string   `json:"code,omitempty"` // of a run of code
	Verdict Verdict  `json:"verdict"`
	// Normalisers are those that were needed; set with Normalised.
	Normalisers []string `json:"normalisers,omitempty"`
	// Difference is the first that matters; set with Diverged and Unstable. More is how many others there are.
	Difference *Difference `json:"difference,omitempty"`
	More       int         `json:"more,omitempty"`
	// Sensitive is where the second run, with another clock, host name and so on, differs although the first had the
	// recorded outcome.
	Sensitive *Difference `json:"sensitive,omitempty"`
	// Reason says why it was not run again, or what makes it unstable.
	Reason string `json:"reason,omitempty"`
	// Answered is how many requests were answered from the record in the first run, and Unanswered what else it asked for.
	Answered   int      `json:"answered,omitempty"`
	Unanswered []string `json:"unanswered,omitempty"`
	// Files says whether the files that it changed were compared; Partly that of its output only what the record keeps
	// was: the beginning and the end.
	Files  bool `json:"files"`
	Partly bool `json:"partly,omitempty"`
}

// Text is the verdict in words.
func (r Result) Text() string {
	switch r.Verdict {
	case Normalised:
		return "reproduced after normalising " + strings.Join(r.Normalisers, ", ")
	case Diverged:
		return "diverged at " + r.Difference.Where()
	case Unstable:
		return "unstable: " + r.Reason
	case NotAttempted:
		return "not attempted because " + r.Reason
	case Reproduced:
	}
	return string(r.Verdict)
}

// Run is what came of running processes again once, in one sandbox for each segment of the plan.
type Run []*Record

// process returns a process of the run, and in which sandbox it was.
func (r Run) process(id string) (side, bool) {
	for _, one := range r {
		if p := one.Process(id); p != nil {
			return side{one, p}, true
		}
	}
	return side{}, false
}

// Judge holds what was recorded against one or two runs of a plan. With one run there is no telling an unstable process
// from a wrong record: then what differs is Diverged.
func (r *Record) Judge(p Plan, runs ...Run) []Result {
	r.assign()
	for _, run := range runs {
		for _, one := range run {
			one.assign()
		}
	}
	j := judge{r: r, runs: runs}
	for range runs {
		j.pairs = append(j.pairs, newPairing())
	}
	j.between = newPairing()
	var out []Result
	for _, one := range p.Wanted {
		res := Result{Process: one.ID, Event: one.Event, Argv: one.Argv}
		if one.Code != nil {
			res.Code = one.Code.Text
		}
		if why := p.Not[one.ID]; why != "" {
			res.Verdict, res.Reason = NotAttempted, why
		} else {
			j.one(one, &res)
		}
		out = append(out, res)
	}
	return out
}

type judge struct {
	r       *Record
	runs    []Run
	pairs   []*pairing // of the record with each run
	between *pairing   // of the runs
}

func (j judge) one(p *Process, res *Result) {
	recorded := side{j.r, p}
	var sides []side
	for i, run := range j.runs {
		s, ok := run.process(p.ID)
		if !ok || s.p.End == "" {
			res.Verdict, res.Reason = NotAttempted, fmt.Sprintf("run %d did not come to it", i+1)
			return
		}
		if unknown := s.p.unseen(); unknown != "" {
			res.Verdict, res.Reason = NotAttempted, fmt.Sprintf("of run %d something was not recorded: %s", i+1, unknown)
			return
		}
		sides = append(sides, s)
	}
	if len(sides) == 0 {
		res.Verdict, res.Reason = NotAttempted, "it was not run again"
		return
	}
	res.Answered, res.Unanswered = len(sides[0].p.Answers()), sides[0].p.unanswered()
	first := compare(recorded, sides[0], j.pairs[0])
	res.Files, res.Partly = first.files, p.partial()
	second, third := first, outcome{}
	if len(sides) > 1 {
		second, third = compare(recorded, sides[1], j.pairs[1]), compare(sides[0], sides[1], j.between)
		// What a file holds differs for a reason where both runs agree, or where only what was varied can have made it.
		first.settle(func(c otherContents) bool { return third.alike[0][c.replayed] })
		second.settle(func(c otherContents) bool { return third.alike[1][c.replayed] || first.alike[0][c.Path] })
	} else {
		first.settle(func(otherContents) bool { return true })
		second = first
	}
	switch {
	case len(first.diffs) == 0 && len(first.names) == 0:
		res.Verdict = Reproduced
	case len(first.diffs) == 0:
		res.Verdict, res.Normalisers = Normalised, first.names
	default:
		res.differs(first.diffs, second.diffs, third.diffs)
		if hidden := p.hidden(); hidden != "" && res.Verdict == Diverged {
			res.Verdict, res.Reason = NotAttempted, "what it was answered is not all in the record ("+hidden+"), and its outcome was another one"
		}
		return
	}
	if len(second.diffs) > 0 {
		res.Sensitive = &second.diffs[0]
	}
}

// unseen says what of a process that was run again is not in that record; "": nothing.
func (p *Process) unseen() string {
	if len(p.unknown) > 0 {
		return p.unknown[0]
	}
	for _, c := range p.contacts {
		if c.why != "" {
			return c.why
		}
	}
	return ""
}

// differs decides between a record that does not hold and a process that has another outcome each time: by the first place
// where both runs differ from the record and not from each other.
func (res *Result) differs(first, second, between []Difference) {
	in := func(list []Difference, d Difference) bool {
		return slices.ContainsFunc(list, func(e Difference) bool { return e.key() == d.key() || e.Part == d.Part && (e.loose() || d.loose()) })
	}
	for i := range first {
		if in(second, first[i]) && !in(between, first[i]) && !first[i].otherFile(between) {
			res.Verdict, res.Difference, res.More = Diverged, &first[i], len(first)-1
			return
		}
	}
	res.Verdict, res.Difference, res.More = Unstable, &first[0], len(first)-1
	if len(second) == 0 {
		res.Reason = "the second run had the recorded outcome, and the first differs at " + first[0].Where()
		return
	}
	res.Reason = "its runs differ from each other where they differ from the record, at " + first[0].Where()
}

// otherFile reports whether it is a file that is not there, where the runs differ in which files are: its name may be another
// one each time.
func (d Difference) otherFile(between []Difference) bool {
	return d.Part == PartFiles && d.Replayed == "" && slices.ContainsFunc(between, func(e Difference) bool {
		return e.Part == PartFiles && (e.Recorded == "" || e.Replayed == "")
	})
}

// loose reports whether a difference stands for all that comes behind it: lines, or files, that are not paired any more.
func (d Difference) loose() bool {
	return d.Part == PartFiles && d.Path == "" || d.Part != PartEnd && d.Part != PartFiles && d.Line == 0
}
