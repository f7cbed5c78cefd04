package tree

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"os"
	"strings"

	"golang.org/x/mod/sumdb/tlog"
)

const (
	streamSize = 28
	recordSize = tlog.HashSize + streamSize + 8 + 4
	// scanRecords is how many records are read at once.
	scanRecords = 8 << 10
)

// Record is a leaf as the file holds it.
type Record struct {
	Hash   tlog.Hash
	Stream string // who it belongs to
	Seq    uint64 // its counter there
}

// ValidStream reports whether a stream's name can be recorded.
func ValidStream(s string) bool {
	return s != "" && len(s) <= streamSize && !strings.Contains(s, "\x00")
}

func (r Record) append(b []byte) []byte {
	at := len(b)
	b = append(b, r.Hash[:]...)
	b = append(b, r.Stream...)
	b = append(b, make([]byte, streamSize-len(r.Stream))...)
	b = binary.BigEndian.AppendUint64(b, r.Seq)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b[at:], castagnoli()))
}

func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) } // which keeps it

// parseRecord reads one record; false where it is damaged.
func parseRecord(b []byte) (r Record, ok bool) {
	sum := recordSize - 4
	if crc32.Checksum(b[:sum], castagnoli()) != binary.BigEndian.Uint32(b[sum:]) {
		return r, false
	}
	copy(r.Hash[:], b)
	name := b[tlog.HashSize : tlog.HashSize+streamSize]
	r.Stream = strings.TrimRight(string(name), "\x00")
	r.Seq = binary.BigEndian.Uint64(b[tlog.HashSize+streamSize:])
	return r, true
}

// scan calls f with each record of the file from from to to, until f returns false. It returns the index
// of the first damaged one, or to.
func scan(file *os.File, from, to int64, f func(at int64, r Record) bool) (int64, error) {
	buf := make([]byte, scanRecords*recordSize)
	for at := from; at < to; {
		n := min(to-at, scanRecords)
		page := buf[:n*recordSize]
		if _, err := file.ReadAt(page, at*recordSize); err != nil {
			if err == io.EOF { //nolint:errorlint // ReadAt's own
				err = io.ErrUnexpectedEOF
			}
			return at, err
		}
		for ; len(page) > 0; page = page[recordSize:] {
			r, ok := parseRecord(page[:recordSize])
			if !ok {
				return at, nil
			}
			if !f(at, r) {
				return to, nil
			}
			at++
		}
	}
	return to, nil
}
