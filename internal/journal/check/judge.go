package check

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Verdict is what a rule comes to.
type Verdict string

// The verdicts.
const (
	Pass      Verdict = "pass"
	Fail      Verdict = "fail"
	Undecided Verdict = "undecided" // the record can't answer
)

// Evidence is what a verdict rests on.
type Evidence struct {
	Event uint64 `json:"event"`
	What  string `json:"what"`
	// Observer saw it: kernel, server or guest.
	Observer string `json:"observer"`
}

// Result is the verdict on one rule.
type Result struct {
	Name    string   `json:"name,omitempty"`
	Line    int      `json:"line"`
	Rule    Kind     `json:"rule"`
	Of      []string `json:"of,omitempty"`
	Verdict Verdict  `json:"verdict"`
	// Why says it in words where it did not pass.
	Why      string     `json:"why,omitempty"`
	Evidence []Evidence `json:"evidence,omitempty"`
	// More is how much further evidence of the kind there is.
	More int `json:"more,omitempty"`
}

// maxEvidence bounds the evidence of one verdict.
const maxEvidence = 20

func (r *Result) show(list ...evidence) {
	for _, e := range list {
		if len(r.Evidence) >= maxEvidence {
			r.More++
			continue
		}
		r.Evidence = append(r.Evidence, Evidence{Event: e.seq, What: e.what, Observer: e.by})
	}
}

func (r *Result) set(v Verdict, why string, list ...evidence) {
	r.Verdict, r.Why = v, why
	r.show(list...)
}

// Judge holds a record against rules.
func (r *Record) Judge(rules []Rule) []Result {
	out := make([]Result, 0, len(rules))
	for _, rule := range rules {
		one := Result{Name: rule.Name, Line: rule.Line, Rule: rule.Kind, Of: rule.Patterns}
		switch rule.Kind {
		case Changed, OnlyChanged, Unchanged:
			r.files(rule, &one)
		case Reached, OnlyReached, NotReached:
			r.hosts(rule, &one)
		case Ran, NotRan:
			r.commands(rule, &one)
		case Exited:
			r.exits(rule, &one)
		case TestsPassed:
			r.tests(rule, &one)
		case NotRefused:
			r.nothingRefused(rule, &one)
		default:
			one.set(Undecided, "the rule is unknown")
		}
		out = append(out, one)
	}
	return out
}

// absent finishes a rule that passes where nothing was found that speaks against it: only if nothing can be missing.
func (r *Record) absent(out *Result) {
	if why, holes := r.incomplete(); why != "" {
		out.set(Undecided, why, holes...)
		return
	}
	out.Verdict = Pass
}

// hosts judges which hosts were reached.
func (r *Record) hosts(rule Rule, out *Result) {
	if rule.Kind == Reached {
		r.present(rule, out, "no connection to %s was opened", func(pattern string) (found []evidence, doubt string) {
			for _, c := range r.opened {
				switch {
				case c.is(pattern):
					found = append(found, c.evidence())
				case c.host == "", c.maybe(pattern):
					doubt = fmt.Sprintf("the record does not say both the name and the address of every connection (event %d)", c.seq)
				}
			}
			return found, doubt
		})
		return
	}
	var against, unclear []evidence
	for _, c := range r.opened {
		is := slices.ContainsFunc(rule.Patterns, c.is)
		switch {
		case c.host == "", !is && slices.ContainsFunc(rule.Patterns, c.maybe):
			unclear = append(unclear, c.evidence())
		case is == (rule.Kind == NotReached):
			against = append(against, c.evidence())
		}
	}
	switch {
	case len(against) > 0:
		out.set(Fail, "a connection was opened that must not be", against...)
	case len(unclear) > 0:
		out.set(Undecided, "the record does not say both the name and the address of every connection", unclear...)
	default:
		r.absent(out)
	}
}

