package mcp

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestWindow(t *testing.T) {
	for _, tt := range []struct {
		name     string
		limit    int
		writes   []string
		text     string
		from, to int64
	}{
		{name: "nothing", limit: 10},
		{name: "it fits", limit: 10, writes: []string{"01234", "56789"}, text: "0123456789"},
		{name: "one over", limit: 10, writes: []string{"0123456789a"}, text: "01234\n[… 1 bytes left out, from offset 5 to 6 …]\n6789a", from: 5, to: 6},
		{name: "much over", limit: 4, writes: []string{strings.Repeat("x", 1000), "yz"}, text: "xx\n[… 998 bytes left out, from offset 2 to 1000 …]\nyz", from: 2, to: 1000},
		{name: "characters stay whole", limit: 8, writes: []string{"aaaé", "ééééé", "aé"}, text: "aaa\n[… 12 bytes left out, from offset 3 to 15 …]\naé", from: 3, to: 15},
	} {
		w := window{limit: tt.limit}
		total := 0
		for _, s := range tt.writes {
			_, _ = w.Write([]byte(s))
			total += len(s)
		}
		if got := w.shown(); got.text != tt.text || got.from != tt.from || got.to != tt.to || got.bytes != int64(total) {
			t.Errorf("%s: %+v", tt.name, got)
		}
	}
}

// TestWindowWithGaps: what the server no longer had is missing in the text, and counted.
func TestWindowWithGaps(t *testing.T) {
	w := window{limit: 100}
	_, _ = w.Write([]byte("head"))
	w.skip(1000)
	_, _ = w.Write([]byte("tail"))
	if got := w.shown(); got.text != "head\n[… 1000 bytes left out, from offset 4 to 1004 …]\ntail" || got.bytes != 1008 {
		t.Errorf("%+v", got)
	}
}

// FuzzWindow: whatever comes, in whatever pieces, head and tail are the output's own and the text is
// text.
func FuzzWindow(f *testing.F) {
	f.Add([]byte("hello wörld, this is long"), 3, 8)
	f.Add([]byte{0xff, 0xc3, 0x28, 0xe2, 0x82}, 1, 2)
	f.Fuzz(func(t *testing.T, data []byte, piece, limit int) {
		if piece <= 0 || limit < 2 || limit > 1<<16 {
			return
		}
		w := window{limit: limit}
		for rest := data; len(rest) > 0; {
			n := min(piece, len(rest))
			_, _ = w.Write(rest[:n])
			rest = rest[n:]
		}
		got := w.shown()
		if !utf8.ValidString(got.text) || got.bytes != int64(len(data)) || len(w.tail) > 2*limit+piece {
			t.Fatalf("%+v", got)
		}
		if got.from == got.to {
			if got.text != text(data) {
				t.Fatalf("%q is not %q", got.text, data)
			}
			return
		}
		want := text(data[:got.from]) + fmt.Sprintf("\n[… %d bytes left out, from offset %d to %d …]\n", got.to-got.from, got.from, got.to) + text(data[got.to:])
		if got.text != want {
			t.Fatalf("%q is not %q", got.text, want)
		}
		if utf8.Valid(data) && !(utf8.Valid(data[:got.from]) && utf8.Valid(data[got.to:])) {
			t.Fatalf("a character of %q is cut in two", data)
		}
	})
}
