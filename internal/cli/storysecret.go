package cli

import (
	"fmt"

	"casemate.dev/client"
)

// tellSecret tells what was done with secrets, and what sandboxes did with theirs.
func tellSecret(e *client.Event, what, by string) story {
	switch what {
	case "used":
		return story{words("secret", orDash(said(e, "note")), "used at", orDash(said(e, "target")), timesText(e), paren(words(said(e, "method"), said(e, "path")))), plain}
	case "misplaced":
		return story{words("placeholder left in", said(e, "note"), "on a request to", orDash(said(e, "target"))), yellow}
	case "masked":
		return story{words(said(e, "note"), "from", orDash(said(e, "target"))), yellow}
	case "set", "rotated", "removed", "bound", "unbound":
		version := ""
		if v := number(e, "version"); v > 0 && what != "removed" {
			version = fmt.Sprintf("version %.0f", v)
		}
		return story{words("secret", orDash(said(e, "name")), what, by, paren(version)), plain}
	}
	return story{words("secret", what, by, paren(allFacts(e))), plain}
}

// tellModel tells of model routes and of their use.
func tellModel(e *client.Event, what, by string) story {
	if what != "used" {
		return story{words("model", what, by, paren(allFacts(e))), plain}
	}
	tokens := fmt.Sprintf("%.0f tokens in, %.0f out", number(e, "tokens_in"), number(e, "tokens_out"))
	if fact(e, "estimated").GetBoolValue() {
		tokens += ", estimated"
	}
	style := plain
	if number(e, "status") >= 400 {
		style = yellow
	}
	return story{words("model", orDash(said(e, "provider")), said(e, "model"), "asked:", said(e, "status"), timesText(e), paren(tokens)), style}
}
