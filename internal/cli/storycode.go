package cli

import (
	"fmt"
	"strings"
	"time"

	"casemate.dev/client"
)

func tellContext(e *client.Event, what, by string) story {
	id := shorten(said(e, "context"), 14)
	speaks := paren(words(said(e, "language"), said(e, "version")))
	switch what {
	case "created":
		return story{words("context", id, "created", speaks, by), plain}
	case "restarted":
		return story{words("context", id, "has a new interpreter", speaks, by), plain}
	case "ended":
		if said(e, "reason") == "deleted" {
			return story{words("context", id, "deleted", by), plain}
		}
		return story{words("context", id, "has lost its interpreter:", tellDriver(e, "end")), yellow}
	}
	return story{words("context", id, what, by, paren(allFacts(e))), plain}
}

// tellDriver tells how an interpreter ended, as the fact named key says.
func tellDriver(e *client.Event, key string) string {
	switch end := said(e, key); end {
	case "exited":
		return words("exit", said(e, "code"))
	case "signaled":
		return words("signal", said(e, "signal"))
	default:
		return orDash(strings.ReplaceAll(end, "_", " "))
	}
}

// tellCode shows the beginning of the code, or says how much it was where it is not kept.
func tellCode(e *client.Event) string {
	if text := fact(e, "code").GetStringValue(); text != "" {
		first, rest, _ := strings.Cut(strings.TrimSpace(text), "\n")
		if rest != "" {
			first += " …"
		}
		return shorten(first, 70)
	}
	n := fact(e, "code").GetStructValue().GetFields()["bytes"].GetNumberValue()
	return words(formatSize(int64(n)), "of", said(e, "language"))
}

func tellRun(e *client.Event, what, by string) story {
	id := words(shorten(said(e, "run"), 14), "in", shorten(said(e, "context"), 14))
	if what == "started" {
		return story{words("▶ "+id, tellCode(e), by), plain}
	}
	end, st := strings.ReplaceAll(said(e, "end"), "_", " "), plain
	switch end {
	case "completed":
	case "failed":
		end, st = words("raised", orDash(said(e, "error"))), yellow
	case "driver ended":
		end, st = words("its interpreter ended:", tellDriver(e, "driver")), red
	default:
		st = yellow
	}
	var extra []string
	if n := number(e, "items"); n > 0 {
		extra = append(extra, fmt.Sprintf("%.0f items", n))
	}
	if n := number(e, "dropped"); n > 0 {
		extra = append(extra, formatSize(int64(n))+" dropped")
	}
	if d := number(e, "duration_ms"); d > 0 {
		extra = append(extra, "after "+formatDuration(time.Duration(d)*time.Millisecond))
	}
	return story{words("■ "+id, end, paren(strings.Join(extra, ", "))), st}
}
