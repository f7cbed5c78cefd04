package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"casemate.dev/client"
)

// story is an event as a sentence.
type story struct {
	text  string
	style style
}

// observers, the most trusted first: where two tell the same, the first one's word is shown.
func observers() []string { return []string{"kernel", "server", "guest"} }

// fact returns what the most trusted observer says under key; nil where nobody does.
func fact(e *client.Event, key string) *structpb.Value {
	for _, o := range observers() {
		if v, ok := e.GetFacts()[o].GetFields()[key]; ok {
			return v
		}
	}
	return nil
}

// said is a fact as text, "" where nobody told it.
func said(e *client.Event, key string) string {
	return valueText(fact(e, key))
}

func number(e *client.Event, key string) float64 {
	return fact(e, key).GetNumberValue()
}

func valueText(v *structpb.Value) string {
	switch k := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		return k.StringValue
	case *structpb.Value_NumberValue:
		return fmt.Sprintf("%.15g", k.NumberValue)
	case *structpb.Value_BoolValue:
		return fmt.Sprint(k.BoolValue)
	case *structpb.Value_ListValue:
		parts := make([]string, len(k.ListValue.GetValues()))
		for i, item := range k.ListValue.GetValues() {
			parts[i] = valueText(item)
		}
		return strings.Join(parts, " ")
	case *structpb.Value_StructValue:
		raw, err := protojson.Marshal(k.StructValue)
		if err != nil {
			return "?"
		}
		return string(raw)
	}
	return ""
}

// words joins what is not empty.
func words(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), " ")
}

// paren is text in parentheses after a space, or nothing.
func paren(text string) string {
	if text == "" {
		return ""
	}
	return "(" + text + ")"
}

// tellEvent makes a sentence of an event; who did it is told where it was neither the server nor
// maker. A type that it does not know shows with its facts.
func tellEvent(e *client.Event, maker string) story {
	by := ""
	if a := e.GetActor(); a != "" && a != "server" && a != maker {
		by = "by " + a
	}
	switch kind, what, _ := strings.Cut(e.GetType(), "."); kind {
	case "sandbox":
		return tellSandbox(e, what, by)
	case "process":
		return tellProcess(e, what, by)
	case "context":
		return tellContext(e, what, by)
	case "run":
		return tellRun(e, what, by)
	case "secret":
		return tellSecret(e, what, by)
	case "model":
		return tellModel(e, what, by)
	case "document":
		return tellDocument(e, what, by)
	case "network":
		return tellNetwork(e, what)
	case "body", "bodies":
		return tellBody(e, what, by)
	case "file", "directory":
		return story{words(kind, what+":", said(e, "path"), tellMove(e), tellSize(e), by), plain}
	case "files":
		return tellFiles(e)
	case "port":
		return story{words("port", said(e, "port"), "dialled", by), plain}
	case "call":
		return tellCall(e, what)
	case "conflict":
		return story{words("CONFLICT: the guest's word and the kernel's differ:", allFacts(e)), red}
	case "usage":
		return story{words("used so far: cpu", formatDuration(time.Duration(number(e, "cpu_us"))*time.Microsecond)+",",
			"memory", formatSize(int64(number(e, "memory_bytes"))), "now"), plain}
	case "gap":
		return story{words("GAP: something was not recorded:", allFacts(e)), yellow}
	}
	return story{words(e.GetType(), by, paren(allFacts(e))), plain}
}

// tellCall tells of a system call that was seen from outside.
func tellCall(e *client.Event, what string) story {
	who := ""
	if command := said(e, "command"); command != "" {
		who = "by " + command
	}
	if pid := number(e, "pid"); pid > 0 {
		who = words(who, fmt.Sprintf("(%v)", pid))
	}
	more := ""
	if n := number(e, "count"); n > 0 {
		more = fmt.Sprintf("%v more times", n)
	}
	if what != "attempt" {
		text := cmp.Or(said(e, "target"), said(e, "call"))
		if argv := fact(e, "argv"); argv.GetListValue() != nil { // else only its hash is told
			text = cmp.Or(valueText(argv), text)
		}
		return story{words(what, shorten(text, 70), who, more, paren(said(e, "note"))), plain}
	}
	done := map[string]string{"pause": "so it is paused", "kill": "so it ends"}[said(e, "reaction")]
	verdict := "ATTEMPT refused:"
	if said(e, "errno") == "" {
		verdict = "ATTEMPT:"
	}
	return story{words(verdict, said(e, "call"), said(e, "target"), said(e, "args"), who, paren(said(e, "errno")), more, done, said(e, "note")), yellow}
}

func tellMove(e *client.Event) string {
	if to := said(e, "to"); to != "" {
		return "to " + to
	}
	return ""
}

func tellSize(e *client.Event) string {
	if n := number(e, "bytes"); n > 0 {
		return paren(formatSize(int64(n)))
	}
	return ""
}

