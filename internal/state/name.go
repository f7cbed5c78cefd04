package state

import (
	"mime"
	"strings"
	"unicode"
	"unicode/utf8"

	"casemate.dev/internal/errs"
)

// The bounds of names.
const (
	maxAgent   = 128
	maxName    = 512
	maxSegment = 255
	maxType    = 255
)

func invalid(format string, args ...any) *errs.Error {
	return errs.New(errs.InvalidArgument, format, args...)
}

// checkAgent says what is wrong with an agent's name.
func checkAgent(s string) error {
	ok := s != "" && len(s) <= maxAgent
	for i := range len(s) {
		c := s[i]
		word := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		ok = ok && (word || i > 0 && strings.IndexByte("._-@", c) >= 0)
	}
	if !ok {
		return invalid("agent %.140q is no agent's name", s).
			WithHint("use letters, digits and . _ - @, at most %d, a letter or digit first", maxAgent)
	}
	return nil
}

// checkName says what is wrong with a document's name.
func checkName(s string) error {
	const hint = "name it like a path, as in memory/facts.json"
	if s == "" {
		return invalid("the document has no name").WithHint(hint)
	}
	if err := checkPrefix(s); err != nil {
		return err
	}
	for part := range strings.SplitSeq(s, "/") {
		switch {
		case part == "":
			return invalid("name %.80q begins or ends with a slash, or has two in a row", s).WithHint(hint)
		case part == "." || part == "..":
			return invalid("name %.80q has the part %q", s, part).WithHint(hint)
		case len(part) > maxSegment:
			return invalid("a part of name %.80q has %d bytes, limit %d", s, len(part), maxSegment)
		}
	}
	return nil
}

// checkPrefix says what is wrong with the beginning of a name.
func checkPrefix(s string) error {
	if len(s) > maxName {
		return invalid("name %.80q has %d bytes, limit %d", s, len(s), maxName)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == '\\' }) {
		return invalid("name %.80q holds a control character, a backslash or bytes that are no UTF-8", s)
	}
	if strings.TrimSpace(s) != s {
		return invalid("name %.80q begins or ends with a space", s)
	}
	return nil
}

// JSON is the content type of documents that hold JSON; Bytes that of any others.
const (
	JSON  = "application/json"
	Bytes = "application/octet-stream"
)

// checkType returns a content type in its usual form.
func checkType(s string) (string, error) {
	if len(s) > maxType {
		return "", invalid("content type has %d bytes, limit %d", len(s), maxType)
	}
	kind, params, err := mime.ParseMediaType(s)
	if err != nil || !strings.Contains(kind, "/") {
		return "", invalid("content type %.80q is none", s).WithHint("use one such as %s or text/plain", JSON)
	}
	return mime.FormatMediaType(kind, params), nil
}

// isJSON reports whether a content type promises JSON.
func isJSON(contentType string) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	return kind == JSON || strings.HasPrefix(kind, "application/") && strings.HasSuffix(kind, "+json")
}
