package sandbox

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

// Bounds of one record: who wrote the files chose their number and names.
const (
	maxNamed      = 500
	maxNamedBytes = 32 << 10
	maxMoreIn     = 50
	maxMoreDepth  = 16
)

// hashLimits bound what is read to hash the files of one record, for which whoever asked for the process waits.
func hashLimits() rootfs.SumLimits {
	return rootfs.SumLimits{Files: maxNamed, FileBytes: 4 << 20, Bytes: 16 << 20, Within: time.Second}
}

// changedFile is one file of a record. Paths are text as in Files.
type changedFile struct {
	Op   string   `json:"op"`
	Path string   `json:"path"`
	From string   `json:"from,omitempty"`
	Type string   `json:"type"`
	Size int64    `json:"size,omitempty"`
	What []string `json:"what,omitempty"`
	// Unhashed says why what it holds is not hashed though it is a file that is there: see rootfs.NotSummedSize.
	Unhashed string `json:"unhashed,omitempty"`
}

// dirCount says how many files of a record that it does not name lie in a directory or below it.
type dirCount struct {
	Dir   string `json:"dir"`
	Files int    `json:"files"`
}

// list counts what changed and, with full, names it as far as there is room. It returns the hashes of those that are named,
// "" for one that has none; nil: none has one.
func (f *changedFacts) list(changes []rootfs.FileChange, full bool) (hashes []string) {
	for _, c := range changes {
		switch c.Op {
		case rootfs.Created:
			f.Created++
		case rootfs.Modified:
			f.Modified++
		case rootfs.Deleted:
			f.Deleted++
		case rootfs.Renamed:
			f.Renamed++
		}
	}
	if !full {
		return nil
	}
	bytes, some := 0, false
	for i, c := range changes {
		one := changedFile{
			Op: c.Op, Path: guestwire.Escape(c.Path), From: guestwire.Escape(c.From), Type: c.Type, Size: c.Size, What: c.What, Unhashed: c.NotSummed,
		}
		// A NUL, which stands for a byte that is no text, takes six in JSON.
		bytes += len(one.Path) + len(one.From) + 5*(strings.Count(one.Path, "\x00")+strings.Count(one.From, "\x00"))
		if i >= maxNamed || bytes > maxNamedBytes {
			f.More = len(changes) - i
			f.MoreIn = directories(changes[i:])
			break
		}
		f.Files, hashes, some = append(f.Files, one), append(hashes, c.Sum), some || c.Sum != ""
	}
	if !some {
		return nil
	}
	return hashes
}

// withHashes adds what the files of a record hold, as SHA-256 of each in the order in which they are named, to the event that
// names them. The hashes are content: who has the hash of a short text can guess it, so they can be left out and erased.
//
//casemate:fact server files.changed hashes body of what the named files hold: a list of SHA-256 in hex, in their order, "" for none
func (t *tracker) withHashes(e journal.Event, hashes []string) journal.Event {
	if hashes == nil {
		return e
	}
	text, _ := json.Marshal(hashes) // of strings
	return t.b.keeping(RecordContent, e, journal.Server, "hashes", text)
}

// directories returns the deepest directories, all of one depth and neither many nor too deep, below which changes lie.
// Of a renamed file both of its paths count.
func directories(changes []rootfs.FileChange) []dirCount {
	paths := make([]string, 0, len(changes))
	for _, c := range changes {
		paths = append(paths, c.Path)
		if c.From != "" {
			paths = append(paths, c.From)
		}
	}
	best := map[string]int{"/": len(paths)}
	for depth := 1; depth <= maxMoreDepth; depth++ {
		counts, deeper := map[string]int{}, false
		size := 0
		for _, p := range paths {
			dir, more := ancestor(p, depth)
			deeper = deeper || more
			if counts[dir]++; counts[dir] == 1 {
				size += len(dir)
			}
			if len(counts) > maxMoreIn || size > maxNamedBytes {
				return dirCounts(best)
			}
		}
		best = counts
		if !deeper {
			break
		}
	}
	return dirCounts(best)
}

func dirCounts(counts map[string]int) []dirCount {
	var out []dirCount
	for _, dir := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, dirCount{Dir: guestwire.Escape(dir), Files: counts[dir]})
	}
	return out
}

// ancestor returns the directory of so many parts that a file lies in or below, or its own where that is shorter; more
// says that there is a deeper one.
func ancestor(path string, depth int) (dir string, more bool) {
	end := 0
	for range depth {
		next := strings.IndexByte(path[end+1:], '/')
		if next < 0 {
			return path[:max(end, 1)], false
		}
		end += 1 + next
	}
	return path[:end], strings.IndexByte(path[end+1:], '/') >= 0
}
