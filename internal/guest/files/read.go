package files

import (
	"errors"
	"io"
	"path"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// read answers file.read.
func (s *server) read(c *guestwire.Conn, job Job, r guestwire.ReadRequest) error {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return err
	}
	if r.Offset < 0 {
		return errs.New(errs.InvalidArgument, "the offset is negative")
	}
	f, st, err := openRegular(p, r.Follow, 0, "read")
	if err != nil {
		return err
	}
	defer f.Close()
	if err := c.Reply(s.info(path.Clean(p), &st, "")); err != nil {
		return err
	}
	// A file that grows is read as long as it was; files of procfs and sysfs say 0 and are read to
	// their end.
	left := int64(-1)
	if st.Size > 0 {
		left = max(st.Size-r.Offset, 0)
	}
	if r.Length >= 0 && (left < 0 || r.Length < left) {
		left = r.Length
	}
	if err := send(c, f, r.Offset, left); err != nil {
		return fault(err, "read", p)
	}
	return c.End(nil)
}

// send sends left bytes from offset on, or all where left is negative.
func send(c *guestwire.Conn, f io.ReaderAt, offset, left int64) error {
	buf := make([]byte, guestwire.ChunkSize)
	for left != 0 {
		chunk := buf
		if left > 0 && left < int64(len(chunk)) {
			chunk = chunk[:left]
		}
		n, err := f.ReadAt(chunk, offset)
		if n > 0 {
			if err := c.Data(chunk[:n]); err != nil {
				return err
			}
			offset += int64(n)
			if left > 0 {
				left -= int64(n)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}
