package cli

import (
	"bytes"
	"testing"
)

func TestTableAligns(t *testing.T) {
	tb := &table{head: []string{"NAME", "STATE", "WHAT"}}
	tb.add("web", cell{"running", green}, "über")
	tb.add("a-longer-name", "paused", "")
	tb.add("evil\x1b[2J\nrow", "x", "y")
	var b bytes.Buffer
	tb.write(&b, false)
	want := "" +
		"NAME              STATE    WHAT\n" +
		"web               running  über\n" +
		"a-longer-name     paused\n" +
		`evil\x1b[2J\nrow  x        y` + "\n"
	if b.String() != want {
		t.Errorf("table:\n%s\nwant:\n%s", b.String(), want)
	}
	b.Reset()
	tb.write(&b, true)
	if !bytes.Contains(b.Bytes(), []byte("\x1b[32mrunning\x1b[0m  über")) {
		t.Errorf("a coloured cell is not padded after its colour ends: %q", b.String())
	}
}
