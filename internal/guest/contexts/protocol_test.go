package contexts

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/guestwire"
)

func TestReadLine(t *testing.T) {
	in := bufio.NewReaderSize(strings.NewReader("short\n\n"+strings.Repeat("l", 100)+"\n"+strings.Repeat("x", 101)+"\nafter\nrest"), 16)
	var buf []byte
	for _, want := range []string{"short", "", strings.Repeat("l", 100), "!long", "after"} {
		line, err := readLine(in, &buf, 101)
		if want == "!long" {
			if !errors.Is(err, errLong) {
				t.Errorf("long line: %q, %v", line, err)
			}
		} else if err != nil || string(line) != want {
			t.Errorf("line %q, %v; want %q", line, err, want)
		}
	}
	if line, err := readLine(in, &buf, 101); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("line without an end: %q, %v", line, err)
	}
}

func TestUnfinished(t *testing.T) {
	for text, want := range map[string]int{
		"": 0, "a": 0, "é": 0, "é"[:1]: 1, "a漢"[:2]: 1, "a漢"[:3]: 2, "😀"[:3]: 3, "😀": 0, "\x80\x80\x80\x80": 0, "\xff": 0, "a\xc3": 1,
	} {
		if got := unfinished([]byte(text)); got != want {
			t.Errorf("unfinished(%q) = %d, want %d", text, got, want)
		}
	}
}

// FuzzDriver reads what a driver might send: whatever it is, what is taken of it is bounded.
func FuzzDriver(f *testing.F) {
	f.Add([]byte(`{"ev":"ready","version":"3"}` + "\n" + `{"ev":"end","id":"r","count":1}` + "\n"))
	f.Add([]byte(`{"ev":"error","id":"r","name":"` + strings.Repeat("é", 3000) + `"}` + "\n"))
	f.Add([]byte("{\n[\n\xff\n" + strings.Repeat("[", 1000) + "\n"))
	f.Add([]byte(strings.Repeat("x", 5000)))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 4 << 10
		in := bufio.NewReaderSize(bytes.NewReader(b), 64)
		var buf []byte
		for {
			line, err := readLine(in, &buf, limit)
			if errors.Is(err, errLong) {
				continue
			}
			if err != nil {
				return
			}
			if len(line) > limit || bytes.IndexByte(line, '\n') >= 0 {
				t.Fatalf("line of %d bytes", len(line))
			}
			m, err := parse(line)
			if err == nil && (len(m.Name) > maxText+4 || len(m.Value) > maxText+4 || len(m.Version) > maxText+4 || m.Count < 0) {
				t.Fatalf("message %+v", m)
			}
		}
	})
}

func TestLogKeepsHeadAndTail(t *testing.T) {
	p := newPool(1 << 20)
	l := p.newLog(64 << 10)
	for range 1000 {
		l.append(guestwire.ItemResult, bytes.Repeat([]byte("r"), 1000))
	}
	l.finish()
	items, dropped := l.sizes()
	if items != 1000 || dropped == 0 || l.size > l.limit {
		t.Fatalf("%d items, %d bytes dropped, %d kept", items, dropped, l.size)
	}
	r := l.newReader(0, false)
	defer r.close()
	next, gaps := int64(0), 0
	for {
		it, gap, _, finished := r.take()
		if finished {
			break
		}
		if it.number != next {
			t.Fatalf("item %d where %d was due", it.number, next)
		}
		if next++; gap > 0 {
			next += gap - 1
			gaps++
		}
	}
	if next != 1000 || gaps != 1 {
		t.Errorf("read to item %d with %d gaps", next, gaps)
	}
	l.drop()
	if p.used != 0 || len(p.logs) != 0 {
		t.Errorf("%d bytes in %d logs are left", p.used, len(p.logs))
	}
}

func TestLogGrowsOnlyWhatNobodyHasRead(t *testing.T) {
	l := newPool(1 << 20).newLog(0)
	l.append(guestwire.ItemStdout, []byte("a"))
	l.append(guestwire.ItemStdout, []byte("b"))
	r := l.newReader(0, false)
	defer r.close()
	if it, _, _, _ := r.take(); string(it.data) != "ab" {
		t.Errorf("item %q", it.data)
	}
	l.append(guestwire.ItemStdout, []byte("c"))
	l.append(guestwire.ItemStderr, []byte("d"))
	if it, _, _, _ := r.take(); string(it.data) != "c" || it.number != 1 {
		t.Errorf("item %d %q", it.number, it.data)
	}
	if it, _, _, _ := r.take(); string(it.data) != "d" || it.kind != guestwire.ItemStderr {
		t.Errorf("item %q", it.data)
	}
}

// TestLogHold: a reader that is to lose nothing loses nothing, and one that leaves holds nobody up.
func TestLogHold(t *testing.T) {
	l := newPool(8 << 20).newLog(64 << 10)
	r := l.newReader(0, true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 500 {
			l.append(guestwire.ItemResult, bytes.Repeat([]byte("r"), 1000))
		}
	}()
	for n := int64(0); n < 300; {
		it, gap, news, _ := r.take()
		if gap > 0 {
			t.Fatalf("a gap at %d", it.number)
		}
		if news != nil {
			<-news
			continue
		}
		n++
	}
	select {
	case <-done:
		t.Fatal("the writer did not wait")
	default:
	}
	r.close()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the writer waits for a reader that has left")
	}
}

func TestPoolBoundsAllLogs(t *testing.T) {
	p := newPool(1 << 20)
	var logs []*log
	for range 50 {
		l := p.newLog(0)
		for range 100 {
			l.append(guestwire.ItemStdout, bytes.Repeat([]byte("x"), 1<<10))
			l.append(guestwire.ItemStderr, []byte("."))
		}
		l.finish()
		logs = append(logs, l)
	}
	if p.used > p.limit {
		t.Errorf("%d bytes are kept, limit %d", p.used, p.limit)
	}
	if _, dropped := logs[49].sizes(); dropped != 0 {
		t.Errorf("the last one has lost %d bytes", dropped)
	}
}
