package guestwire

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"
)

// What passes for each process that is run is encoded and decoded by hand: reflection took each side as long as all
// else that it does for a call. The encoders write what package json would write, byte for byte. The decoders take
// the plain form only (ASCII without escapes, no white space, no null, known fields) and leave everything else to package
// json, so that there is one judge of what is malformed.

// appendRun appends r as JSON.
func appendRun(b []byte, r *RunProcess) []byte {
	b = append(b, `{"start":`...)
	b = appendStart(b, &r.Start)
	b = append(b, `,"output":{"id":`...)
	b = appendText(b, r.Output.ID)
	b = appendInt(b, `,"offset":`, r.Output.Offset)
	b = appendTrue(b, `,"follow":`, r.Output.Follow)
	b = appendTrue(b, `,"hold":`, r.Output.Hold)
	b = appendNonzero(b, `,"limit":`, r.Output.Limit)
	return append(b, "}}"...)
}

func appendStart(b []byte, r *StartProcess) []byte {
	b = appendText(append(b, `{"id":`...), r.ID)
	b = appendTexts(append(b, `,"argv":`...), r.Argv)
	if len(r.Env) > 0 {
		b = append(b, `,"env":`...)
		sep := byte('{')
		for _, k := range slices.Sorted(maps.Keys(r.Env)) {
			b = appendText(append(b, sep), k)
			b = appendText(append(b, ':'), r.Env[k])
			sep = ','
		}
		b = append(b, '}')
	}
	b = appendNonempty(b, `,"dir":`, r.Dir)
	b = appendNonempty(b, `,"user":`, r.User)
	b = appendNonempty(b, `,"stdin":`, string(r.Stdin))
	b = appendTrue(b, `,"tty":`, r.TTY)
	b = appendNonzero(b, `,"rows":`, int64(r.Rows))
	b = appendNonzero(b, `,"cols":`, int64(r.Cols))
	b = appendNonzero(b, `,"timeout_ms":`, r.TimeoutMS)
	b = appendNonzero(b, `,"grace_ms":`, r.GraceMS)
	b = appendNonzero(b, `,"buffer":`, r.Buffer)
	b = appendTrue(b, `,"hold":`, r.Hold)
	if len(r.Scope) > 0 {
		b = appendTexts(append(b, `,"scope":`...), r.Scope)
	}
	return append(b, '}')
}

// appendInfo appends i as JSON.
func appendInfo(b []byte, i *ProcessInfo) []byte {
	b = appendText(append(b, `{"id":`...), i.ID)
	b = appendTexts(append(b, `,"argv":`...), i.Argv)
	b = appendText(append(b, `,"dir":`...), i.Dir)
	b = appendText(append(b, `,"user":`...), i.User)
	b = appendInt(b, `,"pid":`, int64(i.PID))
	b = appendTrue(b, `,"tty":`, i.TTY)
	b = appendTrue(b, `,"attached":`, i.Attached)
	b = appendInt(b, `,"started":`, i.Started)
	b = appendNonzero(b, `,"ended":`, i.Ended)
	b = appendNonempty(b, `,"end":`, string(i.End))
	b = appendNonzero(b, `,"code":`, int64(i.Code))
	b = appendNonzero(b, `,"signal":`, int64(i.Signal))
	b = appendNonempty(b, `,"error":`, i.Error)
	b = appendNonzero(b, `,"user_ms":`, i.UserMS)
	b = appendNonzero(b, `,"system_ms":`, i.SystemMS)
	b = appendNonzero(b, `,"max_rss":`, i.MaxRSS)
	b = appendInt(b, `,"bytes":`, i.Bytes)
	b = appendNonzero(b, `,"dropped":`, i.Dropped)
	b = appendTrue(b, `,"complete":`, i.Complete)
	b = appendNonzero(b, `,"leftover":`, int64(i.Leftover))
	return append(b, '}')
}

func appendInt(b []byte, name string, v int64) []byte {
	return strconv.AppendInt(append(b, name...), v, 10)
}

func appendNonzero(b []byte, name string, v int64) []byte {
	if v == 0 {
		return b
	}
	return appendInt(b, name, v)
}

func appendTrue(b []byte, name string, v bool) []byte {
	if !v {
		return b
	}
	return append(append(b, name...), "true"...)
}

func appendNonempty(b []byte, name, s string) []byte {
	if s == "" {
		return b
	}
	return appendText(append(b, name...), s)
}

func appendTexts(b []byte, all []string) []byte {
	if all == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i, s := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(b, s)
	}
	return append(b, ']')
}

