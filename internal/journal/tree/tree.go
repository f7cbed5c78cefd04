package tree

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// The file names in a log's directory.
const (
	leavesName     = "leaves"
	checkpointName = "checkpoint"
)

// tileHeight and tileWidth are tlog-tiles' own.
const (
	tileHeight = 8
	tileWidth  = 1 << tileHeight
	// levels of tiles that a log of 2^63 leaves would have.
	levels = 8
)

// Config says where a log lies and who signs it.
type Config struct {
	// Dir is the log's directory; it is made with mode 0700 where it is missing.
	Dir string
	// Signer signs checkpoints; its name is the log's origin.
	Signer note.Signer
	// Verifier checks the checkpoint that an earlier process left.
	Verifier note.Verifier
	// SyncEvery bounds how long a leaf stays unflushed; default 25 ms, as in package store.
	SyncEvery time.Duration
	// PublishEvery bounds how long tiles and the checkpoint file lag behind; default 1 s.
	PublishEvery time.Duration
	// Log hears about faults that no caller can be told; nil: nobody.
	Log *slog.Logger
}

// Tree is an open log. Its methods are safe for concurrent use.
type Tree struct {
	cfg    Config
	leaves *os.File
	opened Opened

	kick    chan struct{}
	stopped chan struct{}
	loop    sync.WaitGroup
	closing sync.Once
	closed  error

	// publishing is held while files are published.
	publishing sync.Mutex
	// signing is held while a checkpoint is signed; see checkpoint.
	signing sync.Mutex

	// mu guards the fields below.
	mu      sync.Mutex
	size    int64        // leaves appended
	written int64        // those in the file
	synced  int64        // those flushed
	buf     []byte       // records of those that are not in the file
	stack   []tlog.Hash  // the roots of the perfect subtrees, the biggest first
	edges   [levels]edge // the newest tile of each level
	full    []tile       // full tiles that are not in files yet
	signed  signed       // the newest checkpoint
	done    published    // what was published last
	err     error        // set for good when a flush failed
	over    bool         // it was closed
}

// edge is the newest, incomplete tile of a level.
type edge struct {
	n      int64 // its number
	hashes []byte
}

// tile is a full one.
type tile struct {
	level  int
	n      int64
	hashes []byte
}

// published is what lies in files.
type published struct {
	size int64
	root tlog.Hash
}

// signed is a checkpoint and what it says.
type signed struct {
	note []byte // nil: none was signed yet
	published
}

// Opened tells what Open found.
type Opened struct {
	// Size is the number of leaves.
	Size int64
	// Torn is how many bytes at the end of the leaves were no whole record, and were cut off.
	Torn int64
	// Rebuilt says that tiles were missing or damaged and were made of the leaves again.
	Rebuilt bool
	// OtherKey says that the published checkpoint was signed by another key than Config.Verifier's.
	OtherKey bool
}

