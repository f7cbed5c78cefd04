package output

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

const (
	stdout = guestwire.Stdout
	stderr = guestwire.Stderr
)

// readAll reads everything that is there from an offset on. Gaps come back as zero bytes, with the
// number of bytes missing.
func readAll(t interface{ Fatalf(string, ...any) }, b *Buffer, offset int64) (data []byte, streams []guestwire.Stream, gaps int64) {
	r := b.NewReader(offset, false)
	defer r.Close()
	buf := make([]byte, 1000)
	next := offset
	for {
		p, state, _ := r.Next(buf)
		if state != More {
			return data, streams, gaps
		}
		if p.Offset != next || (p.Gap == 0) == (len(p.Data) == 0) || p.Gap < 0 {
			t.Fatalf("piece at %d of %d bytes, gap %d, where %d was due", p.Offset, len(p.Data), p.Gap, next)
		}
		data = append(data, p.Data...)
		data = append(data, make([]byte, p.Gap)...)
		for range p.Data {
			streams = append(streams, p.Stream)
		}
		for range p.Gap {
			streams = append(streams, 0)
		}
		gaps += p.Gap
		next += int64(len(p.Data)) + p.Gap
	}
}

func TestBufferKeepsAllThatFits(t *testing.T) {
	b := NewPool(64<<20).NewBuffer(0, false)
	var want []byte
	for i := range 1000 {
		p := bytes.Repeat([]byte{byte(i), 1}, 1+i/2)
		b.Append(stdout, p)
		want = append(want, p...)
	}
	got, _, gaps := readAll(t, b, 0)
	if gaps != 0 || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes of %d, gaps %d", len(got), len(want), gaps)
	}
	if got, _, _ := readAll(t, b, 777); !bytes.Equal(got, want[777:]) {
		t.Fatal("reading from an offset differs")
	}
}

// TestBufferKeepsHeadAndTail writes far more than fits: the first and the last bytes are there, and
// one gap says what is not.
func TestBufferKeepsHeadAndTail(t *testing.T) {
	pool := NewPool(64 << 20)
	b := pool.NewBuffer(1<<20, false)
	line := make([]byte, 64<<10)
	const lines = 32 << 10 // 2 GB
	for i := range lines {
		line[0], line[1] = byte(i), byte(i>>8)
		b.Append(stdout, line)
	}
	total, dropped := b.Sizes()
	if total != lines*64<<10 || dropped <= 0 {
		t.Fatalf("total %d, dropped %d", total, dropped)
	}
	if used := pool.Used(); used > 1<<20 {
		t.Fatalf("%d bytes used, limit %d", used, 1<<20)
	}
	r := b.NewReader(0, false)
	defer r.Close()
	buf := make([]byte, 1<<20)
	var head, tail, gaps int64
	for {
		p, state, _ := r.Next(buf)
		if state != More {
			break
		}
		switch {
		case p.Gap > 0:
			gaps++
		case gaps == 0:
			head += int64(len(p.Data))
		default:
			tail += int64(len(p.Data))
		}
	}
	if gaps != 1 || head < 200<<10 || tail < 600<<10 || total-head-tail != dropped {
		t.Fatalf("head %d, tail %d, %d gaps, dropped %d", head, tail, gaps, dropped)
	}
}

// TestBufferProperties compares a buffer with an unbounded model over random writes on two streams.
func TestBufferProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pool := NewPool(rapid.Int64Range(guestwire.MinBuffer, 1<<20).Draw(t, "pool"))
		b := pool.NewBuffer(rapid.Int64Range(1, 512<<10).Draw(t, "size"), false)
		other := pool.NewBuffer(0, false)
		var model []byte
		var streams []guestwire.Stream
		for i := range rapid.IntRange(1, 60).Draw(t, "writes") {
			n := rapid.IntRange(1, 40<<10).Draw(t, "n")
			s := rapid.SampledFrom([]guestwire.Stream{stdout, stderr}).Draw(t, "stream")
			p := bytes.Repeat([]byte{byte(i) | 1}, n)
			if rapid.Bool().Draw(t, "other") {
				other.Append(stdout, p)
				if rapid.Bool().Draw(t, "end") {
					other.Finish()
				}
				continue
			}
			b.Append(s, p)
			model = append(model, p...)
			for range p {
				streams = append(streams, s)
			}
		}
		if pool.used > pool.limit || b.size > b.max {
			t.Fatalf("used %d of %d, size %d of %d", pool.used, pool.limit, b.size, b.max)
		}
		offset := rapid.Int64Range(0, int64(len(model))).Draw(t, "offset")
		got, gotStreams, gaps := readAll(t, b, offset)
		if len(got) != len(model)-int(offset) {
			t.Fatalf("%d bytes, want %d", len(got), len(model)-int(offset))
		}
		for i := range got {
			if gotStreams[i] == 0 {
				continue
			}
			if got[i] != model[int(offset)+i] || gotStreams[i] != streams[int(offset)+i] {
				t.Fatalf("byte %d differs", int(offset)+i)
			}
		}
		if total, dropped := b.Sizes(); total != int64(len(model)) || offset == 0 && gaps != dropped {
			t.Fatalf("total %d, dropped %d; model %d, gaps %d", total, dropped, len(model), gaps)
		}
	})
}

