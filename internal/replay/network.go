package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/journal/bundle"
)

// Network is a recorded sandbox's, as far as it matters.
type Network struct {
	Rules []string `json:"rules"`
	// Recorded says that nothing left it, and that it was answered from a record.
	Recorded bool `json:"recorded"`
}

// Answer is a request that a record tells of, with the answer that it got: all that is needed to answer such a one again.
type Answer struct {
	Method, URL string
	// Size, Salt and Hash are those of the request's body, as the record has them.
	Size int64
	Salt []byte
	Hash string

	Status int
	Header map[string][]string
	Data   []byte
}

// MaxAnswers bounds the answers to one process, in bytes: what a server takes at once (egress.MaxAnswers), with room for what
// goes with them.
const MaxAnswers = 48 << 20

// The texts of the gateway that are looked for: what stands for the value of a header that is a credential, the code of what
// was not in the record that a sandbox was answered from, and the name that it answers itself.
const (
	leftOut     = "[left out]"
	notRecorded = "not_recorded"
	modelHost   = "casemate.internal"
)

// netFacts are those of events of the network.
type netFacts struct {
	Conn    uint64    `json:"conn"`
	Proto   string    `json:"proto"`
	Target  string    `json:"target"`
	Dialed  string    `json:"dialed"`
	Began   time.Time `json:"began"`
	Count   int       `json:"count"`
	Note    string    `json:"note"`
	Status  int       `json:"status"`
	Verdict struct {
		Code string `json:"code"`
	} `json:"verdict"`
	Unfinished  []string    `json:"unfinished"`
	Request     *bundle.Ref `json:"request"`
	RequestBody *bundle.Ref `json:"request_body"`
	Answer      *bundle.Ref `json:"answer"`
	AnswerBody  *bundle.Ref `json:"answer_body"`
}

// contact is something that a sandbox had to do with the network.
type contact struct {
	seq    uint64
	at     time.Time // when it began, and when it ended
	ended  time.Time
	conn   uint64
	target string // host:port
	// what it was, in words: the method and URL of a request.
	what string
	kind contactKind
	// answer is set for a request that the record can answer again, and why says what keeps it from that.
	answer *Answer
	why    string
	// hidden are fields of the answer's header whose values are not in the record.
	hidden []string
	body   []byte // of the request, what is kept of it
}

type contactKind int

const (
	// opened is a connection that was looked into, passed one that was not, request an HTTP request.
	opened contactKind = iota
	passed
	request
	// unknown is what the record that a sandbox was answered from did not have, and unknownName a name of that kind.
	unknown
	unknownName
)

// meets takes an event of the network.
func (r *Record) meets(e event) error {
	var s netFacts
	if err := e.said("server", &s); err != nil {
		return err
	}
	c := &contact{seq: e.Seq, at: e.Time, ended: e.Time, conn: s.Conn, target: cmp.Or(s.Target, "a host"), what: s.Target}
	if !s.Began.IsZero() {
		c.at = s.Began
	}
	switch summed := s.Count > 0 && e.Type != "network.refused"; {
	case summed && (e.Type == "network.opened" || e.Type == "network.request"):
		c.kind, c.why = request, "what it asked "+c.target+" was too much at once to be recorded one by one"
	case e.Type == "network.opened":
		if c.kind = opened; s.Dialed != "" {
			c.kind, c.why = passed, "what passed between it and "+c.target+" was not looked into"
		}
	case e.Type == "network.refused":
		if s.Verdict.Code != notRecorded || strings.Contains(s.Target, " ") { // of a request, its own event tells
			return nil
		}
		c.kind, c.what = unknown, "a connection to "+s.Target
		if s.Proto == "dns" {
			c.kind, c.what = unknownName, "the name "+s.Target
		}
	case e.Type == "model.used":
		c.kind, c.why = request, "it asked a model through the gateway, and a replay has no way to models"
	case e.Type == "network.request":
		c.kind = request
		if !c.asks(e, s, r.recorded()) {
			return nil
		}
	default:
		return nil
	}
	r.contacts = append(r.contacts, c)
	return nil
}

// recorded reports whether the sandbox was answered from a record.
func (r *Record) recorded() bool { return r.Settings.Network != nil && r.Settings.Network.Recorded }

// answering reports whether it was given answers: one without rules asks for none.
func (r *Record) answering() bool { return r.recorded() && len(r.Settings.Network.Rules) > 0 }

// asks reads a request and its answer, again of one in a sandbox that was answered from a record. It reports false for one
// that nobody has to answer: the gateway could not read it.
func (c *contact) asks(e event, s netFacts, again bool) bool {
	switch {
	case s.Request == nil && strings.HasPrefix(c.target, modelHost+":"):
		c.why = "it asked for a model through the gateway, and a replay has no way to models"
		return true
	case s.Request == nil:
		return false
	}
	var head struct{ Method, URL string }
	a := &Answer{Status: s.Status}
	if c.why = e.part("request", s.Request, &head); c.why != "" {
		return true
	}
	a.Method, a.URL, c.what = head.Method, head.URL, head.Method+" "+head.URL
	if again && s.Answer == nil {
		c.kind = unknown
		return true
	}
	if c.why = c.reads(e, s, a); c.why == "" {
		c.answer = a
	}
	return true
}

