package replay

import (
	"strconv"
	"strings"
	"time"
)

// host explains the names of the two sandboxes.
func (n *normaliser) host(p place) (la, lb int) {
	a, b := p.rest()
	for _, pair := range [][2]string{{n.a.r.Host, n.b.r.Host}, {n.a.r.Sandbox, n.b.r.Sandbox}} {
		if pair[0] != "" && pair[1] != "" && strings.HasPrefix(a, pair[0]) && strings.HasPrefix(b, pair[1]) {
			return len(pair[0]), len(pair[1])
		}
	}
	return 0, 0
}

// maxPIDs is how far from a process's own id those of its tree may lie.
const maxPIDs = 256

// pids explains ids of processes that are as far from the process's own on both sides.
func (n *normaliser) pids(p place) (la, lb int) {
	a, b := p.rest()
	la, lb = span(a, isDigit), span(b, isDigit)
	x, err := strconv.Atoi(a[:la])
	y, bad := strconv.Atoi(b[:lb])
	if err != nil || bad != nil || n.a.p.PID == 0 || n.b.p.PID == 0 || a[0] == '0' || b[0] == '0' {
		return 0, 0
	}
	if x -= n.a.p.PID; x != y-n.b.p.PID || x < 0 || x > maxPIDs {
		return 0, 0
	}
	return la, lb
}

// inName are the bytes of names that programs make up.
func inName(c byte) bool { return isWord(c) || c == '.' || c == '-' || c == '+' }

// temporary explains names that a program made up: in a directory for temporary files, or beginning as such names do.
func (n *normaliser) temporary(p place) (la, lb int) {
	a, b := p.rest()
	if p.i > 0 && inName(p.a[p.i-1]) {
		return 0, 0
	}
	la, lb = span(a, inName), span(b, inName)
	a, b = strings.TrimRight(a[:la], ".-"), strings.TrimRight(b[:lb], ".-")
	if len(a) != len(b) || a == b {
		return 0, 0
	}
	known := false
	for _, prefix := range []string{"tmp", "temp", "cc", "pymp-", "pip-", "go-build", "npm-", "sh-thd", "sort", "git-", ".git_"} {
		known = known || strings.HasPrefix(a, prefix) && strings.HasPrefix(b, prefix)
	}
	before := p.before()
	path := before[strings.LastIndexAny(before, " \t'\"=(")+1:]
	inside := false
	for _, dir := range []string{"/tmp/", "/var/tmp/", "/dev/shm/"} {
		inside = inside || strings.HasPrefix(path, dir)
	}
	x, y := random(a, b)
	if !known && !inside || len(x) < 6 || len(x) > 24 || !known && !(madeUp(x) && madeUp(y)) || differing(x, y) < 3 {
		return 0, 0
	}
	if !n.pairs.fits("name "+a, "name "+b) {
		return 0, 0
	}
	return len(a), len(b)
}

// random cuts from two names of one length the words around where they differ.
func random(a, b string) (x, y string) {
	from, to := common(a, b), len(a)
	for to > from && a[to-1] == b[to-1] {
		to--
	}
	for from > 0 && isWord(a[from-1]) {
		from--
	}
	for to < len(a) && isWord(a[to]) {
		to++
	}
	if span(a[from:to], isWord) < to-from || span(b[from:to], isWord) < to-from { // in more than one word
		return "", ""
	}
	for _, prefix := range []string{"tmp", "temp", "cc", "build"} {
		if strings.HasPrefix(a[from:to], prefix) && strings.HasPrefix(b[from:to], prefix) && to-from >= len(prefix)+6 {
			from += len(prefix)
			break
		}
	}
	return a[from:to], b[from:to]
}

// madeUp reports whether a name looks as if nobody had chosen it: digits among letters, or capitals among small ones.
func madeUp(s string) bool {
	digit, small, capital := strings.ContainsAny(s, "0123456789"), strings.ToUpper(s) != s, strings.ToLower(s) != s
	return digit && (small || capital) || len(s) > 2 && small && strings.ToLower(s[1:]) != s[1:]
}

