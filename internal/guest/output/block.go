package output

import (
	"sort"

	"casemate.dev/internal/guestwire"
)

const (
	// blockSize is the capacity of a full block, and the most that Append takes at once.
	blockSize = 32 << 10
	// firstBlock is the capacity of a buffer's first block: most processes print little.
	firstBlock = 512
	// blockOverhead is what a block costs beside its bytes, for the accounting.
	blockOverhead = 64
	runSize       = 8
	// maxRuns bounds the changes of stream in a block.
	maxRuns = 4096
	// smallOutput is up to where blocks are small.
	smallOutput = 4 << 10
)

// block is a stretch of output without a hole.
type block struct {
	offset int64
	data   []byte
	runs   []run
}

// run says that from byte at on, the data is of one stream.
type run struct {
	at     uint32
	stream guestwire.Stream
}

func (b *block) end() int64 { return b.offset + int64(len(b.data)) }

// cost is what the block is accounted for. Streams that alternate bytewise cost more than their
// bytes, and so it must count.
func (b *block) cost() int64 {
	return int64(cap(b.data)) + runSize*int64(cap(b.runs)) + blockOverhead
}

// add appends as much of p as fits and returns how much that was.
func (b *block) add(s guestwire.Stream, p []byte) int {
	n := min(cap(b.data)-len(b.data), len(p))
	if n == 0 {
		return 0
	}
	if len(b.runs) == 0 || b.runs[len(b.runs)-1].stream != s {
		if len(b.runs) == maxRuns {
			return 0
		}
		b.runs = append(b.runs, run{at: uint32(len(b.data)), stream: s})
	}
	b.data = append(b.data, p[:n]...)
	return n
}

// piece returns the bytes from offset on that are of one stream.
func (b *block) piece(offset int64) (guestwire.Stream, []byte) {
	at := uint32(offset - b.offset)
	i := sort.Search(len(b.runs), func(i int) bool { return b.runs[i].at > at }) - 1
	end := uint32(len(b.data))
	if i+1 < len(b.runs) {
		end = b.runs[i+1].at
	}
	return b.runs[i].stream, b.data[at:end]
}
