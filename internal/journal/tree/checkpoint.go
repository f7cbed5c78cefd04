package tree

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// MaxCheckpoint bounds a checkpoint in bytes.
const MaxCheckpoint = 4 << 10

// Head is what a checkpoint says.
type Head struct {
	Origin string
	Size   int64
	Root   tlog.Hash
}

// Text is the signed text of a checkpoint.
func Text(origin string, size int64, root tlog.Hash) string {
	return fmt.Sprintf("%s\n%d\n%s\n", origin, size, base64.StdEncoding.EncodeToString(root[:]))
}

// ParseCheckpoint reads a checkpoint that verifier's key must have signed, in its name.
// *note.UnverifiedNoteError: it is well formed, and signed by others only.
func ParseCheckpoint(text []byte, verifier note.Verifier) (Head, error) {
	if len(text) > MaxCheckpoint {
		return Head{}, fmt.Errorf("a checkpoint of %d bytes is too long", len(text))
	}
	n, err := note.Open(text, note.VerifierList(verifier))
	if err != nil {
		return Head{}, err
	}
	h, err := parseText(n.Text)
	if err == nil && h.Origin != verifier.Name() {
		err = fmt.Errorf("the checkpoint is of %q, and signed as %q", h.Origin, verifier.Name())
	}
	return h, err
}

func parseText(text string) (Head, error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 4 || lines[3] != "" || lines[0] == "" {
		return Head{}, fmt.Errorf("a checkpoint has three lines, this has %d", len(lines)-1)
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil || size < 0 || strconv.FormatInt(size, 10) != lines[1] {
		return Head{}, fmt.Errorf("%q is no size of a log", lines[1])
	}
	root, err := tlog.ParseHash(lines[2])
	if err != nil {
		return Head{}, fmt.Errorf("%q is no root of a log", lines[2])
	}
	return Head{Origin: lines[0], Size: size, Root: root}, nil
}
