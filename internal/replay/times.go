package replay

import (
	"strconv"
	"strings"
	"time"
)

// layout is a way to write a time.
type layout struct {
	form string
	// step is how exact it is.
	step time.Duration
	// zoned says that it names an offset from UTC that can be read, dated and yeared that it has a date, and its year.
	zoned, dated, yeared bool
}

// layouts are those that programs print, the longest first where one begins as another.
func layouts() []layout {
	const s, m, d = time.Second, time.Minute, 24 * time.Hour
	return []layout{
		{"2006-01-02T15:04:05Z07:00", s, true, true, true},
		{"2006-01-02T15:04:05-0700", s, true, true, true},
		{"2006-01-02 15:04:05 -0700", s, true, true, true},
		{"2006-01-02 15:04:05Z07:00", s, true, true, true},
		{"Mon, 02 Jan 2006 15:04:05 -0700", s, true, true, true},
		{"Mon Jan _2 15:04:05 2006 -0700", s, true, true, true},
		{"Mon, 02 Jan 2006 15:04:05 GMT", s, false, true, true},
		{"Mon Jan _2 03:04:05 PM MST 2006", s, false, true, true},
		{"Mon Jan _2 15:04:05 MST 2006", s, false, true, true},
		{"Mon Jan _2 15:04:05 2006", s, false, true, true},
		{"Mon _2 Jan 15:04:05 MST 2006", s, false, true, true},
		{"2006-01-02T15:04:05", s, false, true, true},
		{"2006-01-02 15:04:05", s, false, true, true},
		{"2006/01/02 15:04:05", s, false, true, true},
		{"2006-01-02T15:04", m, false, true, true},
		{"2006-01-02 15:04", m, false, true, true},
		{"20060102150405", s, false, true, true},
		{"20060102-150405", s, false, true, true},
		{"20060102_150405", s, false, true, true},
		{"Jan _2 15:04:05", s, false, true, false},
		{"Jan _2 15:04", m, false, true, false},
		{"_2 Jan 15:04", m, false, true, false},
		{"15:04:05", s, false, false, false},
		{"15:04", m, false, false, false},
		{"2006-01-02", d, false, true, true},
		{"20060102", d, false, true, true},
		{"01/02/06", d, false, true, true},
		{"Mon Jan _2 2006", d, false, true, true},
	}
}

// times explains times at which the sandbox was there until the process had ended, written in the same way on both sides.
func (n *normaliser) times(p place) (la, lb int) {
	a, b := p.rest()
	if !isDigit(a[0]) && strings.IndexByte("SMTWFJADON", a[0]) < 0 {
		return 0, 0
	}
	endsA, endsB := ends(a), ends(b)
	for _, l := range layouts() {
		if isDigit(l.form[0]) != isDigit(a[0]) && l.form[0] != '_' || isDigit(a[0]) != isDigit(b[0]) {
			continue
		}
		x, la := l.read(a, endsA)
		if la == 0 {
			continue
		}
		if y, lb := l.read(b, endsB); lb > 0 && l.fit(x, y, n.a, n.b) {
			return la, lb
		}
	}
	return n.epoch(a, b)
}

// read reads a time at the beginning of s. A fraction of a second may stand where the layout has seconds.
func (l layout) read(s string, ends []int) (time.Time, int) {
	for _, end := range ends {
		if end < max(len("15:04"), len(l.form)-8) || end > len(l.form)+16 || l.form[0] == '2' && isDigit(l.form[4]) != isDigit(s[4]) {
			continue // which the parser would find out, later
		}
		if t, err := time.Parse(l.form, s[:end]); err == nil {
			return t, end
		}
	}
	return time.Time{}, 0
}

// ends returns where a time at the beginning of s can end, the farthest first.
func ends(s string) []int {
	var out []int
	for _, t := range tokens(s[:min(len(s), 48)]) {
		out = append([]int{t.to}, out...)
	}
	return out
}

// maxZone bounds the offset of a time that does not name it: whole quarters of an hour, the same on both sides.
const maxZone = 14 * time.Hour

func (l layout) fit(x, y time.Time, a, b side) bool {
	if l.zoned {
		return l.within(x, 0, a) && l.within(y, 0, b)
	}
	for zone := -maxZone; zone <= maxZone; zone += 15 * time.Minute {
		if l.within(x, a.zone(zone), a) && l.within(y, b.zone(zone), b) {
			return true
		}
	}
	return false
}

// within reports whether a time that was read lies in a side's window, in a zone so far east of UTC.
func (l layout) within(t time.Time, zone time.Duration, s side) bool {
	from, to := s.window()
	in := func(t time.Time) bool {
		t = t.Add(-zone)
		return t.Add(l.step).After(from) && t.Before(to)
	}
	switch {
	case l.yeared:
		return in(t)
	case l.dated:
		return in(t.AddDate(to.Year()-t.Year(), 0, 0)) || in(t.AddDate(from.Year()-t.Year(), 0, 0))
	}
	clock := t.Sub(t.Truncate(24 * time.Hour))
	for _, day := range []time.Time{from, to} {
		if in(day.Add(zone).UTC().Truncate(24 * time.Hour).Add(clock)) {
			return true
		}
	}
	return to.Sub(from) >= 24*time.Hour
}

// epoch explains times as seconds, milliseconds, microseconds or nanoseconds since 1970.
func (n *normaliser) epoch(a, b string) (la, lb int) {
	read := func(s string, of side) int {
		from, to := of.window()
		digits := span(s, isDigit)
		unit := map[int]time.Duration{10: time.Second, 13: time.Millisecond, 16: time.Microsecond, 19: time.Nanosecond}[digits]
		v, err := strconv.ParseInt(s[:digits], 10, 64)
		if unit == 0 || err != nil || v > int64(1<<62)/int64(unit) {
			return 0
		}
		if t := time.Unix(0, v*int64(unit)); t.Add(unit).Before(from) || t.After(to) {
			return 0
		}
		if unit == time.Second && digits+1 < len(s) && s[digits] == '.' && isDigit(s[digits+1]) {
			digits += 1 + span(s[digits+1:], isDigit)
		}
		return digits
	}
	return read(a, n.a), read(b, n.b)
}
