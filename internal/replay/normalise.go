package replay

import (
	"slices"
	"strings"
	"time"
)

// The normalisers, by the names that verdicts have. Each explains a difference between two texts only where both sides are
// what it says they are: a time is one at which the process ran, a process id is as far from the process's own on both.
const (
	normTimes     = "times"
	normPIDs      = "process ids"
	normTemporary = "temporary names"
	normHost      = "host name"
	normAddresses = "addresses"
	normDurations = "durations"
	normInodes    = "inode and device numbers"
	normGit       = "git's ids"
	normPacked    = "sizes of compressed files"
	normContents  = "contents of files"
)

// Normalisers returns the names of all normalisers, in the order in which verdicts name them.
func Normalisers() []string {
	return []string{normTimes, normDurations, normPIDs, normTemporary, normHost, normAddresses, normInodes, normGit, normPacked, normContents}
}

// side is a process in one of two records that are compared.
type side struct {
	r *Record
	p *Process
}

// window is when anything that the process could have made, or looked at, was made.
func (s side) window() (from, to time.Time) {
	const slack = 2 * time.Second // clocks are read at other moments than events are recorded
	return s.r.Begun.Add(-slack), s.p.Ended.Add(slack)
}

// zone is how far east of UTC the process's times are: as far as is given, or as its run has set.
func (s side) zone(given time.Duration) time.Duration {
	if s.r.Settings.Labels[LabelRun] != "" && slices.Contains(s.p.Env, VariedEnv) {
		return variedOffset
	}
	return given
}

// lasted is how long the process could have measured anything to take.
func (s side) lasted() time.Duration { return s.p.Ended.Sub(s.p.Began) + 50*time.Millisecond }

// pairing says which random name on one side stands for which on the other: always the same one, both ways.
type pairing struct{ there, back map[string]string }

func newPairing() *pairing {
	return &pairing{there: map[string]string{}, back: map[string]string{}}
}

// fits reports whether two names can stand for each other, and holds them to it.
func (p *pairing) fits(a, b string) bool {
	x, known := p.there[a]
	y, seen := p.back[b]
	if known || seen {
		return known && seen && x == b && y == a
	}
	p.there[a], p.back[b] = b, a
	return true
}

// normaliser compares texts of two processes.
type normaliser struct {
	a, b  side
	pairs *pairing
	used  map[string]bool
	// git and inodes say that the command is one whose output has ids of git, or numbers of inodes.
	git, inodes bool
	// alike are the files that hold the same, by their paths on each side, and others those that don't.
	alike  [2]map[string]bool
	others []otherContents
}

func newNormaliser(a, b side, pairs *pairing) *normaliser {
	n := &normaliser{a: a, b: b, pairs: pairs, used: map[string]bool{}, alike: [2]map[string]bool{{}, {}}}
	n.git, n.inodes = hints(a.p.Argv)
	return n
}

// hints reads a command for what its output can hold.
func hints(argv []string) (git, inodes bool) {
	words := strings.FieldsFunc(strings.Join(argv, " "), func(r rune) bool { return strings.ContainsRune(" \t\n;|&()'\"`$", r) })
	ls := false
	for _, w := range words {
		switch base := w[strings.LastIndexByte(w, '/')+1:]; {
		case base == "git":
			git = true
		case base == "ls", base == "find":
			ls = true
		case ls && (w == "-ls" || w == "--inode" || len(w) > 1 && w[0] == '-' && w[1] != '-' && !strings.HasPrefix(w, "-in") && strings.Contains(w, "i") && strings.Trim(w, "-1aAlhirtRSdFn") == ""):
			inodes = true
		case strings.Contains(w, "%i"), strings.Contains(w, "%d") && strings.Contains(strings.Join(argv, " "), "stat "), strings.Contains(w, "st_ino"), strings.Contains(w, "st_dev"),
			strings.HasPrefix(w, "/proc/") && (base == "maps" || base == "mountinfo"):
			inodes = true
		}
	}
	return git, inodes
}

func (n *normaliser) use(name string) { n.used[name] = true }

// names returns the normalisers that were needed.
func (n *normaliser) names() []string {
	var out []string
	for _, name := range Normalisers() {
		if n.used[name] {
			out = append(out, name)
		}
	}
	return out
}