func tellSandbox(e *client.Event, what, by string) story {
	switch what {
	case "created":
		detail := strings.Join(slices.DeleteFunc([]string{said(e, "template"), said(e, "profile"), said(e, "isolation")},
			func(p string) bool { return p == "" }), ", ")
		return story{words("sandbox created", by, paren(detail)), bold}
	case "started":
		return story{words("isolation is up", paren(tellApplied(e))), green}
	case "claimed":
		return story{words("identity given:", orDash(said(e, "name"))), plain}
	case "stopping":
		return story{words("ending:", orDash(said(e, "reason")), paren(said(e, "detail")), by), plain}
	case "paused", "resumed":
		return story{words("sandbox", what, by), plain}
	case "ended":
		detail := said(e, "detail")
		if d := number(e, "after_ms"); d > 0 {
			detail = strings.TrimPrefix(detail+", after "+formatDuration(time.Duration(d)*time.Millisecond), ", ")
		}
		return story{words("sandbox ended:", orDash(said(e, "reason")), paren(detail), by), bold}
	case "adopted":
		return story{words("taken up again after a restart of the server", paren(allFacts(e))), yellow}
	case "degraded":
		return story{words("a limit is hit:", allFacts(e)), yellow}
	}
	return story{words("sandbox", what, by, paren(allFacts(e))), plain}
}

// tellApplied names the layers of isolation that the event lists.
func tellApplied(e *client.Event) string {
	var parts []string
	get := func(key string) *structpb.Value { return fact(e, key) }
	if a := get("applied").GetStructValue(); a != nil {
		get = func(key string) *structpb.Value { return a.GetFields()[key] }
	}
	if v := valueText(get("host_uid")); v != "" {
		parts = append(parts, "uids from "+v)
	}
	if n := len(get("namespaces").GetListValue().GetValues()); n > 0 {
		parts = append(parts, fmt.Sprintf("%d namespaces", n))
	}
	if v := valueText(get("seccomp")); v != "" {
		parts = append(parts, "seccomp "+v)
	}
	if v := get("landlock_abi").GetNumberValue(); v > 0 {
		parts = append(parts, fmt.Sprintf("landlock %v", v))
	}
	if v := get("cgroup_version").GetNumberValue(); v > 0 {
		parts = append(parts, fmt.Sprintf("cgroup v%v", v))
	}
	if m := valueText(get("missing")); m != "" {
		parts = append(parts, "MISSING "+m)
	}
	return strings.Join(parts, ", ")
}

func tellProcess(e *client.Event, what, by string) story {
	id := shorten(e.GetProcess(), 14)
	switch what {
	case "started":
		var argv []string
		for _, item := range fact(e, "argv").GetListValue().GetValues() {
			argv = append(argv, valueText(item))
		}
		command := shorten(quoteArgv(argv), 70)
		if len(argv) == 0 {
			command = "?"
		}
		return story{words("▶ "+id, command, by), plain}
	case "ended":
		return tellEnd(e, id)
	case "failed":
		return story{words("✗ "+id, "could not be started:", orDash(said(e, "error")), by), red}
	}
	return story{words("process", id, what, by, paren(allFacts(e))), plain}
}

func tellEnd(e *client.Event, id string) story {
	end, st := said(e, "end"), plain
	if end == "" {
		end = said(e, "reason")
	}
	switch {
	case strings.HasPrefix(end, "exited"):
		end = words("exit", said(e, "code"))
		if number(e, "code") != 0 {
			st = yellow
		}
	case strings.HasPrefix(end, "signaled"):
		end, st = words("signal", said(e, "signal")), yellow
	default:
		end, st = strings.ReplaceAll(end, "_", " "), red
	}
	var extra []string
	if n := number(e, "bytes"); n > 0 {
		extra = append(extra, formatSize(int64(n))+" of output")
	}
	if n := number(e, "dropped"); n > 0 {
		extra = append(extra, formatSize(int64(n))+" dropped")
	}
	if n := number(e, "oom_kills"); n > 0 {
		extra = append(extra, fmt.Sprintf("%.0f killed for memory (kernel)", n))
	}
	if d := number(e, "duration_ms"); d > 0 {
		extra = append(extra, "after "+formatDuration(time.Duration(d)*time.Millisecond))
	}
	return story{words("■ "+id, end, paren(strings.Join(extra, ", "))), st}
}

// allFacts lists every fact on one line.
func allFacts(e *client.Event) string {
	var parts []string
	for _, o := range observers() {
		fields := e.GetFacts()[o].GetFields()
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			parts = append(parts, k+"="+shorten(valueText(fields[k]), 60))
		}
	}
	return strings.Join(parts, ", ")
}

// factLines lists every fact with its observer, one a line.
func factLines(e *client.Event) []string {
	var out []string
	for _, o := range observers() {
		fields := e.GetFacts()[o].GetFields()
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			out = append(out, fmt.Sprintf("%-6s  %s: %s", o, clean(k), clean(valueText(fields[k]))))
		}
	}
	return out
}
