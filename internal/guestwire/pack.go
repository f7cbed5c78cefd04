package guestwire

import (
	"encoding/binary"
	"fmt"
	"io"

	"casemate.dev/internal/errs"
)

// A tree of files travels as a sequence of entries, each its length (4 bytes, big endian), so many bytes of
// Entry as JSON, and then Size bytes of content. A directory comes before what lies in it. The sequence ends
// where its stream does.

// UnpackRequest puts a tree below the directory Path, which is made if it is missing, with those above it. What
// is there stays, but for files that the tree names; a symbolic link is never written through. Path "/" and a
// single entry make a single file.
type UnpackRequest struct {
	PathRequest
	// Owner is "user", "user:group" or ":group", by name or number, to whom everything belongs that is made; "": to
	// whom the entries say.
	Owner string `json:"owner,omitempty"`
}

// UnpackReply says what was unpacked.
type UnpackReply struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"` // of content
}

// Entry is one file of a tree.
type Entry struct {
	Path string   `json:"path"` // relative, clean, without ".."
	Type FileType `json:"type"`
	// Hard names, for a hard link, the entry before it that it is another name of; Type is TypeFile and there is
	// no content.
	Hard   string `json:"hard,omitempty"`
	Mode   uint32 `json:"mode"`             // permissions, with setuid, setgid and sticky
	UID    uint32 `json:"uid,omitempty"`    // inside
	GID    uint32 `json:"gid,omitempty"`    // inside
	Size   int64  `json:"size,omitempty"`   // of a file's content
	Target string `json:"target,omitempty"` // of a symbolic link
	MTime  int64  `json:"mtime,omitempty"`  // Unix nanoseconds; 0: when it is unpacked
	// Attrs are extended attributes.
	Attrs map[string][]byte `json:"attrs,omitempty"`
}

// maxEntry bounds an entry's JSON: a path, a target and attributes.
const maxEntry = 256 << 10

// Pack writes a tree.
type Pack struct {
	w   io.Writer
	buf []byte
}

// NewPack returns a Pack that writes to w.
func NewPack(w io.Writer) *Pack { return &Pack{w: w} }

// Add writes an entry, with its content from in, which gives exactly Size bytes. in may be nil where Size is 0.
func (p *Pack) Add(e Entry, in io.Reader) error {
	e.Path, e.Hard, e.Target = Escape(e.Path), Escape(e.Hard), Escape(e.Target)
	text, err := Marshal(e)
	if err != nil {
		return err
	}
	if len(text) > maxEntry {
		return errs.New(errs.InvalidArgument, "the name and attributes of %s are too long", e.Path)
	}
	p.buf = append(binary.BigEndian.AppendUint32(p.buf[:0], uint32(len(text))), text...)
	if _, err := p.w.Write(p.buf); err != nil {
		return err
	}
	if e.Size == 0 {
		return nil
	}
	n, err := io.Copy(p.w, io.LimitReader(in, e.Size))
	if err == nil && n < e.Size {
		err = fmt.Errorf("%s has become shorter: %w", e.Path, io.ErrUnexpectedEOF)
	}
	return err
}

// ReadEntry reads the next entry of a tree; its content follows in r. io.EOF: there is none.
func ReadEntry(r io.Reader) (Entry, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return Entry{}, err // io.EOF, or in the middle io.ErrUnexpectedEOF
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxEntry {
		return Entry{}, broken("an entry of %d bytes", n)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return Entry{}, io.ErrUnexpectedEOF
	}
	var e Entry
	if err := Unmarshal(text, &e); err != nil {
		return Entry{}, err
	}
	for _, s := range []*string{&e.Path, &e.Hard, &e.Target} {
		plain, ok := Unescape(*s)
		if !ok {
			return Entry{}, broken("an entry's name is malformed")
		}
		*s = plain
	}
	if e.Size < 0 || (e.Type != TypeFile || e.Hard != "") && e.Size > 0 {
		return Entry{}, broken("an entry of type %s with %d bytes", e.Type, e.Size)
	}
	if e.Hard != "" && e.Type != TypeFile {
		return Entry{}, broken("a hard link of type %s", e.Type)
	}
	return e, nil
}
