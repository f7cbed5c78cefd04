// Package httpfile holds what every API that moves files over HTTP needs.
//
// What belongs here: byte ranges, and a request's body that tells whose fault a broken transfer is. What does
// not: routes, headers of one API, and the files themselves.
package httpfile

import (
	"strconv"
	"strings"
)

// Range is one range of a Range header, before the file's size is known.
type Range struct {
	first, last int64 // last -1: to the end
	suffix      int64 // > 0: the last so many bytes; first and last mean nothing
}

// ParseRange reads a Range header with one range. Anything else, also a malformed header, means the
// whole file, as RFC 9110 section 14.2 lets a server do.
func ParseRange(h string) (Range, bool) {
	spec, ok := strings.CutPrefix(h, "bytes=")
	if !ok || strings.Contains(spec, ",") {
		return Range{}, false
	}
	a, b, ok := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok {
		return Range{}, false
	}
	if a == "" {
		n, err := ParseDigits(b)
		return Range{suffix: n}, err == nil && n > 0
	}
	first, err := ParseDigits(a)
	if err != nil {
		return Range{}, false
	}
	if b == "" {
		return Range{first: first, last: -1}, true
	}
	last, err := ParseDigits(b)
	return Range{first: first, last: last}, err == nil && last >= first
}

// ParseDigits reads a number of bytes, up to 2^63-1, without a sign.
func ParseDigits(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err //nolint:gosec // 63 bits
}

// Within cuts r to a file of size bytes; ok is false where nothing of it is in the file.
func (r Range) Within(size int64) (offset, length int64, ok bool) {
	if r.suffix > 0 {
		n := min(r.suffix, size)
		return size - n, n, n > 0
	}
	if r.first >= size {
		return 0, 0, false
	}
	last := size - 1
	if r.last >= 0 {
		last = min(r.last, last)
	}
	return r.first, last - r.first + 1, true
}