// reads reads the rest of a request and its answer, or says what is not in the record.
func (c *contact) reads(e event, s netFacts, a *Answer) (why string) {
	switch {
	case len(s.Unfinished) > 0:
		return c.what + " did not come to its end"
	case s.Answer == nil:
		return c.what + " got no answer (" + cmp.Or(s.Note, "nobody answered") + ")"
	case s.Status == 101:
		return "behind " + c.what + " another protocol was spoken, and that is not recorded"
	}
	var head struct{ Header map[string][]string }
	if why := e.part("answer", s.Answer, &head); why != "" {
		return "the answer to " + c.what + " can't be given: " + why
	}
	a.Header = head.Header
	data, why := e.body("server.answer_body", s.AnswerBody)
	switch {
	case why != "":
		return "the answer to " + c.what + " is not in the record: " + why
	case data.bytes > int64(len(data.data)):
		return fmt.Sprintf("the answer to %s has %d bytes, and of that only the beginning and the end are in the record", c.what, data.bytes)
	case trailed(a.Header):
		return "the answer to " + c.what + " has trailers, which are not recorded"
	}
	a.Data = slices.Clone(data.data)
	for _, name := range slices.Sorted(maps.Keys(a.Header)) {
		if slices.Contains(a.Header[name], leftOut) {
			c.hidden = append(c.hidden, name+" of "+c.what)
		}
	}
	if ref := s.RequestBody; ref != nil && ref.Bytes > 0 {
		i := slices.IndexFunc(e.bodies, func(b bundle.Body) bool { return b.Name == "server.request_body" })
		if i < 0 {
			return "the body of " + c.what + " is not in the record"
		}
		a.Size, a.Hash, a.Salt = ref.Bytes, ref.Body, e.bodies[i].Salt
		c.body = slices.Clone(e.bodies[i].Data)
	}
	return ""
}

// part reads one of a request's parts that are JSON, or says why it can't be read.
func (e event) part(name string, ref *bundle.Ref, into any) (why string) {
	text, why := e.body("server."+name, ref)
	switch {
	case why != "":
		return "a request's " + name + " is not in the record: " + why
	case text.bytes > int64(len(text.data)), json.Unmarshal(text.data, into) != nil:
		return "a request's " + name + " is too long to be in the record whole"
	}
	return ""
}

// trailed reports whether fields follow behind an answer's body, as they do in gRPC.
func trailed(h map[string][]string) bool {
	for name, values := range h {
		if strings.EqualFold(name, "Trailer") || strings.EqualFold(name, "Content-Type") && len(values) > 0 && strings.HasPrefix(values[0], "application/grpc") {
			return true
		}
	}
	return false
}

// assign says of each contact whose it was. Nothing that comes over the network says which process sent it, but when it began
// says it where there was only one: the first one that had not ended then. Where several ran at the same time, it is held to
// be of each of them.
func (r *Record) assign() {
	all := r.Processes()
	asked := map[uint64]bool{}
	for _, c := range r.contacts[r.assigned:] {
		if c.kind == request || c.kind == unknown {
			asked[c.conn] = true
		}
	}
	for _, c := range r.contacts[r.assigned:] {
		if c.kind == opened && !asked[c.conn] {
			c.why = "it said something to " + c.target + " that was no request"
		}
		i := slices.IndexFunc(all, func(p *Process) bool { return !p.unstarted() && (p.Ended.IsZero() || !p.Ended.Before(c.at)) })
		if i < 0 {
			continue // of what processes left behind
		}
		for _, p := range all[i:] {
			if p == all[i] || p.beside != "" && all[i].beside != "" && p.group == all[i].group {
				p.contacts = append(p.contacts, c)
			}
		}
	}
	r.assigned = len(r.contacts)
	for _, p := range all { // as they began; they are told of as they ended
		slices.SortStableFunc(p.contacts, func(a, b *contact) int { return a.at.Compare(b.at) })
	}
}

// reached names what a process reached in the network, not all of it.
func (p *Process) reached() string {
	var out []string
	for _, c := range p.contacts {
		if len(out) < 3 && c.kind != unknown && c.kind != unknownName && !slices.Contains(out, c.target) {
			out = append(out, c.target)
		}
	}
	return strings.Join(out, ", ")
}

// offline says why a process can't be run again without a network; with record, with one that answers from the record.
func (p *Process) offline(record bool) string {
	reached := p.reached()
	if reached == "" {
		return ""
	}
	if !record {
		return "it used the network (" + reached + "), and there is none in a replay (--network record answers from the record)"
	}
	if p.ruled > 0 {
		return fmt.Sprintf("the rules of its network were changed before it (event %d), and that is not done again", p.ruled)
	}
	if p.mixed != "" {
		return p.mixed + " before it left processes behind, and which of them used the network (" + reached + ") is not recorded"
	}
	size := 0
	for _, c := range p.contacts {
		if c.why != "" {
			return c.why
		}
		if c.answer != nil {
			size += len(c.answer.Data) + len(c.answer.URL)
		}
	}
	if size > MaxAnswers {
		return fmt.Sprintf("it was answered with more than the %d MiB that can be given again", MaxAnswers>>20)
	}
	return ""
}