// TestBufferAlternatingStreams changes stream with each byte: bookkeeping must count as memory.
func TestBufferAlternatingStreams(t *testing.T) {
	pool := NewPool(64 << 20)
	b := pool.NewBuffer(256<<10, false)
	for i := range 400 << 10 {
		b.Append(stdout+guestwire.Stream(i%2), []byte{byte(i)})
	}
	if b.size > b.max+maxRuns*runSize*2 {
		t.Fatalf("size %d, max %d", b.size, b.max)
	}
	var real int64
	for _, blk := range append(b.head, b.tail...) {
		real += blk.cost()
	}
	if real != b.size || pool.used != real {
		t.Fatalf("cost %d, size %d, used %d", real, b.size, pool.used)
	}
	if kept := b.kept; kept < 15<<10 {
		t.Fatalf("only %d bytes kept", kept)
	}
}

func TestPoolEmptiesEndedOutputFirst(t *testing.T) {
	pool := NewPool(4 << 20)
	old, young, running := pool.NewBuffer(0, false), pool.NewBuffer(0, false), pool.NewBuffer(0, false)
	p := make([]byte, 1<<20)
	old.Append(stdout, p)
	young.Append(stdout, p)
	old.Finish()
	young.Finish()
	running.Append(stdout, p)
	for range 3 {
		pool.NewBuffer(0, false).Append(stdout, make([]byte, 512<<10))
	}
	_, oldGone := old.Sizes()
	_, youngGone := young.Sizes()
	_, runningGone := running.Sizes()
	if oldGone != 1<<20 || youngGone != 0 || runningGone != 0 {
		t.Fatalf("dropped: old %d, young %d, running %d", oldGone, youngGone, runningGone)
	}
	// And then the largest of those that run.
	for range 20 {
		pool.NewBuffer(0, false).Append(stdout, make([]byte, 256<<10))
	}
	if _, gone := running.Sizes(); gone == 0 || pool.Used() > 4<<20 {
		t.Fatalf("the largest kept everything; used %d", pool.Used())
	}
}

func TestHolderLosesNothing(t *testing.T) {
	b := NewPool(64<<20).NewBuffer(guestwire.MinBuffer, true)
	const total = 10 << 20
	done := make(chan struct{})
	go func() {
		defer close(done)
		p := make([]byte, 10000)
		for sent := 0; sent < total; sent += len(p) {
			p = p[:min(len(p), total-sent)]
			for i := range p {
				p[i] = byte((sent + i) / 7)
			}
			b.Append(stdout, p)
		}
		b.Finish()
	}()
	r := b.NewReader(0, true)
	defer r.Close()
	buf := make([]byte, 5000)
	var next int64
	for {
		p, state, news := r.Next(buf)
		if state == Waiting {
			<-news
			continue
		}
		if state == Finished {
			break
		}
		if p.Gap > 0 {
			t.Fatalf("gap of %d at %d", p.Gap, p.Offset)
		}
		for i, c := range p.Data {
			if c != byte((p.Offset+int64(i))/7) {
				t.Fatalf("byte %d differs", p.Offset+int64(i))
			}
		}
		next = p.Offset + int64(len(p.Data))
	}
	testenv.Receive(t, "the reader ends", done)
	if next != total {
		t.Fatalf("%d bytes of %d", next, total)
	}
}

// TestHolderMayNotStallForEver leaves a holder that takes nothing, and one that never comes.
func TestHolderMayNotStallForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, pending := range []bool{true, false} {
			b := NewPool(64<<20).NewBuffer(guestwire.MinBuffer, pending)
			limit := guestwire.AttachLimit
			if !pending {
				limit = guestwire.StallLimit
				defer b.NewReader(0, true).Close()
			}
			start := time.Now()
			b.Append(stdout, make([]byte, 1<<20))
			if waited := time.Since(start); waited != limit {
				t.Fatalf("waited %v, want %v", waited, limit)
			}
			if _, dropped := b.Sizes(); dropped == 0 {
				t.Fatal("nothing was dropped after the wait")
			}
		}
	})
}

func TestHolderLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewPool(64<<20).NewBuffer(guestwire.MinBuffer, false)
		r := b.NewReader(0, true)
		start := time.Now()
		time.AfterFunc(time.Second, r.Close)
		b.Append(stdout, make([]byte, 1<<20))
		if waited := time.Since(start); waited != time.Second {
			t.Fatalf("waited %v", waited)
		}
	})
}

func TestOutputAfterTheEnd(t *testing.T) {
	pool := NewPool(guestwire.MinBuffer)
	b := pool.NewBuffer(0, false)
	b.Append(stdout, []byte("a"))
	b.Finish()
	pool.NewBuffer(0, false).Append(stdout, make([]byte, 1<<20)) // empties b
	b.Append(stderr, []byte("late"))
	got, _, gaps := readAll(t, b, 0)
	if string(got) != "\x00late" || gaps != 1 {
		t.Fatalf("%q, gaps %d", got, gaps)
	}
	if len(pool.ended) != 1 {
		t.Fatalf("%d ended buffers listed", len(pool.ended))
	}
	b.Drop()
	if len(pool.ended) != 0 {
		t.Fatal("still listed")
	}
}

func BenchmarkAppend(b *testing.B) {
	buf := NewPool(64<<20).NewBuffer(0, false)
	p := make([]byte, blockSize)
	b.SetBytes(blockSize)
	b.ReportAllocs()
	for b.Loop() {
		buf.Append(stdout, p)
	}
}