// differing counts the bytes in which two texts of one length differ.
func differing(a, b string) int {
	n := 0
	for i := range len(a) {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// addresses explains addresses in memory.
func (n *normaliser) addresses(p place) (la, lb int) {
	size := func(s string) int {
		if strings.HasPrefix(s, "0x") {
			if d := span(s[2:], isHex); d >= 5 && d <= 16 {
				return 2 + d
			}
			return 0
		}
		// Where Linux on 64 bits puts programs, stacks and libraries.
		if d := span(s, isHex); d == 12 && (strings.HasPrefix(s, "7f") || strings.HasPrefix(s, "55") || strings.HasPrefix(s, "56")) {
			return d
		}
		return 0
	}
	a, b := p.rest()
	return size(a), size(b)
}

// durations explains times that something took, which is no longer than the process itself, and rates.
func (n *normaliser) durations(p place) (la, lb int) {
	a, b := p.rest()
	x, la := duration(a, labelled(p.a[:p.i]))
	y, lb := duration(b, labelled(p.b[:p.j]))
	if la == 0 || lb == 0 || x > n.a.lasted() || y > n.b.lasted() {
		return 0, 0
	}
	return la, lb
}

// labelled reports whether what stands before a number says that it is seconds.
func labelled(before string) bool {
	before = strings.TrimRight(before, " \t:=")
	for _, label := range []string{"real", "user", "sys", "elapsed", "seconds"} {
		if strings.HasSuffix(before, label) {
			return true
		}
	}
	return false
}

// number reads a number without a sign.
func number(s string) (value float64, size int) {
	size = span(s, isDigit)
	if size == 0 {
		return 0, 0
	}
	if size+1 < len(s) && s[size] == '.' && isDigit(s[size+1]) {
		size += 1 + span(s[size+1:], isDigit)
	}
	value, err := strconv.ParseFloat(s[:size], 64)
	if err != nil {
		return 0, 0
	}
	return value, size
}

// duration reads a number with a unit, as "1.2 ms", "0m0.003s" or a rate, or with a label just a number with a fraction.
func duration(s string, label bool) (time.Duration, int) {
	value, size := number(s)
	if size == 0 {
		return 0, 0
	}
	if s[size:] != "" && s[size] == 'm' { // as bash has it
		if secs, more := number(s[size+1:]); more > 0 && strings.HasPrefix(s[size+1+more:], "s") {
			return seconds(60*value + secs), size + 1 + more + 1
		}
	}
	blank := span(s[size:], func(c byte) bool { return c == ' ' })
	unit := s[size+min(blank, 1):]
	unit = unit[:span(unit, func(c byte) bool { return isWord(c) || c == '/' })]
	if rate(unit) {
		return 0, size + min(blank, 1) + len(unit)
	}
	if one := unitOf(unit); one > 0 && blank <= 1 {
		return seconds(value * one), size + min(blank, 1) + len(unit)
	}
	if label && strings.Contains(s[:size], ".") {
		return seconds(value), size
	}
	return 0, 0
}

// seconds makes a duration; what is longer than any process is the longest one.
func seconds(s float64) time.Duration {
	if s > 1e9 {
		return 1 << 62
	}
	return time.Duration(s * float64(time.Second))
}

// unitOf returns a unit of time in seconds; 0: it is none.
func unitOf(s string) float64 {
	switch s {
	case "ns", "nsec", "nsecs":
		return 1e-9
	case "us", "usec", "usecs", "µs", "μs":
		return 1e-6
	case "ms", "msec", "msecs", "milliseconds":
		return 1e-3
	case "s", "sec", "secs", "second", "seconds":
		return 1
	}
	return 0
}

// rate reports whether a unit is one of bytes a second.
func rate(unit string) bool {
	what, ok := strings.CutSuffix(unit, "/s")
	return ok && len(what) > 0 && len(what) <= 3 && strings.HasSuffix(what, "B")
}

// inode explains numbers of inodes and devices: where they are called so, or the command is one that prints them.
func (n *normaliser) inode(p place) (la, lb int) {
	number := func(c byte) bool { return isHex(c) || c == ',' || c == '/' || c == 'h' || c == 'x' }
	before := strings.TrimRight(p.before(), " \t")
	for _, label := range []string{"Inode:", "Device:", "st_ino=", "st_dev=", "inode=", "dev="} {
		if strings.HasSuffix(before, label) {
			a, b := p.rest()
			return span(a, number), span(b, number)
		}
	}
	if !n.inodes {
		return 0, 0
	}
	a, b := p.rest()
	if strings.HasSuffix(before, "00:") { // a device, as in maps
		return span(a, isHex), span(b, isHex)
	}
	return span(a, isDigit), span(b, isDigit)
}

// gitID explains ids of git's objects, which hold times. The same id always stands for the same one.
func (n *normaliser) gitID(p place) (la, lb int) {
	if !n.git {
		return 0, 0
	}
	a, b := p.rest()
	la, lb = span(a, isHex), span(b, isHex)
	if la == 2 && lb == 2 && len(a) > 40 && len(b) > 40 && a[2] == '/' && b[2] == '/' { // as a file: ab/cdef…
		la, lb = 3+span(a[3:], isHex), 3+span(b[3:], isHex)
		a, b = a[:2]+a[3:la], b[:2]+b[3:lb]
		if la != 41 || lb != 41 || !n.pairs.fits("git "+a[:7], "git "+b[:7]) {
			return 0, 0
		}
		return la, lb
	}
	if la != lb || la < 7 || la > 64 || !n.pairs.fits("git "+a[:7], "git "+b[:7]) {
		return 0, 0
	}
	return la, lb
}
