package bundle

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/gowebpki/jcs"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/journal/tree"
)

// maxProblems bounds a report's list of problems.
const maxProblems = 100

// Options say what a bundle is held against.
type Options struct {
	// Key is the public key that the checker trusts; "": the bundle's own, which proves only that one
	// holder of some key made all of it.
	Key string
	// Heads are checkpoints that the checker, or others, were given at some time.
	Heads [][]byte
	// Each, where it is set, is told of every event in order, as its leaf holds it, with the bodies that are there.
	// Nothing of that means anything before the report says that the bundle's integrity holds.
	Each func(event json.RawMessage, bodies []Body)
}

// Problem is something that is not as it must be.
type Problem struct {
	// Event is the position of the event, from 0, before or at which the bundle can't be trusted any more;
	// -1: of the bundle as a whole.
	Event int    `json:"event"`
	What  string `json:"what"`
}

// Verdict is the answer to one question.
type Verdict struct {
	OK       bool      `json:"ok"`
	Problems []Problem `json:"problems,omitempty"`
}

func (v *Verdict) fail(event int, format string, args ...any) {
	v.OK = false
	if len(v.Problems) < maxProblems {
		v.Problems = append(v.Problems, Problem{Event: event, What: fmt.Sprintf(format, args...)})
	}
}

// Anchor is the answer about heads.
type Anchor struct {
	Verdict
	// Heads is how many were given, and Until how many leaves of the log the biggest one covers that fits.
	Heads int   `json:"heads"`
	Until int64 `json:"until"`
	// Events is how many events of the bundle that is.
	Events int `json:"events"`
}

// Replays is the answer about processes that were run again. Whoever has the records of that fills it in: a bundle by
// itself only says how many processes there are.
type Replays struct {
	Verdict
	// Runs is how often they were run again; 0: they were not, or nobody asked.
	Runs         int `json:"runs"`
	Processes    int `json:"processes"`
	Reproduced   int `json:"reproduced"`
	Normalised   int `json:"normalised"`
	Diverged     int `json:"diverged"`
	Unstable     int `json:"unstable"`
	NotAttempted int `json:"not_attempted"`
	// Answered is how many requests were answered from the record, in the first run.
	Answered int `json:"answered,omitempty"`
}

// Report is what a bundle shows.
type Report struct {
	Origin  string `json:"origin"`
	Sandbox string `json:"sandbox"`
	Key     string `json:"key"`
	// KeyGiven says that the checker named the key.
	KeyGiven bool  `json:"key_given"`
	Size     int64 `json:"size"` // of the log
	Events   int   `json:"events"`
	Imported int   `json:"imported,omitempty"` // events from before the log
	Gaps     int   `json:"gaps"`
	Lost     int   `json:"lost,omitempty"`
	Bodies   int   `json:"bodies"`
	// Erased counts bodies that events speak of and the bundle does not hold; of Redacted of them the record says
	// who had them erased.
	Erased   int `json:"erased,omitempty"`
	Redacted int `json:"redacted,omitempty"`
	// GuestOnly counts events in which some fact is the guest's word.
	GuestOnly int `json:"guest_facts"`

	// Integrity: nothing was changed. Completeness: nothing was left out, but for gaps that are told of.
	Integrity    Verdict `json:"integrity"`
	Completeness Verdict `json:"completeness"`
	Anchored     Anchor  `json:"anchored"`
	Reproduced   Replays `json:"reproduced"`
}

// First returns the earliest problem of integrity and completeness; ok is false where there is none.
func (r Report) First() (p Problem, ok bool) {
	for _, one := range append(append([]Problem(nil), r.Integrity.Problems...), r.Completeness.Problems...) {
		if !ok || one.Event < p.Event {
			p, ok = one, true
		}
	}
	return p, ok
}

// Verify reads a bundle to its end and reports what it shows. The error is of reading, and of a key or
// head that is none; a bundle that is wrong gets a report.
func Verify(in io.Reader, o Options) (Report, error) {
	v := verifier{o: o, last: -1}
	v.r.Integrity.OK, v.r.Completeness.OK = true, true
	if o.Key != "" {
		var err error
		if v.key, err = note.NewVerifier(o.Key); err != nil {
			return Report{}, fmt.Errorf("the key is none of a journal: %w", err)
		}
		v.r.Key, v.r.KeyGiven = o.Key, true
	}
	lines := bufio.NewReaderSize(in, 64<<10)
	for n := 1; ; n++ {
		b, err := readLine(lines)
		if errors.Is(err, io.EOF) && len(b) == 0 {
			break
		}
		if errors.Is(err, errTooLong) || errors.Is(err, io.EOF) {
			v.r.Integrity.fail(v.at(), "line %d is cut off or too long", n)
			break
		}
		if err != nil {
			return Report{}, fmt.Errorf("read bundle: %w", err)
		}
		l, err := parseLine(b)
		if err != nil {
			if v.damaged(n, b, err) {
				continue
			}
			break
		}
		if !v.line(n, l) {
			break
		}
	}
	v.finish()
	return v.r, v.err
}

