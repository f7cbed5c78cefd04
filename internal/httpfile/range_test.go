package httpfile

import "testing"

func TestParseRange(t *testing.T) {
	tests := []struct {
		header         string
		size           int64
		ranged, ok     bool
		offset, length int64
	}{
		{"bytes=0-0", 10, true, true, 0, 1},
		{"bytes=2-5", 10, true, true, 2, 4},
		{"bytes=2-", 10, true, true, 2, 8},
		{"bytes=2-99", 10, true, true, 2, 8},
		{"bytes=-3", 10, true, true, 7, 3},
		{"bytes=-99", 10, true, true, 0, 10},
		{"bytes=10-", 10, true, false, 0, 0},
		{"bytes=0-", 0, true, false, 0, 0},
		{"bytes=-1", 0, true, false, 0, 0},
		{"bytes=-0", 10, false, false, 0, 0},
		{"bytes=5-2", 10, false, false, 0, 0},
		{"bytes=0-1,3-4", 10, false, false, 0, 0},
		{"bytes=a-b", 10, false, false, 0, 0},
		{"bytes=+1-2", 10, false, false, 0, 0},
		{"bytes=9223372036854775808-", 10, false, false, 0, 0},
		{"lines=1-2", 10, false, false, 0, 0},
		{"", 10, false, false, 0, 0},
	}
	for _, tt := range tests {
		r, ranged := ParseRange(tt.header)
		if ranged != tt.ranged {
			t.Errorf("ParseRange(%q) ok = %v, want %v", tt.header, ranged, tt.ranged)
			continue
		}
		if !ranged {
			continue
		}
		offset, length, ok := r.Within(tt.size)
		if ok != tt.ok || offset != tt.offset || length != tt.length {
			t.Errorf("%q of %d bytes = %d, %d, %v; want %d, %d, %v", tt.header, tt.size, offset, length, ok, tt.offset, tt.length, tt.ok)
		}
	}
}

// FuzzParseRange: a range that is taken lies within the file.
func FuzzParseRange(f *testing.F) {
	for _, h := range []string{"bytes=1-2", "bytes=-2", "bytes=5-", "bytes=3-2", "bytes=0-0,2-3", "bytes=-", "bytes=9223372036854775807-", "x=1-2"} {
		f.Add(h, int64(10))
	}
	f.Add("bytes=-9223372036854775807", int64(1))
	f.Fuzz(func(t *testing.T, header string, size int64) {
		r, ok := ParseRange(header)
		if !ok || size < 0 {
			return
		}
		offset, length, ok := r.Within(size)
		if ok && (offset < 0 || length <= 0 || offset > size-length) {
			t.Fatalf("%q of %d: %d+%d", header, size, offset, length)
		}
	})
}
