package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// The spool is a file beside the database to which changes are appended in the order of the queue. A
// change that lies in it survives the death of the process, for the price of one write(2) instead of
// a transaction's dozen; the database gets it within CommitEvery, many in one transaction. Open
// replays what the database may lack. It is flushed to disk as the database's log is.
//
// Only changes whose writes all have a redo form can lie in it, and the file is emptied whenever the
// database holds all of it.
//
//	frame   length of the body (4 bytes, little endian), CRC-32C of it (4), body
//	record  kind (1 byte), fields (integers as varints, texts as length and bytes); a body is records
const (
	spoolName = "spool"
	// spoolKeep is how long the file may be when it is left alone, and spoolMax from where on changes
	// take the slow way until it is empty.
	spoolKeep = 256 << 10
	spoolMax  = 8 << 20
	maxFrame  = 16 << 20
	frameHead = 8
	// bufKeep is how much memory is kept for the next frame.
	bufKeep = 64 << 10
	// lookAhead is how many writes lie between an added row and the put that makes it needless, at most.
	lookAhead = 64
)

// The kinds of records. They are on disk: a number never changes its meaning.
const (
	redoEvent            = 1
	redoAddProcess       = 2
	redoPutProcess       = 3
	redoOldBody          = 4 // without its time
	redoBody             = 5
	redoEraseBody        = 6
	redoReplaceInProcess = 7
)

// spool is guarded by writer.mu.
type spool struct {
	f      *os.File // nil where there is none: changes take the slow way
	next   []Write  // what the next frame holds
	buf    []byte   // for frames
	size   int64
	broken bool // an append failed: what comes after it could not be replayed
	full   bool // wait until it can be emptied
	// unsettled counts queued changes that are in buf or in the file.
	unsettled int
	// keep says that the database refused a change that is in the file, so that it must stay.
	keep bool
	// flush flushes the database to disk, so that the file is not the only place there that holds a change.
	flush func() error
}

func (s *spool) open() bool { return s.f != nil && !s.broken && !s.full }

// add puts a change's records into the next frame, and reports false where they can't be there.
func (s *spool) add(writes []Write) bool {
	if !s.open() || len(writes) == 0 {
		return false
	}
	for _, w := range writes {
		if w.redo == nil {
			return false
		}
	}
	s.next = append(s.next, writes...)
	s.unsettled++
	return true
}

// encode makes the frame. A row that is put later in it need not be added before.
func (s *spool) encode() {
	s.buf = append(s.buf[:0], make([]byte, frameHead)...)
	for i, w := range s.next {
		near := s.next[i:min(i+lookAhead, len(s.next))]
		if w.adds != "" && slices.ContainsFunc(near, func(o Write) bool { return o.puts == w.adds }) {
			continue
		}
		s.buf = w.redo(s.buf)
	}
	clear(s.next)
	s.next = s.next[:0]
}

// write appends the frame.
func (s *spool) write() error {
	s.encode()
	body := s.buf[frameHead:]
	binary.LittleEndian.PutUint32(s.buf, uint32(len(body)))
	binary.LittleEndian.PutUint32(s.buf[4:], crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
	if _, err := s.f.WriteAt(s.buf, s.size); err != nil {
		s.broken = true
		return fmt.Errorf("append to spool: %w", err)
	}
	s.size += int64(len(s.buf))
	if cap(s.buf) > bufKeep {
		s.buf = nil
	}
	s.full = s.size > spoolMax
	return nil
}

// settle takes note that a change which add took is in the database, or was refused by it though it
// had been acknowledged. When that is known of all, nothing of the file is needed any more, unless it
// is all there is of a refused one.
func (s *spool) settle(refused bool) {
	s.keep = s.keep || refused
	if s.unsettled--; s.unsettled > 0 || s.keep {
		return
	}
	clear(s.next)
	s.next = s.next[:0]
	if s.size > spoolKeep {
		_ = s.empty() // where the disk fails, the syncer takes no more changes
	}
}

// openSpool replays what an earlier process left, and empties the file once the database's log is on disk.
func openSpool(dir string, tx *Tx, wal *os.File) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, spoolName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open spool: %w", err)
	}
	err = tx.transact(func() error { return replay(f, tx) })
	if err == nil {
		err = syncData(wal)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("replay spool: %w", err), f.Close())
	}
	return f, nil
}

// replay applies every whole frame. What follows a torn one was acknowledged to nobody.
func replay(r io.Reader, tx *Tx) error {
	for {
		body, err := readFrame(r)
		if err != nil {
			return err
		}
		if body == nil {
			return nil
		}
		for len(body) > 0 {
			w, rest, err := parseRedo(body)
			if err != nil {
				return err
			}
			if err := w(tx); err != nil {
				return err
			}
			body = rest
		}
	}
}

// readFrame returns the next frame's body, nil at the end or where a frame is torn.
func readFrame(r io.Reader) ([]byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, ignoreEnd(err)
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > maxFrame {
		return nil, nil
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, ignoreEnd(err)
	}
	if crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, nil
	}
	return body, nil
}

func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

// parseRedo returns the write of the first record, and what follows it.
func parseRedo(b []byte) (func(*Tx) error, []byte, error) {
	kind, p := b[0], parser{rest: b[1:]}
	var do func(*Tx) error
	switch kind {
	case redoEvent:
		e := Event{Sandbox: p.text(), Seq: uint64(p.number()), Time: p.number(), Type: p.text(), Actor: p.text(), Process: p.text(), Facts: p.bytes()}
		// The database may hold it already, or a gap in its place.
		do = func(tx *Tx) error { return e.insert(tx, restoreEvent) }
	case redoAddProcess, redoPutProcess:
		query := addProcess
		if kind == redoPutProcess {
			query = putProcess
		}
		r := Process{Sandbox: p.text(), ID: p.text(), Started: p.number(), Ended: p.number(), Body: p.bytes()}
		do = func(tx *Tx) error { return r.insert(tx, query) }
	case redoOldBody, redoBody:
		b := Body{Sandbox: p.text(), Seq: uint64(p.number()), Name: p.text(), Size: p.number(), Salt: p.bytes(), Data: p.bytes()}
		if kind == redoBody {
			b.Time = p.number()
		}
		do = b.insert
	case redoEraseBody:
		do = Body{Sandbox: p.text(), Seq: uint64(p.number()), Name: p.text()}.erase
	case redoReplaceInProcess:
		do = replacement{p.text(), p.text(), p.text(), p.text()}.do
	default:
		return nil, nil, fmt.Errorf("record of unknown kind %d", kind)
	}
	if p.bad {
		return nil, nil, fmt.Errorf("record of kind %d is malformed", kind)
	}
	return do, p.rest, nil
}

func appendText[T ~string | ~[]byte](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// parser reads fields; after the first that is not there it only gives zeros.
type parser struct {
	rest []byte
	bad  bool
}

func (p *parser) number() int64 {
	v, n := binary.Varint(p.rest)
	if n <= 0 {
		p.bad = true
		return 0
	}
	p.rest = p.rest[n:]
	return v
}

func (p *parser) bytes() []byte {
	size, n := binary.Uvarint(p.rest)
	if n <= 0 || size > uint64(len(p.rest)-n) {
		p.bad = true
		return nil
	}
	v := p.rest[n : n+int(size)]
	p.rest = p.rest[n+int(size):]
	return v
}

func (p *parser) text() string { return string(p.bytes()) }
