package secret

import (
	"crypto/hkdf"
	"crypto/sha256"
	"strings"

	"casemate.dev/internal/errs"
)

// The shape of a placeholder that names no other: a prefix that people recognise, and enough
// characters that nobody guesses it.
const (
	placeholderPrefix = "csm-placeholder-"
	placeholderLength = len(placeholderPrefix) + minRandom + 10
	// minRandom is how many characters are random at least: 26 of 62 are 154 bits.
	minRandom            = 26
	maxPlaceholderLength = 512
)

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// Shape says what a placeholder looks like, for clients that check a key's form before they use it.
// The zero Shape is Casemate's own.
type Shape struct {
	// Prefix is what it begins with, such as "sk-ant-api03-".
	Prefix string `json:"prefix,omitempty"`
	// Length is that of the whole; 0: the prefix and 36 characters.
	Length int `json:"length,omitempty"`
}

func (s Shape) filled() Shape {
	if s.Prefix == "" {
		s.Prefix = placeholderPrefix
	}
	if s.Length == 0 {
		s.Length = len(s.Prefix) + placeholderLength - len(placeholderPrefix)
	}
	return s
}

func (s Shape) check() error {
	s = s.filled()
	if strings.ContainsFunc(s.Prefix, func(r rune) bool { return !strings.ContainsRune(base62+"-_.", r) }) {
		return invalid("the placeholder's prefix %.40q holds more than letters, digits and -_.", s.Prefix)
	}
	if s.Length < len(s.Prefix)+minRandom || s.Length > maxPlaceholderLength {
		return invalid("the placeholder's length is %d: with its prefix it must be %d to %d", s.Length,
			len(s.Prefix)+minRandom, maxPlaceholderLength)
	}
	return nil
}

// placeholder returns the placeholder of a secret in a sandbox. It is derived, so that nothing need
// be stored and it stays the same over rotations and restarts; without the master key it can't be
// guessed, and it says nothing about the value.
func (s *sealer) placeholder(shape Shape, sandbox, secretID string) string {
	shape = shape.filled()
	seed := s.derived("placeholder", sandbox, secretID)
	n := shape.Length - len(shape.Prefix)
	// 4 bytes a character: far more than it takes to find n below 248, which is 4 × 62.
	stream, err := hkdf.Expand(sha256.New, seed, "casemate placeholder", min(4*n+64, 255*sha256.Size))
	if err != nil {
		return "" // the length is bounded by check: can't happen, and an empty placeholder matches nothing
	}
	var b strings.Builder
	b.WriteString(shape.Prefix)
	for _, c := range stream {
		if c < 248 && b.Len() < shape.Length {
			b.WriteByte(base62[c%62])
		}
	}
	return b.String()
}

func invalid(format string, args ...any) *errs.Error {
	return errs.New(errs.InvalidArgument, format, args...)
}
