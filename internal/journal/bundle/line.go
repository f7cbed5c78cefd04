package bundle

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// Version is the format's.
const Version = 1

// maxLine bounds one line in bytes: an event with its proof, or a body.
const maxLine = 4 << 20

// Header is a bundle's first line.
type Header struct {
	Version int    `json:"version"`
	Origin  string `json:"origin"`
	Sandbox string `json:"sandbox"`
	Key     string `json:"key"`
}

// Lost stands for an event that is proved to have been and that the server does not have any more.
type Lost struct {
	Seq  uint64    `json:"seq"`
	Hash tlog.Hash `json:"hash"`
}

// Body is content that an event speaks of.
type Body struct {
	Seq  uint64 `json:"seq"`  // the event's
	Name string `json:"name"` // observer and fact, "server.argv"
	Salt []byte `json:"salt"`
	Data []byte `json:"data"` // what is kept of it: see Ref
}

// Ref stands for a body among an event's facts. Its hashes are those of HashBody, in hex.
type Ref struct {
	// Body is the hash of the whole; "": the body is empty.
	Body  string `json:"body,omitempty"`
	Bytes int64  `json:"bytes"`
	// Kept is set where only that much is kept, the last Tail bytes of it from the end and the others from the
	// beginning, and Head is the hash of that.
	Kept int64  `json:"kept,omitempty"`
	Tail int64  `json:"tail,omitempty"`
	Head string `json:"head,omitempty"`
	// Hashed says that no content was kept at all.
	Hashed bool `json:"hashed,omitempty"`
}

// HashBody is the hash that stands in an event for a body: SHA-256 of salt and content, in hex.
func HashBody(salt, data []byte) string {
	h := sha256.New()
	h.Write(salt)
	h.Write(data)
	return hex.EncodeToString(h.Sum(nil))
}

// Line is one line of a bundle. One of the first group is set; Leaf goes with Event and Lost, Proof with
// these and Head.
type Line struct {
	Bundle     *Header         `json:"bundle,omitempty"`
	Checkpoint string          `json:"checkpoint,omitempty"`
	Head       string          `json:"head,omitempty"`
	Event      json.RawMessage `json:"event,omitempty"`
	Lost       *Lost           `json:"lost,omitempty"`
	Body       *Body           `json:"body,omitempty"`
	Seal       string          `json:"seal,omitempty"`

	Leaf  *int64      `json:"leaf,omitempty"`
	Proof []tlog.Hash `json:"proof,omitempty"`
}

// encode writes a line without its line feed, in the one way that there is.
func (l Line) encode() ([]byte, error) {
	event := l.Event
	l.Event = nil
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(l); err != nil {
		return nil, fmt.Errorf("encode a bundle's line: %w", err)
	}
	out := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	if event == nil {
		return out, nil
	}
	// The event as it is: the encoder would write its text in another way.
	rest := out[1:]
	out = append([]byte(`{"event":`), event...)
	if len(rest) > 1 {
		out = append(out, ',')
	}
	return append(out, rest...), nil
}

// Write writes a line.
func (l Line) Write(w io.Writer) error {
	b, err := l.encode()
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// parseLine reads a line, which must be written as encode writes it.
func parseLine(b []byte) (Line, error) {
	var l Line
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return Line{}, fmt.Errorf("it is no line of a bundle: %w", err)
	}
	again, err := l.encode()
	if err != nil {
		return Line{}, err
	}
	if !bytes.Equal(again, b) {
		return Line{}, errors.New("it is not written as a bundle's lines are")
	}
	kinds := 0
	for _, set := range []bool{l.Bundle != nil, l.Checkpoint != "", l.Head != "", l.Event != nil, l.Lost != nil, l.Body != nil, l.Seal != ""} {
		if set {
			kinds++
		}
	}
	if leaf := l.Event != nil || l.Lost != nil; kinds != 1 || leaf != (l.Leaf != nil) || l.Proof != nil && !leaf && l.Head == "" {
		return Line{}, errors.New("it is no line of a bundle")
	}
	return l, nil
}

// Seal is what the server signs for: that the sandbox had so many events when the log was that.
type Seal struct {
	Origin  string
	Sandbox string
	// Last is the counter of the last event.
	Last uint64
	// Size and Root are the log's, as in the checkpoint.
	Size int64
	Root tlog.Hash
	// Imported is how many leaves at the log's beginning are events from before it: it proves what they
	// are since it was begun, and not since they happened.
	Imported int64
}

const sealTitle = "casemate.dev/journal/bundle 1"

// Sign returns the seal as a signed note.
func (s Seal) Sign(signer note.Signer) (string, error) {
	b, err := note.Sign(&note.Note{Text: s.text()}, signer)
	return string(b), err
}

func (s Seal) text() string {
	return fmt.Sprintf("%s\n%s\n%s\n%d\n%d\n%s\n%d\n", sealTitle, s.Origin, s.Sandbox, s.Last, s.Size,
		base64.StdEncoding.EncodeToString(s.Root[:]), s.Imported)
}

func parseSeal(text string, verifier note.Verifier) (Seal, error) {
	n, err := note.Open([]byte(text), note.VerifierList(verifier))
	if err != nil {
		return Seal{}, err
	}
	lines := strings.Split(n.Text, "\n")
	if len(lines) != 8 || lines[0] != sealTitle {
		return Seal{}, errors.New("it is the signature of something else")
	}
	s := Seal{Origin: lines[1], Sandbox: lines[2]}
	var bad [4]error
	s.Last, bad[0] = strconv.ParseUint(lines[3], 10, 64)
	s.Size, bad[1] = strconv.ParseInt(lines[4], 10, 64)
	s.Root, bad[2] = tlog.ParseHash(lines[5])
	s.Imported, bad[3] = strconv.ParseInt(lines[6], 10, 64)
	return s, errors.Join(bad[:]...)
}
