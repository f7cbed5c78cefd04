package contexts

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"unicode/utf8"

	"casemate.dev/internal/guestwire"
)

// The words of the protocol.
const (
	evReady  = "ready"
	evResult = "result"
	evError  = "error"
	evEnd    = "end"
	// evInterrupted tells that an interrupt has come: drivers that say so are sent none for nothing.
	evInterrupted = "interrupted"
	// A zygote says these about its forks.
	evZygote = "zygote"
	evForked = "forked"
	evReaped = "reaped"
)

// message is what the guest itself reads of a driver's line.
type message struct {
	Ev      string `json:"ev"`
	ID      string `json:"id"`
	Version string `json:"version"`
	Count   int64  `json:"count"`
	Name    string `json:"name"`
	Value   string `json:"value"`
	Slot    int    `json:"slot"`
	PID     int    `json:"pid"`
	PIDs    []int  `json:"pids"`
	Code    int    `json:"code"`
	Signal  int    `json:"signal"`
	Error   string `json:"error"`
	Answers bool   `json:"answers_interrupts"`
}

// order is what the guest says to a driver.
type order struct {
	Op      string            `json:"op"`
	ID      string            `json:"id,omitempty"`
	Code    string            `json:"code,omitempty"`
	File    bool              `json:"file,omitempty"` // the code is in the file
	Env     map[string]string `json:"env,omitempty"`
	Slot    int               `json:"slot,omitempty"`
	Slots   []int             `json:"slots,omitempty"`
	Forget  []int             `json:"forget,omitempty"`
	Place   bool              `json:"place,omitempty"`
	Imports []string          `json:"imports,omitempty"`
}

// line encodes an order.
func (o order) line() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b) // ends with a line break
	e.SetEscapeHTML(false)
	if err := e.Encode(o); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

var (
	errLong      = errors.New("line is too long")
	errMalformed = errors.New("line is no message")
)

// readLine reads one line without its end. A line of more than limit bytes is read to its end, and
// gives errLong. The line is valid until the next call.
func readLine(r *bufio.Reader, buf *[]byte, limit int) ([]byte, error) {
	part, err := r.ReadSlice('\n')
	if err == nil {
		return part[:len(part)-1], nil
	}
	*buf = (*buf)[:0]
	long := false
	for {
		if long = long || len(*buf)+len(part) > limit; !long {
			*buf = append(*buf, part...)
		}
		switch {
		case err == nil && long:
			*buf = nil // it may have grown to the limit
			return nil, errLong
		case err == nil:
			return (*buf)[:len(*buf)-1], nil
		case !errors.Is(err, bufio.ErrBufferFull):
			if err == io.EOF && (len(*buf) > 0 || long) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		part, err = r.ReadSlice('\n')
	}
}

// maxDepth bounds how deep a line may nest: charts nest six levels, application/json of a user more.
const maxDepth = 256

// parse reads a driver's line.
func parse(line []byte) (message, error) {
	var m message
	if !utf8.Valid(line) || guestwire.Depth(line) > maxDepth {
		return m, errMalformed
	}
	if err := json.Unmarshal(line, &m); err != nil {
		return m, errMalformed
	}
	m.Version, m.Name, m.Value, m.Error = cut(m.Version), cut(m.Name), cut(m.Value), cut(m.Error)
	if m.Count < 0 {
		m.Count = 0
	}
	return m, nil
}

// maxText bounds short texts of a driver that go into RunInfo and ContextInfo.
const maxText = 1 << 10

// cut shortens s to maxText without breaking a character.
func cut(s string) string {
	if len(s) <= maxText {
		return s
	}
	n := maxText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// errorLine is an error item in the driver's words, for what the guest itself has to say.
func errorLine(run, name, value string) []byte {
	b, _ := json.Marshal(map[string]string{ // plain text: can't fail
		"ev": evError, "id": run, "name": name, "value": value, "traceback": name + ": " + value,
	})
	return b
}

// itemOf returns the kind of item that an event becomes, 0 for none.
func itemOf(ev string) guestwire.ItemKind {
	switch ev {
	case evResult:
		return guestwire.ItemResult
	case evError:
		return guestwire.ItemError
	}
	return 0
}
