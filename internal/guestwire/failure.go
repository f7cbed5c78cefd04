package guestwire

import (
	"errors"
	"strings"

	"casemate.dev/internal/errs"
)

// maxText bounds the text of a failure that is shown to anybody.
const maxText = 2 << 10

// FailureOf returns what the caller of a guest is told about err: its kind and public text.
func FailureOf(err error) Failure {
	var e *errs.Error
	if !errors.As(err, &e) || e.Public == "" {
		// Inside the sandbox there is nothing to hide from its owner: the text helps.
		return Failure{Kind: errs.KindOf(err).String(), Message: cut(err.Error())}
	}
	return Failure{Kind: e.Kind.String(), Message: cut(e.Public), Hint: cut(e.Hint)}
}

// Err returns the failure as an error of its kind. The text is the guest's word: it is cut, and
// control characters are replaced. A guest can't speak about who the caller is, so the kind
// Unauthenticated becomes Internal, as does an unknown one.
func (f Failure) Err() error {
	k, ok := errs.FromCode(f.Kind)
	if !ok || k == errs.Unauthenticated {
		k = errs.Internal
	}
	text := plain(f.Message)
	if text == "" {
		text = "the guest gave no reason"
	}
	return &errs.Error{Kind: k, Public: text, Hint: plain(f.Hint)}
}

func cut(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.ToValidUTF8(s, "?")
}

// plain makes guest text safe to print: one line, no terminal control, no bidirectional overrides.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case r < 0x20 || r >= 0x7f && r < 0xa0:
			return '?'
		case r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x2028, r == 0x2029:
			return '?'
		}
		return r
	}, cut(s))
}

// hasKind reports whether err says more than that a connection was lost.
func hasKind(err error) bool {
	var e *errs.Error
	var p *ProtocolError
	return errors.As(err, &e) || errors.As(err, &p)
}
