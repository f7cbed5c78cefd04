package sandbox

import "slices"

// The bounds of output that Execute returns whole.
const (
	defaultCollect = 1 << 20
	maxCollect     = 64 << 20
)

// collector keeps the head and the tail of an output in bounded memory, whatever its length. Half of
// the bound is for each.
type collector struct {
	limit int64
	head  []chunk
	tail  []chunk
	used  int64 // bytes in head
	kept  int64 // bytes in tail
	gaps  []Gap // dropped by the guest, or from the tail, in order
}

// chunk is output of one stream without a hole.
type chunk struct {
	stream Stream
	offset int64
	data   []byte
}

func newCollector(limit int64) *collector { return &collector{limit: max(limit, 2)} }

// Started implements RunSink.
func (c *collector) Started(Process) error { return nil }

// Output implements OutputSink.
func (c *collector) Output(s Stream, offset int64, data []byte) error {
	if room := c.limit/2 - c.used; room > 0 && len(c.tail) == 0 {
		n := min(int64(len(data)), room)
		c.head = join(c.head, s, offset, data[:n])
		c.used += n
		offset, data = offset+n, data[n:]
	}
	if len(data) == 0 {
		return nil
	}
	c.tail = join(c.tail, s, offset, data)
	c.kept += int64(len(data))
	for over := c.kept - c.limit/2; over > 0; over = c.kept - c.limit/2 {
		first := &c.tail[0]
		n := min(over, int64(len(first.data)))
		c.drop(Gap{From: first.offset, To: first.offset + n})
		c.kept -= n
		if first.offset, first.data = first.offset+n, first.data[n:]; len(first.data) == 0 {
			c.tail = c.tail[1:]
		}
	}
	return nil
}

// Gap implements OutputSink.
func (c *collector) Gap(g Gap) error {
	c.drop(g)
	return nil
}

// drop notes a gap. One that the guest made may lie behind output that is kept so far and dropped
// later, so gaps are put in their place, and those that touch become one.
func (c *collector) drop(g Gap) {
	i := len(c.gaps)
	for i > 0 && c.gaps[i-1].From > g.From {
		i--
	}
	if i > 0 && c.gaps[i-1].To == g.From {
		i--
		c.gaps[i].To = g.To
	} else {
		c.gaps = slices.Insert(c.gaps, i, g)
	}
	if i+1 < len(c.gaps) && c.gaps[i].To == c.gaps[i+1].From {
		c.gaps[i].To = c.gaps[i+1].To
		c.gaps = slices.Delete(c.gaps, i+1, i+2)
	}
}

// maxChunk is how long a chunk grows: dropping from the front of a slice keeps its array.
const maxChunk = 64 << 10

// join adds data, which is copied, to the last chunk if it continues it.
func join(chunks []chunk, s Stream, offset int64, data []byte) []chunk {
	if len(data) == 0 {
		return chunks
	}
	if n := len(chunks); n > 0 {
		last := &chunks[n-1]
		if last.stream == s && last.offset+int64(len(last.data)) == offset && len(last.data)+len(data) <= maxChunk {
			last.data = append(last.data, data...)
			return chunks
		}
	}
	return append(chunks, chunk{stream: s, offset: offset, data: append([]byte(nil), data...)})
}

func (c *collector) result() Result {
	r := Result{Gaps: c.gaps}
	for _, part := range [][]chunk{c.head, c.tail} {
		for _, ch := range part {
			if ch.stream == Stderr {
				r.Stderr = append(r.Stderr, ch.data...)
			} else {
				r.Stdout = append(r.Stdout, ch.data...)
			}
		}
	}
	return r
}
