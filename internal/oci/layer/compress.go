package layer

import (
	"bufio"
	"bytes"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"casemate.dev/internal/errs"
)

// maxWindow bounds what unpacking zstd may keep in memory: 128 MiB is what its own program takes by default
// (zstd(1), --long).
const maxWindow = 128 << 20

// bufferSize is how much is read at once.
const bufferSize = 256 << 10

// Decompress returns the archive that r holds, by its first bytes: gzip, zstd, or neither. What follows the end of
// a compressed archive is an error of the reader's.
func Decompress(r io.Reader) (io.ReadCloser, error) {
	buf := bufio.NewReaderSize(r, bufferSize)
	head, err := buf.Peek(4)
	if err != nil && len(head) == 0 {
		return io.NopCloser(buf), nil // an empty archive, or an error that reading tells
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(buf)
		if err != nil {
			return nil, corrupt(err)
		}
		return z, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(head) == 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:], []byte{0x2a, 0x4d, 0x18}):
		// Also what begins with a frame to skip (RFC 8878, 3.1.2), as archives of eStargz's kind do.
		z, err := zstd.NewReader(buf, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, corrupt(err)
		}
		return z.IOReadCloser(), nil
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X'}):
		return nil, errs.New(errs.Unsupported, "the layer is compressed with bzip2 or xz; gzip, zstd and plain archives can be read")
	}
	return io.NopCloser(buf), nil
}

// corrupt says that an archive can't be read, unless err says why already.
func corrupt(err error) error {
	if errs.KindOf(err) != errs.Internal {
		return err
	}
	return errs.Wrap(err, errs.InvalidArgument, "the layer's archive is damaged: %v", err)
}