var errTooLong = errors.New("a line is too long")

func readLine(r *bufio.Reader) ([]byte, error) {
	var b []byte
	for {
		part, err := r.ReadSlice('\n')
		b = append(b, part...)
		if err == nil {
			return b[:len(b)-1], nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return b, err
		}
		if len(b) > maxLine {
			return nil, errTooLong
		}
	}
}

// The stages of a bundle.
const (
	atHeader = iota
	atCheckpoint
	inHeads
	inEvents
	atEnd
)

type verifier struct {
	o     Options
	r     Report
	err   error
	key   note.Verifier
	stage int
	head  tree.Head
	heads map[tree.Head]bool // proved to be prefixes
	seal  *Seal
	// checked says that the checkpoint is signed; else no proof means anything.
	checked bool
	last    int64 // the leaf of the event before
	next    uint64
	leaves  []int64         // of events
	astray  bool            // the last event could not be read
	refs    map[string]Ref  // of the last event, by name
	told    json.RawMessage // the last event, of which Each is told once its bodies are read
	bodies  []Body
	started map[string]bool
}

// at is the position of the event that comes next; -1 before the checkpoint.
func (v *verifier) at() int {
	if v.stage <= atCheckpoint {
		return -1
	}
	return len(v.leaves)
}

// line takes one line; false ends the reading.
func (v *verifier) line(n int, l Line) bool {
	switch {
	case l.Bundle != nil && v.stage == atHeader:
		return v.header(*l.Bundle)
	case l.Checkpoint != "" && v.stage == atCheckpoint:
		v.checkpoint(l.Checkpoint)
	case l.Head != "" && v.stage == inHeads:
		v.older(l)
	case (l.Event != nil || l.Lost != nil) && (v.stage == inHeads || v.stage == inEvents):
		v.stage = inEvents
		v.endBodies()
		v.astray = false
		v.event(l)
	case l.Body != nil && v.astray: // of an event that could not be read
	case l.Body != nil && v.stage == inEvents:
		v.body(*l.Body)
	case l.Seal != "" && (v.stage == inHeads || v.stage == inEvents):
		v.endBodies()
		v.sealed(l.Seal)
	default:
		v.endBodies()
		v.r.Integrity.fail(v.at(), "line %d is in a place where none of its kind can be", n)
		return v.stage == inEvents
	}
	return true
}

// damaged takes a line that can't be read; false ends the reading. Where it is not plain what it stood for, it was
// the body of the last event if one is still to come, and else the next event, whose bodies follow.
func (v *verifier) damaged(n int, b []byte, err error) bool {
	at := v.at()
	isBody := len(v.refs) > 0
	switch {
	case bytes.HasPrefix(b, []byte(`{"body":`)):
		isBody = !v.astray
	case bytes.HasPrefix(b, []byte(`{"event":`)), bytes.HasPrefix(b, []byte(`{"lost":`)):
		isBody = false
	}
	if v.stage == inEvents && isBody {
		at--
	} else {
		v.endBodies()
		v.astray = true
	}
	v.r.Integrity.fail(at, "line %d: %v", n, err)
	return v.stage == inHeads || v.stage == inEvents
}

func (v *verifier) header(h Header) bool {
	v.stage = atCheckpoint
	v.r.Origin, v.r.Sandbox = h.Origin, h.Sandbox
	if h.Version != Version {
		v.r.Integrity.fail(-1, "it is a bundle of version %d, and this program reads %d", h.Version, Version)
		return false
	}
	if v.key == nil {
		key, err := note.NewVerifier(h.Key)
		if err != nil {
			v.r.Integrity.fail(-1, "its key is none of a journal")
			return false
		}
		v.key, v.r.Key = key, h.Key
	} else if h.Key != v.o.Key {
		v.r.Integrity.fail(-1, "it was made with another key than the one given")
	}
	if h.Origin != v.key.Name() {
		v.r.Integrity.fail(-1, "it is of the log %q, and the key of %q", h.Origin, v.key.Name())
	}
	return true
}