// Open opens a log, or makes it. FailedPrecondition: the files are not those that the published
// checkpoint was made of, so the log was cut or changed.
func Open(cfg Config) (*Tree, error) {
	if cfg.SyncEvery <= 0 {
		cfg.SyncEvery = 25 * time.Millisecond
	}
	if cfg.PublishEvery <= 0 {
		cfg.PublishEvery = time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make log directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(cfg.Dir, leavesName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open leaves: %w", err)
	}
	t := &Tree{cfg: cfg, leaves: f, kick: make(chan struct{}, 1), stopped: make(chan struct{})}
	if err := t.recover(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := durable.SyncDir(cfg.Dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	t.loop.Go(t.run)
	return t, nil
}

// Opened tells what Open found.
func (t *Tree) Opened() Opened { return t.opened }

// Origin is the log's name, as its checkpoints show it.
func (t *Tree) Origin() string { return t.cfg.Signer.Name() }

// Size is the number of leaves.
func (t *Tree) Size() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.size
}

// Append adds the leaf of data, which is entry seq of stream, and returns its index. It does not
// touch the disk. Preconditions: ValidStream(stream), and the tree is not closed.
func (t *Tree) Append(stream string, seq uint64, data []byte) int64 {
	r := Record{Hash: tlog.RecordHash(data), Stream: stream, Seq: seq}
	t.mu.Lock()
	at := t.size
	t.addLocked(r.Hash)
	t.buf = r.append(t.buf)
	t.mu.Unlock()
	select {
	case t.kick <- struct{}{}:
	default:
	}
	return at
}

// addLocked puts a hash into the stack and the tiles.
func (t *Tree) addLocked(h tlog.Hash) {
	t.edgeLocked(0, h)
	for level := 0; t.size>>level&1 == 1; level++ {
		last := len(t.stack) - 1
		h = tlog.NodeHash(t.stack[last], h)
		t.stack = t.stack[:last]
		if (level+1)%tileHeight == 0 {
			t.edgeLocked((level+1)/tileHeight, h)
		}
	}
	t.stack = append(t.stack, h)
	t.size++
}

func (t *Tree) edgeLocked(level int, h tlog.Hash) {
	e := &t.edges[level]
	e.hashes = append(e.hashes, h[:]...)
	if len(e.hashes) == tileWidth*tlog.HashSize {
		t.full = append(t.full, tile{level: level, n: e.n, hashes: e.hashes})
		*e = edge{n: e.n + 1}
	}
}

// rootLocked is the hash of the whole tree (RFC 6962, section 2.1).
func (t *Tree) rootLocked() tlog.Hash {
	if len(t.stack) == 0 {
		root, _ := tlog.TreeHash(0, nil) // needs no reader
		return root
	}
	root := t.stack[len(t.stack)-1]
	for i := len(t.stack) - 2; i >= 0; i-- {
		root = tlog.NodeHash(t.stack[i], root)
	}
	return root
}

// Checkpoint returns a signed checkpoint that covers every leaf appended so far, all of which survive
// the death of this process from here on. The caller must not change it.
func (t *Tree) Checkpoint() ([]byte, error) {
	c, err := t.checkpoint()
	return c.note, err
}

// checkpoint is Checkpoint, with what it says. A signature takes longer than all else that the tree does, so it is made
// without the tree's lock, one at a time: whoever comes meanwhile waits for the one under way and then finds its
// leaves covered, or makes the next for everybody who waits by then. So there are never more signatures than sizes.
func (t *Tree) checkpoint() (signed, error) {
	t.mu.Lock()
	have, want := t.signed, t.size
	t.mu.Unlock()
	if have.covers(want) {
		return have, nil
	}
	t.signing.Lock()
	defer t.signing.Unlock()
	t.mu.Lock()
	have = t.signed
	next := published{size: t.size, root: t.rootLocked()}
	var err error
	if !have.covers(want) {
		err = t.writeLocked()
	}
	t.mu.Unlock()
	if have.covers(want) || err != nil {
		return have, err
	}
	text, err := note.Sign(&note.Note{Text: Text(t.Origin(), next.size, next.root)}, t.cfg.Signer)
	if err != nil {
		return signed{}, fmt.Errorf("sign checkpoint: %w", err)
	}
	have = signed{note: text, published: next}
	t.mu.Lock()
	t.signed = have
	t.mu.Unlock()
	return have, nil
}

func (c signed) covers(size int64) bool { return c.note != nil && c.size >= size }

// writeLocked puts what was appended into the file.
func (t *Tree) writeLocked() error {
	switch {
	case t.err != nil:
		return t.err
	case t.over:
		return errs.New(errs.Unavailable, "the journal's log is closed")
	case len(t.buf) == 0:
		return nil
	}
	// What a failed write left there is overwritten by the next.
	if _, err := t.leaves.WriteAt(t.buf, t.written*recordSize); err != nil {
		return errs.Wrap(fmt.Errorf("write leaves: %w", err), errs.Unavailable, "cannot write the journal's log: the server's disk fails or is full")
	}
	t.written = t.size
	if t.buf = t.buf[:0]; cap(t.buf) > 64<<10 {
		t.buf = nil
	}
	return nil
}

// Close publishes what was appended, and releases the files. Idempotent.
func (t *Tree) Close() error {
	t.closing.Do(func() {
		close(t.stopped)
		t.loop.Wait()
		err := errors.Join(t.sync(), t.publish())
		t.mu.Lock()
		t.over = true
		t.mu.Unlock()
		t.closed = errors.Join(err, t.leaves.Close())
	})
	return t.closed
}
