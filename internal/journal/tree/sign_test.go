package tree

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"casemate.dev/internal/testenv"
)

// slowSigner counts signatures, and holds each up until it is let go.
type slowSigner struct {
	note.Signer
	count atomic.Int64
	begun chan struct{} // one for each that waits
	gate  chan struct{} // closed: nothing waits
}

func (s *slowSigner) Sign(msg []byte) ([]byte, error) {
	s.count.Add(1)
	select {
	case s.begun <- struct{}{}:
	default:
	}
	<-s.gate
	return s.Signer.Sign(msg)
}

func openSlow(t testing.TB) (*Tree, *slowSigner) {
	t.Helper()
	cfg := quiet(t, t.TempDir())
	s := &slowSigner{Signer: cfg.Signer, begun: make(chan struct{}, 1), gate: make(chan struct{})}
	cfg.Signer = s
	return open(t, cfg), s
}

// TestOneSignatureServesAllWhoWait has many ask while a signature is under way: all of them are answered by the next one.
func TestOneSignatureServesAllWhoWait(t *testing.T) {
	tr, s := openSlow(t)
	const callers = 20
	grow(tr, 1)
	var all sync.WaitGroup
	all.Go(func() { checkCovers(t, tr, 1) })
	<-s.begun
	for i := range callers {
		all.Go(func() {
			at := tr.Append("s", uint64(i+2), data(i)) // which a signature does not hold up
			checkCovers(t, tr, at+1)
		})
	}
	testenv.Eventually(t, time.Minute, "all have appended", func() bool { return tr.Size() == callers+1 })
	close(s.gate)
	all.Wait()
	if n := s.count.Load(); n != 2 {
		t.Errorf("%d signatures for %d callers who came during the first", n, callers)
	}
	for range 3 {
		checkCovers(t, tr, callers+1)
	}
	if n := s.count.Load(); n != 2 {
		t.Errorf("a size that is signed was signed again: %d", n)
	}
}

// checkCovers asks for a checkpoint, which must be valid and cover size leaves.
func checkCovers(t *testing.T, tr *Tree, size int64) {
	text, err := tr.Checkpoint()
	if err != nil {
		t.Error(err)
		return
	}
	h, err := ParseCheckpoint(text, tr.cfg.Verifier)
	if err != nil || h.Size < size {
		t.Errorf("a checkpoint of %d for %d leaves: %v", h.Size, size, err)
	}
}

// TestNeverMoreSignaturesThanSizes asks from many sides, and holds what each got against the tree's own roots.
func TestNeverMoreSignaturesThanSizes(t *testing.T) {
	tr, s := openSlow(t)
	close(s.gate)
	const callers, each = 8, 60
	heads := make([][]Head, callers)
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			for i := range each {
				at := tr.Append(fmt.Sprintf("s%d", c), uint64(i+1), data(c*each+i))
				text, err := tr.Checkpoint()
				if err != nil {
					t.Error(err)
					return
				}
				h, err := ParseCheckpoint(text, tr.cfg.Verifier)
				if err != nil || h.Size <= at {
					t.Errorf("leaf %d: a checkpoint of %d: %v", at, h.Size, err)
				}
				heads[c] = append(heads[c], h)
			}
		})
	}
	all.Wait()
	if n := s.count.Load(); n > callers*each {
		t.Errorf("%d signatures for %d sizes", n, callers*each)
	}
	v, err := tr.View()
	if err != nil {
		t.Fatal(err)
	}
	for _, own := range heads {
		for _, h := range own {
			p, err := v.ProvePrefix(h.Size)
			if err == nil {
				err = CheckPrefix(v.Head, h, p)
			}
			if err != nil {
				t.Errorf("a checkpoint of %d is no beginning of the log: %v", h.Size, err)
			}
		}
	}
}

// TestPublishingBesideGrowth publishes while others append: what lies in files then is taken up again, and nothing in
// them is ahead of the checkpoint.
func TestPublishingBesideGrowth(t *testing.T) {
	cfg := quiet(t, t.TempDir())
	tr := open(t, cfg)
	stop := make(chan struct{})
	var growing sync.WaitGroup
	growing.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				grow(tr, 1)
			}
		}
	})
	halt := sync.OnceFunc(func() { close(stop); growing.Wait() })
	defer halt()
	for tr.Size() < 3000 {
		if err := tr.publish(); err != nil {
			t.Fatal(err)
		}
		tr.mu.Lock()
		for _, one := range tr.full {
			if one.end() <= tr.done.size {
				t.Errorf("tile %d/%d of a tree of %d was left in memory", one.level, one.n, tr.done.size)
			}
		}
		done := tr.done
		tr.mu.Unlock()
		if done.size == 0 {
			continue // nothing was appended so far
		}
		other := &Tree{cfg: cfg}
		if !other.loadTiles(done.size) || other.rootLocked() != done.root {
			t.Fatalf("the files of a tree of %d don't hold it", done.size)
		}
	}
	halt()
	size := tr.Size()
	abandon(tr)
	again := open(t, cfg)
	if o := again.Opened(); o.Rebuilt || o.Size > size {
		t.Errorf("taken up as %+v, it had %d leaves", o, size)
	}
	if h := head(t, again); h.Root != reference(t, int(h.Size)) {
		t.Errorf("the root of %d leaves is another one", h.Size)
	}
}

// BenchmarkCheckpointsAtOnce is what answers to many at once cost: two events and a checkpoint each.
func BenchmarkCheckpointsAtOnce(b *testing.B) {
	tr := open(b, quiet(b, b.TempDir()))
	b.SetParallelism(8)
	var n atomic.Uint64
	b.RunParallel(func(pb *testing.PB) {
		line := make([]byte, 400)
		for pb.Next() {
			at := n.Add(1)
			binary.LittleEndian.PutUint64(line, at)
			tr.Append("abcdefghijklmnopqrst", at, line)
			tr.Append("abcdefghijklmnopqrst", at, line)
			if _, err := tr.Checkpoint(); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
