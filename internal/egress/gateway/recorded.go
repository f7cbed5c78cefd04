package gateway

import (
	"net/url"
	"sync"
	"sync/atomic"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
)

// maxAnswersAll bounds what is held of answers for all sandboxes together: nobody takes the gateway from the others so.
const maxAnswersAll = 4 * egress.MaxAnswers

// recorded is what a sandbox of which nothing leaves is answered: what stands in a record. It takes the place of the way out
// alone; packets, connections, TLS, HTTP and the rules are as ever.
type recorded struct {
	all *atomic.Int64 // the cost of those of all sandboxes

	// mu guards the fields below.
	mu      sync.Mutex
	asked   map[string][]*recordedAnswer // by method and URL, in the order of the record
	targets map[egress.Target]bool
	names   map[string]bool
	cost    int64
	closed  bool
}

type recordedAnswer struct {
	egress.RecordedAnswer
	given bool
}

// newRecorded returns the answers of a sandbox that asks a record, with none in it; nil for any other sandbox.
func newRecorded(p egress.Policy, all *atomic.Int64) *recorded {
	if !p.Recorded {
		return nil
	}
	r := &recorded{all: all}
	r.reset()
	return r
}

func (r *recorded) reset() {
	r.all.Add(-r.cost)
	r.asked, r.targets, r.names, r.cost = map[string][]*recordedAnswer{}, map[egress.Target]bool{}, map[string]bool{}, 0
}

// close lets go of all answers, for good.
func (r *recorded) close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reset()
	r.closed = true
}

// take puts answers in the place of those that are there, or with more behind them. On error there are none. Kinds:
// NotFound, InvalidArgument, ResourceExhausted.
func (r *recorded) take(list []egress.RecordedAnswer, more bool) (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errs.New(errs.NotFound, "the sandbox has no network any more")
	}
	if !more {
		r.reset()
	}
	defer func() {
		if err != nil {
			r.reset()
		}
	}()
	for i := range list {
		a := &list[i]
		t, err := a.Target()
		if err != nil {
			return err
		}
		n := int64(a.Cost())
		r.cost += n
		if r.all.Add(n) > maxAnswersAll {
			return errs.New(errs.ResourceExhausted, "the gateway holds %d MiB of recorded answers for all sandboxes; try again when other replays are through", maxAnswersAll>>20)
		}
		if r.cost > egress.MaxAnswers {
			return errs.New(errs.ResourceExhausted, "the answers are longer than the %d MiB that a sandbox can be given of a record at once", egress.MaxAnswers>>20)
		}
		key := a.Method + " " + a.URL
		r.asked[key] = append(r.asked[key], &recordedAnswer{RecordedAnswer: *a})
		r.targets[t] = true
		if t.Name != "" {
			r.names[t.Name] = true
		}
	}
	return nil
}

// knows reports whether the record has an answer of a target.
func (r *recorded) knows(t egress.Target) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.targets[t]
}

// knowsName reports whether it has one of a name.
func (r *recorded) knowsName(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.names[name]
}

// answer returns the next answer to a request; nil, and why, where there is none.
func (r *recorded) answer(method, target string, body []byte) (*egress.RecordedAnswer, string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.asked[method+" "+target]
	shown := method + " " + withoutQuery(target)
	for _, given := range []bool{false, true} {
		for _, a := range list {
			if a.given != given || !a.Fits(body) {
				continue
			}
			if given {
				return nil, shown + " is asked for once more than it is in the record"
			}
			a.given = true
			return &a.RecordedAnswer, ""
		}
	}
	if len(list) > 0 {
		return nil, shown + " is in the record with another body"
	}
	return nil, shown + " is not in the record"
}

// withoutQuery is a URL as it may be recorded among facts.
func withoutQuery(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return "a URL"
	}
	u.RawQuery, u.ForceQuery, u.User = "", false, nil
	const most = 512
	s := u.String()
	return s[:min(len(s), most)]
}

// notRecorded is the verdict on what no record answers.
func notRecorded(what string) rules.Verdict {
	return rules.Verdict{Code: rules.NotRecorded, Reason: what + ", and nothing leaves this sandbox: it is answered from a record"}
}

// SetAnswers gives a sandbox that asks a record its answers; see egress.RecordedAnswer. What was refused before is forgotten, so that
// it is told again. Kinds: NotFound, FailedPrecondition, InvalidArgument, ResourceExhausted.
func (g *Gateway) SetAnswers(id string, list []egress.RecordedAnswer, more bool) error {
	s, err := g.find(id)
	if err != nil {
		return err
	}
	if s.recorded == nil {
		return errs.New(errs.FailedPrecondition, "sandbox %s is not answered from a record", id)
	}
	if !more {
		s.mu.Lock()
		s.refusals = nil
		s.mu.Unlock()
	}
	return s.recorded.take(list, more)
}

// judgeName judges a name that may be looked up by the rules.
func (s *sandbox) judgeName(name string) rules.Verdict {
	v := s.judge(rules.Query{Proto: rules.DNS, Name: name})
	if s.recorded != nil && v.Allow && !s.recorded.knowsName(name) {
		return notRecorded(name + " is not in the record")
	}
	return v
}

// judgeTarget judges a connection by what is known before anything is dialled.
func (c *conn) judgeTarget() rules.Verdict {
	q := c.judged()
	v := c.s.judge(q)
	if c.s.recorded == nil {
		return v
	}
	v.Inspect = true
	if v.Allow && !c.s.recorded.knows(c.target) {
		return notRecorded(string(c.proto) + " to " + rules.Target(q) + " is not in the record")
	}
	return v
}

// fromRecord answers a request in place of the target.
func (c *conn) fromRecord(method, target string, body []byte) (*egress.RecordedAnswer, error) {
	a, why := c.s.recorded.answer(method, target, body)
	if a != nil {
		return a, nil
	}
	v := notRecorded(why)
	shown := method + " " + withoutQuery(target)
	c.s.refuse(c.proto, shown, v)
	return nil, &egress.RefusedError{Target: shown, Verdict: v}
}

// sealed is the error of a sandbox of which nothing leaves, where it would; nil for any other. Whatever opens a connection to
// the world, or asks it anything, asks this first.
func (c *conn) sealed() error {
	if c.s.recorded == nil {
		return nil
	}
	return c.failed(notRecorded(string(c.proto) + " to " + rules.Target(c.judged()) + " would leave"))
}
