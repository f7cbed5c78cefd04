package cli

import (
	"fmt"
	"strings"

	"casemate.dev/client"
)

// tellNetwork tells what the gateway saw.
func tellNetwork(e *client.Event, what string) story {
	verdict := fact(e, "verdict").GetStructValue().GetFields()
	target := orDash(said(e, "target"))
	if p := said(e, "proto"); p != "" && p != "tcp" {
		target = p + " " + target
	}
	count := timesText(e)
	switch what {
	case "opened":
		return story{words("→ "+target, count, paren(valueText(verdict["rule"]))), plain}
	case "closed":
		sizes := fmt.Sprintf("%s sent, %s received", formatSize(int64(number(e, "sent"))), formatSize(int64(number(e, "received"))))
		return story{words("← "+target, "closed", count, paren(sizes)), plain}
	case "refused":
		return story{words("✗ "+target, "refused:", orDash(valueText(verdict["reason"])), count), yellow}
	case "cut":
		return story{words("✗ "+target, "cut:", orDash(valueText(verdict["reason"])), count), yellow}
	case "request":
		st := plain
		if number(e, "status") >= 400 {
			st = yellow
		}
		return story{words("→ "+target, said(e, "method"), said(e, "path"), said(e, "status"), count, paren(exchanged(e)), said(e, "note")), st}
	}
	return story{words("network", what, paren(allFacts(e))), plain}
}

// exchanged tells how long a request's body was and its answer's; "" where neither was seen.
func exchanged(e *client.Event) string {
	var parts []string
	for _, one := range []struct{ fact, text string }{{"request_body", "sent"}, {"answer_body", "received"}} {
		if f := fact(e, one.fact).GetStructValue().GetFields(); f != nil {
			parts = append(parts, formatSize(int64(f["bytes"].GetNumberValue()))+" "+one.text)
		}
	}
	for _, u := range fact(e, "unfinished").GetListValue().GetValues() {
		parts = append(parts, u.GetStringValue()+" cut off")
	}
	return strings.Join(parts, ", ")
}

// timesText tells how many events one is; "" where it is one.
func timesText(e *client.Event) string {
	if n := number(e, "count"); n > 1 {
		return fmt.Sprintf("%.0f times", n)
	}
	return ""
}

// tellBody tells of content that was erased.
func tellBody(e *client.Event, what, by string) story {
	if what == "redacted" {
		return story{words("redacted:", strings.ReplaceAll(said(e, "names"), " ", ", "), "of event", said(e, "event"), by, paren(said(e, "reason"))), yellow}
	}
	return story{words("old content erased:", said(e, "bodies"), "bodies,", formatSize(int64(number(e, "bytes"))), paren(said(e, "reason"))), plain}
}