// Answers returns what a process was answered, in the order in which it asked.
func (p *Process) Answers() []Answer {
	var out []Answer
	for _, c := range p.contacts {
		if c.answer != nil {
			out = append(out, *c.answer)
		}
	}
	return out
}

// hidden names what of the answers to a process is not in the record.
func (p *Process) hidden() string {
	var out []string
	for _, c := range p.contacts {
		out = append(out, c.hidden...)
	}
	if len(out) > 3 {
		out = append(out[:3:3], fmt.Sprintf("%d more", len(out)-3))
	}
	return strings.Join(out, ", ")
}

// Unanswered names what a process asked for that was not in the record that its sandbox was answered from.
func (p *Process) unanswered() []string {
	var out []string
	for _, c := range p.contacts {
		if c.kind == unknown || c.kind == unknownName {
			out = append(out, c.what)
		}
	}
	return out
}

// compareRequests compares what two processes asked for: what is not in the record, and what was not asked for again. A name
// alone that was looked up is no difference: names that nobody knew leave no trace in a record. It explains others.
func compareRequests(a, b side) (diffs, lookups []Difference) {
	if !a.r.recorded() && !b.r.recorded() {
		return nil, nil
	}
	left := map[string]int{}
	for _, c := range a.p.contacts {
		left[c.key()]++
	}
	for _, c := range b.p.contacts {
		if left[c.key()]--; left[c.key()] >= 0 || c.kind == opened {
			continue
		}
		d := Difference{Part: PartNetwork, Path: c.what, Replayed: "asked for"}
		if c.kind == unknownName {
			lookups = append(lookups, d)
		} else {
			diffs = append(diffs, d)
		}
	}
	for _, c := range a.p.contacts {
		if c.kind == opened || left[c.key()] <= 0 {
			continue
		}
		left[c.key()]--
		d := Difference{Part: PartNetwork, Path: c.what, Recorded: "asked for"}
		if c.kind == unknownName {
			lookups = append(lookups, d)
		} else {
			diffs = append(diffs, d)
		}
	}
	return diffs, lookups
}

// key tells contacts apart: one that was not in the record is another than one that is.
func (c *contact) key() string { return fmt.Sprint(c.kind, " ", c.what) }

// answered checks that a replay's sandbox was answered what stands in the record, each time in the order that it has there,
// and that nothing of it left.
func (r *Record) answered(one *Record) error {
	one.assign()
	r.assign()
	for _, c := range one.contacts {
		if c.kind == passed || !one.recorded() && (c.kind == opened || c.kind == request) {
			return fmt.Errorf("%s was reached from it (event %d)", c.target, c.seq)
		}
	}
	if !one.recorded() {
		return nil
	}
	for id, p := range one.byID {
		if bad := r.byID[id].otherwise(p); bad != nil {
			return fmt.Errorf("%s was answered in it (event %d) as the record does not have it", bad.what, bad.seq)
		}
	}
	return nil
}

// otherwise returns a request of a process that was run again to which the answer is not the record's: another one, or not
// the next one. Of requests that were under way at the same time, either may come first. nil: there is none.
func (p *Process) otherwise(again *Process) *contact {
	type placed struct {
		c  *contact
		at int // among the requests of its kind
	}
	given := map[string][]placed{}
	for _, c := range again.contacts {
		if c.answer == nil {
			continue
		}
		same, before := p.sameRequests(c), given[c.question()]
		at := slices.IndexFunc(same, func(d *contact) bool {
			return d.answer.same(c.answer) && !slices.ContainsFunc(before, func(b placed) bool { return same[b.at] == d })
		})
		if at < 0 || slices.ContainsFunc(before, func(b placed) bool { return b.at > at && !b.c.ended.After(c.at) }) {
			return c
		}
		given[c.question()] = append(before, placed{c, at})
	}
	for _, list := range given {
		for _, one := range list {
			if one.at >= len(list) {
				return one.c // one before it was left out
			}
		}
	}
	return nil
}

// sameRequests are the requests of a process that are like c, and were answered.
func (p *Process) sameRequests(c *contact) []*contact {
	var out []*contact
	if p == nil {
		return nil
	}
	for _, d := range p.contacts {
		if d.answer != nil && d.question() == c.question() {
			out = append(out, d)
		}
	}
	return out
}

// question tells requests apart by what was asked: method, URL and what is kept of the body.
func (c *contact) question() string { return fmt.Sprintf("%s %d %s", c.what, c.answer.Size, c.body) }

// same reports whether two answers are the same.
func (a *Answer) same(b *Answer) bool {
	return a.Status == b.Status && bytes.Equal(a.Data, b.Data) && maps.EqualFunc(a.Header, b.Header, slices.Equal)
}