func (v *verifier) checkpoint(text string) {
	v.stage = inHeads
	h, err := tree.ParseCheckpoint([]byte(text), v.key)
	if err != nil {
		v.r.Integrity.fail(-1, "its checkpoint is not signed with the key: %v", err)
		return
	}
	v.head, v.checked, v.r.Size = h, true, h.Size
}

func (v *verifier) older(l Line) {
	h, err := tree.ParseCheckpoint([]byte(l.Head), v.key)
	if err == nil {
		err = tree.CheckPrefix(v.head, h, l.Proof)
	}
	if err != nil {
		v.r.Integrity.fail(-1, "an older checkpoint does not hold: %v", err)
		return
	}
	if v.heads == nil {
		v.heads = make(map[tree.Head]bool)
	}
	v.heads[h] = true
}

// fields are what of an event is looked at.
type fields struct {
	Sandbox string                                `json:"sandbox"`
	Seq     uint64                                `json:"seq"`
	Type    string                                `json:"type"`
	Process string                                `json:"process"`
	Facts   map[string]map[string]json.RawMessage `json:"facts"`
}

func (v *verifier) event(l Line) {
	at := len(v.leaves)
	var f fields
	var hash tlog.Hash
	if l.Lost != nil {
		v.r.Lost++
		f.Sandbox, f.Seq, hash = v.r.Sandbox, l.Lost.Seq, l.Lost.Hash
		v.r.Completeness.fail(at, "event %d was lost by the server", f.Seq)
	} else {
		hash = tlog.RecordHash(l.Event)
		v.told = l.Event
		if again, err := jcs.Transform(l.Event); err != nil || !bytes.Equal(again, l.Event) {
			v.r.Integrity.fail(at, "the event is not in canonical form")
		}
		if err := json.Unmarshal(l.Event, &f); err != nil {
			v.r.Integrity.fail(at, "the event can't be read: %v", err)
		}
	}
	v.leaves = append(v.leaves, *l.Leaf)
	v.r.Events++
	if v.checked {
		if *l.Leaf < 0 || *l.Leaf >= v.head.Size {
			v.r.Integrity.fail(at, "event %d can't be entry %d of a log of %d", f.Seq, *l.Leaf, v.head.Size)
		} else if err := tlog.CheckRecord(l.Proof, v.head.Size, v.head.Root, *l.Leaf, hash); err != nil {
			v.r.Integrity.fail(at, "event %d is not in the log: it was changed", f.Seq)
		}
	}
	if f.Sandbox != v.r.Sandbox {
		v.r.Integrity.fail(at, "the event is of %q", f.Sandbox)
	}
	v.order(at, f.Seq, *l.Leaf)
	v.note(f)
}

// order checks counter and leaf against the event before.
func (v *verifier) order(at int, seq uint64, leaf int64) {
	want := v.next + 1
	switch {
	case seq > want:
		v.r.Completeness.fail(at, "events %d to %d are missing", want, seq-1)
	case seq < want:
		v.r.Integrity.fail(at, "event %d comes after event %d", seq, v.next)
	}
	if leaf <= v.last && seq >= want {
		v.r.Integrity.fail(at, "event %d is at a place in the log before that of the one before", seq)
	}
	v.next, v.last = max(seq, v.next), max(leaf, v.last)
}

// note counts what an event tells.
func (v *verifier) note(f fields) {
	switch f.Type {
	case "gap":
		v.r.Gaps++
	case "body.redacted":
		var names []string
		if json.Unmarshal(f.Facts["server"]["names"], &names) == nil {
			v.r.Redacted += len(names)
		}
	case "process.started":
		if v.started == nil {
			v.started = make(map[string]bool)
		}
		v.started[f.Process] = true
	}
	if len(f.Facts["guest"]) > 0 {
		v.r.GuestOnly++
	}
	v.refs = nil
	for observer, members := range f.Facts {
		for name, m := range members {
			var b Ref
			if len(m) == 0 || m[0] != '{' || json.Unmarshal(m, &b) != nil || len(b.Body) != hex.EncodedLen(sha256.Size) || b.Hashed {
				continue
			}
			if v.refs == nil {
				v.refs = make(map[string]Ref)
			}
			v.refs[observer+"."+name] = b
		}
	}
}

