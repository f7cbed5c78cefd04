package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"casemate.dev/internal/journal/bundle"
)

// changes are the facts of files.changed that matter.
type changes struct {
	Run      string       `json:"run"`
	Between  bool         `json:"between"`
	Created  int          `json:"created"`
	Modified int          `json:"modified"`
	Deleted  int          `json:"deleted"`
	Renamed  int          `json:"renamed"`
	Files    []fileChange `json:"files"`
	More     int          `json:"more"`
	Unknown  string       `json:"unknown"`
	// Hashes stands for the hashes of what Files hold.
	Hashes *bundle.Ref `json:"hashes"`
}

type fileChange struct {
	Op   string   `json:"op"`
	Path string   `json:"path"`
	From string   `json:"from"`
	Type string   `json:"type"`
	Size int64    `json:"size"`
	What []string `json:"what"`

	hash string // SHA-256 of what it holds, in hex; "": not in the record
}

// hashed takes the hashes of the files that it names, as far as they are in the record.
func (c *changes) hashed(e event) error {
	text, why := e.body("server.hashes", c.Hashes)
	if why != "" || len(text.data) == 0 || text.bytes > int64(len(text.data)) {
		return nil
	}
	var all []string
	if err := json.Unmarshal(text.data, &all); err != nil || len(all) != len(c.Files) {
		return errors.New("the hashes of files are not as many as the files")
	}
	for i, hash := range all {
		c.Files[i].hash = hash
	}
	return nil
}

// count is how many files changed; -1: not known.
func (c *changes) count() int {
	if c == nil || c.Unknown != "" {
		return -1
	}
	return c.Created + c.Modified + c.Deleted + c.Renamed
}

// text says what changed, in the words of the journal.
func (c fileChange) text() string {
	out := c.Op + " " + c.Path
	if c.From != "" {
		out = c.Op + " " + c.From + " to " + c.Path
	}
	if c.Type != "" && c.Type != "file" {
		out += " (" + c.Type + ")"
	}
	if len(c.What) > 0 {
		out += " (" + strings.Join(c.What, ", ") + ")"
	}
	return out
}

// counts says how many there are of each kind.
func (c *changes) counts() string {
	return fmt.Sprintf("%d created, %d modified, %d deleted, %d renamed", c.Created, c.Modified, c.Deleted, c.Renamed)
}

// named reports whether it names any of the files that it counts.
func (c *changes) named() bool { return c.count() == 0 || len(c.Files) > 0 }

// compareFiles compares which files changed, and how: by path, kind and size where they are named, else by number. Where it
// is not known on one side there is nothing to compare.
func (n *normaliser) compareFiles() (diffs []Difference, compared bool) {
	x, y := n.a.p.changes, n.b.p.changes
	if n.a.p.unstarted() && n.b.p.unstarted() {
		return nil, true
	}
	if x.count() < 0 || y.count() < 0 {
		return nil, false
	}
	if !x.named() || !y.named() {
		if x.counts() != y.counts() {
			diffs = append(diffs, Difference{Part: PartFiles, Recorded: x.counts(), Replayed: y.counts()})
		}
		return diffs, true
	}
	left, right, both := align(n.without(x.Files), n.without(y.Files))
	for _, pair := range both {
		diffs = append(diffs, n.changes(pair[0], pair[1])...)
	}
	for _, f := range left {
		i := slices.IndexFunc(right, func(g fileChange) bool { return f.Op == g.Op && f.Type == g.Type && n.same(f.Path, g.Path) })
		if i < 0 {
			diffs = append(diffs, Difference{Part: PartFiles, Path: f.Path, Recorded: f.text()})
			continue
		}
		diffs = append(diffs, n.changes(f, right[i])...)
		right = slices.Delete(right, i, i+1)
	}
	for _, g := range right {
		diffs = append(diffs, Difference{Part: PartFiles, Path: g.Path, Replayed: g.text()})
	}
	slices.SortStableFunc(diffs, func(d, e Difference) int { return cmp.Compare(d.Path, e.Path) })
	if x.More != y.More {
		diffs = append(diffs, Difference{Part: PartFiles, Recorded: fmt.Sprintf("%d more files", x.More), Replayed: fmt.Sprintf("%d more files", y.More)})
	}
	return diffs, true
}