func (c connection) evidence() evidence {
	what := "opened: " + c.host
	if c.host == "" {
		what = "opened: several connections"
	}
	if c.port != "" {
		what += ":" + c.port
	}
	if c.dialed != "" && c.dialed != c.host {
		what += " at " + c.dialed
	}
	return evidence{c.seq, what, "server"}
}

// is reports whether a connection went to a host as a rule names it: by the name that was asked for or, for an
// address, also by the one that was dialled.
func (c connection) is(pattern string) bool {
	host, port := splitHost(strings.ToLower(pattern))
	if port != "" && port != c.port {
		return false
	}
	if want, err := netip.ParseAddr(host); err == nil {
		for _, have := range []string{c.host, c.dialed} {
			if a, err := netip.ParseAddr(have); err == nil && a.Unmap() == want.Unmap() {
				return true
			}
		}
		return false
	}
	if rest, ok := strings.CutPrefix(host, "*."); ok {
		return strings.HasSuffix(c.host, "."+rest)
	}
	return host == "*" || strings.TrimSuffix(host, ".") == c.host
}

// maybe reports whether a connection that is not what a rule names could have been to it: one to a bare address, where
// the rule has a name, or one by a name whose address nobody here looked up, where the rule has an address.
func (c connection) maybe(pattern string) bool {
	host, port := splitHost(strings.ToLower(pattern))
	if port != "" && port != c.port {
		return false
	}
	_, bare := netip.ParseAddr(c.host)
	if _, err := netip.ParseAddr(host); err != nil {
		return bare == nil
	}
	_, dialed := netip.ParseAddr(c.dialed)
	return bare != nil && dialed != nil
}

// present judges a rule for each pattern of which something must be found. doubt says why more could be there.
func (r *Record) present(rule Rule, out *Result, missing string, find func(pattern string) (found []evidence, doubt string)) {
	out.Verdict = Pass
	for i, pattern := range rule.Patterns {
		found, doubt := find(pattern)
		if len(found) > 0 {
			out.show(found[0])
			continue
		}
		why, holes := r.incomplete()
		if doubt != "" {
			why = doubt
		}
		if why != "" {
			if out.Verdict == Pass {
				out.set(Undecided, fmt.Sprintf(missing, rule.Patterns[i])+", but "+why, holes...)
			}
			continue
		}
		if out.Verdict != Fail {
			out.set(Fail, fmt.Sprintf(missing, rule.Patterns[i]))
		}
	}
}

// commands judges which commands were started.
func (r *Record) commands(rule Rule, out *Result) {
	if rule.Kind == Ran {
		r.present(rule, out, "no command %q was started", func(pattern string) ([]evidence, string) {
			found, doubt := r.matching(pattern)
			var list []evidence
			for _, p := range found {
				if !p.failed {
					list = append(list, p.evidence())
				}
			}
			return list, doubt
		})
		return
	}
	var against, failed []evidence
	var unclear string
	for _, pattern := range rule.Patterns {
		found, doubt := r.matching(pattern)
		for _, p := range found {
			if p.failed {
				failed = append(failed, p.outcome())
				continue
			}
			against = append(against, p.evidence())
		}
		if doubt != "" {
			unclear = doubt
		}
	}
	switch {
	case len(against) > 0:
		out.set(Fail, "a command was started that must not be", against...)
	case unclear != "":
		out.set(Undecided, unclear)
	case len(failed) > 0:
		out.set(Undecided, "a command that must not be was asked for, and its start failed", failed...)
	default:
		r.absent(out)
	}
}

// matching returns the processes whose command matches; doubt says why others could.
func (r *Record) matching(pattern string) (found []*process, doubt string) {
	for _, p := range r.procs {
		switch {
		case p.known && wildcard(pattern, p.command) && (!p.cut || strings.HasSuffix(pattern, "*")):
			found = append(found, p)
		case !p.known && pattern == "*":
			found = append(found, p)
		case !p.known:
			doubt = fmt.Sprintf("the arguments of %s (event %d) are not in the record any more", p.id, p.started)
		case p.cut:
			doubt = fmt.Sprintf("the arguments of %s (event %d) are too long to be recorded whole", p.id, p.started)
		}
	}
	return found, doubt
}

