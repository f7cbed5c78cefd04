package cli

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"casemate.dev/client"
)

func TestCleanEscapesWhatSteersATerminal(t *testing.T) {
	for in, want := range map[string]string{
		"plain über 報告":                "plain über 報告",
		"a\x1b]52;c;aGk=\x07b":         `a\x1b]52;c;aGk=\x07b`,
		"two\nlines\r\tand tab":        `two\nlines\r\tand tab`,
		"bad \xff\xc3 utf8":            `bad \xff\xc3 utf8`,
		"evil\u202egpj.exe":            `evil\u202egpj.exe`,
		"zero\u200bwidth":              `zero\u200bwidth`,
		"c1 \u009b31m":                 `c1 \u009b31m`,
		"":                             "",
		"para\u2029graph":              `para\u2029graph`,
		"tag \U000e0041":               `tag \ue0041`,
		"replacement character \ufffd": `replacement character \ufffd`,
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestScreenPassesTextAndColoursOnly(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"text", "hi\r\n\tthere über\n", "hi\r\n\tthere über\n"},
		{"colour", "\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"},
		{"clipboard", "a\x1b]52;c;ZXZpbA==\x07b", "ab"},
		{"link", "a\x1b]8;;http://evil\x1b\\b\x1b]8;;\x1b\\c", "abc"},
		{"title", "a\x1b]0;sudo password:\x07b", "ab"},
		{"cursor and clear", "a\x1b[2J\x1b[1;1Hb", "ab"},
		{"report request", "a\x1b[6nb\x1b[cb", "abb"},
		{"device control", "a\x1bP+q544e\x1b\\b", "ab"},
		{"private mode", "a\x1b[?1049hb", "ab"},
		{"private m", "a\x1b[>4;1mb", "ab"},
		{"charset", "a\x1b(0b", "ab"},
		{"reset", "a\x1bcb", "ab"},
		{"bell and backspace", "a\x07\x08b\x7f", "ab"},
		{"cut short", "a\x1b[3\x181mb", "a1mb"},
		{"control inside", "a\x1b[3\x071mb", "ab"},
		{"endless colour", "a\x1b[" + strings.Repeat("1;", 500) + "mb", "ab"},
	} {
		var whole bytes.Buffer
		if n, err := (&screen{w: &whole}).Write([]byte(tc.in)); n != len(tc.in) || err != nil {
			t.Errorf("%s: Write = %d, %v", tc.name, n, err)
		}
		if whole.String() != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, whole.String(), tc.want)
		}
		// Where a sequence is cut into pieces makes no difference.
		var single bytes.Buffer
		s := &screen{w: &single}
		for i := range len(tc.in) {
			s.Write([]byte{tc.in[i]})
		}
		if single.String() != tc.want {
			t.Errorf("%s, byte by byte: %q, want %q", tc.name, single.String(), tc.want)
		}
	}
}

// FuzzScreen checks that nothing but text and colours ever comes through.
func FuzzScreen(f *testing.F) {
	f.Add([]byte("a\x1b]52;c;x\x07b\x1b[31mc"))
	f.Add([]byte("\x1b[\x1b[31m\x1b]\x1b\x1b\\"))
	f.Add([]byte("\x1b[\x181m"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		(&screen{w: &out}).Write(in)
		rest := out.String()
		for {
			i := strings.IndexByte(rest, 0x1b)
			if i < 0 {
				break
			}
			end := strings.IndexByte(rest[i:], 'm')
			if end < 0 || strings.Trim(rest[i+1:i+end], "[0123456789;:") != "" {
				t.Fatalf("%q came through of %q", rest[i:], in)
			}
			rest = rest[i+end:]
		}
	})
}

// FuzzClean checks that what is cleaned is printable text.
func FuzzClean(f *testing.F) {
	f.Add("a\x1b[31m\u202e\xff")
	f.Fuzz(func(t *testing.T, in string) {
		out := clean(in)
		if !utf8.ValidString(out) || strings.ContainsFunc(out, unsafeRune) {
			t.Fatalf("clean(%q) = %q", in, out)
		}
	})
}

func TestQuoteArgv(t *testing.T) {
	got := quoteArgv([]string{"sh", "-c", "echo 'a' $b", "", "x=1"})
	if want := `sh -c 'echo '\''a'\'' $b' '' x=1`; got != want {
		t.Errorf("quoteArgv = %s, want %s", got, want)
	}
}

func TestLimitsText(t *testing.T) {
	asked := &client.Limits{MemoryBytes: 1 << 30, Cpus: 1.8, Pids: 512, OpenFiles: 4096, DiskBytes: 2 << 30, Inodes: 5000}
	tests := map[string]struct {
		applied *client.Limits
		want    string
	}{
		"all of it":          {&client.Limits{DiskBytes: 2 << 30}, "disk 2 GiB,"},
		"less":               {&client.Limits{DiskBytes: 1 << 30}, "disk 1 GiB (of 2 GiB: the store has no more),"},
		"nothing said of it": {nil, "disk 2 GiB, 4096 open files, 5000 files"},
		"files counted":      {&client.Limits{DiskBytes: 2 << 30, Inodes: 5000}, ", 5000 files"},
		"files not counted":  {&client.Limits{DiskBytes: 2 << 30}, ", as many files as the disk takes (not 5000 files: the store can't count them)"},
	}
	for name, tt := range tests {
		if got := limitsText(asked, tt.applied); !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	for inodes, want := range map[int64]string{5000: "project", 0: "project, files by their bytes"} {
		if got := diskText("project", &client.Limits{Inodes: inodes}); got != want {
			t.Errorf("%d files: %s, want %s", inodes, got, want)
		}
	}
}