// without leaves out the directories that git sorts objects into, by the first two digits of ids that hold times.
func (n *normaliser) without(files []fileChange) []fileChange {
	if !n.git {
		return files
	}
	return slices.DeleteFunc(slices.Clone(files), func(f fileChange) bool {
		_, digits, found := strings.Cut(f.Path, "/objects/")
		sorted := found && f.Type == "dir" && len(digits) == 2 && span(digits, isHex) == 2
		if sorted {
			n.use(normGit)
		}
		return sorted
	})
}

// align pairs changes of the same paths, and returns the others.
func align(x, y []fileChange) (left, right []fileChange, both [][2]fileChange) {
	there := make(map[string]fileChange, len(y))
	for _, g := range y {
		there[g.Path] = g
	}
	for _, f := range x {
		if g, ok := there[f.Path]; ok {
			both = append(both, [2]fileChange{f, g})
			delete(there, f.Path)
			continue
		}
		left = append(left, f)
	}
	for _, g := range y {
		if _, alone := there[g.Path]; alone {
			right = append(right, g)
		}
	}
	return left, right, both
}

// changes compares two changes of paths that are the same, or stand for each other.
func (n *normaliser) changes(f, g fileChange) []Difference {
	d := Difference{Part: PartFiles, Path: f.Path, Recorded: f.text(), Replayed: g.text()}
	if f.Op != g.Op || f.Type != g.Type || !slices.Equal(f.What, g.What) || f.From != g.From && !n.same(f.From, g.From) {
		return []Difference{d}
	}
	if f.Type == "file" && f.Size != g.Size && f.Op != "deleted" && !n.sizes(f, g) {
		d.Recorded, d.Replayed = fmt.Sprintf("%s: %d bytes", f.text(), f.Size), fmt.Sprintf("%s: %d bytes", g.text(), g.Size)
		return []Difference{d}
	}
	if f.Size == g.Size {
		n.contents(f, g)
	}
	return nil
}

// holds says what a file holds.
func (c fileChange) holds() string { return fmt.Sprintf("%s: SHA-256 %.16s…", c.text(), c.hash) }

// contents compares what two files of one size hold, as far as hashes tell. Why it differs can't be seen of hashes: that is
// left to settle.
func (n *normaliser) contents(f, g fileChange) {
	switch {
	case f.hash == "" || g.hash == "" || f.Op == "deleted":
	case f.hash == g.hash:
		n.alike[0][f.Path], n.alike[1][g.Path] = true, true
	default:
		n.others = append(n.others, otherContents{Difference{Part: PartFiles, Path: f.Path, Recorded: f.holds(), Replayed: g.holds()}, g.Path})
	}
}

// otherContents is a file that holds something else in a replay, where it has that path.
type otherContents struct {
	Difference
	replayed string
}

// settle decides about files that hold something else than recorded: those that steady names are differences, others hold
// something else each time.
func (o *outcome) settle(steady func(otherContents) bool) {
	for _, c := range o.others {
		if steady(c) {
			o.diffs = append(o.diffs, c.Difference)
		} else if !slices.Contains(o.names, normContents) {
			o.names = append(o.names, normContents)
		}
	}
}

// sizes explains sizes that differ since what is compressed holds times: of git's objects, and a little of archives.
func (n *normaliser) sizes(f, g fileChange) bool {
	if n.git && strings.Contains(f.Path, "/objects/") {
		n.use(normGit)
		return true
	}
	const most = 16 // bytes, and one in a hundred
	for _, ending := range []string{".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".whl", ".jar"} {
		if strings.HasSuffix(f.Path, ending) && max(f.Size, g.Size)-min(f.Size, g.Size) <= most+f.Size/100 {
			n.use(normPacked)
			return true
		}
	}
	return false
}
