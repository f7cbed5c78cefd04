package rootfs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"strings"
	"time"

	"casemate.dev/internal/linux/fd"
)

// Why the contents of a file are not hashed though it is a regular one that is there.
const (
	NotSummedSize       = "size"       // it is longer than SumLimits.FileBytes
	NotSummedLimit      = "limit"      // the others took all that SumLimits gives together
	NotSummedUnreadable = "unreadable" // the disk failed
)

// SumLimits bound what Between reads to hash the contents of the files that changed. The zero value hashes none.
type SumLimits struct {
	Files     int           // the first so many changes, in their order
	FileBytes int64         // of one file
	Bytes     int64         // of all together
	Within    time.Duration // for all together
}

// summed is a file of a point that is to be hashed.
type summed struct {
	at   int // in between.out
	root *os.File
	path string
	size int64
}

// toSum notes which of the changes from first on are of regular files that are there now, as far as so many are asked for.
func (b *between) toSum(first int) error {
	for i := first; i < min(len(b.out), b.limits.Files); i++ {
		c := b.out[i]
		if c.Type != "file" || c.Op == Deleted {
			continue
		}
		path := strings.TrimPrefix(c.Path, b.prefix)
		f, err := b.to.find(path)
		if err != nil {
			return err
		}
		if f != nil && f.info.IsRegular() {
			b.sums = append(b.sums, summed{i, f.root, path, f.info.Size})
		}
	}
	return nil
}

// sum hashes what toSum noted, the first ones first.
func (b *between) sum() {
	ctx, cancel := context.WithTimeout(b.ctx, b.limits.Within)
	defer cancel()
	left := b.limits.Bytes
	buf := make([]byte, min(64<<10, max(left, 1)))
	for _, s := range b.sums {
		c := &b.out[s.at]
		switch {
		case s.size > b.limits.FileBytes:
			c.NotSummed = NotSummedSize
		case s.size > left || ctx.Err() != nil:
			c.NotSummed = NotSummedLimit
		default:
			left -= s.size
			c.Sum, c.NotSummed = sumOf(ctx, s, buf)
		}
	}
}

// sumOf hashes the contents of one file.
func sumOf(ctx context.Context, s summed, buf []byte) (sum, why string) {
	dir, name, err := dirOf(s.root, s.path)
	if err != nil {
		return "", NotSummedUnreadable
	}
	defer dir.Close()
	f, err := fd.OpenFile(dir, name)
	if err != nil {
		return "", NotSummedUnreadable
	}
	defer f.Close()
	h, read := sha256.New(), int64(0)
	for {
		n, err := f.Read(buf)
		h.Write(buf[:n])
		read += int64(n)
		switch {
		case read > s.size: // it grows: it lies in a folder of the host
			return "", NotSummedLimit
		case err == io.EOF: //nolint:errorlint // Read returns it as it is
			return hex.EncodeToString(h.Sum(nil)), ""
		case err != nil:
			return "", NotSummedUnreadable
		case ctx.Err() != nil:
			return "", NotSummedLimit
		}
	}
}
