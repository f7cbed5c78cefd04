package trajectory

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"casemate.dev/internal/otlp"
)

// Spans returns the story as OTLP requests in JSON: one trace for the sandbox, with a span for its life and one of GenAI's
// execute_tool for each call that has ended. The same record gives the same ids. With content, what calls were given and
// said is among the attributes: it may be secret.
func (s *Story) Spans(content bool) ([][]byte, error) {
	trace := id(16, s.Origin, s.Sandbox)
	root := id(8, s.Origin, s.Sandbox, "life")
	spans := []otlp.Span{{
		TraceID: trace, SpanID: root, Name: "sandbox " + s.Sandbox, Kind: otlp.KindInternal, Start: otlp.Nanos(s.Begun), End: otlp.Nanos(s.Ended),
		Attributes: []otlp.Attribute{
			otlp.Text("gen_ai.conversation.id", s.Sandbox), otlp.Text("casemate.template", text(s.Created["template"])),
			otlp.Text("casemate.isolation", text(s.Created["isolation"])), otlp.Int("casemate.journal.events", int64(s.Events)), otlp.Int("casemate.journal.gaps", int64(s.Gaps)),
		},
	}}
	for _, c := range s.Calls {
		if c.Ended.IsZero() {
			continue
		}
		span := c.span(s.Sandbox, content)
		span.TraceID, span.SpanID, span.ParentSpanID = trace, id(8, s.Origin, s.Sandbox, c.Tool, c.ID), root
		spans = append(spans, span)
	}
	return otlp.Encode([]otlp.Attribute{
		otlp.Text("service.name", "casemate"), otlp.Text("service.instance.id", s.Origin), otlp.Text("casemate.sandbox.id", s.Sandbox),
	}, "casemate.dev/journal", spans)
}

// span is a call without its ids.
func (c *Call) span(sandbox string, content bool) otlp.Span {
	tool := functionName(c.Tool)
	span := otlp.Span{
		Name: "execute_tool " + tool, Kind: otlp.KindInternal, Start: otlp.Nanos(c.Begun), End: otlp.Nanos(c.Ended),
		Attributes: []otlp.Attribute{
			otlp.Text("gen_ai.operation.name", "execute_tool"), otlp.Text("gen_ai.tool.name", tool), otlp.Text("gen_ai.tool.call.id", c.ID),
			otlp.Text("gen_ai.conversation.id", sandbox), otlp.Text("casemate.actor", c.Actor), otlp.Text("casemate.end", c.outcome()),
			otlp.Int("casemate.journal.event", int64(c.End.Event)), otlp.Int("casemate.journal.log_index", c.End.Index), //nolint:gosec // counters
			otlp.Int("casemate.net.connections", int64(c.Connections)), otlp.Int("casemate.net.refused", int64(c.Refused)),
		},
	}
	if wrong := c.wrong(); wrong != "" {
		span.Attributes = append(span.Attributes, otlp.Text("error.type", wrong))
		span.Status = otlp.Status{Code: otlp.StatusError, Message: wrong}
	}
	if code, ok := c.fact("code").(float64); ok {
		span.Attributes = append(span.Attributes, otlp.Int("process.exit.code", int64(code)))
	}
	for _, op := range []string{"created", "modified", "deleted", "renamed"} {
		if n, ok := c.Files[op].(float64); ok {
			span.Attributes = append(span.Attributes, otlp.Int("casemate.files."+op, int64(n)))
		}
	}
	if content {
		arguments, err := json.Marshal(c.Arguments)
		if err == nil {
			span.Attributes = append(span.Attributes, otlp.Text("gen_ai.tool.call.arguments", string(arguments)))
		}
		span.Attributes = append(span.Attributes, otlp.Text("gen_ai.tool.call.result", c.said()))
	}
	return span
}

// id is an id of so many bytes, in hex, of what it is of.
func id(size int, of ...string) string {
	h := sha256.New()
	for _, s := range of {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	return hex.EncodeToString(h.Sum(nil)[:size])
}