func (p *process) evidence() evidence {
	command := p.command
	if !p.known {
		command = "?"
	}
	return evidence{p.started, "started: " + command, p.by}
}

// outcome tells how a process ended.
func (p *process) outcome() evidence {
	what := strings.ReplaceAll(p.end, "_", " ")
	by := "guest"
	switch {
	case p.end == "exited" && p.code != nil:
		what = fmt.Sprintf("exit %d", *p.code)
	case p.failed:
		by = "server"
	case p.end == "sandbox_stopped" || p.end == "lost" || p.end == "oom_killed":
		by = "server"
	}
	if p.known {
		what += ": " + p.command
	}
	return evidence{p.ended, what, by}
}

// exits judges the ends of all processes whose command matches.
func (r *Record) exits(rule Rule, out *Result) {
	var bad, open, good []evidence
	for _, pattern := range rule.Patterns {
		found, doubt := r.matching(pattern)
		if doubt != "" {
			out.set(Undecided, doubt)
		}
		if len(found) == 0 && out.Verdict == "" {
			out.set(Undecided, fmt.Sprintf("no command %q was started", pattern))
		}
		for _, p := range found {
			switch {
			case p.ended == 0:
				open = append(open, p.evidence())
			case p.code == nil || !slices.Contains(rule.Codes, *p.code):
				bad = append(bad, p.outcome())
			default:
				good = append(good, p.outcome())
			}
		}
	}
	switch {
	case len(bad) > 0:
		out.Evidence, out.More = nil, 0
		out.set(Fail, fmt.Sprintf("a command ended otherwise than with %s", codes(rule.Codes)), bad...)
	case out.Verdict == Undecided:
	case len(open) > 0:
		out.set(Undecided, "a command has not ended", open...)
	default:
		if r.absent(out); out.Verdict == Pass {
			out.show(good...)
		}
	}
}

func codes(list []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(list), " ", " or "), "[]")
}

// tests judges, for each pattern, the end of the last process whose command matches.
func (r *Record) tests(rule Rule, out *Result) {
	out.Verdict = Pass
	for _, pattern := range rule.Patterns {
		found, doubt := r.matching(pattern)
		why, holes := r.incomplete()
		if doubt != "" {
			why = doubt
		}
		switch {
		case len(found) == 0 && why == "":
			out.set(Fail, fmt.Sprintf("no command %q was started", pattern))
			return
		case len(found) == 0:
			out.set(Undecided, fmt.Sprintf("no command %q was started, but %s", pattern, why), holes...)
			continue
		}
		last := found[len(found)-1]
		switch {
		case last.ended == 0:
			out.set(Undecided, "a command has not ended", last.evidence())
		case last.code == nil || *last.code != 0:
			out.set(Fail, "the last run did not end with 0", last.outcome())
			return
		case why != "":
			out.set(Undecided, "a later run could be missing: "+why, append([]evidence{last.outcome()}, holes...)...)
		default:
			out.show(last.outcome())
		}
	}
}

// nothingRefused judges whether connections were refused, and system calls attempted.
func (r *Record) nothingRefused(rule Rule, out *Result) {
	var against []evidence
	if slices.Contains(rule.Patterns, refusedConnections) {
		against = append(against, r.refused...)
	}
	calls := slices.Contains(rule.Patterns, refusedCalls)
	if calls {
		against = append(against, r.attempts...)
	}
	switch {
	case len(against) > 0:
		out.set(Fail, "something was refused", against...)
	case calls && !r.observed:
		out.set(Undecided, "whether calls were attempted was not recorded: create the sandbox with --calls attempts")
	default:
		r.absent(out)
	}
}