// same reports whether two texts are the same, but for what normalisers explain.
func (n *normaliser) same(a, b string) bool {
	_, ok := n.line(a, b)
	return ok
}

// token is a part of a line: a word, a run of blanks, or one other byte.
type token struct{ from, to int }

func tokens(s string) []token {
	var out []token
	for i := 0; i < len(s); {
		j := i + 1
		for kind := kindOf(s[i]); kind != 0 && j < len(s) && kindOf(s[j]) == kind; {
			j++
		}
		out = append(out, token{i, j})
		i = j
	}
	return out
}

func kindOf(c byte) int {
	switch {
	case isWord(c):
		return 1
	case c == ' ' || c == '\t':
		return 2
	}
	return 0
}

func isWord(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isHex(c byte) bool { return isDigit(c) || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' }

// maxBack is how many tokens before the first that differ something that explains it may begin: as many as the longest
// time has.
const maxBack = 20

// line compares two lines; where they are not the same, at is the first byte of a that differs.
func (n *normaliser) line(a, b string) (at int, ok bool) {
	if a == b {
		return 0, true
	}
	x, y := tokens(a), tokens(b)
	back, loose := 0, false
	i, j := 0, 0
	for i < len(x) && j < len(y) {
		s, t := a[x[i].from:x[i].to], b[y[j].from:y[j].to]
		// What was normalised may be longer on one side, and the blanks behind it fewer.
		if s == t || loose && kindOf(s[0]) == 2 && kindOf(t[0]) == 2 {
			i, j, back = i+1, j+1, back+1
			continue
		}
		// A number that is right-aligned has other blanks before it.
		if kindOf(s[0]) == 2 && kindOf(t[0]) == 2 && i+1 < len(x) && j+1 < len(y) {
			if ni, nj, found := n.explain(a, b, x, y, i+1, j+1, 0); found {
				i, j, back, loose = ni, nj, 0, true
				continue
			}
		}
		ni, nj, found := n.explain(a, b, x, y, i, j, min(back, maxBack))
		if !found {
			return x[i].from + common(s, t), false
		}
		i, j, back, loose = ni, nj, 0, true
	}
	if i < len(x) {
		return x[i].from, false
	}
	return len(a), j == len(y)
}

// common is the length of what two texts begin with.
func common(a, b string) int {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	return i
}

// explain finds a normaliser for a difference at tokens i and j that may have begun some tokens before, and returns the
// tokens behind it.
func (n *normaliser) explain(a, b string, x, y []token, i, j, back int) (ni, nj int, ok bool) {
	for k := back; k >= 0; k-- {
		p := place{a: a, b: b, i: x[i-k].from, j: y[j-k].from}
		for _, m := range n.matchers() {
			la, lb := m.match(p)
			ea, eb := p.i+la, p.j+lb
			if la == 0 || lb == 0 || ea < x[i].to || eb < y[j].to {
				continue
			}
			ni, endsA := tokenAt(x, i, ea, len(a))
			nj, endsB := tokenAt(y, j, eb, len(b))
			if endsA && endsB {
				n.use(m.name)
				return ni, nj, true
			}
		}
	}
	return 0, 0, false
}

// tokenAt returns the index of the token that begins at an offset.
func tokenAt(x []token, i, at, end int) (int, bool) {
	for ; i < len(x); i++ {
		if x[i].from == at {
			return i, true
		}
	}
	return i, at == end
}

// place is a place in two lines.
type place struct {
	a, b string
	i, j int
}

// matcher explains what stands at a place, and returns how long that is in each line; 0: it does not.
type matcher struct {
	name  string
	match func(place) (la, lb int)
}

func (n *normaliser) matchers() []matcher {
	return []matcher{
		{normTimes, n.times},
		{normHost, n.host},
		{normTemporary, n.temporary},
		{normAddresses, n.addresses},
		{normDurations, n.durations},
		{normPIDs, n.pids},
		{normInodes, n.inode},
		{normGit, n.gitID},
	}
}

// rest returns what stands at the place and behind it.
func (p place) rest() (a, b string) { return p.a[p.i:], p.b[p.j:] }

// before returns what stands before it, in the first line.
func (p place) before() string { return p.a[:p.i] }

// span is how many bytes at the beginning of s are of a kind.
func span(s string, of func(byte) bool) int {
	i := 0
	for i < len(s) && of(s[i]) {
		i++
	}
	return i
}
