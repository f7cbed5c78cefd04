package check

import (
	"fmt"
	"slices"
	"strings"
)

// touch is a path that a change is about.
type touch struct {
	path string
	// tree says that what lies below it is gone or new with it, and is not told of by itself.
	tree bool
}

// touches returns the paths that a change is about: what was deleted or renamed took along what lay below it.
func (c fileChange) touches() []touch {
	dir := c.Type == "dir"
	switch c.Op {
	case "deleted":
		return []touch{{raw(c.Path), dir}}
	case "renamed":
		return []touch{{raw(c.From), dir}, {raw(c.Path), dir}}
	}
	return []touch{{raw(c.Path), c.Op == "modified" && slices.Contains(c.What, "type")}}
}

func (c fileChange) text(s changeSet) evidence {
	what := c.Op + " " + raw(c.Path)
	if c.From != "" {
		what = c.Op + " " + raw(c.From) + " → " + raw(c.Path)
	}
	if len(c.What) > 0 {
		what += " (" + strings.Join(c.What, ", ") + ")"
	}
	return evidence{s.Seq, what + " " + s.who(), "server"}
}

// files judges which files were changed.
func (r *Record) files(rule Rule, out *Result) {
	if r.level != "full" && r.level != "summary" {
		why, holes := "which files change was not recorded: create the sandbox with --file-changes full", []evidence(nil)
		if !r.created {
			why, holes = r.incomplete()
		}
		out.set(Undecided, why, holes...)
		return
	}
	if rule.Kind == Changed {
		r.present(rule, out, "nothing that matches %s was changed", func(pattern string) ([]evidence, string) {
			return r.changedBy(rule.globs[slices.Index(rule.Patterns, pattern)])
		})
		return
	}
	var against []evidence
	var doubts []evidence
	for _, s := range r.changes {
		a, d := s.judge(rule)
		against, doubts = append(against, a...), append(doubts, d...)
	}
	if len(against) > 0 {
		out.set(Fail, "a file was changed that must not be", against...)
		return
	}
	if len(r.replaced) > 0 && len(doubts) == 0 {
		out.set(Undecided, "the files as a whole were replaced by those of a commit, and how these differ is not in the record", r.replaced...)
		return
	}
	if why, more := r.unseen(); why != "" && len(doubts) == 0 {
		out.set(Undecided, why, more...)
		return
	}
	if len(doubts) > 0 {
		out.set(Undecided, "the record does not name every path that was changed", doubts...)
		return
	}
	r.absent(out)
}

// changedBy returns the changes that match a glob; doubt says why there could be others.
func (r *Record) changedBy(g glob) (found []evidence, doubt string) {
	for _, s := range r.changes {
		for _, f := range s.Files {
			for _, t := range f.touches() {
				if g.match(t.path) {
					found = append(found, f.text(s))
				} else if some, _ := g.below(t.path); some && t.tree {
					doubt = fmt.Sprintf("%s went with all that was in it (event %d)", t.path, s.Seq)
				}
			}
		}
		if s.Unknown != "" || s.count() > len(s.Files) {
			doubt = fmt.Sprintf("event %d does not name every path that was changed", s.Seq)
		}
	}
	if len(r.replaced) > 0 {
		doubt = fmt.Sprintf("the files were replaced by those of a commit (event %d)", r.replaced[0].seq)
	}
	if why, _ := r.unseen(); why != "" {
		doubt = why
	}
	return found, doubt
}

// judge returns what of one event's changes is against a rule, and what could be.
func (s changeSet) judge(rule Rule) (against, doubts []evidence) {
	if s.Unknown != "" {
		return nil, []evidence{{s.Seq, "not known: " + s.Unknown, "server"}}
	}
	for _, f := range s.Files {
		for _, t := range f.touches() {
			switch rule.touch(t) {
			case Fail:
				against = append(against, f.text(s))
			case Undecided:
				doubts = append(doubts, f.text(s))
			case Pass:
				continue
			}
			break
		}
	}
	if s.More == 0 && s.count() > len(s.Files) { // a summary
		return against, append(doubts, evidence{s.Seq, fmt.Sprintf("%s %s, only counted", changesOf(s.count()), s.who()), "server"})
	}
	for _, d := range s.MoreIn {
		e := evidence{s.Seq, fmt.Sprintf("%s below %s %s, not named", changesOf(d.Files), raw(d.Dir), s.who()), "server"}
		switch rule.inside(raw(d.Dir)) {
		case Fail:
			against = append(against, e)
		case Undecided:
			doubts = append(doubts, e)
		case Pass:
		}
	}
	if s.More > 0 && len(s.MoreIn) == 0 {
		doubts = append(doubts, evidence{s.Seq, fmt.Sprintf("%s %s, not named", changesOf(s.More), s.who()), "server"})
	}
	return against, doubts
}

func changesOf(n int) string {
	if n == 1 {
		return "1 change"
	}
	return fmt.Sprintf("%d changes", n)
}

// touch judges one path that was changed.
func (rule Rule) touch(t touch) Verdict {
	matches := slices.ContainsFunc(rule.globs, func(g glob) bool { return g.match(t.path) })
	if rule.Kind == OnlyChanged {
		switch {
		case !matches:
			return Fail
		case t.tree && rule.inside(t.path) != Pass: // it may have been empty
			return Undecided
		}
		return Pass
	}
	if matches {
		return Fail
	}
	if t.tree {
		return rule.inside(t.path)
	}
	return Pass
}

// inside judges a directory in or below which something was changed that is not named.
func (rule Rule) inside(dir string) Verdict {
	some, every := false, false
	for _, g := range rule.globs {
		s, e := g.below(dir)
		some, every = some || s, every || e
	}
	switch {
	case rule.Kind == OnlyChanged && every, rule.Kind == Unchanged && !some:
		return Pass
	case rule.Kind == OnlyChanged && !some, rule.Kind == Unchanged && every:
		return Fail
	}
	return Undecided
}

// unseen tells why files can have changed that no event tells of yet; "" where they can't.
func (r *Record) unseen() (string, []evidence) {
	if r.Ended {
		return "", nil
	}
	if open := r.open(); len(open) > 0 {
		list := make([]evidence, len(open))
		for i, p := range open {
			list[i] = p.evidence()
		}
		return "a process still runs, and what it changes is recorded at its end", list
	}
	for run, seq := range r.runs {
		return "a run still goes on, and what it changes is recorded at its end", []evidence{{seq, "began: " + run, "server"}}
	}
	for id, seq := range r.contexts {
		return "an interpreter is alive, and what it changes on its own is recorded with the next process", []evidence{{seq, "context " + id, "server"}}
	}
	last := uint64(0)
	if n := len(r.changes); n > 0 {
		last = r.changes[n-1].Seq
		if left := r.changes[n-1].Left; len(left) > 0 {
			return "something that a process left behind runs, and what it changes is recorded with the next process",
				[]evidence{{last, "left by " + strings.Join(left, " "), "server"}}
		}
	}
	for _, p := range r.procs {
		if p.left && p.ended > 0 && p.ended+1 >= last {
			return "something that a process left behind runs, and what it changes is recorded with the next process", []evidence{p.outcome()}
		}
	}
	if r.written > last {
		return "a call of the file API changed something since the last record", []evidence{{r.written, "a call of the file API", "server"}}
	}
	return "", nil
}