func (v *verifier) body(b Body) {
	at := len(v.leaves) - 1
	ref, ok := v.refs[b.Name]
	if !ok || b.Seq != v.next {
		v.r.Integrity.fail(at, "a body %q is there of which event %d does not speak", b.Name, v.next)
		return
	}
	delete(v.refs, b.Name)
	want, size := ref.Body, ref.Bytes
	if ref.Head != "" {
		want, size = ref.Head, ref.Kept
	}
	if int64(len(b.Data)) != size || HashBody(b.Salt, b.Data) != want {
		v.r.Integrity.fail(at, "body %q of event %d was changed", b.Name, b.Seq)
		return
	}
	v.r.Bodies++
	if v.o.Each != nil {
		v.bodies = append(v.bodies, b)
	}
}

// endBodies takes note of the bodies that did not come.
func (v *verifier) endBodies() {
	v.r.Erased += len(v.refs)
	v.refs = nil
	if v.o.Each != nil && v.told != nil {
		v.o.Each(v.told, v.bodies)
	}
	v.told, v.bodies = nil, nil
}

func (v *verifier) sealed(text string) {
	v.stage = atEnd
	s, err := parseSeal(text, v.key)
	if err != nil {
		v.r.Integrity.fail(len(v.leaves), "its seal is not signed with the key: %v", err)
		return
	}
	v.seal = &s
	if s.Origin != v.r.Origin || s.Sandbox != v.r.Sandbox {
		v.r.Integrity.fail(-1, "its seal is of another bundle")
	}
	if v.checked && (s.Size != v.head.Size || s.Root != v.head.Root) {
		v.r.Integrity.fail(-1, "its seal is of another checkpoint")
	}
	switch {
	case v.next < s.Last:
		v.r.Completeness.fail(len(v.leaves), "events %d to %d are missing", v.next+1, s.Last)
	case v.next > s.Last:
		v.r.Integrity.fail(len(v.leaves)-1, "event %d is there, and the server signed for %d", v.next, s.Last)
	}
	for _, leaf := range v.leaves {
		if leaf < s.Imported {
			v.r.Imported++
		}
	}
}

func (v *verifier) finish() {
	v.endBodies()
	if v.stage < inHeads {
		v.r.Integrity.fail(-1, "it has no checkpoint")
	}
	if v.seal == nil && v.stage != atEnd {
		v.r.Completeness.fail(v.at(), "it ends without its seal: it was cut off")
	}
	v.anchor()
	p := &v.r.Reproduced
	p.Processes, p.NotAttempted, p.OK = len(v.started), len(v.started), true
}

// anchor holds the log against the heads that were given.
func (v *verifier) anchor() {
	a := &v.r.Anchored
	a.OK, a.Heads = true, len(v.o.Heads)
	if v.key == nil {
		a.OK = len(v.o.Heads) == 0
		return
	}
	for _, text := range v.o.Heads {
		h, err := tree.ParseCheckpoint(text, v.key)
		if err != nil {
			v.err = fmt.Errorf("a head that was given is not signed with the bundle's key: %w", err)
			return
		}
		switch {
		case !v.checked:
			a.fail(-1, "the bundle has no valid checkpoint")
		case v.proved(h):
			a.Until = max(a.Until, h.Size)
		case h.Size > v.head.Size:
			a.fail(-1, "a head of %d entries is beyond the bundle's log of %d: export again with this head; if that is refused, the log was cut", h.Size, v.head.Size)
		default:
			a.fail(-1, "a head of %d entries is not proved to be the beginning of the log: export again with this head; if that is refused, the log was rewritten", h.Size)
		}
	}
	for _, leaf := range v.leaves {
		if leaf < a.Until {
			a.Events++
		}
	}
}

func (v *verifier) proved(h tree.Head) bool {
	if h.Size == 0 || h.Size == v.head.Size && h.Root == v.head.Root {
		return true
	}
	return v.heads[h]
}

// Read calls each with every line of a bundle, in order, without verifying anything.
func Read(in io.Reader, each func(Line) error) error {
	lines := bufio.NewReaderSize(in, 64<<10)
	for n := 1; ; n++ {
		b, err := readLine(lines)
		if errors.Is(err, io.EOF) && len(b) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read line %d of the bundle: %w", n, err)
		}
		l, err := parseLine(b)
		if err != nil {
			return fmt.Errorf("line %d of the bundle: %w", n, err)
		}
		if err := each(l); err != nil {
			return err
		}
	}
}