func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if !plainByte(s[i]) {
			text, _ := json.Marshal(s) // of a string it can't fail
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// plainByte reports whether a byte stands for itself in a text, as package json writes it.
func plainByte(c byte) bool {
	return c >= ' ' && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

// parseRun decodes b into *r; false: not in the plain form, and *r is as before.
func parseRun(b []byte, r *RunProcess) bool {
	q, v := quick{rest: b}, *r
	q.object(func(name []byte) {
		switch string(name) {
		case "start":
			q.start(&v.Start)
		case "output":
			q.output(&v.Output)
		default:
			q.bad = true
		}
	})
	if !q.whole() {
		return false
	}
	*r = v
	return true
}

func (q *quick) start(r *StartProcess) {
	q.object(func(name []byte) {
		switch string(name) {
		case "id":
			r.ID = q.text()
		case "argv":
			r.Argv = q.texts()
		case "env":
			q.env(r)
		case "dir":
			r.Dir = q.text()
		case "user":
			r.User = q.text()
		case "stdin":
			r.Stdin = Stdin(q.text())
		case "tty":
			r.TTY = q.boolean()
		case "rows":
			r.Rows = uint16(q.number(0, 1<<16-1))
		case "cols":
			r.Cols = uint16(q.number(0, 1<<16-1))
		case "timeout_ms":
			r.TimeoutMS = q.number(minInt, maxInt)
		case "grace_ms":
			r.GraceMS = q.number(minInt, maxInt)
		case "buffer":
			r.Buffer = q.number(minInt, maxInt)
		case "hold":
			r.Hold = q.boolean()
		case "scope":
			r.Scope = q.texts()
		default:
			q.bad = true
		}
	})
}

func (q *quick) env(r *StartProcess) {
	if r.Env != nil { // twice: package json joins them
		q.bad = true
		return
	}
	env := make(map[string]string)
	q.object(func(name []byte) { env[string(name)] = q.text() })
	r.Env = env
}

func (q *quick) output(r *OutputRequest) {
	q.object(func(name []byte) {
		switch string(name) {
		case "id":
			r.ID = q.text()
		case "offset":
			r.Offset = q.number(minInt, maxInt)
		case "follow":
			r.Follow = q.boolean()
		case "hold":
			r.Hold = q.boolean()
		case "limit":
			r.Limit = q.number(minInt, maxInt)
		default:
			q.bad = true
		}
	})
}

// parseInfo decodes b into *i; false: not in the plain form, and *i is as before.
func parseInfo(b []byte, i *ProcessInfo) bool {
	q, v := quick{rest: b}, *i
	q.object(func(name []byte) { q.info(&v, name) })
	if !q.whole() {
		return false
	}
	*i = v
	return true
}

func (q *quick) info(i *ProcessInfo, name []byte) {
	switch string(name) {
	case "id":
		i.ID = q.text()
	case "argv":
		i.Argv = q.texts()
	case "dir":
		i.Dir = q.text()
	case "user":
		i.User = q.text()
	case "pid":
		i.PID = int(q.number(minInt, maxInt))
	case "tty":
		i.TTY = q.boolean()
	case "attached":
		i.Attached = q.boolean()
	case "started":
		i.Started = q.number(minInt, maxInt)
	case "ended":
		i.Ended = q.number(minInt, maxInt)
	case "end":
		i.End = End(q.text())
	case "code":
		i.Code = int(q.number(minInt, maxInt))
	case "signal":
		i.Signal = int(q.number(minInt, maxInt))
	case "error":
		i.Error = q.text()
	case "user_ms":
		i.UserMS = q.number(minInt, maxInt)
	case "system_ms":
		i.SystemMS = q.number(minInt, maxInt)
	case "max_rss":
		i.MaxRSS = q.number(minInt, maxInt)
	case "bytes":
		i.Bytes = q.number(minInt, maxInt)
	case "dropped":
		i.Dropped = q.number(minInt, maxInt)
	case "complete":
		i.Complete = q.boolean()
	case "leftover":
		i.Leftover = int(q.number(minInt, maxInt))
	default:
		q.bad = true
	}
}

// The range of numbers that the plain form has. maxDigits of them fit an uint64.
const (
	maxInt    = math.MaxInt64
	minInt    = -maxInt
	maxDigits = 19
)

// quick reads JSON in the plain form. After the first thing that is not in it, bad is set and the rest is undefined.
type quick struct {
	rest []byte
	bad  bool
}

// whole reports whether everything was read, and was plain.
func (q *quick) whole() bool { return !q.bad && len(q.rest) == 0 }

// take reads c, if it is next.
func (q *quick) take(c byte) bool {
	if q.bad || len(q.rest) == 0 || q.rest[0] != c {
		return false
	}
	q.rest = q.rest[1:]
	return true
}

// need reads c.
func (q *quick) need(c byte) { q.bad = !q.take(c) || q.bad }

// object reads an object; member reads the value of each of its names.
func (q *quick) object(member func(name []byte)) {
	q.need('{')
	for first := true; !q.bad; first = false {
		if q.take('}') {
			return
		}
		if !first {
			q.need(',')
		}
		name := q.plain()
		q.need(':')
		if !q.bad {
			member(name)
		}
	}
}

func (q *quick) texts() []string {
	all := make([]string, 0, 4)
	q.need('[')
	for !q.bad && !q.take(']') {
		if len(all) > 0 {
			q.need(',')
		}
		all = append(all, q.text())
	}
	return all
}

func (q *quick) text() string { return string(q.plain()) }

func (q *quick) plain() []byte {
	q.need('"')
	if q.bad {
		return nil
	}
	for i, c := range q.rest {
		if c == '"' {
			text := q.rest[:i]
			q.rest = q.rest[i+1:]
			return text
		}
		if c < ' ' || c >= 0x7f || c == '\\' {
			break
		}
	}
	q.bad = true
	return nil
}

func (q *quick) boolean() bool {
	for _, v := range [...]bool{true, false} {
		word := strconv.FormatBool(v)
		if !q.bad && len(q.rest) >= len(word) && string(q.rest[:len(word)]) == word {
			q.rest = q.rest[len(word):]
			return v
		}
	}
	q.bad = true
	return false
}

// number reads an integer in its one spelling.
func (q *quick) number(least, most int64) int64 {
	negative := q.take('-')
	n, digits := uint64(0), 0
	for ; digits < len(q.rest) && digits <= maxDigits; digits++ {
		c := q.rest[digits]
		if c < '0' || c > '9' {
			break
		}
		n = 10*n + uint64(c-'0')
	}
	if q.bad || digits == 0 || digits > maxDigits || digits > 1 && q.rest[0] == '0' || n > maxInt {
		q.bad = true
		return 0
	}
	q.rest = q.rest[digits:] // what follows, as a point, is refused by whoever reads on
	v := int64(n)
	if negative {
		v = -v
	}
	q.bad = v < least || v > most
	return v
}
